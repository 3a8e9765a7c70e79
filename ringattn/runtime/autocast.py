"""Autocast as in torch's own attention: inputs are cast once, and nothing is cast inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def cast_inputs(*tensors: Any) -> tuple[Any, ...]:
    """The tensors, cast to the dtype of autocast where autocast is on for their device. fp64 tensors stay, as in torch.

    Arguments that are not floating-point tensors are returned unchanged; later checks report them.
    """
    return tuple(map(_cast, tensors))


def _cast(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type)) if _enabled(x.device.type) else x


@contextmanager
def autocast_off(device: torch.device) -> Iterator[None]:
    """A context without autocast on `device`, the CPU and CUDA: attention may be streamed between the CPU and CUDA."""
    with ExitStack() as stack:
        for kind in {"cpu", "cuda", device.type}:
            if _enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _enabled(kind: str) -> bool:
    """Whether autocast is on for devices of type `kind`."""
    try:
        return torch.is_autocast_enabled(kind)
    except RuntimeError:  # a device that has no autocast, such as meta
        return False
