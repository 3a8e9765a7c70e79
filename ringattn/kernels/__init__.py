"""Attention kernels: one interface over the ops of well-kept libraries. One kernel per file, imported when chosen."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..errors import InvalidInput, did_you_mean
from ..registry import Registry
from .base import Kernel

#: Kernels by name. An installed package adds a subclass of `Kernel` by an entry point of the group "ringattn.kernels".
KERNELS: Registry[type[Kernel]] = Registry(
    "kernels",
    {
        "reference": "kernels.reference:Reference",
        "aten_cpu": "kernels.aten_cpu:AtenCpu",
        "aten_cuda": "kernels.aten_cuda:AtenCuda",
    },
)
#: The kernel that "auto" chooses, by the type of the tensors' device; "reference" for all other devices.
AUTO = {"cpu": "aten_cpu", "cuda": "aten_cuda"}


def get_kernel(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, deterministic: bool = False) -> Kernel:
    """The kernel called `name`, checked against q [B, H, n, D], k [B, K, n, D] and v [B, K, n, Dv].

    "auto" chooses one of this package's kernels by the device, see `AUTO`. A name is never replaced by another kernel:
    raises InvalidInput for an unknown name, Unsupported if the kernel cannot compute the tensors.
    """
    if name == "auto":
        name = AUTO.get(q.device.type, "reference")
    base, colon, choice = name.partition(":")
    if base not in KERNELS or (colon and choice not in KERNELS[base].choices):
        names = ["auto", *kernel_names()]
        raise InvalidInput(f"unknown kernel {name!r}; {did_you_mean(name, names)}expected {', '.join(names)}")
    kernel = KERNELS[base].create(choice or None, q.dtype, deterministic=deterministic)
    kernel.check(q, k, v)
    return kernel


def kernel_names() -> Iterator[str]:
    """Names of all kernels, with their choices as "name:choice". Imports all kernels."""
    for name, kernel in KERNELS.items():
        yield name
        yield from (f"{name}:{choice}" for choice in kernel.choices)


def available() -> dict[str, str]:
    """For each name of `kernel_names` the text "ok", or why the kernel cannot run on this machine."""
    return {name: KERNELS[name.partition(":")[0]].missing() or "ok" for name in kernel_names()}
