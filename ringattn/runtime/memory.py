"""Allocations that fail with OutOfMemory, workspaces of merges, and batches that fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import InvalidInput, OutOfMemory, raised_below

T = TypeVar("T")


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`. Raises OutOfMemory on CPUs; on other devices torch raises its own."""
    try:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        # On CPUs lack of memory is a plain RuntimeError, and with a valid shape `torch.empty` fails for nothing else,
        # unless a signal handler has raised. On CUDA a plain RuntimeError is another failure, such as an error of a
        # kernel that ran before.
        if device.type != "cpu" or not raised_below(error, (__name__,)):
            raise
        raise out_of_memory(device, error) from error


class MergeSpace:
    """Workspaces of merges one after another, which are made anew only where the shape or the strides change."""

    def __init__(self) -> None:
        self._fits: object = None
        self._tensors: tuple[Tensor, ...] = ()

    def fit(self, lse: Tensor, part_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """(two tensors like part_lse in the dtype of lse, a third one in `dtype`, and that one as a column)."""
        shape = lse.shape, lse.stride(), part_lse.stride()
        if shape != self._fits:  # bits depend on strides: some ops compute other last bits where memory is contiguous
            widened = torch.empty_like(part_lse, dtype=lse.dtype)
            difference, gate = torch.empty_like(widened), torch.empty_like(widened, dtype=dtype)
            self._fits, self._tensors = shape, (widened, difference, gate, gate.unsqueeze(-1))
        return self._tensors


def out_of_memory(device: torch.device, error: BaseException) -> OutOfMemory:
    """The error for a lack of memory on `device`."""
    return OutOfMemory(
        f"{device} has not enough memory: {error}; try a smaller batch (auto_batch_size finds one), more ranks, or a "
        "narrower dtype"
    )


def auto_batch_size(call: Callable[[int], T], start: int) -> tuple[int, T]:
    """(batch, call(batch)) for the first of start, start // 2, ... 1 that fits into the memory of this process.

    Raises OutOfMemory if a batch of 1 does not fit. Any other error passes: on CPUs a tensor that `call` itself makes
    and that does not fit is a plain RuntimeError of torch, which passes, too. For one process only: on a ring a rank
    that runs out of memory leaves the other ranks waiting, so find the size with `virtual_attention` or on one rank.
    """
    if isinstance(start, bool) or not isinstance(start, int) or start < 1:
        raise InvalidInput(f"start={start!r} must be an integer >= 1, the largest batch to try")
    batch = start
    while True:
        try:
            return batch, call(batch)
        except (OutOfMemory, torch.OutOfMemoryError, MemoryError) as error:
            if batch <= 1:
                if isinstance(error, OutOfMemory):
                    raise
                raise OutOfMemory(
                    f"a batch of {batch} does not fit into memory: {error}; shard the sequence"
                ) from error
            batch //= 2
