"""What computes merges and sums of gradients: torch, or Triton kernels."""

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

import torch

from ..errors import InvalidInput, Unsupported

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
