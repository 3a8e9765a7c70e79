"""Message buffers of one rank: contiguous bytes, viewed as the tensors of their parts and reused from step to step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..plan.plan import Plan
from ..plan.row_overlap import RowCopy, find_copies
from ..plan.row_sets import AllRows, RowSet
from ..plan.steps import BLOCKS, SUMS, Batch, Hop, Part, Step
from ..transport.base import Message, Post, Program, Wait
from .memory_pool import empty, memory_pool

#: The tensors of one part, such as (K, V), (dK, dV), (q, dO), (lse, delta), (dQ,) or (q, k, v).
Tensors = tuple[torch.Tensor, ...]
#: Shape and dtype of one tensor of a part.
TensorSpec = tuple[tuple[int, ...], torch.dtype]
#: Bytes of the widest loads and stores of GPUs.
ALIGNED = 16


class Buffer:
    """One message: its parts in one contiguous uint8 tensor, aligned without a byte of padding.

    Parts whose sizes are multiples of ALIGNED bytes come first. Each of these parts then begins at a multiple of
    ALIGNED bytes, as GPU kernels require of blocks that they read in place. The other parts follow in descending order
    of their item sizes, so that each part begins at a multiple of its item size.

    `as_sent`: the parts have the dtypes of a message, else the dtypes that kernels compute with.
    """

    def __init__(self, store: torch.Tensor, parts: tuple[Part, ...], plan: Plan, *, as_sent: bool) -> None:
        self.store, self.parts = store, parts
        #: Parts that are still needed. A buffer without a live part is free.
        self.live = set(parts)
        sizes = [plan.part_bytes(part, as_sent=as_sent) for part in parts]
        specs = [tensor_specs(plan, part, as_sent=as_sent) for part in parts]
        self.data = store[: sum(sizes)]
        self._views: dict[Part, Tensors] = {}
        start = 0
        for i in sorted(range(len(parts)), key=lambda i: (sizes[i] % ALIGNED != 0, -specs[i][0][1].itemsize)):
            self._views[parts[i]] = _views(self.data[start : start + sizes[i]], specs[i])
            start += sizes[i]

    def view(self, part: Part) -> Tensors:
        """The contiguous tensors of a part, [B, heads, rows, width] each."""
        return self._views[part]


def tensor_specs(plan: Plan, part: Part, *, as_sent: bool) -> list[TensorSpec]:
    """Shapes [B, heads, rows, width] and dtypes of the tensors of a part; see `Plan.part_bytes` for `as_sent`."""
    if part.kind in (*BLOCKS, *SUMS):
        dtype: torch.dtype = getattr(torch, plan.part_dtype(part, as_sent=as_sent))
        ring_plan, _ = plan.ring_plan(0)
        heads, rows = ring_plan.part_heads(part.kind), ring_plan.layout.rows(part.owner)
        if isinstance(part.row_set, RowSet):
            heads, rows = len(part.row_set.heads), part.row_set.count
        return [((plan.batch, heads, rows, width), dtype) for width in ring_plan.part_widths(part.kind)]
    # The exchange of a Ulysses group: rows of one member for the heads of one member, in full precision.
    rows = plan.layout.rows(part.owner)
    heads, kv_heads = plan.heads // plan.ulysses_size, plan.kv_heads // plan.ulysses_size
    own: torch.dtype = getattr(torch, plan.dtype)
    if part.kind in ("qkv", "dqkv"):
        sizes = ((heads, plan.head_dim), (kv_heads, plan.head_dim), (kv_heads, plan.value_dim))
        return [((plan.batch, count, rows, width), own) for count, width in sizes]
    accumulated = torch.float64 if own == torch.float64 else torch.float32
    # lse or its gradient comes first: the wider dtype is then aligned.
    return [((plan.batch, heads, rows, 1), accumulated), ((plan.batch, heads, rows, plan.value_dim), own)]


def _views(data: torch.Tensor, specs: Sequence[TensorSpec]) -> Tensors:
    """Views of consecutive bytes of `data` as tensors of these shapes and dtypes."""
    views, start = [], 0
    for shape, dtype in specs:
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        views.append(data[start:stop].view(dtype).view(shape))
        start = stop
    return tuple(views)


class Buffers:
    """Hands out message buffers and takes them back.

    Sizes are multiples of an eighth of the largest message, so that the forward and the backward meet the same few
    sizes again and again. `largest_message` is in bytes.
    """

    def __init__(self, plan: Plan, largest_message: int, device: torch.device) -> None:
        unit = max(1, -(-largest_message // 8))
        # Rounded up by at most a sixteenth, so that messages of nearly equal sizes share buffers.
        self.plan, self.unit = plan, unit + -unit % (1 << max(unit.bit_length() - 5, 0))
        self.pool = memory_pool(device)
        self.free: list[torch.Tensor] = []

    def take(self, parts: tuple[Part, ...], *, as_sent: bool = False) -> Buffer:
        """A reused buffer for these parts, with arbitrary contents; see `Buffer` for `as_sent`."""
        size = -(-self._size(parts, as_sent=as_sent) // self.unit) * self.unit
        fitting = [i for i, store in enumerate(self.free) if store.numel() >= size]
        if fitting:
            store = self.free.pop(min(fitting, key=lambda i: self.free[i].numel()))
        else:
            store = self.pool.take(size)
        return Buffer(store, parts, self.plan, as_sent=as_sent)

    def allocate(self, parts: tuple[Part, ...], *, as_sent: bool = False) -> Buffer:
        """A newly allocated buffer for parts that outlive the run; the pool never reuses its memory."""
        size = self._size(parts, as_sent=as_sent)
        return Buffer(empty((size,), torch.uint8, self.pool.device), parts, self.plan, as_sent=as_sent)

    def drop(self, buffer: Buffer, part: Part) -> None:
        """Mark one part of a buffer as not needed any more; the buffer is free when no live part is left."""
        buffer.live.discard(part)
        if not buffer.live:
            self.free.append(buffer.store)

    def close(self) -> None:
        """Give the free buffers back to the pool of the device."""
        while self.free:
            self.pool.give(self.free.pop())

    def _size(self, parts: tuple[Part, ...], *, as_sent: bool) -> int:
        return sum(self.plan.part_bytes(part, as_sent=as_sent) for part in parts)


@dataclass(frozen=True)
class _OpenBatch:
    """Messages that are in flight until the end of step `until`.

    Each sent buffer is listed with those of its parts that are copies and can be dropped after the send.
    """

    until: int
    ticket: object
    sent: list[tuple[Buffer, list[Part]]]
    received: list[tuple[Hop, Buffer]]


class StepMessages(ABC):
    """Posts the messages of a rank's steps, and waits for each message at the end of the step that it is due in.

    A subclass says what is sent (`pack`), where messages arrive (`make_room`) and what becomes of them (`unpack`).
    """

    def __init__(self, steps: Sequence[Step], buffers: Buffers) -> None:
        self.steps, self.buffers = steps, buffers
        #: Buffers that are being sent and must not change.
        self.sending: list[Buffer] = []
        self._open: list[_OpenBatch] = []

    def start(self, index: int, label: str) -> Program[None]:
        """Post the messages of step `index`. `label` names the step in errors."""
        for batch in self.steps[index].posts:
            self._open.append((yield from self._post(batch, label)))

    def wait(self, index: int) -> Program[None]:
        """Wait for the messages that are due at the end of step `index`, and unpack what has arrived."""
        due = [batch for batch in self._open if batch.until <= index]
        self._open = [batch for batch in self._open if batch.until > index]
        for batch in due:
            yield Wait(batch.ticket)
            for buffer, copies in batch.sent:
                self.sending.remove(buffer)
                for part in copies:
                    self.buffers.drop(buffer, part)
            for hop, buffer in batch.received:
                self.unpack(hop, buffer)

    @abstractmethod
    def pack(self, hop: Hop) -> tuple[Buffer, list[Part]]:
        """The buffer that holds the message to send, and those of its parts that are needed for the send only."""

    def make_room(self, hop: Hop) -> Buffer:
        """The buffer that a message is received in."""
        return self.buffers.take(hop.parts, as_sent=True)

    @abstractmethod
    def unpack(self, hop: Hop, buffer: Buffer) -> None:
        """Take in a message that has arrived."""

    def _post(self, batch: Batch, label: str) -> Program[_OpenBatch]:
        packed: list[tuple[Buffer, list[Part]]] = []
        for hop in batch.sends:  # before the receives: packing can free buffers for them
            packed.append(self.pack(hop))
            self.sending.append(packed[-1][0])
        received = [(hop, self.make_room(hop)) for hop in batch.recvs]
        sends = tuple(Message(hop.peer, hop.tag, b.data) for hop, (b, _) in zip(batch.sends, packed, strict=True))
        recvs = tuple(Message(hop.peer, hop.tag, buffer.data) for hop, buffer in received)
        return _OpenBatch(batch.until, (yield Post(sends, recvs, label)), packed, received)


def row_copies(
    target: RowSet | AllRows, source: RowSet | AllRows, heads: int, rows: int, device: torch.device
) -> tuple[RowCopy[torch.Tensor], ...]:
    """`find_copies` with index lists as tensors on `device`: to bring indices there makes the host wait."""

    def indices(x: range | np.ndarray) -> range | torch.Tensor:
        return x if isinstance(x, range) else torch.as_tensor(x, device=device)

    copies = find_copies(target, source, heads, rows)
    return tuple(RowCopy(x.to_heads, indices(x.to_rows), x.from_heads, indices(x.from_rows)) for x in copies)


def copy_rows(target: torch.Tensor, source: torch.Tensor, rows: RowCopy[torch.Tensor], *, add: bool) -> None:
    """Copy rows of `source` [B, heads, rows, D] to rows of `target`, or add them to the rows of `target`."""
    to = target[:, _slice(rows.to_heads)]
    of = source[:, _slice(rows.from_heads)]
    if isinstance(rows.from_rows, range) or isinstance(rows.to_rows, range):
        assert isinstance(rows.from_rows, range) and isinstance(rows.to_rows, range)
        to, of = to[:, :, _slice(rows.to_rows)], of[:, :, _slice(rows.from_rows)]
        to.add_(of) if add else to.copy_(of)
        return
    selected = of.index_select(2, rows.from_rows).to(target.dtype)
    to.index_add_(2, rows.to_rows, selected) if add else to.index_copy_(2, rows.to_rows, selected)


def _slice(r: range) -> slice:
    return slice(r.start, r.stop, r.step)
