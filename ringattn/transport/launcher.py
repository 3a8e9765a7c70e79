"""This process's place among the ranks of a job, and local ranks that this process starts itself."""

from __future__ import annotations

import ctypes
import importlib
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
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from ..errors import InvalidInput, LaunchFailure

#: Lines of a failed rank's stderr that the error repeats.
TAIL = 30
#: Exit statuses, as a shell reports them, after SIGTERM and after SIGPIPE (nobody reads standard output any more).
TERMINATED, UNREAD = 143, 141
#: Seconds that new ranks have to find each other, even if the timeout of messages is shorter: they first import torch.
MEETING = 60.0


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
#: also set in a plain batch script. Of two names the first that is set counts: MPICH's mpirun sets variables for the
#: place on the node, while srun, which may speak the same PMI, sets its own.
_VARIABLES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("openmpi", f"{_OPENMPI}RANK", f"{_OPENMPI}SIZE", f"{_OPENMPI}LOCAL_RANK", f"{_OPENMPI}LOCAL_SIZE"),
    ("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID SLURM_LOCALID", "MPI_LOCALNRANKS SLURM_NTASKS_PER_NODE"),
    ("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


def detect(env: Mapping[str, str] | None = None) -> Launch:
    """The launcher that started this process: torchrun, openmpi, mpich, slurm or none. Raises InvalidInput.

    `env` defaults to the environment of this process.
    """
    env = os.environ if env is None else env
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


def init_process_group(launch: Launch, *, backend: str, timeout: float) -> None:
    """Join the process group of a torchrun job (env://), also after a restart by `torchrun --max-restarts`.

    `timeout` (seconds) bounds the meeting and every later collective.
    """
    if launch.kind != "torchrun":
        raise InvalidInput(
            f"{launch.kind} started this job, which transport={backend} cannot join; start it with torchrun, use "
            "transport=mpi, or start it alone with ranks=2 to use ranks on this machine"
        )
    dist = importlib.import_module("torch.distributed")
    within = timedelta(seconds=timeout)
    store, rank, world = next(dist.rendezvous("env://", timeout=within))
    # torchrun's store outlives the ranks: after a restart Gloo would find the addresses of the previous ranks there.
    store = dist.PrefixStore(f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=within)


@dataclass
class _LocalRank:
    """A process that runs one rank, the pipe of its result, and what is known of its end."""

    process: SpawnProcess
    pipe: Connection
    log: Path
    result: Any = None
    done: bool = False
    ended_well: bool = False
    #: The handles that become ready at the result (the pipe) and at the end of the process (its sentinel).
    waits: list[Connection | int] = field(default_factory=list)


def run_local(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 120.0,
    group_timeout: float | None = None,
    threads: int | None = None,
    log_dir: Path | None = None,
    passthrough: Sequence[int] = (),
    grace: float = 3.0,
) -> list[Any]:
    """The return values, in rank order, of fn(rank, *args) on `ranks` new processes joined in a Gloo group.

    `fn` is a function of an importable module; arguments and results are pickled. `timeout` (seconds) bounds the
    whole run, and `group_timeout` (default: the same) bounds every collective in the run. `threads` is torch's thread
    count per rank. After one rank has failed, the other ranks get `grace` seconds to end by themselves. stderr and
    stdout of a rank go to `log_dir`/rank_0001.log, except the stdout of the ranks in `passthrough`.

    Raises LaunchFailure with the stderr of the rank that failed first. Neither a process nor a temporary file is left
    behind, even if this process is killed, or receives SIGTERM, which ends it with SystemExit.
    """
    # torch.distributed.elastic.multiprocessing is not used: when their parent is killed, its ranks get only SIGINT,
    # which a rank inside a collective does not act on. At the first failure it terminates all ranks, so that the rank
    # to blame cannot be told from a rank that lost its peer.
    if ranks < 1:
        raise InvalidInput(f"ranks={ranks}: at least one rank is needed")
    context = get_context("spawn")
    with terminable(), _scratch_folder() as scratch:
        logs = scratch if log_dir is None else log_dir
        logs.mkdir(parents=True, exist_ok=True)
        group: dict[str, Any] = {
            "world": ranks,
            "store": str(scratch / "store"),
            "timeout": group_timeout or timeout,
            "threads": threads,
        }
        local_ranks: list[_LocalRank] = []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                log = logs / f"rank_{rank:04d}.log"
                shown = rank in passthrough
                process = context.Process(
                    target=_run_rank,
                    args=(os.getpid(), theirs, str(log), shown, group, rank, pickle.dumps((fn, args))),
                    daemon=True,
                )
                with _uninterrupted():
                    process.start()
                theirs.close()
                local_ranks.append(_LocalRank(process, ours, log, waits=[ours, process.sentinel]))
            _watch(local_ranks, timeout, grace)
            return [local.result for local in local_ranks]
        finally:
            for local in local_ranks:
                if local.process.is_alive():
                    local.process.kill()
                local.process.join()
                local.pipe.close()


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A temporary folder. A shell removes it when its standard input ends: after the block, or with this process."""
    folder = tempfile.mkdtemp(prefix="ringattn-")
    command = ["/bin/sh", "-c", 'cat; exec rm -rf "$0"', folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield Path(folder)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """SIGINT waits for the end of the block and never reaches processes that are started in the block.

    Ctrl-C goes to every process of a terminal. The process that started the ranks reports it and ends the ranks.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises SystemExit in the block, so that the block cleans up, unless SIGTERM has another handler."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(TERMINATED)

    is_main = threading.current_thread() is threading.main_thread()
    is_unhandled = is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if is_unhandled:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if is_unhandled:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def drop_output() -> None:
    """Discard all further standard output. For a process whose reader, such as `head`, has ended."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _watch(local_ranks: list[_LocalRank], timeout: float, grace: float) -> None:
    """Collect results until every rank has ended. Raises LaunchFailure if a rank fails or the time is over."""
    failed: list[int] = []
    deadline = time.monotonic() + timeout
    while not all(local.done for local in local_ranks):
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            break
        handles = [handle for local in local_ranks if not local.done for handle in local.waits]
        ready = connection.wait(handles, min(seconds, 3600.0))
        for rank, local in enumerate(local_ranks):
            if not local.done and _update(local, ready):
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + grace)
    if failed:
        first = _find_first_failure(local_ranks, failed)
        raise LaunchFailure(_describe_failure(local_ranks, failed, first), local_ranks[first].process.exitcode)
    late = [rank for rank, local in enumerate(local_ranks) if not local.done]
    if late:
        parts = [f"rank {rank} still ran{tail(local_ranks[rank].log)}" for rank in late[:4]]
        raise LaunchFailure(
            f"the ranks did not end within {timeout:g} s (a longer timeout= allows more): " + "\n".join(parts)
        )


def _update(local: _LocalRank, ready: Sequence[object]) -> bool:
    """Take in what a rank has sent, and whether its process has ended. True if the rank has failed."""
    if local.pipe in ready and local.pipe in local.waits:
        local.waits.remove(local.pipe)
        # A pipe that ends without a result belongs to a failed rank, whose exit code says more.
        with suppress(EOFError):
            local.result = pickle.loads(local.pipe.recv_bytes())
            local.ended_well = True
    if local.process.sentinel not in ready:
        return False
    local.process.join()
    local.done = True
    return bool(local.process.exitcode) or not local.ended_well


def _find_first_failure(local_ranks: list[_LocalRank], failed: list[int]) -> int:
    """The rank to blame: first a killed rank, then a rank that does not itself complain of a lost peer."""

    def blame(rank: int) -> tuple[bool, bool]:
        local = local_ranks[rank]
        return _exit_code(local) >= 0, "CommFailure" in tail(local.log)

    return min(failed, key=blame)


def _exit_code(local: _LocalRank) -> int:
    """The exit code of a process that has ended."""
    assert local.process.exitcode is not None
    return local.process.exitcode


def _describe_failure(local_ranks: list[_LocalRank], failed: list[int], first: int) -> str:
    """The text of a LaunchFailure: how rank `first` ended, the other failed ranks, and its last output."""
    code = _exit_code(local_ranks[first])
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    if code == 0:
        how = "ended before it gave a result"
    others = [rank for rank in failed if rank != first]
    also = f" (then also failed: {', '.join(map(str, others))})" if others else ""
    return f"rank {first} of {len(local_ranks)} {how}{also}{tail(local_ranks[first].log)}"


def tail(log: Path) -> str:
    """The last lines of a log as an error repeats them; empty if the log has no lines."""
    if not log.exists():
        return ""
    lines = log.read_text(errors="replace").strip().splitlines()[-TAIL:]
    return "; its last output:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""


def _run_rank(
    parent: int, pipe: Connection, log: str, shown: bool, group: dict[str, Any], rank: int, work: bytes
) -> None:
    """The main function of a rank's process: join the group, run, send the result. The process dies with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(target, 2)
    if not shown:
        os.dup2(target, 1)
    os.close(target)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if group["threads"]:
        os.environ["OMP_NUM_THREADS"] = str(group["threads"])
    torch = importlib.import_module("torch")
    dist = importlib.import_module("torch.distributed")
    if group["threads"]:
        torch.set_num_threads(group["threads"])
    store = dist.FileStore(group["store"], group["world"])
    timeout = timedelta(seconds=max(group["timeout"], MEETING))
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=group["world"], timeout=timeout)
        fn, args = pickle.loads(work)
        pipe.send_bytes(pickle.dumps(fn(rank, *args)))
        pipe.close()
    finally:
        failure = sys.exc_info()[1]
        if failure is not None and not isinstance(failure, SystemExit):  # a SystemExit comes after its own message
            traceback.print_exception(failure)
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        # Without the interpreter's shutdown, in which torch's Gloo threads sometimes abort the process.
        code = failure.code if isinstance(failure, SystemExit) else failure and 1
        os._exit(code if isinstance(code, int) else 0)
