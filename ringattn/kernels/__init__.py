"""Attention kernels: one interface to the ops of maintained libraries. One kernel per file, imported when chosen."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InvalidInput, Unsupported
from ..registry import Registry
from ..text import did_you_mean
from .base import Kernel

if TYPE_CHECKING:
    from .dropout import Dropout

#: Kernels by name. An installed package adds a `Kernel` subclass through an entry point in group "ringattn.kernels".
KERNELS: Registry[type[Kernel]] = Registry(
    "kernels",
    {
        "reference": "kernels.reference:Reference",
        "aten_cpu": "kernels.aten_cpu:AtenCpu",
        "aten_cuda": "kernels.aten_cuda:AtenCuda",
        "flash_attn": "kernels.flash_attn:FlashAttn",
        "flash_attn_3": "kernels.flash_attn:FlashAttn3",
        "flash_attn_4": "kernels.flash_attn:FlashAttn4",
    },
)
#: The kernel that "auto" chooses, by the type of the tensors' device; "reference" for all other devices.
AUTO = {"cpu": "aten_cpu", "cuda": "aten_cuda"}


def get_kernel(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    deterministic: bool = False,
    softcap: float | None = None,
    dropout: Dropout | None = None,
) -> Kernel:
    """The kernel called `name`, checked against q [B, H, n, D], k [B, K, n, D] and v [B, K, n, Dv].

    "auto" chooses one of this package's kernels by the device, see `AUTO`, or "reference" if there is a `softcap` or
    `dropout`. An explicit name is never replaced by another kernel: raises InvalidInput for an unknown name, and
    Unsupported if the kernel cannot compute these tensors or options.
    """
    if q.is_meta and q.device.type not in AUTO:
        raise InvalidInput("q is on the meta device and has no values; try to_empty(device='cpu') and load them")
    asked = {key: value for key, value in (("softcap", softcap), ("dropout", dropout)) if value is not None}
    if name == "auto":
        name = "reference" if asked else AUTO.get(q.device.type, "reference")
    base, choice = split_kernel(name)
    for feature, value in asked.items():
        if feature not in KERNELS[base].features:
            raise Unsupported(f"kernel {name} has no {feature} ({feature}={value}); try kernel='reference' or 'auto'")
    kernel = KERNELS[base].create(choice or None, q.dtype, deterministic=deterministic)
    kernel.check(q, k, v)
    return kernel.derive(asked=(choice, deterministic), **asked)


def split_kernel(name: str) -> tuple[str, str]:
    """Split a name such as "aten_cuda:flash" into the kernel and its choice, "" without one.

    Raises InvalidInput for an unknown name.
    """
    base, colon, choice = name.partition(":")
    if base not in KERNELS or (colon and choice not in KERNELS[base].choices):
        names = ["auto", *available()]
        raise InvalidInput(f"unknown kernel {name!r}; {did_you_mean(name, names)}expected {', '.join(names)}")
    return base, choice


def available() -> dict[str, str]:
    """For each kernel, "ok" or the reason why it cannot run on this machine. Imports all kernels.

    Keys are the names that `get_kernel` takes, except "auto": each kernel and each of its choices, as "name:choice".
    """
    states: dict[str, str] = {}
    for name in KERNELS:
        try:
            kernel = KERNELS[name]
        except InvalidInput as error:  # an installed package offers a kernel that cannot be imported
            states[name] = str(error)
            continue
        state = kernel.missing() or "ok"
        states |= {name: state, **{f"{name}:{choice}": state for choice in kernel.choices}}
    return states


#: What computes merges and sums: "torch", "triton", or "auto": triton for CUDA tensors if Triton can run, else torch.
MERGES = ("auto", "torch", "triton")
#: One choice for all threads, because torch runs a backward on CUDA in its own threads.
_choice = "auto"


@contextmanager
def merging(choice: str) -> Iterator[None]:
    """Context manager that selects what merges partial results and sums gradients, in all threads.

    `choice` is one of `MERGES`, such as "triton" or "torch". Raises InvalidInput for an unknown choice, and Unsupported
    for "triton" if Triton cannot run.
    """
    global _choice
    if choice not in MERGES:
        raise InvalidInput(f"merging({choice!r}): unknown; expected {', '.join(MERGES)}")
    if choice == "triton" and (reason := missing()):
        raise Unsupported(f"merging('triton'): {reason}; or try merging('torch')")
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why Triton cannot run here; None if it can. Triton needs a C compiler and Python's headers."""
    if find_spec("triton") is None:
        return "Triton is not installed; try pip install 'ringattn[triton]'"
    if _fused().INTERPRETED:
        return None
    if not ("CC" in os.environ or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler; install gcc, or set CC"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Triton needs Python.h; install the headers of Python, such as python3-dev"
    return None


def _fused() -> ModuleType:
    return import_module(".fused", __package__)


def fused_kernels(device: torch.device) -> ModuleType | None:
    """The module with Triton kernels for merges and sums on this device; None if torch computes them there."""
    return _fused() if _by_triton(_choice, device) else None


@lru_cache(maxsize=64)
def _by_triton(choice: str, device: torch.device) -> bool:
    """Whether Triton merges and sums tensors on this device."""
    if choice == "triton":
        if device.type != "cuda" and not _fused().INTERPRETED:
            raise Unsupported(f"merging('triton') needs tensors on a cuda device, got {device}; try merging('auto')")
        return True
    if choice == "torch" or device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and missing() is None
