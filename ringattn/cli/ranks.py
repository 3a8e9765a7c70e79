"""Starting the ranks of a verb: on this machine, or as one rank of a torchrun, mpirun or srun job."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..config.groups import TransportGroup
from ..errors import InvalidInput, LaunchFailure, RingAttentionError
from ..transport import TRANSPORTS as REGISTERED
from ..transport.base import Transport
from ..transport.launcher import UNREAD, Launch, detect, drop_output, init_process_group, run_local
from ..transport.mpi import INSTALL, AbortOnError, Mpi, load
from ..transport.torchdist import TorchDist

#: Local ranks per core, and threads of one rank per core, at most.
LOCAL = 32
#: The longest timeout in seconds: a year.
LONGEST = 31_536_000
TRANSPORTS = ("gloo", "nccl", "mpi", "virtual")


class Started(Protocol):
    """What a verb's configuration says of its ranks."""

    ranks: int
    transport: TransportGroup
    threads: int | None
    timeout: float


#: What a rank does, in a function of an importable module.
Worker = Callable[[Any, Transport], Any]


def check(config: Started, transports: tuple[str, ...] = TRANSPORTS) -> None:
    """Raise InvalidInput where a value about ranks cannot be used."""
    transports = (*transports, *REGISTERED.installed)
    if config.transport.spec not in transports:
        raise InvalidInput(f"transport={config.transport.spec}: expected one of {', '.join(transports)}")
    if config.ranks < 1:
        raise InvalidInput(f"ranks={config.ranks}: must be at least 1")
    most = LOCAL * (os.cpu_count() or 1)
    if config.ranks > most and config.transport.spec in ("gloo", "nccl") and detect().kind == "none":
        raise InvalidInput(
            f"ranks={config.ranks:,}: each would be a process of this machine, of which at most {most} are started here; "
            "start them with torchrun, or try ringattn run transport=virtual, or ringattn simulate"
        )
    check_threads("threads", config.threads)
    if not 0 < config.timeout <= LONGEST:
        raise InvalidInput(
            f"timeout={config.timeout:g}: must be a number of seconds above 0, and at most {LONGEST:,} (a year)"
        )
    if config.transport.gpu_aware and config.transport.spec != "mpi":
        raise InvalidInput(
            f"transport.gpu_aware=true is an option of transport=mpi, not of {config.transport.spec}; leave it out"
        )


def check_threads(name: str, threads: int | None) -> None:
    """Raise InvalidInput where a number of threads is not one that torch can start here; None is one."""
    most = LOCAL * (os.cpu_count() or 1)
    if threads is not None and not 1 <= threads <= most:
        raise InvalidInput(
            f"{name}={threads:,}: must be 1 .. {most}, {LOCAL} for each core; leave it out to share the cores evenly"
        )


def device(config: Started) -> torch.device:
    """Where the tensors of this rank are."""
    if config.transport.spec == "nccl" or config.transport.gpu_aware:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def start(config: Any, work: Worker, verb: str, before: Callable[[Any], None] = lambda config: None) -> None:
    """Run `work(config, transport)` on every rank; here, where a launcher started this process, else on new processes.

    `before` is called once, in this process, before it starts any.
    """
    launch = detect()
    if config.transport.spec in REGISTERED.installed:
        work(config, REGISTERED[config.transport.spec](timeout=config.timeout))
    elif config.transport.spec == "mpi":
        _under_mpi(launch, config, work, verb)
    elif launch.kind != "none":
        from torch.distributed.elastic.multiprocessing.errors import record

        record(_launched)(launch, config, work)
    else:
        if config.transport.spec == "nccl":
            raise InvalidInput(
                f"transport=nccl needs one process per GPU; start with torchrun --nproc-per-node N -m ringattn {verb} "
                "transport=nccl"
            )
        before(config)
        _local(config, work)


def _local(config: Any, work: Worker) -> None:
    threads = config.threads or max(1, (os.cpu_count() or 1) // config.ranks)
    try:
        run_local(
            _started, config.ranks, config, work, timeout=math.inf, group_timeout=config.timeout, threads=threads,
            passthrough=(0,),
        )  # fmt: skip
    except LaunchFailure as error:
        if error.status == UNREAD:
            raise BrokenPipeError from None
        raise RingAttentionError(str(error)) from None


def _started(rank: int, config: Any, work: Worker) -> None:
    """A rank that `_local` started: a wrong call is told in one line, which the parent repeats."""
    try:
        work(config, TorchDist(timeout=config.timeout))
    except RingAttentionError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    except BrokenPipeError:
        drop_output()
        raise SystemExit(UNREAD) from None


def _launched(launch: Launch, config: Any, work: Worker) -> None:
    torch.set_num_threads(config.threads or int(os.environ.get("OMP_NUM_THREADS", "1")))
    init_process_group(launch, backend=config.transport.spec, timeout=config.timeout)
    if config.transport.spec == "nccl":
        torch.cuda.set_device(launch.local_rank)
    try:
        work(config, TorchDist(timeout=config.timeout))
    finally:
        dist.destroy_process_group()


def _under_mpi(launch: Launch, config: Any, work: Worker, verb: str) -> None:
    """This process is one rank of an mpirun, or of an srun whose Slurm speaks the MPI library's PMI."""
    if launch.kind in ("none", "torchrun"):
        how = "torchrun started this job" if launch.kind == "torchrun" else "no MPI launcher started this process"
        raise InvalidInput(
            f"transport=mpi: {how}; start it with mpirun -n {config.ranks} ringattn {verb} transport=mpi ... "
            f"(where mpirun or mpi4py is missing: {INSTALL})"
        )
    torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // max(launch.local_world, 1)))
    load()
    with AbortOnError():
        if config.transport.gpu_aware:
            if not torch.cuda.is_available():
                raise InvalidInput(
                    "transport.gpu_aware=true passes CUDA tensors to MPI, and this rank sees no CUDA device (ringattn "
                    "doctor tells why); leave it out for CPU tensors"
                )
            # A rank that its launcher shows one device takes that one; ranks that see all of a node take turns.
            torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
        transport = Mpi(timeout=config.timeout, gpu_aware=config.transport.gpu_aware)
        if transport.size != launch.world:
            raise InvalidInput(
                f"{launch.kind} started {launch.world} processes, and MPI in this one knows of {transport.size}: mpirun "
                "and mpi4py belong to different MPI libraries; use the mpirun that ringattn doctor names"
            )
        work(config, transport)
