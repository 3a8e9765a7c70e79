"""Attention kernels: one interface to the ops of maintained libraries. One kernel per file, imported when chosen."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import InvalidInput, Unsupported
from ..registry import Registry
from ..text import did_you_mean
from .contract import VisitKernel
from .merges import MERGES as MERGES
from .merges import merging as merging
from .merges import missing as missing

if TYPE_CHECKING:
    from .dropout import Dropout

#: Kernels by name. An installed package adds a `VisitKernel` subclass, such as one of `base.Kernel`, through an entry
#: point in group "ringattn.kernels".
KERNELS: Registry[type[VisitKernel]] = Registry(
    "kernels",
    {
        "reference": "kernels.reference:Reference",
        "aten_cpu": "kernels.aten_cpu:AtenCpu",
        "aten_cuda": "kernels.aten_cuda:AtenCuda",
        "cuda": "kernels.cuda:Cuda",
        "visit": "kernels.visit:VisitTriton",
        "flash_attn": "kernels.flash_attn:FlashAttn",
        "flash_attn_3": "kernels.flash_attn:FlashAttn3",
        "flash_attn_4": "kernels.flash_attn:FlashAttn4",
    },
)
#: The kernel that "auto" chooses, by the type of the tensors' device; "reference" for all other devices.
AUTO = {"cpu": "aten_cpu", "cuda": "cuda"}


def get_kernel(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    deterministic: bool = False,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    reproducible: int | None = None,
    chosen: bool = False,
) -> VisitKernel:
    """The kernel called `name`, checked against q [B, H, n, D], k [B, K, n, D] and v [B, K, n, Dv].

    "auto" chooses one of this package's kernels by the device, see `AUTO`, or "reference" if that cannot compute a
    `softcap` or `dropout`, leaves (`reproducible`) or `chosen` keys. An explicit name is never replaced by another
    kernel: raises InvalidInput for an unknown name, and Unsupported if the kernel cannot compute these tensors or
    options.
    """
    if q.is_meta and q.device.type not in AUTO:
        raise InvalidInput("q is on the meta device and has no values; try to_empty(device='cpu') and load them")
    options = ("softcap", softcap), ("dropout", dropout), ("reproducible", reproducible), ("chosen", chosen or None)
    asked = {key: value for key, value in options if value is not None}
    if name == "auto":
        name = AUTO.get(q.device.type, "reference")
        if asked:
            with suppress(Unsupported):
                return _make_kernel(name, q, k, v, asked, deterministic=deterministic)
            name = "visit" if reproducible is not None and q.is_cuda else "reference"
    return _make_kernel(name, q, k, v, asked, deterministic=deterministic)


def _make_kernel(
    name: str, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], *, deterministic: bool
) -> VisitKernel:
    """The kernel of this name with options that only some kernels have. Raises Unsupported."""
    base, choice = split_kernel(name)
    for feature, value in options.items():
        if feature not in KERNELS[base].features:
            raise Unsupported(f"kernel {name} has no {feature} ({feature}={value}); try kernel='reference' or 'auto'")
    kernel = KERNELS[base].create(choice or None, q.dtype, deterministic=deterministic)
    kernel = kernel.derive(asked=(choice or None, deterministic), **options)
    kernel.check(q, k, v)
    return kernel


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
