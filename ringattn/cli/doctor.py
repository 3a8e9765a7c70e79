"""ringattn doctor: what can run here, and what to install for the rest."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import InvalidInput, Unsupported
from ..plan.work import Work
from ..simulator.reporting.console import Number, print_numbers
from ..transport.launcher import detect
from .config.schema import DoctorConfig

#: Optional packages, what each is for, and the command that installs it.
EXTRAS = {
    "mpi4py": ("the MPI transport", "pip install 'ringattn[mpi]'"),
    "matplotlib": ("plots", "pip install 'ringattn[plot]'"),
    "transformers": ("models of Hugging Face", "pip install 'ringattn[transformers]'"),
    "triton": ("fused merges on CUDA", "pip install 'ringattn[triton]'"),
    "joblib": ("studies over processes", "pip install 'ringattn[joblib]'"),
    "submitit": ("studies on Slurm", "pip install 'ringattn[slurm]'"),
    "ring_attention_pytorch": ("bench suite=peers", "pip install 'ringattn[peers]'"),
    "sphinx": ("building the documentation", "pip install 'ringattn[docs]'"),
}
#: Works of 4,096 rows and keys with 8 heads of 128 columns, as rings of a decoder make them.
TYPICAL = {
    name: [Work(range(8), range(kv_heads), range(a, b), (range(a, b),), lo, hi) for a, b in pairwise(cuts)]
    for name, kv_heads, lo, hi, cuts in (
        ("dense", 8, None, None, (0, 4096)),
        ("causal", 8, 0, None, (0, 4096)),
        ("grouped heads", 2, 0, None, (0, 4096)),
        ("window", 8, 0, 1023, (0, 4096)),
        ("documents", 8, 0, None, (0, 1000, 3000, 4096)),
    )
}
#: Rows of 128 see their own block of keys and another.
TYPICAL["block mask"] = [
    Work(range(8), range(8), range(128 * i, 128 * i + 128), (range(128 * j, 128 * j + 128),))
    for i in range(32)
    for j in {i, i * i % 32}
]


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
        Number("cuda", _cuda_devices(torch)),
        Number("gloo", "ok" if dist.is_available() and dist.is_gloo_available() else "missing from this torch build"),
        Number("nccl", _nccl_version(torch, dist)),
    ]
    numbers += [Number(f"kernel {name}", state) for name, state in kernels.available().items()]
    numbers += _kernel_choices(config.capability)
    for package, (purpose, command) in EXTRAS.items():
        numbers.append(Number(package, _installed_version(package) or f"missing; for {purpose}: {command}"))
    numbers += [Number("mpi library", _mpi_library()), Number("mpirun", _mpirun())]
    print_numbers("ringattn doctor", numbers)


def _kernel_choices(capability: str | None) -> list[Number]:
    """What kernel=auto runs for typical works on this machine, or on a device of the given compute capability."""
    torch: Any = importlib.import_module("torch")
    aten_cuda: Any = importlib.import_module("ringattn.kernels.aten_cuda")
    cuda_device: Any = importlib.import_module("ringattn.kernels.cuda_device")
    aten_cpu: Any = importlib.import_module("ringattn.kernels.aten_cpu")
    if capability is None and not torch.cuda.is_available():
        return [Number(f"auto for {name}", str(aten_cpu.AtenCpu().explain(*works))) for name, works in TYPICAL.items()]
    if capability is None:
        device, place = cuda_device.CudaDevice.read(), "here"
    else:
        if not re.fullmatch(r"\d+\.\d", capability):
            raise InvalidInput(f"capability={capability}: expected a compute capability such as 9.0")
        major, minor = capability.split(".")
        device, place = cuda_device.CudaDevice((int(major), int(minor))), f"supposing {capability}"
    numbers = []
    # Before 8.0 fp16 has ops and bf16 has none.
    half = [torch.bfloat16] if device.capability >= (8, 0) else [torch.bfloat16, torch.float16]
    for dtype in (*half, torch.float32):
        kernel = aten_cuda.AtenCuda(None, dtype, deterministic=False)
        label = f"{str(dtype).removeprefix('torch.')} {place}"
        try:
            kernel.use(device, 128)
        except Unsupported as error:
            numbers.append(Number(f"auto, {label}", str(error)))
            continue
        numbers += [Number(f"auto for {name}, {label}", str(kernel.explain(*works))) for name, works in TYPICAL.items()]
    return numbers


def _cuda_devices(torch: Any) -> str:
    if not torch.cuda.is_available():
        return "no device, or a CPU build of torch"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{torch.version.cuda}: {', '.join(names)}"


def _nccl_version(torch: Any, dist: Any) -> str:
    if not dist.is_nccl_available():
        return "missing from this torch build; install a CUDA build of torch"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _mpi_library() -> str:
    """The version of the MPI library that mpi4py finds. MPI itself is not started."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"unknown without mpi4py; try: {EXTRAS['mpi4py'][1]}"
    importlib.import_module("mpi4py").rc(initialize=False, finalize=False)
    try:
        text: str = importlib.import_module("mpi4py.MPI").Get_library_version()
    except (ImportError, RuntimeError) as error:
        return f"none that mpi4py can load ({str(error).splitlines()[0]}); try: {EXTRAS['mpi4py'][1]}"
    return " ".join(text.splitlines()[0].rstrip("\0").split())


def _mpirun() -> str:
    """The path of mpirun: the mpirun of this environment first, as it belongs to the library that mpi4py loads."""
    beside_python = Path(sys.executable).parent / "mpirun"
    on_path = shutil.which("mpirun")
    if beside_python.is_file():
        same = on_path is not None and Path(on_path).resolve() == beside_python.resolve()
        return f"{beside_python}" + (
            "" if same else f", not on the PATH{f', where {on_path} stands' if on_path else ''}"
        )
    return on_path or f"missing; try: {EXTRAS['mpi4py'][1]}"


def _installed_version(package: str) -> str | None:
    """The version of an installed package; "found" where it has none; None where it is missing."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        return "found"
