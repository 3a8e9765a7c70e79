"""ringattn doctor: what this machine can run, and what to install for the rest."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import InvalidInput, Unsupported
from ..kernels import available, missing
from ..kernels.aten_cpu import AtenCpu
from ..kernels.cuda import Cuda
from ..kernels.cuda_device import CudaDevice
from ..kernels.visit import device_refuses, ptxas_version
from ..plan.work import Work
from ..simulator.reporting.console import Number, print_numbers
from ..text import first_line
from ..transport.launcher import detect
from .config.schema import DoctorConfig

#: For each optional package: its purpose and the command that installs it.
EXTRAS = {
    "mpi4py": ("the MPI transport", "pip install 'ringattn[mpi]'"),
    "matplotlib": ("plots", "pip install 'ringattn[plot]'"),
    "transformers": ("models of Hugging Face", "pip install 'ringattn[transformers]'"),
    "diffusers": ("diffusion transformers", "pip install 'ringattn[diffusers]'"),
    "triton": ("masks and fused merges on CUDA", "pip install 'ringattn[triton]'"),
    "ring_attention_pytorch": ("report suite=peers", "pip install 'ringattn[peers]'"),
    "sphinx": ("building the documentation", "pip install 'ringattn[docs]'"),
}
#: Typical works of a decoder ring: 4,096 rows and keys, 8 heads, head_dim 128.
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
#: Each block of 128 rows sees its own block of keys and one other.
TYPICAL["block mask"] = [
    Work(range(8), range(8), range(128 * i, 128 * i + 128), (range(128 * j, 128 * j + 128),))
    for i in range(32)
    for j in {i, i * i % 32}
]


def main(config: DoctorConfig) -> None:
    """Print versions, launcher, devices, backends, kernels and missing extras."""
    launch = detect()
    nccl = "missing from this torch build; install a CUDA build of torch"
    numbers = [
        Number("ringattn", version("ringattn")),
        Number("python", f"{platform.python_version()} on {platform.platform()}"),
        Number("torch", torch.__version__),
        Number("launcher", f"{launch.kind}, rank {launch.rank} of {launch.world}, local rank {launch.local_rank}"),
        Number("cores", f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads"),
        Number("cuda", _cuda_devices()),
        Number("gloo", "ok" if dist.is_available() and dist.is_gloo_available() else "missing from this torch build"),
        Number("nccl", ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else nccl),
    ]
    network = os.environ.get("GLOO_SOCKET_IFNAME")
    leads = "the interface that reaches the store of the group; GLOO_SOCKET_IFNAME=eth0 selects another"
    numbers.append(Number("network of records", network or leads))
    numbers += [Number(f"kernel {name}", state) for name, state in available().items()]
    numbers += [Number("merges on CUDA", missing() or "by Triton"), Number("ptxas", _ptxas())]
    numbers += _kernel_choices(config.capability)
    for package, (purpose, command) in EXTRAS.items():
        numbers.append(Number(package, _installed_version(package) or f"missing; for {purpose}: {command}"))
    numbers += [Number("mpi library", _mpi_library()), Number("mpirun", _mpirun())]
    print_numbers("ringattn doctor", numbers)


def _kernel_choices(capability: str | None) -> list[Number]:
    """The ops that kernel=auto uses for TYPICAL works, here or with a device of the given compute capability."""
    if capability is None and not torch.cuda.is_available():
        return [Number(f"auto for {name}", str(AtenCpu().explain(*works))) for name, works in TYPICAL.items()]
    if capability is None:
        device, place = CudaDevice.read(), "here"
    else:
        if not re.fullmatch(r"\d+\.\d", capability):
            raise InvalidInput(f"capability={capability}: expected a compute capability such as 9.0")
        major, minor = capability.split(".")
        device, place = CudaDevice((int(major), int(minor))), f"supposing {capability}"
    refused = missing() or device_refuses(device.capability)
    numbers = []
    if capability is not None:
        numbers.append(Number(f"kernel visit {place}", refused or "ok; a self-test runs at its first use"))
    # Below compute capability 8.0 there are ops for fp16 but not for bf16.
    half = [torch.bfloat16] if device.capability >= (8, 0) else [torch.bfloat16, torch.float16]
    for dtype in (*half, torch.float32):
        kernel = Cuda(None, dtype, deterministic=False)
        label = f"{str(dtype).removeprefix('torch.')} {place}"
        try:
            kernel.use(device, 128)
        except Unsupported as error:
            numbers.append(Number(f"auto, {label}", str(error)))
            continue
        if refused:
            kernel.refused = "see kernel visit"
        numbers += [Number(f"auto for {name}, {label}", str(kernel.explain(*works))) for name, works in TYPICAL.items()]
    return numbers


def _ptxas() -> str:
    """The version and path of the ptxas with which Triton compiles."""
    if find_spec("triton") is None:
        return f"unknown without Triton; try: {EXTRAS['triton'][1]}"
    path = import_module("triton").knobs.nvidia.ptxas.path
    return f"{'.'.join(map(str, ptxas_version()))}: {path}; TRITON_PTXAS_PATH names another"


def _cuda_devices() -> str:
    if not torch.cuda.is_available():
        return "no device, or a CPU build of torch"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{torch.version.cuda}: {', '.join(names)}"


def _mpi_library() -> str:
    """The version of the MPI library that mpi4py loads, without initializing MPI."""
    if find_spec("mpi4py") is None:
        return f"unknown without mpi4py; try: {EXTRAS['mpi4py'][1]}"
    import_module("mpi4py").rc(initialize=False, finalize=False)
    try:
        text: str = import_module("mpi4py.MPI").Get_library_version()
    except (ImportError, RuntimeError) as error:
        return f"none that mpi4py can load ({first_line(error)}); try: {EXTRAS['mpi4py'][1]}"
    return " ".join(text.splitlines()[0].rstrip("\0").split())


def _mpirun() -> str:
    """The path of mpirun, preferably the one beside this Python: it belongs to the library that mpi4py loads."""
    beside_python = Path(sys.executable).parent / "mpirun"
    on_path = shutil.which("mpirun")
    if beside_python.is_file():
        same = on_path is not None and Path(on_path).resolve() == beside_python.resolve()
        return f"{beside_python}" + ("" if same else f", not on the PATH{f', which has {on_path}' if on_path else ''}")
    return on_path or f"missing; try: {EXTRAS['mpi4py'][1]}"


def _installed_version(package: str) -> str | None:
    """The version of an installed package, or "found" if it has none; None if it is not installed."""
    if find_spec(package) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        return "found"
