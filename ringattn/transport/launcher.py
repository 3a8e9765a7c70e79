"""Finds this process's rank in a job, and starts local ranks."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import CommFailure, InvalidInput, LaunchFailure, Unsupported

if TYPE_CHECKING:
    import torch

#: The last lines of a failed rank's stderr that the error repeats.
TAIL = 30
#: Exit statuses, as a shell reports them, after SIGTERM and after SIGPIPE (the reader of standard output has gone).
TERMINATED, UNREAD = 143, 141
#: Seconds until a signal that a finalizer swallowed is sent again.
AGAIN = 0.05
#: Seconds in which new ranks must connect, even if the timeout of messages is shorter: they first import torch.
MEETING = 60.0
#: Seconds in which ranks must end by themselves after one has failed.
GRACE = 3.0


@dataclass(frozen=True)
class Launch:
    """The launcher ("none" without one) that started this process, and this process's place in the job."""

    kind: str
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


_OPENMPI = "OMPI_COMM_WORLD_"
#: The variables of (launcher, rank, world, local rank, local world), the most reliable launcher first: SLURM_PROCID is
#: also set in a plain batch script. Of two names, the first that is set counts: MPICH's mpirun sets variables for the
#: local rank; srun, which may use the same PMI, sets its own.
_VARIABLES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("openmpi", f"{_OPENMPI}RANK", f"{_OPENMPI}SIZE", f"{_OPENMPI}LOCAL_RANK", f"{_OPENMPI}LOCAL_SIZE"),
    ("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID SLURM_LOCALID", "MPI_LOCALNRANKS SLURM_NTASKS_PER_NODE"),
    ("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


def detect() -> Launch:
    """Find out which launcher started this process: torchrun, openmpi, mpich, slurm or none.

    Raises InvalidInput if one of the launcher's environment variables is not a number.
    """
    env = os.environ
    for kind, rank, world, local_rank, local_world in _VARIABLES:
        if rank in env and world in env:
            place = []
            for names, default in ((rank, "0"), (world, "1"), (local_rank, "0"), (local_world, "1")):
                name = next((name for name in names.split() if name in env), "")
                try:
                    place.append(int(env.get(name, default)))
                except ValueError:
                    raise InvalidInput(f"{name}={env[name]!r} in the environment is not a number; unset it") from None
            if kind != "slurm" or place[1] > 1:
                return Launch(kind, *place)
    return Launch("none")


def init_process_group(
    launch: Launch, *, backend: str, timeout: float, device: torch.device | None = None, store: Any = None
) -> None:
    """Join the process group of a torchrun job, at its store or `store`, also after `torchrun --max-restarts` restarts.

    `timeout` (seconds) bounds joining and every later collective. NCCL connects `device` immediately. Raises
    CommFailure that quotes the first rank that could not connect.
    """
    if launch.kind != "torchrun":
        raise InvalidInput(
            f"{launch.kind} started this job, and transport={backend} cannot join it; use torchrun, transport=mpi, or "
            "start it without a launcher, with ranks=2, to get ranks on this machine"
        )
    dist = importlib.import_module("torch.distributed")
    within = timedelta(seconds=timeout)
    store, rank, world = store or next(dist.rendezvous("env://", timeout=within))[0], launch.rank, launch.world
    if launch.local_world == world and "lo" in interfaces().split(", "):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # of one host
    # torchrun's store outlives the ranks: after a restart, Gloo would find the previous ranks' addresses in it.
    store = dist.PrefixStore(f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=within, device_id=device)
    except RuntimeError as error:
        why = f"rank {rank}, on a host with the interfaces {interfaces()}: {str(error).strip().splitlines()[-1]}"
        first = why
        with suppress(RuntimeError):  # the store may have ended with its host
            first = store.compare_set("ringattn/failure", "", why).decode()  # the others only time out
        raise CommFailure(
            f"the ranks cannot connect; the first to fail was {first}; on each host, {backend.upper()}_SOCKET_IFNAME "
            "must name an interface that leads to the others, and no firewall may stand between them"
        ) from error


def interfaces() -> str:
    """The network interfaces of this host, for errors."""
    return ", ".join(name for _, name in socket.if_nameindex())


def refuse_windows(what: str) -> None:
    """Raise Unsupported on Windows, which has no POSIX signals, no shell, and no report of peak memory."""
    if sys.platform == "win32":
        raise Unsupported(
            f"{what}: not on Windows, which has no POSIX signals; try WSL 2, or here ringattn plan, simulate and advise"
        )


def run_local(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 120.0,
    group_timeout: float | None = None,
    threads: int | None = None,
    show: bool = False,
    place: Callable[[int], None] | None = None,
    warm: Sequence[str] = (),
) -> list[Any]:
    """The return values, in rank order, of fn(rank, *args) on `ranks` new processes joined in a Gloo group.

    `fn` is a function of an importable module; arguments are pickled, and results are what JSON holds. `timeout`
    (seconds) bounds the whole run, and `group_timeout` (default: the same) bounds every collective in the run.
    `threads` is torch's thread count per rank. After one rank has failed, the others get `GRACE` seconds to end by
    themselves. The standard output and standard error of ranks are kept for error messages; rank 0 shows its progress
    on this process's standard error and, with `show`, writes to this process's standard output. `place(rank)` runs
    first on each rank, and chooses its network interface; by default, the loopback interface. `warm` names modules that
    are imported before ranks are forked, from this process unless it has other threads; they may start no threads.

    Raises LaunchFailure with the stderr of the rank that failed first. No process or temporary file is left behind,
    even if this process is killed. SIGTERM ends it with SystemExit.
    """
    # Neither torch.multiprocessing nor torch.distributed.elastic is used: when their parent is killed, their ranks get
    # only SIGINT, which a rank inside a collective ignores. At the first failure they terminate all ranks, so the rank
    # that failed first cannot be distinguished from ranks that lost a peer.
    refuse_windows("ranks in processes of their own")
    if ranks < 1:
        raise InvalidInput(f"ranks={ranks}: at least one rank is needed")
    group = {"world": ranks, "timeout": group_timeout or timeout, "threads": threads, "show": show, "place": place}
    work = pickle.dumps((fn, args))
    alone = threading.active_count() == 1
    context: Any = get_context(("fork" if alone else "forkserver") if warm else "spawn")
    if warm and alone:
        for name in warm:
            importlib.import_module(name)
    elif warm:
        context.set_forkserver_preload([*warm])
    with terminable(), _scratch_folder() as scratch:
        processes = [
            context.Process(target=_run_rank, args=(scratch, group, rank, work), daemon=True) for rank in range(ranks)
        ]
        try:
            with _uninterrupted():
                for process in processes:
                    process.start()
            _wait(processes, scratch, timeout)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [json.loads(_file(scratch, rank, "json").read_text()) for rank in range(ranks)]


def _file(scratch: Path, rank: int, ending: str) -> Path:
    """The file of a rank's standard error ("log"), or of its result ("json")."""
    return scratch / f"rank_{rank:04d}.{ending}"


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A temporary folder, which ends with the block, or with this process."""
    folder = tempfile.mkdtemp(prefix="ringattn-")
    with at_end('rm -rf "$0"', folder):
        yield Path(folder)


@contextmanager
def at_end(script: str, *arguments: str) -> Iterator[None]:
    """A context that runs a shell script at the end of its block, even if this process is killed before that."""
    command = ["/bin/sh", "-c", f"cat; {script}", *arguments]
    # The shell runs the script when its standard input closes.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay SIGINT until the end of the block; processes started in the block ignore it.

    Ctrl-C signals every process of a terminal. The process that started the ranks reports it and ends them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def handling(handlers: Mapping[int, tuple[Any, Any]]) -> Iterator[None]:
    """Replace handlers of signals in the block: {signal: (old, new)}. A signal whose handler is not `old` keeps it."""
    is_main = threading.current_thread() is threading.main_thread()  # only that can set handlers
    ours = {number: pair for number, pair in handlers.items() if is_main and signal.getsignal(number) == pair[0]}
    try:
        for number, (_, new) in ours.items():
            signal.signal(number, new)
        yield
    finally:
        for number, (old, _) in ours.items():
            signal.signal(number, old)


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise SystemExit in the block, so that the block can clean up, unless SIGTERM has another handler."""
    before = sys.unraisablehook

    def send_again(lost: Any) -> None:
        """Where a finalizer, or a callback of a weak reference, swallowed the exit, send the signal once more."""
        if isinstance(lost.exc_value, SystemExit) and lost.exc_value.code == TERMINATED:
            threading.Timer(AGAIN, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            before(lost)

    sys.unraisablehook = send_again
    try:
        with handling({signal.SIGTERM: (signal.SIG_DFL, lambda number, frame: sys.exit(TERMINATED))}):
            yield
    finally:
        sys.unraisablehook = before


def drop_output() -> None:
    """Discard all further standard output, because its reader, such as `head`, has ended."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def progress_stream() -> TextIO:
    """The stream for progress: standard error; for rank 0 of `run_local`, the parent's."""
    return _progress or sys.stderr


def show_note(text: str = "") -> None:
    """Show `text` on a line of standard error until the next output replaces it; on terminals only."""
    stream = progress_stream()
    if stream.isatty():
        stream.write(f"\r{text:<30}\r")
        stream.flush()


#: The standard error of the parent of a local rank 0, whose own standard error is kept for errors.
_progress: TextIO | None = None


def _wait(processes: Sequence[BaseProcess], scratch: Path, timeout: float) -> None:
    """Wait for the results of all ranks. Raises LaunchFailure if a rank fails or the timeout is over."""
    running = dict(enumerate(processes))
    failed: dict[int, int] = {}  # the exit codes of failed ranks, the first one first
    deadline = time.monotonic() + timeout
    while running and (seconds := deadline - time.monotonic()) > 0:
        connection.wait([process.sentinel for process in running.values()], min(seconds, 3600.0))
        for rank in [rank for rank, process in running.items() if process.exitcode is not None]:
            if (code := running.pop(rank).exitcode) or not _file(scratch, rank, "json").exists():
                failed[rank] = code or 0
                deadline = min(deadline, time.monotonic() + GRACE)
    tails = {rank: _tail(_file(scratch, rank, "log")) for rank in failed or [*running][:4]}
    if failed:
        # Blame a killed rank first, then a rank whose own error is not about a lost peer.
        first = min(failed, key=lambda rank: (failed[rank] >= 0, "CommFailure" in tails[rank]))
        code = failed.pop(first)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        how = how if code else "ended before it gave a result"
        also = f" (then also failed: {', '.join(map(str, failed))})" if failed else ""
        raise LaunchFailure(f"rank {first} of {len(processes)} {how}{also}{tails[first]}", code)
    if running:
        parts = "\n".join(f"rank {rank} still ran{text}" for rank, text in tails.items())
        raise LaunchFailure(f"the ranks did not end within {timeout:g} s (a longer timeout= allows more): {parts}")


def _tail(log: Path) -> str:
    """The last lines of a log, formatted for an error; "" if the log is empty."""
    lines = log.read_text(errors="replace").strip().splitlines()[-TAIL:] if log.exists() else []
    return "; its last output:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""


def _run_rank(scratch: Path, group: dict[str, Any], rank: int, work: bytes) -> None:
    """The main function of a rank's process: join the group, run, write the result. Ends when its parent ends."""
    parent = parent_process()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if parent is None or not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        global _progress
        _progress = os.fdopen(os.dup(2), "w", buffering=1)
    with _file(scratch, rank, "log").open("wb") as log:
        os.dup2(log.fileno(), 2)
        if rank or not group["show"]:
            os.dup2(log.fileno(), 1)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, closefd=False) for fd in (1, 2))  # not what a parent redirects
    if group["place"]:
        group["place"](rank)
    elif any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # No rank starts work before all are connected: otherwise a quick rank's end would be an error on ranks still
    # connecting.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    if group["threads"]:
        os.environ["OMP_NUM_THREADS"] = str(group["threads"])
    torch = importlib.import_module("torch")
    dist = importlib.import_module("torch.distributed")
    if group["threads"]:
        torch.set_num_threads(group["threads"])
    store = dist.FileStore(str(scratch / "store"), group["world"])
    timeout = timedelta(seconds=max(group["timeout"], MEETING))
    code: Any = 0
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=group["world"], timeout=timeout)
        fn, args = pickle.loads(work)  # from the process that started this one, by a pipe
        _file(scratch, rank, "json").write_text(json.dumps(fn(rank, *args)))
    except SystemExit as end:  # after a message of its own
        code = end.code or 0
    finally:
        if failure := sys.exc_info()[1]:
            traceback.print_exception(failure)
            code = 1
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        # Skip the interpreter's shutdown, in which torch's Gloo threads sometimes abort the process.
        os._exit(code if isinstance(code, int) else 1)
