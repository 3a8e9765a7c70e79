"""Records, before a rank runs, what it will hold: blocks, sums and messages, and their buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..cache import cached
from ..kernels.contract import Tensors
from ..plan.plan import Plan
from ..plan.row_sets import RowCopy, RowSet, find_copies, to_numbers
from ..plan.steps import BLOCKS, OF_KEYS, SUMS, Hop, Kind, Part, Step
from ..transport.base import Wait
from .tensors import ALL, EVERY_HEAD, Actions, How, Memory, Move, NumberedPost, Numbers, RowIndex, View

#: Shape and dtype of one tensor of a part.
TensorSpec = tuple[tuple[int, ...], torch.dtype]
#: The kind of the sums for the rows of a block of queries, by the block's kind.
SUM_OF: dict[Kind, Kind] = {"q": "dq", "query": "part"}
#: Bytes of the widest loads and stores of GPUs.
ALIGNED = 16
#: Message buffers begin at multiples of this many bytes.
PAGE = 512


class Buffer:
    """The memory of one message, with the numbers of its tensors: its bytes, and the tensors of each part.

    See `place_parts` for where the parts lie.
    """

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
    """Records the actions of a pass, so that they can be replayed with tensors given by number.

    It also hands out message buffers and reuses them. Buffer sizes are multiples of an eighth of `largest_message`
    (bytes), so messages of similar sizes can share buffers.
    """

    def __init__(self, plan: Plan, largest_message: int, device: torch.device) -> None:
        self.plan, self.device, self.unit = plan, device, max(1, -(-largest_message // 8))
        self.tickets = count()
        #: The actions recorded since the last `collect`.
        self.actions: list[Move | NumberedPost | Wait] = []
        self._stores = [0]
        self._free: list[tuple[int, int]] = []  # (first byte, bytes) in store 0
        self._views: list[View | None] = []
        self._shapes: list[tuple[int, ...]] = []
        self._numbers: dict[View, int] = {}

    def given(self, *shapes: Sequence[int]) -> Numbers:
        """New numbers for tensors of these shapes, which the caller passes to `PassTensors` before a pass."""
        first = len(self._views)
        self._views += [None] * len(shapes)
        self._shapes += map(tuple, shapes)
        return tuple(range(first, first + len(shapes)))

    def shape(self, number: int) -> tuple[int, ...]:
        """The shape of the tensor with this number."""
        return self._shapes[number]

    def number(self, view: View) -> int:
        """The number of a tensor in a buffer."""
        if view not in self._numbers:
            self._numbers[view] = len(self._views)
            self._views.append(view)
            self._shapes.append(view.shape)
        return self._numbers[view]

    def take(self, parts: Sequence[Part], *, as_sent: bool = False, saved: bool = False) -> Buffer:
        """An uninitialized buffer for these parts. `saved` buffers outlive the pass; others may be reused ones."""
        size = sum(self.plan.part_bytes(part, as_sent=as_sent) for part in parts)
        if saved:
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
        """Mark a part of a buffer as no longer needed; once all its parts are, the buffer can be reused."""
        buffer.live.discard(part)
        if not buffer.live and not buffer.store:
            self._free.append((buffer.first, buffer.size))

    def add(self, kind: Kind, targets: Numbers, sources: Numbers, rows: RowCopy | None = None) -> None:
        """Record an action that adds the sums `sources` to `targets`, or merges them if they are (out, lse)."""
        self.copy(targets, sources, rows, how="merge" if kind == "part" else "add")

    def copy(self, targets: Numbers, sources: Numbers, rows: RowCopy | None = None, *, how: How = "copy") -> None:
        """Record an action that copies a part's tensors, or only some `rows`, which are the same in each tensor."""
        index = ALL
        if rows is not None:
            index = RowIndex.of(rows, self._shapes[targets[0]], self._shapes[sources[0]], self.device)
        self.actions.append(Move(targets, sources, index, how))

    def zero(self, kind: Kind, targets: Numbers) -> None:
        """Record an action that sets the sums of a part to their initial values: 0, and -inf for lse."""
        self.actions.append(Move(targets, (), ALL, "merge" if kind == "part" else "copy"))

    def collect(self) -> Actions:
        """The actions recorded since the last call."""
        actions, self.actions = tuple(self.actions), []
        return actions

    @property
    def memory(self) -> Memory:
        """How much memory the pass needs, and where its tensors lie; only valid after all actions are recorded."""
        grouped: dict[tuple[int, torch.dtype], list[tuple[int, View]]] = {}
        for number, view in enumerate(self._views):
            if view is not None:
                grouped.setdefault((view.store, view.dtype), []).append((number, view))
        return Memory(tuple(self._stores), len(self._views), tuple((*key, tuple(x)) for key, x in grouped.items()))


class StepMessages(ABC):
    """Records when a rank posts its messages and when it waits for them, step by step.

    A subclass defines what is sent (`pack`), where messages arrive (`make_room`) and how they are used (`unpack`).
    """

    def __init__(self, recorder: Recorder, steps: Sequence[Step]) -> None:
        self.recorder, self.steps = recorder, steps
        #: Buffers that are being sent and must not change.
        self.sending: list[Buffer] = []
        #: Messages in flight: the step at whose end they are due, the wait, the buffers being sent, each with its parts
        #: that are copies and can be dropped afterwards, and the buffers being received.
        self._open: list[tuple[int, Wait, list[tuple[Buffer, list[Part]]], list[tuple[Hop, Buffer]]]] = []

    def start(self, index: int) -> None:
        """Record the messages that step `index` posts."""
        for until, sends, recvs in self.steps[index].posts:
            sent: list[tuple[Buffer, list[Part]]] = []
            for hop in sends:  # before the receives: packing can free buffers for them
                sent.append(self.pack(hop))
                self.sending.append(sent[-1][0])
            received = [(hop, self.make_room(hop)) for hop in recvs]
            ticket = next(self.recorder.tickets)
            numbered_sends = tuple((hop.peer, hop.tag, x.data) for hop, (x, _) in zip(sends, sent, strict=True))
            numbered_recvs = tuple((hop.peer, hop.tag, x.data) for hop, x in received)
            self.recorder.actions.append(NumberedPost(numbered_sends, numbered_recvs, ticket))
            self._open.append((until, Wait(ticket), sent, received))

    def wait(self, index: int) -> None:
        """Record that the rank waits for the messages due at the end of step `index`, and uses them."""
        due = [messages for messages in self._open if messages[0] <= index]
        self._open = [messages for messages in self._open if messages[0] > index]
        for _, wait, sent, received in due:
            self.recorder.actions.append(wait)
            for buffer, copies in sent:
                self.sending.remove(buffer)
                for part in copies:
                    self.recorder.drop(buffer, part)
            for hop, buffer in received:
                self.unpack(hop, buffer)

    @abstractmethod
    def pack(self, hop: Hop) -> tuple[Buffer, list[Part]]:
        """(buffer, copies): the buffer to send as this message, and its parts that may be dropped once sent."""

    def make_room(self, hop: Hop) -> Buffer:
        """A buffer in which to receive the message."""
        return self.recorder.take(hop.parts, as_sent=True)

    @abstractmethod
    def unpack(self, hop: Hop, buffer: Buffer) -> None:
        """Record what happens to a message that has arrived."""


class RankState(StepMessages):
    """Tracks, step by step, which parts of blocks and gradient sums a rank holds during one pass around the ring.

    `rank` is the rank's number in `plan`, the plan of the ring. `own` lists the kinds of the rank's own blocks that
    travel, and `sums` the kinds of the sums for its own rows. `saved` are the parts that a forward must save or, with
    `given`, those that a backward got from its forward.
    """

    def __init__(
        self,
        recorder: Recorder,
        plan: Plan,
        rank: int,
        steps: Sequence[Step],
        own: Sequence[Kind],
        saved: tuple[Part, ...],
        *,
        sums: Sequence[Kind],
        given: bool,
    ) -> None:
        super().__init__(recorder, steps)
        self.rank, self.plan, self.saved = rank, plan, saved
        self.own = {Part(kind, rank): self._given(Part(kind, rank)) for kind in own}
        self.blocks = {**self.own, **({part: self._given(part) for part in saved} if given else {})}
        #: The buffer of each part of a block or of a sum.
        self.home: dict[Part, Buffer] = {}
        #: The gradient sums of this rank's own rows, by part.
        self.own_sums = {Part(kind, rank): self._given(Part(kind, rank)) for kind in sums}
        #: By owner, the parts of other ranks' gradients that this rank sums. Gradients that arrive for the same rows
        #: are added to them. Gradients of keys are sent as one of these parts; gradients of queries may be sent in
        #: pieces.
        self.summed: dict[int, list[Part]] = {}
        for part in (part for step in self.steps for hop in step.sends for part in hop.parts):
            if part.kind == "grad":
                self.summed.setdefault(part.owner, []).append(part)
        for part in (part for step in self.steps for hop in step.recvs for part in hop.parts):
            if part.kind in SUM_OF:
                self.summed.setdefault(part.owner, []).append(Part(SUM_OF[part.kind], part.owner, part.row_set))
        self.last_use = _last_uses(self.steps)

    def finish(self, index: int) -> Actions:
        """End step `index`: free what no later step needs, and return the actions recorded since the last call."""
        self.wait(index)
        for part in self.saved:
            if self._is_done(part, index):
                self.block(part)
        for part in [part for part in {**self.blocks, **self.home} if self._is_done(part, index)]:
            self._forget(part)
        return self.recorder.collect()

    def block(self, part: Part) -> Numbers:
        """The numbers of a block part's tensors: those that arrived, or new ones assembled from parts with its rows."""
        if part not in self.blocks:
            buffer = self.recorder.take((part,), saved=part in self.saved)
            self._copy_part(part, buffer.view(part))
            self.blocks[part], self.home[part] = buffer.view(part), buffer
        return self.blocks[part]

    def is_new(self, part: Part) -> bool:
        """Whether the gradients in this part belong to another rank and this rank has yet to add to them."""
        return part.owner != self.rank and part not in self.home

    def sums(self, part: Part, *, zero: bool = True) -> Numbers:
        """The numbers of the tensors in which a part's gradients are summed, in fp32 (fp64 for fp64 inputs).

        They start as zeros. With zero=False new ones are uninitialized: the caller overwrites all of them.
        """
        if part.owner == self.rank:
            return self.own_sums[Part(part.kind, self.rank)]
        if part not in self.home:
            self.home[part] = self.recorder.take((part,))
            if zero:
                self.recorder.zero(part.kind, self.home[part].view(part))
        return self.home[part].view(part)

    def make_room(self, hop: Hop) -> Buffer:
        # A saved part stays in the buffer that received it, unless it must first be cast to a wider dtype.
        outlives = self.plan.comm_dtype is None and any(part in self.saved for part in hop.parts)
        return self.recorder.take(hop.parts, as_sent=True, saved=outlives)

    def pack(self, hop: Hop) -> tuple[Buffer, list[Part]]:
        """(buffer, copies): a buffer with exactly the message's parts, and those of them that are mere copies.

        An existing buffer is used if it fits.
        """
        buffer = self.home.get(hop.parts[0])
        if (
            buffer is not None
            and buffer.parts == hop.parts
            and buffer.live == set(hop.parts)
            and self.plan.comm_dtype is None
        ):
            return buffer, []
        buffer = self.recorder.take(hop.parts, as_sent=True)
        return buffer, [part for part in hop.parts if not self._pack_part(part, buffer)]

    def unpack(self, hop: Hop, buffer: Buffer) -> None:
        """Record the use of a received message: blocks stay in their buffer, gradients are added to sums."""
        for part in buffer.parts:
            self._take_in(part, buffer)

    def _given(self, part: Part) -> Numbers:
        """Numbers for the tensors of a part that the caller gives to the run."""
        return self.recorder.given(*(shape for shape, _ in tensor_specs(self.plan, part, as_sent=False)))

    def _pack_part(self, part: Part, buffer: Buffer) -> bool:
        """Pack the part; True if the buffer then holds its only copy."""
        self._copy_part(part, buffer.view(part))
        previous = self.home.get(part)
        # A buffer that is being sent must not change until it has arrived.
        if previous is None or part in self.saved or previous in self.sending or self.plan.comm_dtype is not None:
            return False
        self.recorder.drop(previous, part)
        self.home[part] = buffer
        if part.kind in BLOCKS:
            self.blocks[part] = buffer.view(part)
        return True

    def _copy_part(self, part: Part, views: Numbers) -> None:
        """Copy the rows of a part to `views`, from the parts of its block or sum that this rank holds."""
        is_block = part.kind in BLOCKS
        present = self.blocks if is_block else self.summed[part.owner]
        sources = [part] if part in present else [x for x in present if (x.kind, x.owner) == (part.kind, part.owner)]
        for source in sources:
            tensors = self.blocks[source] if is_block else self.sums(source)
            for rows in shared_rows(self.plan, part, source):
                self.recorder.copy(views, tensors, rows)

    def _take_in(self, part: Part, buffer: Buffer) -> None:
        """Take in one part that has arrived in `buffer`."""
        if self.plan.comm_dtype is not None:
            buffer = self._cast(part, buffer)
        views = buffer.view(part)
        if part.kind in BLOCKS:
            self.blocks[part], self.home[part] = views, buffer
            return
        previous = self.home.get(part)
        if part in self.summed.get(part.owner, ()):
            # The sum travels on in the buffer that arrived, after this rank's own visits are added to it.
            if previous is not None:
                self.recorder.add(part.kind, views, previous.view(part))
                self.recorder.drop(previous, part)
            self.home[part] = buffer
            return
        if self.plan.reproducible is not None:  # nodes of this rank's own block
            self.recorder.actions.append(Move(self.own_sums[Part(part.kind, part.owner)], views, part.row_set, "join"))
            self.recorder.drop(buffer, part)
            return
        sums = [Part(part.kind, part.owner)] if part.owner == self.rank else self.summed[part.owner]
        for summed in sums:
            for rows in shared_rows(self.plan, summed, part):
                self.recorder.add(part.kind, self.sums(summed), views, rows)
        self.recorder.drop(buffer, part)

    def _cast(self, part: Part, message: Buffer) -> Buffer:
        """A buffer with a part of a message, cast to the dtype that kernels compute with."""
        buffer = self.recorder.take((part,), saved=part in self.saved)
        self.recorder.copy(buffer.view(part), message.view(part))
        self.recorder.drop(message, part)
        return buffer

    def _is_done(self, part: Part, index: int) -> bool:
        """Whether no step after `index` uses a part of another rank's block. All parts of a block are used together."""
        return part not in self.own and self.last_use.get(_use(part), -1) <= index

    def _forget(self, part: Part) -> None:
        if part.kind in BLOCKS:
            if part in self.saved:
                return
            del self.blocks[part]
        buffer = self.home.pop(part, None)
        if buffer is not None:
            self.recorder.drop(buffer, part)


def _last_uses(steps: Sequence[Step]) -> dict[tuple[bool, int], int]:
    """The last step that uses any part of each block and of each sum. A part is in use while it is in flight."""
    last: dict[tuple[bool, int], int] = {}
    for index, step in enumerate(steps):
        sent = [(part, hop.until) for hop in step.sends for part in hop.parts if part.kind in (*BLOCKS, *SUMS)]
        for part, until in (*sent, *((part, index) for part in step.visits)):
            last[_use(part)] = max(last.get(_use(part), 0), until)
    return last


def _use(part: Part) -> tuple[bool, int]:
    """A key that is equal for parts that are used and freed together: all parts of an owner's block, or of its sum."""
    return part.kind in SUMS, part.owner


def shared_rows(plan: Plan, target: Part, source: Part) -> tuple[RowCopy, ...]:
    """The rows that a part shares with another part of its block."""
    heads, rows = plan.part_heads(target.kind), plan.layout_of(target.kind).rows(target.owner)
    copies = find_copies(target.row_set, source.row_set, heads, rows)
    if plan.block is None or target.kind not in OF_KEYS:
        return copies
    return tuple(replace(rows, to_heads=EVERY_HEAD, from_heads=EVERY_HEAD) for rows in copies)


@cached
def find_places(plan: Plan, part: Part, device: torch.device) -> tuple[Tensor, Tensor]:
    """(heads [H], positions [1 or H, rows]) of a part of a block, int64."""
    positions, rows = plan.layout_of(part.kind).positions(part.owner), part.row_set
    heads = np.arange(plan.kv_heads if part.kind in OF_KEYS else plan.heads)
    if isinstance(rows, RowSet):
        heads, positions = np.array(rows.heads), np.stack([positions[to_numbers(x)] for x in rows.rows])
    with torch.inference_mode(False):  # the cache outlives the caller's inference mode
        return torch.as_tensor(heads, device=device), torch.as_tensor(np.atleast_2d(positions), device=device)


def place_parts(
    plan: Plan, parts: Sequence[Part], *, as_sent: bool
) -> tuple[int, dict[Part, list[tuple[int, TensorSpec]]]]:
    """(bytes of a message, places): for each part, the first byte and the spec of each of its tensors.

    Parts are placed without padding. Parts whose sizes are multiples of ALIGNED bytes come first, so each begins at a
    multiple of ALIGNED bytes, as GPU kernels require for blocks that they read in place. The tensors of these parts,
    and then those of the others, are in descending order of their item sizes, so that each begins at a multiple of its
    item size. `as_sent` means the dtypes of messages, otherwise those in which kernels compute.
    """
    sizes = [plan.part_bytes(part, as_sent=as_sent) for part in parts]
    specs = [tensor_specs(plan, part, as_sent=as_sent) for part in parts]
    order = [
        (size % ALIGNED != 0, -spec[1].itemsize, i, j)
        for i, size in enumerate(sizes)
        for j, spec in enumerate(specs[i])
    ]
    starts, start = {}, 0
    for _, _, i, j in sorted(order):
        starts[i, j] = start
        start += prod(specs[i][j][0]) * specs[i][j][1].itemsize
    places = {part: [(starts[i, j], spec) for j, spec in enumerate(specs[i])] for i, part in enumerate(parts)}
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
    """The shape and dtype of each tensor of a part; see `Plan.part_bytes` for `as_sent`.

    Shapes are [B, heads, rows, width], and [B, heads, rows] for lse of visited queries.
    """
    rows: Sequence[int]
    if part.kind in (*BLOCKS, *SUMS):
        ring_plan, _ = plan.ring_plan(0)
        tensors = ring_plan.tensors(part.kind, as_sent=as_sent)
        rows = [ring_plan.layout_of(part.kind).rows(part.owner)] * len(tensors)
        if isinstance(part.row_set, RowSet):
            rows = [part.row_set.count] * len(tensors)
            if part.kind not in OF_KEYS or plan.block is None:
                tensors = tuple((len(part.row_set.heads), width, dtype) for _, width, dtype in tensors)
    else:  # the exchange in a Ulysses group: one member's rows, for one member's heads, in full precision
        tensors, rows = plan.exchange_tensors(part.kind, plan.ulysses_size), plan.exchange_rows(part.kind, part.owner)
    specs: list[TensorSpec] = []
    for of_tensor, (heads, width, dtype) in zip(rows, tensors, strict=True):
        is_lse = (part.kind, len(specs)) in (("row", 0), ("part", 1))  # lse in the kernels' form
        shape = (plan.batch, heads, of_tensor, *(() if is_lse else (width,)))
        specs.append((shape, getattr(torch, dtype)))
    return specs
