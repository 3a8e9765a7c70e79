"""What a rank holds while it runs: rows of blocks, gradients gathered for them, and the messages in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..kernels.base import wide
from ..plan.plan import Plan
from ..plan.row_overlap import RowCopy, find_copies
from ..plan.steps import BLOCKS, SUMS, Batch, Hop, Kind, Part, Step
from ..transport.base import Message, Post, Program, Wait
from .message_buffers import Buffer, Buffers, Tensors, put


@dataclass(frozen=True)
class _OpenBatch:
    """Messages on their way until the end of a step: those sent, each with its parts that are copies, and those to come."""

    until: int
    ticket: object
    sent: list[tuple[Buffer, list[Part]]]
    arriving: list[Buffer]


class RankState:
    """Parts of blocks and of gradients, and the buffers they live in, from step to step of one run.

    `own` are this rank's blocks of the kinds that travel. `kept` parts outlive the run; `held` are the tensors of
    `kept` at the start of a backward.
    """

    def __init__(
        self, plan: Plan, rank: int, own: dict[Kind, Tensors], steps: Sequence[Step], *,
        kept: tuple[Part, ...] = (), held: tuple[Tensors, ...] = (),
    ) -> None:  # fmt: skip
        self.plan, self.rank, self.steps, self.kept = plan, rank, steps, kept
        self.own = {Part(kind, rank): tensors for kind, tensors in own.items()}
        self.blocks: dict[Part, Tensors] = {**self.own, **dict(zip(kept, held, strict=False))}
        self.mine: Tensors | None = None
        self.where: dict[Part, Buffer] = {}
        self.flying: list[_OpenBatch] = []
        self.sending: list[Buffer] = []
        #: The gradients that this rank gathers, by owner: what arrives for their rows is added to them. Those of keys
        #: go on as they are gathered, those of queries are gathered for the rows that arrive and go on in parts.
        self.sums: dict[int, list[Part]] = {}
        for part in (part for step in steps for hop in step.sends for part in hop.parts):
            if part.kind == "grad":
                self.sums.setdefault(part.owner, []).append(part)
        for part in (part for step in steps for hop in step.recvs for part in hop.parts):
            if part.kind == "q":
                self.sums.setdefault(part.owner, []).append(Part("dq", part.owner, part.row_set))
        self.buffers = Buffers(self.plan, _largest(plan, rank), next(iter(own.values()))[0].device)
        self.last = _last_uses(steps)

    def start(self, index: int, label: str) -> Program[None]:
        """Post the messages of a step."""
        for batch in self.steps[index].posts:
            self.flying.append((yield from self._post(batch, label)))

    def finish(self, index: int) -> Program[None]:
        """Wait for the messages that are due, take in what arrived, and free what is not needed any more."""
        due = [flight for flight in self.flying if flight.until <= index]
        self.flying = [flight for flight in self.flying if flight.until > index]
        for flight in due:
            yield Wait(flight.ticket)
            for buffer, copies in flight.sent:
                self.sending.remove(buffer)
                for part in copies:
                    self.buffers.drop(buffer, part)
            for buffer in flight.arriving:
                for part in buffer.parts:
                    self._arrived(part, buffer)
        for part in self.kept:
            if self._done(part, index):
                self.block(part)
        for part in [part for part in {**self.blocks, **self.where} if self._done(part, index)]:
            self._forget(part)

    def block(self, part: Part) -> Tensors:
        """The tensors of a part of a block: as it arrived, or put together from the parts that hold its rows."""
        if part not in self.blocks:
            buffer = (self.buffers.fresh if part in self.kept else self.buffers.take)((part,))
            self._fill(part, buffer.view(part))
            self.blocks[part], self.where[part] = buffer.view(part), buffer
        return self.blocks[part]

    def gathered(self, part: Part) -> Tensors:
        """The gradients gathered so far for a part, in fp32 or fp64; zeros at first."""
        if part.owner == self.rank:
            if self.mine is None:
                block = self.blocks[Part("kv" if part.kind == "grad" else "q", self.rank)]
                self.mine = zeros(block[: len(self.plan.part_widths(part.kind))])
            return self.mine
        if part not in self.where:
            self.where[part] = self.buffers.take((part,))
            for view in self.where[part].view(part):
                view.zero_()
        return self.where[part].view(part)

    def _post(self, batch: Batch, label: str) -> Program[_OpenBatch]:
        sent = [self._outgoing(hop) for hop in batch.sends]  # first: what was packed leaves its buffers
        arriving = [self._receiving(hop) for hop in batch.recvs]
        sends = tuple(Message(hop.peer, hop.tag, b.data) for hop, (b, _) in zip(batch.sends, sent, strict=True))
        recvs = tuple(Message(h.peer, h.tag, b.data) for h, b in zip(batch.recvs, arriving, strict=True))
        return _OpenBatch(batch.until, (yield Post(sends, recvs, label)), sent, arriving)

    def _receiving(self, hop: Hop) -> Buffer:
        # What is kept stays where it arrived, unless it must be widened first.
        keeps = self.plan.comm_dtype is None and any(part in self.kept for part in hop.parts)
        return (self.buffers.fresh if keeps else self.buffers.take)(hop.parts, wire=True)

    def _outgoing(self, hop: Hop) -> tuple[Buffer, list[Part]]:
        """The buffer to send, the one that holds exactly these parts or a packed one, and its parts that are copies."""
        buffer = self.where.get(hop.parts[0])
        if (
            buffer is None
            or buffer.parts != hop.parts
            or buffer.live != set(hop.parts)
            or self.plan.comm_dtype is not None
        ):
            buffer = self.buffers.take(hop.parts, wire=True)
            copies = [part for part in hop.parts if not self._packed(part, buffer)]
        else:
            copies = []
        self.sending.append(buffer)
        return buffer, copies

    def _packed(self, part: Part, buffer: Buffer) -> bool:
        """Copy a part into a message, and let it live there if it may, so that it is held but once; whether it does."""
        self._fill(part, buffer.view(part))
        before = self.where.get(part)
        # What is being sent must stay as it is until it has arrived.
        if before is None or part in self.kept or before in self.sending or self.plan.comm_dtype is not None:
            return False
        self.buffers.drop(before, part)
        self.where[part] = buffer
        if part.kind in BLOCKS:
            self.blocks[part] = buffer.view(part)
        return True

    def _fill(self, part: Part, views: Tensors) -> None:
        """Copy the rows of a part from the parts of its block, or of its gradients, that are here."""
        block = part.kind in BLOCKS
        known = self.blocks if block else self.sums[part.owner]
        sources = [part] if part in known else [x for x in known if (x.kind, x.owner) == (part.kind, part.owner)]
        for source, shared in zip(sources, self._moves(part, tuple(sources)), strict=True):
            tensors = self.blocks[source] if block else self.gathered(source)
            for move in shared:
                for target, x in zip(views, tensors, strict=True):
                    put(target, x, move, add=False)

    def _moves(self, target: Part, sources: tuple[Part, ...]) -> list[tuple[RowCopy, ...]]:
        """The rows that a part shares with others of its block."""

        def find() -> list[tuple[RowCopy, ...]]:
            heads, rows = self.plan.part_heads(target.kind), self.plan.layout.rows(target.owner)
            return [find_copies(target.row_set, source.row_set, heads, rows) for source in sources]

        return self.plan.cache.answer((find_copies, target, sources), find)

    def _arrived(self, part: Part, buffer: Buffer) -> None:
        if self.plan.comm_dtype is not None:
            buffer = self._widened(part, buffer)
        views = buffer.view(part)
        if part.kind in BLOCKS:
            self.blocks[part], self.where[part] = views, buffer
            return
        here = self.where.get(part)
        if part in self.sums.get(part.owner, ()):
            if here is not None:  # gathered by this rank's own visit; the sum goes on in the buffer that arrived
                for target, x in zip(views, here.view(part), strict=True):
                    target.add_(x)
                self.buffers.drop(here, part)
            self.where[part] = buffer
            return
        sums = [Part(part.kind, part.owner)] if part.owner == self.rank else self.sums[part.owner]
        for place in sums:
            for move in self._moves(place, (part,))[0]:
                for target, x in zip(self.gathered(place), views, strict=True):
                    put(target, x, move, add=True)
        self.buffers.drop(buffer, part)

    def _widened(self, part: Part, message: Buffer) -> Buffer:
        """A part of a message in the dtype that it is computed with."""
        buffer = (self.buffers.fresh if part in self.kept else self.buffers.take)((part,))
        for target, x in zip(buffer.view(part), message.view(part), strict=True):
            target.copy_(x)
        self.buffers.drop(message, part)
        return buffer

    def _done(self, part: Part, index: int) -> bool:
        """Whether no later step uses a part. Parts of a block are used together."""
        return part not in self.own and self.last.get(_use(part), -1) <= index

    def _forget(self, part: Part) -> None:
        if part.kind in BLOCKS:
            if part in self.kept:
                return
            del self.blocks[part]
        buffer = self.where.pop(part, None)
        if buffer is not None:
            self.buffers.drop(buffer, part)


def _last_uses(steps: Sequence[Step]) -> dict[tuple[bool, int], int]:
    """The last step that uses gradients, or any part of a block; a part in flight is in use."""
    last: dict[tuple[bool, int], int] = {}
    for index, step in enumerate(steps):
        for hop in step.sends:
            for part in hop.parts:
                last[_use(part)] = max(last.get(_use(part), 0), hop.until)
        for part in step.visits:
            last[_use(part)] = max(last.get(_use(part), 0), index)
    return last


def _largest(plan: Plan, rank: int) -> int:
    """Bytes of the largest message of a rank, or of a part of one in the dtype that it is computed with."""

    def find() -> int:
        mine = plan.for_rank(rank)
        hops = [hop for step in (*mine.forward, *mine.backward) for hop in (*step.sends, *step.recvs)]
        sizes = [sum(map(plan.part_bytes, hop.parts)) for hop in hops]
        sizes += [plan.part_bytes(part, wire=False) for hop in hops for part in hop.parts]
        return max(sizes, default=0)

    return plan.cache.answer((_largest, rank), find)


def _use(part: Part) -> tuple[bool, int]:
    """What is used together, and freed together: all parts of the block of an owner, or all of their gradients."""
    return part.kind in SUMS, part.owner


def zeros(like: Tensors) -> Tensors:
    """Sums for tensors of these shapes and strides, in fp32 or fp64."""
    return tuple(torch.zeros_like(x, dtype=wide(x.dtype)) for x in like)
