"""One execution of a pass of a rank: its tensors by number, its copies between them, and its messages.

A pass is a list of copies and messages between numbered tensors, as recorded by `runtime.program`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.contract import Tensors
from ..kernels.memory import empty
from ..kernels.softmax import begin_sums, merge_
from ..plan.row_sets import RowCopy
from ..transport.base import TAGS, Message, Post, Program, Tags, Wait

#: The numbers of the tensors of a part in a `PassTensors`.
Numbers = tuple[int, ...]


#: All heads of a tensor, however many it has: a slice ends with the tensor.
EVERY_HEAD = range(1 << 30)


class RowIndex(NamedTuple):
    """Which rows of the source a copy reads, and which of the target it writes, as indices for torch.

    Both tensors are [B, heads, rows, D]. `to_view` and `from_view` are slices for views (None: the whole tensor).
    `to_rows` and `from_rows` are row numbers, where no slice can select the rows.
    """

    to_view: tuple[slice, ...] | None
    to_rows: Tensor | None
    from_view: tuple[slice, ...] | None
    from_rows: Tensor | None

    @classmethod
    def of(cls, rows: RowCopy, target: Sequence[int], source: Sequence[int], device: torch.device) -> RowIndex:
        """Convert a `RowCopy` to indices for a target and a source of these shapes on `device`."""
        to_index = _index(rows.to_heads, rows.to_rows, target, device)
        return cls(*to_index, *_index(rows.from_heads, rows.from_rows, source, device))


ALL = RowIndex(None, None, None, None)


#: The ways in which a `Move` combines rows.
How = Literal["copy", "add", "merge", "join"]


class Move(NamedTuple):
    """A call of `move_rows`, with the numbers of its tensors.

    A "join" gives nodes, `plan.leaves.Nodes` in `rows`, to the sums of `kernels.leaves` that stand in for the targets.
    """

    targets: Numbers
    sources: Numbers
    rows: Any
    how: How


class NumberedPost(NamedTuple):
    """A recorded `Post`: (peer, tag, tensor number) of each message. `Wait(ticket)` waits for all of them."""

    sends: tuple[tuple[int, int, int], ...]
    recvs: tuple[tuple[int, int, int], ...]
    ticket: int


#: The actions of a rank, in order, besides its kernel calls.
Actions = tuple[Move | NumberedPost | Wait, ...]


class View(NamedTuple):
    """Where a contiguous tensor lies: in store number `store` (a block of bytes), from element `start` on.

    All reusable buffers are in store 0.
    """

    store: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def at(cls, store: int, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> View:
        """The place of a contiguous tensor that begins at byte `first` of a store."""
        strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        return cls(store, first // dtype.itemsize, shape, strides, dtype)


@dataclass(frozen=True)
class Memory:
    """The memory layout of a pass: the bytes of its stores, the number of tensors, and where those in stores lie.

    `views` holds (number, view) of each tensor in a store, by store and dtype. The caller gives the other tensors.
    """

    stores: tuple[int, ...]
    count: int
    views: tuple[tuple[int, torch.dtype, tuple[tuple[int, View], ...]], ...]


class PassTensors:
    """The tensors of one execution of a pass, by number."""

    def __init__(self, memory: Memory, device: torch.device, tags: Tags) -> None:
        stores: dict[int, Tensor] = {}
        self.tensors: list[Any] = [None] * memory.count
        for number, dtype, views in memory.views:
            store = stores.get(number)
            if store is None:
                store = stores[number] = empty((memory.stores[number],), torch.uint8, device)
            if rest := store.numel() % dtype.itemsize:
                store = store[:-rest]
            if dtype != torch.uint8:
                store = store.view(dtype)
            for place, (_, start, shape, strides, _) in views:
                self.tensors[place] = store.as_strided(shape, strides, start)
        self._tags = tags
        self._tickets: dict[int, Any] = {}

    def give(self, numbers: Numbers, tensors: Sequence[Tensor]) -> None:
        """Store `tensors`, which the caller provides, under these numbers."""
        for number, x in zip(numbers, tensors, strict=True):
            self.tensors[number] = x

    def get(self, numbers: Numbers) -> Tensors:
        """The tensors with these numbers."""
        return tuple(map(self.tensors.__getitem__, numbers))

    def perform(self, actions: Actions, label: str = "") -> Program[None]:
        """Replay recorded actions: copy rows, post messages, wait for messages. `label` names the step in errors."""
        for action in actions:
            if isinstance(action, NumberedPost):
                (first, step), tensors, sends = self._tags, self.tensors, len(action.sends)
                numbered = (*action.sends, *action.recvs)
                messages = [Message(peer, (first + step * tag) % TAGS, tensors[data]) for peer, tag, data in numbered]
                self._tickets[action.ticket] = yield Post(tuple(messages[:sends]), tuple(messages[sends:]), label)
            elif isinstance(action, Wait):
                yield Wait(self._tickets.pop(action.ticket))
            elif action.how == "join":
                self.tensors[action.targets[0]].join(action.rows, self.get(action.sources))
            else:
                move_rows(self.get(action.targets), self.get(action.sources), action.rows, action.how)


def move_rows(targets: Tensors, sources: Tensors, rows: RowIndex, how: How) -> None:
    """Copy or add rows of a part's `sources` to its `targets`, or merge them as (out, lse); `how` says which.

    Without sources, sets the targets to their initial values: 0, and for a merge -inf for lse.
    """
    if not sources:
        if how == "merge":
            begin_sums(*targets)
        else:
            for x in targets:
                x.zero_()
        return
    to_view, to_rows, from_view, from_rows = rows
    to = targets if to_view is None else [x[to_view] for x in targets]
    of = sources if from_view is None else [x[from_view] for x in sources]
    of = of if from_rows is None else [x.index_select(2, from_rows) for x in of]
    if how == "merge" and to_rows is not None:
        merged = [x.index_select(2, to_rows) for x in to]
        merge_(*merged, *of)
        of = merged
    elif how == "merge":
        merge_(*to, *of)
        return
    for x, y in zip(to, of, strict=True):
        if to_rows is None:
            x.add_(y) if how == "add" else x.copy_(y)
        else:
            y = y.to(x.dtype)
            x.index_add_(2, to_rows, y) if how == "add" else x.index_copy_(2, to_rows, y)


def _index(
    heads: range, rows: range | np.ndarray, shape: Sequence[int], device: torch.device
) -> tuple[tuple[slice, ...] | None, Tensor | None]:
    """(the view's index, the numbers of its rows) for heads and rows of a tensor of this shape; see `RowIndex`."""
    numbers = None if isinstance(rows, range) else torch.as_tensor(np.asarray(rows), device=device)
    run = rows if isinstance(rows, range) else range(shape[2])
    if heads in (EVERY_HEAD, range(shape[1])) and run == range(shape[2]):
        return None, numbers
    return (slice(None), *(slice(r.start, r.stop, r.step) for r in (heads, run))), numbers
