"""Autocast, as torch's own attention has it: inputs are cast at the door, and inside nothing is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def cast_inputs(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in the dtype of autocast, where it is on for their device; fp64 stays, as in torch.

    What is not a floating-point tensor is returned as it is, for the checks to report.
    """
    return tuple(map(_cast, tensors))


def _cast(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type)) if _enabled(x.device.type) else x


@contextmanager
def autocast_off(device: torch.device) -> Iterator[None]:
    """Autocast is off inside, for `device` and for the CPU and CUDA, between which attention is streamed."""
    with ExitStack() as stack:
        for kind in {"cpu", "cuda", device.type}:
            if _enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _enabled(kind: str) -> bool:
    try:
        return torch.is_autocast_enabled(kind)
    except RuntimeError:  # a device that has no autocast, such as meta
        return False
