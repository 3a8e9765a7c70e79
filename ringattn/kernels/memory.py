"""Tensors of kernels: dtypes, allocations that raise OutOfMemory, alignment, and a batch size that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor

from ..errors import InvalidInput, OutOfMemory, raised_below
from ..text import shown

T = TypeVar("T")
#: Bytes of a cache line and of the widest registers of CPUs.
LINE = 64


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results of `dtype` are accumulated: fp64 for fp64, else fp32."""
    return dtype if dtype == torch.float64 else torch.float32


def is_dense(x: object) -> TypeGuard[Tensor]:
    """Whether x is a tensor with strides: not sparse, not nested."""
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested


def kind_of(x: object) -> str:
    """A description of x, which is not a dense tensor, for an error message."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return "a nested tensor; try padding" if x.is_nested else f"a {x.layout} tensor; try to_dense()"


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this dtype; x itself, without calling torch, if it already has the dtype."""
    return x if x.dtype == dtype else x.to(dtype=dtype)  # torch parses a keyword argument in half the time


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """x [B, K, n, D] with each key/value head repeated for its query heads: [B, H, n, D]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized tensor, as `torch.empty` makes it. On CPUs a lack of memory raises OutOfMemory.

    On other devices torch raises its own error.
    """
    try:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        # On CPUs, out of memory is a plain RuntimeError, the only error of `torch.empty` for a valid shape unless a
        # signal handler raises. On CUDA a plain RuntimeError is something else, such as an earlier kernel's failure.
        if device.type != "cpu" or not raised_below(error, (__name__,)):
            raise
        raise out_of_memory(device, error) from error


def empty_rows(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized tensor [B, H, n, ...] with rows before heads in memory, like the results of the kernels.

    Merges then access memory in order.
    """
    batch, heads, rows, *width = shape
    return empty((batch, rows, heads, *width), dtype, device).transpose(1, 2)


def align_rows(x: Tensor) -> Tensor:
    """x with its rows aligned to cache lines: x itself if they already are, else a contiguous copy.

    x itself is returned if a row is a whole number of cache lines, or if x is contiguous and begins a cache line. The
    order of summation in a matrix product depends on addresses. With aligned rows, a shard gives the same bits as a
    separate tensor (on a real rank) and as a view of the whole sequence (on a virtual rank).
    """
    if x.shape[-1] * x.element_size() % LINE == 0 or (x.is_contiguous() and x.data_ptr() % LINE == 0):
        return x
    return empty(x.shape, x.dtype, x.device).copy_(x)


def differentiable(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Those of the tensors whose dtype has gradients: floating point of 16 bits or more."""
    return tuple([x for x in tensors if x.is_floating_point() and x.dtype.itemsize > 1])


def wide_zeros(x: Tensor) -> Tensor:
    """Zeros to sum gradients of x: fp32, or fp64 for fp64."""
    return torch.zeros_like(x, dtype=wide(x.dtype))


class MergeSpace:
    """Temporary tensors for merges, reused as long as shapes and strides stay the same."""

    def __init__(self) -> None:
        self._fits: object = None
        self._tensors: tuple[Tensor, ...] = ()

    def fit(self, lse: Tensor, part_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Four temporary tensors for a merge, reused from the last one if shapes and strides are the same.

        They are two tensors like part_lse in lse's dtype, a third in `dtype`, and a view of the third as a column [...,
        1].
        """
        shape = lse.shape, lse.stride(), part_lse.stride()
        if shape != self._fits:  # bits depend on strides: some ops give other last bits for contiguous memory
            widened = torch.empty_like(part_lse, dtype=lse.dtype)
            difference, gate = torch.empty_like(widened), torch.empty_like(widened, dtype=dtype)
            self._fits, self._tensors = shape, (widened, difference, gate, gate.unsqueeze(-1))
        return self._tensors


def out_of_memory(device: torch.device, error: BaseException) -> OutOfMemory:
    """The error for a lack of memory on `device`."""
    return OutOfMemory(
        f"{device} ran out of memory: {error}; try a smaller batch (auto_batch_size finds one), more ranks, or a "
        "narrower dtype"
    )


def auto_batch_size(call: Callable[[int], T], start: int) -> tuple[int, T]:
    """Find a batch size that fits into memory; returns (batch, call(batch)).

    Tries start, start // 2, ... 1. Raises OutOfMemory if a batch of 1 does not fit. Any other error propagates,
    including torch's plain RuntimeError on CPUs if `call` itself makes a tensor that does not fit. For one process
    only: in a ring, a rank that runs out of memory leaves the other ranks waiting, so find the size with
    `virtual_attention` or on one rank.
    """
    if isinstance(start, bool) or not isinstance(start, int) or start < 1:
        raise InvalidInput(f"start={shown(start)} must be an integer >= 1, the largest batch to try")
    if not callable(call):
        raise InvalidInput(f"call={shown(call)}: expected a function of a batch size")
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
