"""Message buffers of one rank: contiguous bytes, viewed as blocks and gradients, and reused from hop to hop."""

from __future__ import annotations

import numpy as np
import torch

from ..plan.plan import Plan
from ..plan.row_overlap import RowCopy
from ..plan.row_sets import RowSet
from ..plan.steps import Part
from .memory_pool import empty, memory_pool

#: (K, V), (dK, dV), (q, dO), (lse, delta) or (dQ,).
Tensors = tuple[torch.Tensor, ...]
#: Bytes of the widest loads and stores of GPUs.
ALIGNED = 16


class Buffer:
    """A message: its parts in one contiguous uint8 tensor, aligned without a byte of padding.

    First come the parts whose sizes are multiples of ALIGNED bytes, so that all of these begin at such multiples, as the
    kernels of GPUs want it of blocks that they read in place. The others follow by the sizes of their numbers, widest
    first, so that each begins at a multiple of its own.
    """

    def __init__(self, store: torch.Tensor, parts: tuple[Part, ...], plan: Plan, *, wire: bool) -> None:
        self.store, self.parts = store, parts
        self.live = set(parts)
        sizes = [plan.part_bytes(part, wire=wire) for part in parts]
        dtypes: list[torch.dtype] = [getattr(torch, plan.part_dtype(part, wire=wire)) for part in parts]
        self.data = store[: sum(sizes)]
        self._views: dict[Part, Tensors] = {}
        start = 0
        for i in sorted(range(len(parts)), key=lambda i: (sizes[i] % ALIGNED != 0, -dtypes[i].itemsize)):
            self._views[parts[i]] = _views(self.data[start : start + sizes[i]], parts[i], plan, dtypes[i])
            start += sizes[i]

    def view(self, part: Part) -> Tensors:
        """The tensors of a part, [B, heads, rows, D], Dv or 1, contiguous."""
        return self._views[part]


def _views(data: torch.Tensor, part: Part, plan: Plan, dtype: torch.dtype) -> Tensors:
    heads, rows = plan.part_heads(part.kind), plan.layout.rows(part.owner)
    if isinstance(part.row_set, RowSet):
        heads, rows = len(part.row_set.heads), part.row_set.count
    flat, found, start = data.view(dtype), [], 0
    for width in plan.part_widths(part.kind):
        stop = start + plan.batch * heads * rows * width
        found.append(flat[start:stop].view(plan.batch, heads, rows, width))
        start = stop
    return tuple(found)


class Buffers:
    """Hands out buffers and takes them back. Their sizes are eighths of that of the largest message, so that few sizes are
    met again and again, by the forward and by the backward."""

    def __init__(self, plan: Plan, largest: int, device: torch.device) -> None:
        unit = max(1, -(-largest // 8))
        # Rounded up by a sixteenth at most, so that messages of nearly the same size find each other's buffers.
        self.plan, self.unit = plan, unit + -unit % (1 << max(unit.bit_length() - 5, 0))
        self.pool = memory_pool(device)
        self.free: list[torch.Tensor] = []

    def take(self, parts: tuple[Part, ...], *, wire: bool = False) -> Buffer:
        """A buffer for these parts, with arbitrary contents; `wire`: as a message carries them."""
        size = -(-sum(self.plan.part_bytes(part, wire=wire) for part in parts) // self.unit) * self.unit
        fitting = [i for i, store in enumerate(self.free) if store.numel() >= size]
        if fitting:
            store = self.free.pop(min(fitting, key=lambda i: self.free[i].numel()))
        else:
            store = self.pool.take(size)
        return Buffer(store, parts, self.plan, wire=wire)

    def fresh(self, parts: tuple[Part, ...], *, wire: bool = False) -> Buffer:
        """A buffer of its own, for parts that outlive the run: the pool never sees it."""
        size = sum(self.plan.part_bytes(part, wire=wire) for part in parts)
        return Buffer(empty((size,), torch.uint8, self.pool.device), parts, self.plan, wire=wire)

    def drop(self, buffer: Buffer, part: Part) -> None:
        """One part is not needed any more; a buffer without a live part is free again."""
        buffer.live.discard(part)
        if not buffer.live:
            self.free.append(buffer.store)

    def close(self) -> None:
        """Give the free buffers back to the pool of the device."""
        while self.free:
            self.pool.give(self.free.pop())


def put(target: torch.Tensor, x: torch.Tensor, move: RowCopy, *, add: bool) -> None:
    """Write, or add, rows of x [B, heads, rows, D] to rows of the target."""
    to = target[:, _slice(move.to_heads)]
    of = x[:, _slice(move.from_heads)]
    if isinstance(move.from_rows, range) and isinstance(move.to_rows, range):
        to, of = to[:, :, _slice(move.to_rows)], of[:, :, _slice(move.from_rows)]
        to.add_(of) if add else to.copy_(of)
        return
    rows = of.index_select(2, torch.as_tensor(np.asarray(move.from_rows), device=x.device)).to(target.dtype)
    index = torch.as_tensor(np.asarray(move.to_rows), device=x.device)
    to.index_add_(2, index, rows) if add else to.index_copy_(2, index, rows)


def _slice(r: range) -> slice:
    return slice(r.start, r.stop, r.step)
