"""Messages of one rank as bytes, and the copies into and out of them, written down before the first message."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.plan import Plan
from ..plan.row_sets import RowCopy, RowSet
from ..plan.steps import BLOCKS, SUMS, Hop, Kind, Part, Step
from ..transport.base import Wait
from .rank_run import ALL, Actions, Copy, Memory, Merge, NumberedPost, Numbers, RowIndex, Tensors, View

#: Shape and dtype of one tensor of a part.
TensorSpec = tuple[tuple[int, ...], torch.dtype]
#: Bytes of the widest loads and stores of GPUs.
ALIGNED = 16
#: Message buffers begin at multiples of this many bytes.
PAGE = 512


class Buffer:
    """One message in a store: the number of its bytes, and of the tensors of each part. See `place_parts`."""

    def __init__(self, recorder: Recorder, store: int, first: int, size: int, parts: Sequence[Part], *, as_sent: bool):
        self.store, self.first, self.size, self.parts = store, first, size, tuple(parts)
        #: Parts that are still needed. A buffer without a live part is free.
        self.live = set(parts)
        used, places = place_parts(recorder.plan, parts, as_sent=as_sent)
        self.data = recorder.number(View.at(store, first, (used,), torch.uint8))
        self._views = {
            part: tuple(recorder.number(View.at(store, first + start, *spec)) for start, spec in places[part])
            for part in parts
        }

    def view(self, part: Part) -> Numbers:
        """The contiguous tensors of a part, [B, heads, rows, width] each."""
        return self._views[part]


class Recorder:
    """Writes down what a pass does, gives tensors their numbers, and hands out message buffers for reuse.

    Sizes of buffers are multiples of an eighth of the largest message (`largest_message`, bytes), so that messages of
    nearly equal sizes share buffers.
    """

    def __init__(self, plan: Plan, largest_message: int, device: torch.device) -> None:
        self.plan, self.device, self.unit = plan, device, max(1, -(-largest_message // 8))
        self.tickets = count()
        #: What was written down since the last `collect`.
        self.actions: list[Copy | Merge | NumberedPost | Wait] = []
        self._stores = [0]
        self._free: list[tuple[int, int]] = []  # (first byte, bytes) in store 0
        self._views: list[View | None] = []
        self._shapes: list[tuple[int, ...]] = []
        self._numbers: dict[View, int] = {}

    def given(self, *shapes: Sequence[int]) -> Numbers:
        """Numbers of tensors of these shapes, which a `PassTensors` is given."""
        first = len(self._views)
        self._views += [None] * len(shapes)
        self._shapes += map(tuple, shapes)
        return tuple(range(first, first + len(shapes)))

    def number(self, view: View) -> int:
        """The number of a tensor in a buffer."""
        if view not in self._numbers:
            self._numbers[view] = len(self._views)
            self._views.append(view)
            self._shapes.append(view.shape)
        return self._numbers[view]

    def take(self, parts: Sequence[Part], *, as_sent: bool = False, kept: bool = False) -> Buffer:
        """A buffer for these parts, with arbitrary contents: a reused one, or of its own for what outlives the pass."""
        size = sum(self.plan.part_bytes(part, as_sent=as_sent) for part in parts)
        if kept:
            self._stores.append(size)
            return Buffer(self, len(self._stores) - 1, 0, size, parts, as_sent=as_sent)
        size = -(-size // self.unit) * self.unit
        fitting = [free for free in self._free if free[1] >= size]
        if fitting:
            first, size = min(fitting, key=lambda free: free[1])
            self._free.remove((first, size))
        else:
            first = self._stores[0]
            self._stores[0] += size + -size % PAGE
        return Buffer(self, 0, first, size, parts, as_sent=as_sent)

    def drop(self, buffer: Buffer, part: Part) -> None:
        """Mark one part of a buffer as not needed any more; the buffer is free when no live part is left."""
        buffer.live.discard(part)
        if not buffer.live and not buffer.store:
            self._free.append((buffer.first, buffer.size))

    def add(self, kind: Kind, targets: Numbers, sources: Numbers, rows: RowCopy | None = None) -> None:
        """Write down that the sums of a part are added to those of another part: (out, lse) are merged."""
        if kind != "part":
            self.copy(targets, sources, rows, add=True)
            return
        index = ALL
        if rows is not None:
            index = RowIndex.of(rows, self._shapes[targets[0]], self._shapes[sources[0]], self.device)
        self.actions.append(Merge(targets, sources, index))

    def copy(self, targets: Numbers, sources: Numbers, rows: RowCopy | None = None, *, add: bool = False) -> None:
        """Write down a copy of the tensors of a part, or of some of their rows."""
        for target, source in zip(targets, sources, strict=True):
            index = ALL
            if rows is not None:
                index = RowIndex.of(rows, self._shapes[target], self._shapes[source], self.device)
            self.actions.append(Copy(target, source, index, add))

    def zero(self, kind: Kind, targets: Numbers) -> None:
        """Write down that the sums of a part begin: with 0, and lse with -inf."""
        if kind == "part":
            self.actions.append(Merge(targets, (), ALL))
        else:
            self.actions += [Copy(target, None, ALL, False) for target in targets]

    def collect(self) -> Actions:
        """What was written down since the last call."""
        actions, self.actions = tuple(self.actions), []
        return actions

    @property
    def memory(self) -> Memory:
        """What the pass needs, when all of it is written down."""
        grouped: dict[tuple[int, torch.dtype], list[tuple[int, View]]] = {}
        for number, view in enumerate(self._views):
            if view is not None:
                grouped.setdefault((view.store, view.dtype), []).append((number, view))
        return Memory(tuple(self._stores), len(self._views), tuple((*key, tuple(x)) for key, x in grouped.items()))


class StepMessages(ABC):
    """Writes down the messages of a rank's steps: each is posted in a step, and waited for when it is due.

    A subclass says what is sent (`pack`), where messages arrive (`make_room`) and what becomes of them (`unpack`).
    """

    def __init__(self, recorder: Recorder, steps: Sequence[Step]) -> None:
        self.recorder, self.steps = recorder, steps
        #: Buffers that are being sent and must not change.
        self.sending: list[Buffer] = []
        self._open: list[_InFlight] = []

    def start(self, index: int) -> None:
        """Write down the messages that step `index` posts."""
        for due in self.steps[index].posts:
            self._post(*due)

    def wait(self, index: int) -> None:
        """Write down the waits for messages that are due at the end of step `index`."""
        due = [messages for messages in self._open if messages.until <= index]
        self._open = [messages for messages in self._open if messages.until > index]
        for messages in due:
            self.recorder.actions.append(messages.wait)
            for buffer, copies in messages.sent:
                self.sending.remove(buffer)
                for part in copies:
                    self.recorder.drop(buffer, part)
            for hop, buffer in messages.received:
                self.unpack(hop, buffer)

    @abstractmethod
    def pack(self, hop: Hop) -> tuple[Buffer, list[Part]]:
        """The buffer that holds the message to send, and those of its parts that are needed for the send only."""

    def make_room(self, hop: Hop) -> Buffer:
        """The buffer that a message is received in."""
        return self.recorder.take(hop.parts, as_sent=True)

    @abstractmethod
    def unpack(self, hop: Hop, buffer: Buffer) -> None:
        """Take in a message that has arrived."""

    def _post(self, until: int, sends: Sequence[Hop], recvs: Sequence[Hop]) -> None:
        sent: list[tuple[Buffer, list[Part]]] = []
        for hop in sends:  # before the receives: packing can free buffers for them
            sent.append(self.pack(hop))
            self.sending.append(sent[-1][0])
        received = [(hop, self.make_room(hop)) for hop in recvs]
        ticket = next(self.recorder.tickets)
        numbered_sends = tuple((hop.peer, hop.tag, buffer.data) for hop, (buffer, _) in zip(sends, sent, strict=True))
        numbered_recvs = tuple((hop.peer, hop.tag, buffer.data) for hop, buffer in received)
        self.recorder.actions.append(NumberedPost(numbered_sends, numbered_recvs, ticket))
        self._open.append(_InFlight(until, Wait(ticket), sent, received))


class _InFlight(NamedTuple):
    """Messages that are in flight until the end of step `until`.

    Each sent buffer is listed with those of its parts that are copies and can be dropped after the send.
    """

    until: int
    wait: Wait
    sent: list[tuple[Buffer, list[Part]]]
    received: list[tuple[Hop, Buffer]]


def place_parts(
    plan: Plan, parts: Sequence[Part], *, as_sent: bool
) -> tuple[int, dict[Part, list[tuple[int, TensorSpec]]]]:
    """(bytes of a message, first byte and spec of each tensor of each part), aligned without a byte of padding.

    Parts whose sizes are multiples of ALIGNED bytes come first. Each of these parts then begins at a multiple of
    ALIGNED bytes, as GPU kernels require of blocks that they read in place. The other parts follow in descending order
    of their item sizes, so that each part begins at a multiple of its item size. `as_sent`: the parts have the dtypes
    of a message, else the dtypes that kernels compute with.
    """
    sizes = [plan.part_bytes(part, as_sent=as_sent) for part in parts]
    specs = [tensor_specs(plan, part, as_sent=as_sent) for part in parts]
    places: dict[Part, list[tuple[int, TensorSpec]]] = {}
    start = 0
    for i in sorted(range(len(parts)), key=lambda i: (sizes[i] % ALIGNED != 0, -specs[i][0][1].itemsize)):
        places[parts[i]] = []
        for spec in specs[i]:
            places[parts[i]].append((start, spec))
            start += prod(spec[0]) * spec[1].itemsize
    return start, places


def message_views(data: Tensor, plan: Plan, parts: Sequence[Part]) -> dict[Part, Tensors]:
    """The tensors of the parts of a message, as views of its bytes `data`."""
    _, places = place_parts(plan, parts, as_sent=True)
    return {
        part: tuple(
            data[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, (shape, dtype) in places[part]
        )
        for part in parts
    }


def tensor_specs(plan: Plan, part: Part, *, as_sent: bool) -> list[TensorSpec]:
    """Shapes and dtypes of the tensors of a part; see `Plan.part_bytes` for `as_sent`.

    Shapes are [B, heads, rows, width], and [B, heads, rows] for lse of visited queries.
    """
    if part.kind in (*BLOCKS, *SUMS):
        dtype: torch.dtype = getattr(torch, plan.part_dtype(part.kind, as_sent=as_sent))
        ring_plan, _ = plan.ring_plan(0)
        heads, rows = ring_plan.part_heads(part.kind), ring_plan.layout_of(part.kind).rows(part.owner)
        if isinstance(part.row_set, RowSet):
            heads, rows = len(part.row_set.heads), part.row_set.count
        if part.kind == "row":  # lse as kernels take it, and one number per row beside it
            return [((plan.batch, heads, rows), dtype), ((plan.batch, heads, rows, 1), dtype)]
        if part.kind == "part":
            return [((plan.batch, heads, rows, ring_plan.value_dim), dtype), ((plan.batch, heads, rows), dtype)]
        return [((plan.batch, heads, rows, width), dtype) for width in ring_plan.part_widths(part.kind)]
    # The exchange of a Ulysses group: rows of one member for the heads of one member, in full precision.
    counts = plan.exchange_rows(part.kind, part.owner)
    heads, kv_heads = plan.member_heads(plan.ulysses_size)
    own: torch.dtype = getattr(torch, plan.dtype)
    if part.kind in ("qkv", "dqkv"):
        sizes = ((heads, plan.head_dim), (kv_heads, plan.head_dim), (kv_heads, plan.value_dim))
        return [((plan.batch, count, n, width), own) for n, (count, width) in zip(counts, sizes, strict=True)]
    accumulated = torch.float64 if own == torch.float64 else torch.float32
    # lse or its gradient comes first: the wider dtype is then aligned.
    return [((plan.batch, heads, counts[0], 1), accumulated), ((plan.batch, heads, counts[0], plan.value_dim), own)]
