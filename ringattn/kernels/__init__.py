"""Kernels: one interface over well-kept libraries. `auto` chooses by device; a name is never replaced silently."""

from __future__ import annotations

import torch

from ..errors import InvalidInput, did_you_mean
from .aten_cpu import AtenCpu
from .aten_cuda import CHOICES, AtenCuda, missing
from .base import Kernel
from .reference import Reference

NAMES = ("reference", "aten_cpu", "aten_cuda", *(f"aten_cuda:{choice}" for choice in CHOICES))


def get_kernel(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, deterministic: bool = False) -> Kernel:
    """The kernel called `name`, checked against the tensors. Raises InvalidInput or Unsupported.

    "auto" is aten_cpu on a CPU, aten_cuda on a CUDA device, else reference.
    """
    if name == "auto":
        name = {"cpu": "aten_cpu", "cuda": "aten_cuda"}.get(q.device.type, "reference")
    if name not in NAMES:
        hint = did_you_mean(name, [*NAMES, "auto"])
        raise InvalidInput(f"unknown kernel {name!r}; {hint}expected auto, {', '.join(NAMES)}")
    kernel: Kernel
    if name == "reference":
        kernel = Reference()
    elif name == "aten_cpu":
        kernel = AtenCpu()
    else:
        kernel = AtenCuda(name.partition(":")[2] or None, q.dtype, deterministic=deterministic)
    kernel.check(q, k, v)
    return kernel


def available() -> dict[str, str]:
    """For each kernel "ok", or why it cannot run on this machine."""
    return {name: "ok" if name in ("reference", "aten_cpu") else missing() or "ok" for name in NAMES}
