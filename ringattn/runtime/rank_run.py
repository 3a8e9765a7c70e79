"""One execution of a pass of a rank: its tensors by number, its copies between them, and its messages.

A pass is a list of copies and messages between numbered tensors, which `runtime.rank_program` has written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ..plan.row_overlap import RowCopy
from ..transport.base import Message, Post, Program, Wait
from .memory import empty

#: The tensors of one part, such as (K, V), (dK, dV), (q, dO), (lse, delta), (dQ,) or (q, k, v).
Tensors = tuple[torch.Tensor, ...]
#: The numbers of these tensors in a `PassTensors`.
Numbers = tuple[int, ...]


class RowIndex(NamedTuple):
    """Heads and rows of a target and of a source [B, heads, rows, D] as torch indexes them; None is all of them."""

    to_heads: slice | None
    to_rows: slice | torch.Tensor | None
    from_heads: slice | None
    from_rows: slice | torch.Tensor | None

    @classmethod
    def of(cls, rows: RowCopy, target: Sequence[int], source: Sequence[int], device: torch.device) -> RowIndex:
        """The index of a copy between tensors of these shapes on `device`."""
        return cls(
            _slice(rows.to_heads, target[1]),
            _index(rows.to_rows, target[2], device),
            _slice(rows.from_heads, source[1]),
            _index(rows.from_rows, source[2], device),
        )


ALL = RowIndex(None, None, None, None)


class Copy(NamedTuple):
    """Copy rows of tensor `source` to tensor `target`, or `add` them. A `source` of None is zeros."""

    target: int
    source: int | None
    rows: RowIndex
    add: bool


class BatchPost(NamedTuple):
    """The copies that pack messages, and the messages: peer, tag and tensor of each. `ticket` numbers the batch."""

    copies: tuple[Copy, ...]
    sends: tuple[tuple[int, int, int], ...]
    recvs: tuple[tuple[int, int, int], ...]
    ticket: int


class BatchWait(NamedTuple):
    """A batch to wait for, and the copies that follow. A `ticket` of None waits for nothing."""

    ticket: int | None
    copies: tuple[Copy, ...]


class View(NamedTuple):
    """A contiguous tensor in a store of bytes, from element `start` on. Buffers that are reused share store 0."""

    store: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def at(cls, store: int, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> View:
        """The view that begins at byte `first`."""
        strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        return cls(store, first // dtype.itemsize, shape, strides, dtype)


@dataclass(frozen=True)
class Memory:
    """What a pass needs: the bytes of its stores, and the views that have numbers. None is a tensor that is given."""

    stores: tuple[int, ...]
    views: tuple[View | None, ...]


class PassTensors:
    """The tensors of one execution of a pass, by number."""

    def __init__(self, memory: Memory, device: torch.device) -> None:
        stores = [empty((size,), torch.uint8, device) if size else None for size in memory.stores]
        typed: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.tensors: list[Any] = []
        for view in memory.views:
            if view is None:
                self.tensors.append(None)
                continue
            key = view.store, view.dtype
            if key not in typed:
                store = stores[view.store]
                assert store is not None
                size = store.numel() - store.numel() % view.dtype.itemsize
                typed[key] = store[:size].view(view.dtype)
            self.tensors.append(typed[key].as_strided(view.shape, view.strides, view.start))
        self._tickets: dict[int, Any] = {}

    def give(self, numbers: Numbers, tensors: Sequence[torch.Tensor]) -> None:
        """Set tensors that the pass is given."""
        for number, x in zip(numbers, tensors, strict=True):
            self.tensors[number] = x

    def get(self, numbers: Numbers) -> Tensors:
        """The tensors of these numbers."""
        return tuple([self.tensors[number] for number in numbers])

    def copy(self, copies: tuple[Copy, ...]) -> None:
        """Make these copies."""
        for target, source, rows, add in copies:
            if source is None:
                self.tensors[target].zero_()
            else:
                copy_rows(self.tensors[target], self.tensors[source], rows, add=add)

    def start(self, posts: tuple[BatchPost, ...], label: str) -> Program[None]:
        """Pack and post the messages of a step. `label` names the step in errors."""
        for post in posts:
            self.copy(post.copies)
            sends, recvs = (
                tuple([Message(peer, tag, self.tensors[data]) for peer, tag, data in side])
                for side in (post.sends, post.recvs)
            )
            self._tickets[post.ticket] = yield Post(sends, recvs, label)

    def finish(self, waits: tuple[BatchWait, ...]) -> Program[None]:
        """Wait for the messages that are due at the end of a step, and unpack them."""
        for ticket, copies in waits:
            if ticket is not None:
                yield Wait(self._tickets.pop(ticket))
            self.copy(copies)


def copy_rows(target: torch.Tensor, source: torch.Tensor, rows: RowIndex, *, add: bool) -> None:
    """Copy rows of `source` to rows of `target`, or add them to the rows of `target`."""
    to_heads, to_rows, from_heads, from_rows = rows
    to, of = _narrow(target, to_heads, to_rows), _narrow(source, from_heads, from_rows)
    if isinstance(from_rows, torch.Tensor):
        of = of.index_select(2, from_rows)
    if not isinstance(to_rows, torch.Tensor):
        to.add_(of) if add else to.copy_(of)
    else:
        of = of.to(to.dtype)
        to.index_add_(2, to_rows, of) if add else to.index_copy_(2, to_rows, of)


def _narrow(x: torch.Tensor, heads: slice | None, rows: slice | torch.Tensor | None) -> torch.Tensor:
    """The view of x at these heads, and at these rows where they are a slice."""
    if heads is not None:
        x = x[:, heads]
    return x[:, :, rows] if isinstance(rows, slice) else x


def _index(r: range | np.ndarray, size: int, device: torch.device) -> slice | torch.Tensor | None:
    if isinstance(r, range):
        return _slice(r, size)
    return torch.as_tensor(np.asarray(r), device=device)


def _slice(r: range, size: int) -> slice | None:
    return None if r == range(size) else slice(r.start, r.stop, r.step)
