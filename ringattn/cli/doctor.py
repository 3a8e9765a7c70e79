"""ringattn doctor: what can run here, and what to install for the rest."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..config.schema import DoctorConfig
from ..reporting.console import Number, show
from ..transport.launcher import detect

#: Optional packages, what they bring, and how to get them.
EXTRAS = {
    "mpi4py": ("the MPI transport", "pip install 'ringattn[mpi]'"),
    "matplotlib": ("plots", "pip install 'ringattn[plot]'"),
}


def main(config: DoctorConfig) -> None:
    """Print versions, launcher, devices, backends, kernels and missing extras."""
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    kernels: Any = importlib.import_module("ringattn.kernels")
    launch = detect()
    numbers = [
        Number("ringattn", version("ringattn")),
        Number("python", f"{platform.python_version()} on {platform.platform()}"),
        Number("torch", torch.__version__),
        Number("launcher", f"{launch.kind}, rank {launch.rank} of {launch.world}, local rank {launch.local_rank}"),
        Number("cores", f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads"),
        Number("cuda", _cuda(torch)),
        Number("gloo", "ok" if dist.is_available() and dist.is_gloo_available() else "missing from this torch build"),
        Number("nccl", _nccl(torch, dist)),
    ]
    numbers += [Number(f"kernel {name}", state) for name, state in kernels.available().items()]
    for package, (brings, command) in EXTRAS.items():
        numbers.append(Number(package, _installed(package) or f"missing; for {brings}: {command}"))
    numbers += [Number("mpi library", _mpi_library()), Number("mpirun", _mpirun())]
    show("ringattn doctor", numbers)


def _cuda(torch: Any) -> str:
    if not torch.cuda.is_available():
        return "no device, or a CPU build of torch"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{torch.version.cuda}: {', '.join(names)}"


def _nccl(torch: Any, dist: Any) -> str:
    if not dist.is_nccl_available():
        return "missing from this torch build; install a CUDA build of torch"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _mpi_library() -> str:
    """The version of the MPI library that mpi4py finds; MPI itself is not started."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"unknown without mpi4py; try: {EXTRAS['mpi4py'][1]}"
    importlib.import_module("mpi4py").rc(initialize=False, finalize=False)
    try:
        text: str = importlib.import_module("mpi4py.MPI").Get_library_version()
    except (ImportError, RuntimeError) as error:
        return f"none that mpi4py can load ({str(error).splitlines()[0]}); try: {EXTRAS['mpi4py'][1]}"
    return " ".join(text.splitlines()[0].rstrip("\0").split())


def _mpirun() -> str:
    """Where mpirun is. The one of this environment comes first: it belongs to the library that mpi4py loads."""
    beside = Path(sys.executable).parent / "mpirun"
    found = shutil.which("mpirun")
    if beside.is_file():
        same = found is not None and Path(found).resolve() == beside.resolve()
        return f"{beside}" + ("" if same else f", not on the PATH{f', where {found} stands' if found else ''}")
    return found or f"missing; try: {EXTRAS['mpi4py'][1]}"


def _installed(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        return "found"
