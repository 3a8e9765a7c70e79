"""The exchange of tokens for heads inside a Ulysses group: the first and the last step of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cache import cached
from ..kernels.contract import Tensors
from ..kernels.memory import empty
from ..layout.regular import Layout
from ..plan.plan import Plan
from ..plan.row_sets import RowCopy, as_range
from ..plan.steps import Hop, Kind, Part, Step
from ..transport.base import Program
from .buffers import Buffer, Recorder, StepMessages, TensorSpec, tensor_specs
from .tensors import Actions, Numbers, PassTensors

#: Heads and rows of a tensor [B, heads, rows, D].
Side = tuple[range, range | np.ndarray]


@dataclass(frozen=True)
class ExchangeStep:
    """A recorded exchange within a Ulysses group: its tensors before (`given`) and after (`received`) the exchange."""

    index: int
    given: Numbers
    received: Numbers
    specs: tuple[TensorSpec, ...]
    actions: Actions

    def perform(self, run: PassTensors, tensors: Tensors, label: str) -> Program[Tensors]:
        """Exchange `tensors`, and return the tensors received. `label` names the exchange in errors."""
        run.give(self.given, tensors)
        run.give(self.received, [empty(shape, dtype, tensors[0].device) for shape, dtype in self.specs])
        yield from run.perform(self.actions, label)
        return run.get(self.received)


class HeadExchange(StepMessages):
    """Records one exchange of `rank` with the other members of its Ulysses group.

    With `to_heads`, as in the first step, a rank gives its rows of all heads [B, H, n, D] and gets the whole group's
    rows for its share of the heads; otherwise, as in the last step, the reverse.
    """

    def __init__(self, recorder: Recorder, plan: Plan, rank: int, steps: Sequence[Step], *, to_heads: bool) -> None:
        super().__init__(recorder, steps)
        self.plan, self.rank, self.size, self.to_heads = plan, rank, plan.ulysses_size, to_heads
        self.group = rank // self.size

    def record(self, kind: Kind) -> ExchangeStep:
        """Record the exchange of the tensors in a part of this kind, such as "qkv"."""
        member = self.rank % self.size
        ring_plan, owner = self.plan.ring_plan(self.rank)
        specs = tensor_specs(self.plan, Part(kind, self.rank), as_sent=True)
        #: The layout of each tensor: the queries', and for those of a block in "qkv" and "dqkv" the keys'.
        others: Kind = "kv" if kind in ("qkv", "dqkv") else "q"
        self.kinds: tuple[Kind, ...] = ("q", *[others] * (len(specs) - 1))
        group_rows = [ring_plan.layout_of(each).rows(owner) for each in self.kinds]
        self.heads = [spec[0][1] for spec in specs]
        #: Of a key/value head with copies, one is sent, and the gradients of all copies come back.
        self.all_heads = [heads * self.size for heads in self.heads]
        if kind == "qkv":
            self.all_heads[1:] = [self.plan.kv_heads] * 2 if self.plan.block is None else self.heads[1:]
        by_tokens = [
            ((batch, heads, rows, width), dtype)
            for heads, ((batch, _, rows, width), dtype) in zip(self.all_heads, specs, strict=True)
        ]
        by_heads = [
            ((batch, heads, rows, width), dtype)
            for rows, ((batch, heads, _, width), dtype) in zip(group_rows, specs, strict=True)
        ]
        before, after = (by_tokens, by_heads) if self.to_heads else (by_heads, by_tokens)
        self.given = self.recorder.given(*(shape for shape, _ in before))
        self.received = self.recorder.given(*(shape for shape, _ in after))
        index = 0 if self.to_heads else len(self.steps) - 1
        self.start(index)
        for i, (source, target) in enumerate(zip(self.given, self.received, strict=True)):
            self.recorder.copy((target,), (source,), RowCopy(*self._to(member, i), *self._from(member, i)))
        self.wait(index)
        return ExchangeStep(index, self.given, self.received, tuple(after), self.recorder.collect())

    def pack(self, hop: Hop) -> tuple[Buffer, list[Part]]:
        (part,) = hop.parts
        buffer = self.recorder.take(hop.parts, as_sent=True)
        for i, (target, source) in enumerate(zip(buffer.view(part), self.given, strict=True)):
            side = self._from(hop.peer % self.size, i)
            self.recorder.copy((target,), (source,), RowCopy(range(self.heads[i]), range(len(side[1])), *side))
        return buffer, [part]

    def unpack(self, hop: Hop, buffer: Buffer) -> None:
        (part,) = hop.parts
        for i, (target, source) in enumerate(zip(self.received, buffer.view(part), strict=True)):
            side = self._to(hop.peer % self.size, i)
            self.recorder.copy((target,), (source,), RowCopy(*side, range(self.heads[i]), range(len(side[1]))))
        self.recorder.drop(buffer, part)

    def _from(self, member: int, tensor: int) -> Side:
        """The heads and rows of tensor number `tensor` to send to a member of the group."""
        return self._heads_of(member, tensor) if self.to_heads else self._rows_of(member, tensor)

    def _to(self, member: int, tensor: int) -> Side:
        """The heads and rows of tensor number `tensor` to receive from a member of the group."""
        return self._rows_of(member, tensor) if self.to_heads else self._heads_of(member, tensor)

    def _heads_of(self, member: int, tensor: int) -> Side:
        """The heads of a member, in all rows of this rank."""
        rows = range(self.plan.layout_of(self.kinds[tensor]).rows(self.rank))
        if self.plan.block is not None and self.kinds[tensor] == "kv":  # each member has all heads: copies are adjacent
            heads = self.all_heads[tensor]
            return (range(heads) if heads == self.heads[tensor] else range(member, heads, self.size)), rows
        first = member * self.all_heads[tensor] // self.size
        return range(first, first + self.heads[tensor]), rows

    def _rows_of(self, member: int, tensor: int) -> Side:
        """The rows of a member among the rows of its group, in all heads of this member."""
        places = _places(self.plan, self.plan.layout_of(self.kinds[tensor]), self.group)[member]
        ascending = bool((np.diff(places) > 0).all()) and len(places)
        run = as_range(places.tolist()) if ascending else None
        return range(self.heads[tensor]), places if run is None else run


@cached
def _places(plan: Plan, layout: Layout, group: int) -> list[np.ndarray]:
    """The indices of each member's local rows among the rows of its group, int64 [rows] each."""
    positions = layout.grouped(plan.ulysses_size).positions(group)
    order = np.argsort(positions)
    members = range(group * plan.ulysses_size, (group + 1) * plan.ulysses_size)
    return [order[np.searchsorted(positions, layout.positions(rank), sorter=order)] for rank in members]
