"""Who this process is among the ranks of a job, and ranks started by this process itself."""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

from ..errors import InvalidInput, LaunchFailure

#: Lines of a failed rank's stderr that the error repeats.
TAIL = 30
#: Exit statuses after SIGTERM, and where nobody reads standard output any more, as of a shell.
TERMINATED, UNREAD = 143, 141
#: Seconds in which new ranks must find each other, however short their messages may take: they import torch meanwhile.
MEETING = 60.0


@dataclass(frozen=True)
class Launch:
    """The launcher seen in the environment, and this process's place in the job."""

    kind: str
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


#: (launcher, rank, world, local rank, local world), in order of trust: SLURM_PROCID is also set in a plain batch script,
#: where one task is no job of ranks. Of two names the first that is set counts: MPICH's mpirun tells the place on the
#: node, and srun, which may speak the same PMI, tells it in its own variables.
_VARIABLES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID SLURM_LOCALID", "MPI_LOCALNRANKS SLURM_NTASKS_PER_NODE"),
    ("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)  # fmt: skip


def detect(env: Mapping[str, str] | None = None) -> Launch:
    """The launcher that started this process: torchrun, openmpi, mpich, slurm, or none."""
    env = os.environ if env is None else env
    for kind, rank, world, local_rank, local_world in _VARIABLES:
        if rank in env and world in env:
            numbers = []
            for names, default in ((rank, "0"), (world, "1"), (local_rank, "0"), (local_world, "1")):
                name = next((name for name in names.split() if name in env), "")
                try:
                    numbers.append(int(env.get(name, default)))
                except ValueError:
                    raise InvalidInput(f"{name}={env[name]!r} in the environment is not a number; unset it") from None
            if kind != "slurm" or numbers[1] > 1:
                return Launch(kind, *numbers)
    return Launch("none")


def init_process_group(launch: Launch, *, backend: str, timeout: float) -> None:
    """Join the process group of a torchrun job (env://), after a restart by `torchrun --max-restarts` too."""
    if launch.kind != "torchrun":
        raise InvalidInput(
            f"{launch.kind} started this job, which transport={backend} cannot join; start it with torchrun, use "
            "transport=mpi, or start it alone with ranks=2 to use ranks on this machine"
        )
    dist = importlib.import_module("torch.distributed")
    within = timedelta(seconds=timeout)
    store, rank, world = next(dist.rendezvous("env://", timeout=within))
    # torchrun's store outlives the ranks: after a restart Gloo would find in it where the ranks before listened.
    store = dist.PrefixStore(f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=within)


@dataclass
class _LocalRank:
    process: Any
    pipe: Any
    log: Path
    result: Any = None
    done: bool = False
    ended_well: bool = False
    waits: list[Any] = field(default_factory=list)


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
    """Run fn(rank, *args) on `ranks` new processes joined in a Gloo group; their return values in rank order.

    `fn` is a function of an importable module; arguments and results are pickled. `timeout` (seconds) bounds the
    whole run and `group_timeout` (default: the same) every collective in it. `threads` is torch's thread count
    per rank. After one rank has failed the others get `grace` seconds to end by themselves. stderr and
    stdout of a rank go to `log_dir`/rank_0001.log, but for the stdout of the ranks in `passthrough`.

    Raises LaunchFailure with the stderr of the rank that failed first; no process is left behind, nor any file, also
    where this process gets a SIGTERM, which ends it with SystemExit.
    """
    if ranks < 1:
        raise InvalidInput(f"ranks={ranks}: at least one rank is needed")
    context = get_context("spawn")
    with terminable(), tempfile.TemporaryDirectory(prefix="ringattn-") as scratch:
        logs = Path(scratch) if log_dir is None else log_dir
        logs.mkdir(parents=True, exist_ok=True)
        group: dict[str, Any] = {
            "world": ranks,
            "store": str(Path(scratch) / "store"),
            "timeout": group_timeout or timeout,
            "threads": threads,
        }
        team: list[_LocalRank] = []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                log = logs / f"rank_{rank:04d}.log"
                shown = rank in passthrough
                process = context.Process(
                    target=_child,
                    args=(os.getpid(), theirs, str(log), shown, group, rank, pickle.dumps((fn, args))),
                    daemon=True,
                )
                with _uninterrupted():
                    process.start()
                theirs.close()
                team.append(_LocalRank(process, ours, log, waits=[ours, process.sentinel]))
            _watch(team, timeout, grace)
            return [member.result for member in team]
        finally:
            for member in team:
                if member.process.is_alive():
                    member.process.kill()
                member.process.join()
                member.pipe.close()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """SIGINT waits for the end of the block, and does not reach processes that are started in it.

    Ctrl-C goes to every process of a terminal: the one that started the ranks tells of it, and ends them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises SystemExit in the block, so that what it holds is given back; unless somebody else handles it."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(TERMINATED)

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def drop_output() -> None:
    """Let what is still to be written to standard output vanish: its reader is gone, as `head` is."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _watch(team: list[_LocalRank], timeout: float, grace: float) -> None:
    """Collect results until every rank has ended well, one has failed, or the time is over."""
    failed: list[int] = []
    deadline = time.monotonic() + timeout
    while not all(member.done for member in team):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        ready = connection.wait([w for m in team if not m.done for w in m.waits], min(left, 3600.0))
        for rank, member in enumerate(team):
            if member.done or not any(w in ready for w in member.waits):
                continue
            if member.pipe in ready and member.pipe in member.waits:
                member.waits.remove(member.pipe)
                try:
                    member.result = pickle.loads(member.pipe.recv_bytes())
                    member.ended_well = True
                except EOFError:
                    pass  # it ended without a result; its exit code says more
            if member.process.sentinel in ready:
                member.process.join()
                member.done = True
                if member.process.exitcode or not member.ended_well:
                    failed.append(rank)
                    deadline = min(deadline, time.monotonic() + grace)
    if failed:
        first = _first(team, failed)
        raise LaunchFailure(_report(team, failed, first), team[first].process.exitcode)
    late = [rank for rank, member in enumerate(team) if not member.done]
    if late:
        parts = [f"rank {rank} still ran{tail(team[rank].log)}" for rank in late[:4]]
        raise LaunchFailure(f"the ranks did not end within {timeout:g} s: " + "\n".join(parts))


def _first(team: list[_LocalRank], failed: list[int]) -> int:
    """The rank to blame: a killed one first, then one that does not itself complain of a lost peer."""

    def innocent(rank: int) -> bool:
        return "CommFailure" in tail(team[rank].log)

    return min(failed, key=lambda rank: (team[rank].process.exitcode >= 0, innocent(rank)))


def _report(team: list[_LocalRank], failed: list[int], first: int) -> str:
    code = team[first].process.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    if code == 0:
        how = "ended before it gave a result"
    others = [rank for rank in failed if rank != first]
    also = f" (then also failed: {', '.join(map(str, others))})" if others else ""
    return f"rank {first} of {len(team)} {how}{also}{tail(team[first].log)}"


def tail(log: Path) -> str:
    """The last lines of a log, as an error repeats them; empty where there are none."""
    if not log.exists():
        return ""
    lines = log.read_text(errors="replace").strip().splitlines()[-TAIL:]
    return "; its last output:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""


def _child(parent: int, pipe: Any, log: str, shown: bool, group: dict[str, Any], rank: int, work: bytes) -> None:
    """A rank's process: die with the parent, join the group, run, report."""
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
        if failure is not None and not isinstance(failure, SystemExit):  # that has said what there is to say
            traceback.print_exception(failure)
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not by way of the interpreter's end: there torch's Gloo threads abort the process now and then.
        code = failure.code if isinstance(failure, SystemExit) else failure and 1
        os._exit(code if isinstance(code, int) else 0)
