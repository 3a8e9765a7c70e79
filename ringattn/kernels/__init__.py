"""Attention kernels: one interface over the ops of well-kept libraries. One kernel per file, imported when chosen."""

from __future__ import annotations

import torch

from ..errors import InvalidInput, Unsupported
from ..registry import Registry
from ..text import did_you_mean
from .base import Kernel
from .reference import Reference

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


def get_kernel(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    deterministic: bool = False,
    softcap: float | None = None,
) -> Kernel:
    """The kernel called `name`, checked against q [B, H, n, D], k [B, K, n, D] and v [B, K, n, Dv].

    "auto" chooses one of this package's kernels by the device, see `AUTO`, or "reference" for a `softcap`. A name is
    never replaced by another kernel: raises InvalidInput for an unknown name, Unsupported if the kernel cannot compute
    the tensors.
    """
    if name == "auto":
        name = AUTO.get(q.device.type, "reference") if softcap is None else "reference"
    base, colon, choice = name.partition(":")
    if base not in KERNELS or (colon and choice not in KERNELS[base].choices):
        names = ["auto", *available()]
        raise InvalidInput(f"unknown kernel {name!r}; {did_you_mean(name, names)}expected {', '.join(names)}")
    if softcap is not None:
        if base != "reference":
            raise Unsupported(f"kernel {name} has no softcap (softcap={softcap}); try kernel='reference' or 'auto'")
        return Reference(softcap)
    kernel = KERNELS[base].create(choice or None, q.dtype, deterministic=deterministic)
    kernel.check(q, k, v)
    return kernel


def available() -> dict[str, str]:
    """For each kernel "ok", or why it cannot run on this machine. Imports all kernels.

    Keys are the names that `get_kernel` takes, but for "auto": each kernel and its choices, as "name:choice".
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
