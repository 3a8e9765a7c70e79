"""Checks and starts the ranks of a verb, on this machine or as part of a torchrun, mpirun or srun job."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from ..errors import InvalidInput, LaunchFailure, RingAttentionError
from ..text import plural
from ..transport import TRANSPORTS as REGISTERED_TRANSPORTS
from ..transport.base import Transport
from ..transport.launcher import UNREAD, Launch, detect, drop_output, init_process_group, run_local, show_note
from ..transport.mpi import INSTALL, AbortOnError, Mpi, load
from ..transport.torchdist import TorchDist
from .config.groups import TransportGroup, check_choice, check_least, default_of

#: Transports whose ranks a launcher may start.
LAUNCHED = ("gloo", "nccl", "mpi")
#: The most local ranks per core, and the most threads per core.
MAX_PER_CORE = 32
#: The longest timeout in seconds: a year.
MAX_TIMEOUT = 31_536_000
#: The most virtual ranks in one process.
MAX_VIRTUAL = 1 << 14


class RankConfig(Protocol):
    """The settings of a verb that runs on ranks."""

    transport: TransportGroup
    ranks: int
    threads: int | None
    timeout: float


C = TypeVar("C", bound=RankConfig)
#: What a rank returns: a report to print, or None.
Report = dict[str, Any] | None
#: The function that each rank runs: a module-level function, or a partial of one, as new processes import it by name.
Worker = Callable[[C, Transport], Report]


def check_ranks(config: RankConfig, alone: str) -> None:
    """Raise InvalidInput if the transport, the number of ranks, the threads or the timeout cannot be used.

    `alone` names the transport that the verb uses in a single process, such as "virtual".
    """
    transport = config.transport.spec
    check_choice("transport", transport, (*LAUNCHED, alone, *REGISTERED_TRANSPORTS.installed))
    check_least(config, ranks=1)
    launch = detect()
    fitting = (default_of(config, "ranks"), launch.world)
    if launch.kind != "none" and transport in LAUNCHED and config.ranks not in fitting:
        raise InvalidInput(
            f"ranks={config.ranks}: {launch.kind} started {launch.world} ranks; leave ranks out, or give "
            f"ranks={launch.world}, or start another number with {launch.kind}"
        )
    max_ranks = MAX_PER_CORE * (os.cpu_count() or 1)
    if config.ranks > max_ranks and transport in ("gloo", "nccl") and launch.kind == "none":
        raise InvalidInput(
            f"ranks={config.ranks:,}: at most {max_ranks} processes are started on this machine; start the ranks with "
            "torchrun, or try ringattn run transport=virtual, or ringattn simulate"
        )
    if config.ranks > MAX_VIRTUAL and transport == "virtual":
        raise InvalidInput(
            f"ranks={config.ranks:,}: at most {MAX_VIRTUAL:,} virtual ranks fit in one process; try fewer, or ringattn "
            "verify, which executes sampled rows of any number of ranks"
        )
    check_threads("threads", config.threads)
    if not 0 < config.timeout <= MAX_TIMEOUT:
        raise InvalidInput(
            f"timeout={config.timeout:g}: must be a number of seconds above 0, and at most {MAX_TIMEOUT:,} (a year)"
        )
    if config.transport.gpu_aware and transport != "mpi":
        raise InvalidInput(f"transport.gpu_aware=true is an option of transport=mpi, not of {transport}; leave it out")
    if config.transport.check and transport not in ("gloo", "nccl"):
        raise InvalidInput(f"transport.check is an option of transport=gloo and nccl, not of {transport}; leave it out")


def check_threads(name: str, threads: int | None) -> None:
    """Raise InvalidInput if this number of threads is out of range; None is always valid."""
    max_threads = MAX_PER_CORE * (os.cpu_count() or 1)
    if threads is not None and not 1 <= threads <= max_threads:
        raise InvalidInput(
            f"{name}={threads:,}: must be 1 .. {max_threads}, {MAX_PER_CORE} per core; leave it out to share the "
            "cores evenly"
        )


def rank_device(config: RankConfig) -> torch.device:
    """The device of this rank's tensors."""
    if config.transport.spec == "nccl" or config.transport.gpu_aware:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def start_ranks(config: C, work: Worker[C], verb: str) -> Report:
    """Run `work(config, transport)` on every rank: this process under a launcher, otherwise new local processes.

    Returns the report of this process's rank, or of rank 0 of the new processes.
    """
    launch = detect()
    if config.transport.spec in REGISTERED_TRANSPORTS.installed:
        return work(config, REGISTERED_TRANSPORTS[config.transport.spec](timeout=config.timeout))
    elif config.transport.spec == "mpi":
        return _run_under_mpi(launch, config, work, verb)
    elif launch.kind != "none":
        from torch.distributed.elastic.multiprocessing.errors import record

        report: Report = record(_run_under_torchrun)(launch, config, work)
        return report
    elif config.transport.spec == "nccl":
        _set_cuda_device(launch, "transport=nccl")
        raise InvalidInput(
            f"transport=nccl needs one process per GPU; start with torchrun --nproc-per-node N -m ringattn {verb} "
            "transport=nccl"
        )
    else:
        return _run_locally(config, work)


def _run_locally(config: C, work: Worker[C]) -> Report:
    """Run the ranks as new processes on this machine; rank 0 prints, and its report is returned."""
    threads = config.threads or max(1, (os.cpu_count() or 1) // config.ranks)
    show_note(f"starting {plural(config.ranks, 'rank')} ...")
    try:
        return run_local(
            _run_local_rank,
            config.ranks,
            config,
            work,
            timeout=math.inf,
            group_timeout=config.timeout,
            threads=threads,
            show=True,
        )[0]
    except LaunchFailure as error:
        if error.status == UNREAD:
            raise BrokenPipeError from None
        raise


def _run_local_rank(rank: int, config: C, work: Worker[C]) -> Report:
    """Run one local rank. Prints a ringattn error as one line, which the parent process repeats."""
    try:
        return work(config, TorchDist(timeout=config.timeout))
    except RingAttentionError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    except BrokenPipeError:
        drop_output()
        raise SystemExit(UNREAD) from None


def _set_cuda_device(launch: Launch, setting: str) -> torch.device:
    """Make this rank's CUDA device current and return it. Raises InvalidInput if there is none."""
    if not torch.cuda.is_available():
        raise InvalidInput(
            f"{setting} needs a CUDA device, but this rank sees none (see ringattn doctor); leave it out, or try "
            "transport=gloo for CPU tensors"
        )
    # Modulo, because some launchers show each rank only its own device.
    device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _run_under_torchrun(launch: Launch, config: C, work: Worker[C]) -> Report:
    """Run this process's rank of a torchrun job."""
    torch.set_num_threads(config.threads or int(os.environ.get("OMP_NUM_THREADS", "1")))
    # Set the device before creating the group: NCCL then connects at once, and ranks do not all use device 0.
    device = _set_cuda_device(launch, "transport=nccl") if config.transport.spec == "nccl" else None
    init_process_group(launch, backend=config.transport.spec, timeout=config.timeout, device=device)
    try:
        return work(config, TorchDist(timeout=config.timeout))
    finally:
        dist.destroy_process_group()


def _run_under_mpi(launch: Launch, config: C, work: Worker[C], verb: str) -> Report:
    """Run this process's rank of an mpirun job, or of an srun job if Slurm supports the MPI library's PMI."""
    if launch.kind in ("none", "torchrun"):
        how = "torchrun started this job" if launch.kind == "torchrun" else "no MPI launcher started this process"
        raise InvalidInput(
            f"transport=mpi: {how}; start it with mpirun -n {config.ranks} ringattn {verb} transport=mpi ... "
            f"(if mpirun or mpi4py is missing: {INSTALL})"
        )
    torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // max(launch.local_world, 1)))
    load()
    with AbortOnError():
        if config.transport.gpu_aware:
            _set_cuda_device(launch, "transport.gpu_aware=true")
        transport = Mpi(timeout=config.timeout, gpu_aware=config.transport.gpu_aware)
        check_mpi_size(launch, transport.size)
        return work(config, transport)


def check_mpi_size(launch: Launch, size: int) -> None:
    """Raise InvalidInput if MPI sees another number of processes than the launcher started."""
    if size != launch.world:
        raise InvalidInput(
            f"{launch.kind} started {launch.world} processes, but MPI sees {size}: mpirun and mpi4py "
            "belong to different MPI libraries; use the mpirun that ringattn doctor shows"
        )
