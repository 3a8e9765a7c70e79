"""What a rank holds while it runs: rows of blocks, sums of gradients, and the buffers that both live in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernels.base import wide
from ..plan.row_overlap import RowCopy
from ..plan.steps import BLOCKS, SUMS, Hop, Kind, Part, Step
from ..transport.base import Program
from .message_buffers import Buffer, Buffers, StepMessages, Tensors, copy_rows, row_copies
from .rank_program import RankProgram


class RankState(StepMessages):
    """Parts of blocks and of gradient sums, from step to step of the ring in one forward or backward.

    `own` are this rank's own blocks of the kinds that travel. `kept` are the tensors of `program.kept` at the start of
    a backward; a forward has none, and with `keep` leaves them in `blocks`.
    """

    def __init__(
        self,
        program: RankProgram,
        buffers: Buffers,
        own: dict[Kind, Tensors],
        *,
        keep: bool = True,
        kept: Sequence[Tensors] = (),
    ) -> None:
        super().__init__(program.steps, buffers)
        self.rank, self.plan = program.owner, program.ring_plan
        self.kept = program.kept if keep else ()
        self.own = {Part(kind, self.rank): tensors for kind, tensors in own.items()}
        self.blocks: dict[Part, Tensors] = {**self.own, **dict(zip(self.kept, kept, strict=False))}
        #: The buffer that a part of a block, or of a sum, lives in.
        self.home: dict[Part, Buffer] = {}
        #: The sums of the gradients of this rank's own rows.
        self.own_sums: Tensors | None = None
        #: By owner, the parts of other ranks' gradients that this rank sums. Arriving gradients of the same rows are
        #: added to these parts. Gradients of keys leave as one of these parts; gradients of queries may leave split.
        self.summed: dict[int, list[Part]] = {}
        for part in (part for step in self.steps for hop in step.sends for part in hop.parts):
            if part.kind == "grad":
                self.summed.setdefault(part.owner, []).append(part)
        for part in (part for step in self.steps for hop in step.recvs for part in hop.parts):
            if part.kind == "q":
                self.summed.setdefault(part.owner, []).append(Part("dq", part.owner, part.row_set))
        self.last_use = _last_uses(self.steps)

    def finish(self, index: int) -> Program[None]:
        """Wait for the messages that are due at the end of step `index`, and free what no later step needs."""
        yield from self.wait(index)
        for part in self.kept:
            if self._is_done(part, index):
                self.block(part)
        for part in [part for part in {**self.blocks, **self.home} if self._is_done(part, index)]:
            self._forget(part)

    def block(self, part: Part) -> Tensors:
        """The tensors of a part of a block: as it arrived, or assembled from the parts that hold its rows."""
        if part not in self.blocks:
            buffer = (self.buffers.allocate if part in self.kept else self.buffers.take)((part,))
            self._copy_part(part, buffer.view(part))
            self.blocks[part], self.home[part] = buffer.view(part), buffer
        return self.blocks[part]

    def sums(self, part: Part) -> Tensors:
        """The gradients summed so far for a part, in fp32 (fp64 for fp64 inputs); zeros at first."""
        if part.owner == self.rank:
            if self.own_sums is None:
                block = self.blocks[Part("kv" if part.kind == "grad" else "q", self.rank)]
                self.own_sums = zeros(block[: len(self.plan.part_widths(part.kind))])
            return self.own_sums
        if part not in self.home:
            self.home[part] = self.buffers.take((part,))
            for view in self.home[part].view(part):
                view.zero_()
        return self.home[part].view(part)

    def make_room(self, hop: Hop) -> Buffer:
        """The buffer that a message is received in."""
        # A kept part stays in the buffer that it arrives in, unless it must first be cast to a wider dtype.
        outlives = self.plan.comm_dtype is None and any(part in self.kept for part in hop.parts)
        return (self.buffers.allocate if outlives else self.buffers.take)(hop.parts, as_sent=True)

    def pack(self, hop: Hop) -> tuple[Buffer, list[Part]]:
        """The buffer that holds exactly the message's parts, or a packed one, and the parts that are copies in it."""
        buffer = self.home.get(hop.parts[0])
        if (
            buffer is not None
            and buffer.parts == hop.parts
            and buffer.live == set(hop.parts)
            and self.plan.comm_dtype is None
        ):
            return buffer, []
        buffer = self.buffers.take(hop.parts, as_sent=True)
        return buffer, [part for part in hop.parts if not self._pack_part(part, buffer)]

    def unpack(self, hop: Hop, buffer: Buffer) -> None:
        """Take in the parts of a message that has arrived: blocks as they are, gradients added to the sums here."""
        for part in buffer.parts:
            self._take_in(part, buffer)

    def _pack_part(self, part: Part, buffer: Buffer) -> bool:
        """Pack the part; True if the buffer is now its only copy."""
        self._copy_part(part, buffer.view(part))
        previous = self.home.get(part)
        # A buffer that is being sent must not change until it has arrived.
        if previous is None or part in self.kept or previous in self.sending or self.plan.comm_dtype is not None:
            return False
        self.buffers.drop(previous, part)
        self.home[part] = buffer
        if part.kind in BLOCKS:
            self.blocks[part] = buffer.view(part)
        return True

    def _copy_part(self, part: Part, views: Tensors) -> None:
        """Copy the rows of a part to `views`, from those parts of its block, or of its sum, that are here."""
        is_block = part.kind in BLOCKS
        present = self.blocks if is_block else self.summed[part.owner]
        sources = [part] if part in present else [x for x in present if (x.kind, x.owner) == (part.kind, part.owner)]
        for source, copies in zip(sources, self._row_copies(part, tuple(sources)), strict=True):
            tensors = self.blocks[source] if is_block else self.sums(source)
            for rows in copies:
                for target, x in zip(views, tensors, strict=True):
                    copy_rows(target, x, rows, add=False)

    def _row_copies(self, target: Part, sources: tuple[Part, ...]) -> list[tuple[RowCopy[torch.Tensor], ...]]:
        """The rows that a part shares with each source, another part of its block. Cached."""
        device = self.buffers.pool.device

        def compute() -> list[tuple[RowCopy[torch.Tensor], ...]]:
            heads, rows = self.plan.part_heads(target.kind), self.plan.layout.rows(target.owner)
            return [row_copies(target.row_set, source.row_set, heads, rows, device) for source in sources]

        return self.plan.cache.answer((row_copies, target, sources, device), compute)

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
            # The sum travels on in the buffer that arrived; what this rank's own visit has summed is added there.
            if previous is not None:
                for target, x in zip(views, previous.view(part), strict=True):
                    target.add_(x)
                self.buffers.drop(previous, part)
            self.home[part] = buffer
            return
        sums = [Part(part.kind, part.owner)] if part.owner == self.rank else self.summed[part.owner]
        for summed in sums:
            for rows in self._row_copies(summed, (part,))[0]:
                for target, x in zip(self.sums(summed), views, strict=True):
                    copy_rows(target, x, rows, add=True)
        self.buffers.drop(buffer, part)

    def _cast(self, part: Part, message: Buffer) -> Buffer:
        """A buffer with a part of a message in the dtype that kernels compute with."""
        buffer = (self.buffers.allocate if part in self.kept else self.buffers.take)((part,))
        for target, x in zip(buffer.view(part), message.view(part), strict=True):
            target.copy_(x)
        self.buffers.drop(message, part)
        return buffer

    def _is_done(self, part: Part, index: int) -> bool:
        """Whether no step after `index` uses a part of another rank's block. All parts of a block are used together."""
        return part not in self.own and self.last_use.get(_use(part), -1) <= index

    def _forget(self, part: Part) -> None:
        if part.kind in BLOCKS:
            if part in self.kept:
                return
            del self.blocks[part]
        buffer = self.home.pop(part, None)
        if buffer is not None:
            self.buffers.drop(buffer, part)


def _last_uses(steps: Sequence[Step]) -> dict[tuple[bool, int], int]:
    """The last step that uses any part of each block and of each sum. A part is in use while it is in flight."""
    last: dict[tuple[bool, int], int] = {}
    for index, step in enumerate(steps):
        sent = [(part, hop.until) for hop in step.sends for part in hop.parts if part.kind in (*BLOCKS, *SUMS)]
        for part, until in (*sent, *((part, index) for part in step.visits)):
            last[_use(part)] = max(last.get(_use(part), 0), until)
    return last


def _use(part: Part) -> tuple[bool, int]:
    """Equal for parts that are used, and freed, together: all parts of an owner's block, or of the sum for it."""
    return part.kind in SUMS, part.owner


def zeros(like: Tensors) -> Tensors:
    """Sums for tensors of these shapes and strides, in fp32 (fp64 for fp64 tensors)."""
    return tuple(torch.zeros_like(x, dtype=wide(x.dtype)) for x in like)
