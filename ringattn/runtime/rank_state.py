"""What a rank holds while it runs, written down before it runs: blocks, sums of gradients, and the buffers of both."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.plan import Plan
from ..plan.row_sets import RowCopy, find_copies
from ..plan.steps import BLOCKS, SUMS, Hop, Kind, Part, Step
from .message_buffers import Buffer, Recorder, StepMessages, tensor_specs
from .rank_run import Actions, Numbers

#: By the kind of a block of queries, the kind of what is summed for its rows.
SUM_OF: dict[Kind, Kind] = {"q": "dq", "query": "part"}


class RankState(StepMessages):
    """Parts of blocks and of gradient sums, from step to step of the ring in one forward or backward.

    `rank` is the rank in `plan`, the plan of the ring. `own` are the kinds of this rank's own blocks that travel, and
    `sums` the kinds of the sums of its own rows.
    `kept` are the parts that a forward keeps, or that a backward is `given` from its forward.
    """

    def __init__(
        self,
        recorder: Recorder,
        plan: Plan,
        rank: int,
        steps: Sequence[Step],
        own: Sequence[Kind],
        kept: tuple[Part, ...],
        *,
        sums: Sequence[Kind],
        given: bool,
    ) -> None:
        super().__init__(recorder, steps)
        self.rank, self.plan, self.kept = rank, plan, kept
        self.own = {Part(kind, rank): self._given(Part(kind, rank)) for kind in own}
        self.blocks = {**self.own, **({part: self._given(part) for part in kept} if given else {})}
        #: The buffer that a part of a block, or of a sum, lives in.
        self.home: dict[Part, Buffer] = {}
        #: The sums of the gradients of this rank's own rows, by part.
        self.own_sums = {Part(kind, rank): self._given(Part(kind, rank)) for kind in sums}
        #: By owner, the parts of other ranks' gradients that this rank sums. Arriving gradients of the same rows are
        #: added to these parts. Gradients of keys leave as one of these parts; gradients of queries may leave split.
        self.summed: dict[int, list[Part]] = {}
        for part in (part for step in self.steps for hop in step.sends for part in hop.parts):
            if part.kind == "grad":
                self.summed.setdefault(part.owner, []).append(part)
        for part in (part for step in self.steps for hop in step.recvs for part in hop.parts):
            if part.kind in SUM_OF:
                self.summed.setdefault(part.owner, []).append(Part(SUM_OF[part.kind], part.owner, part.row_set))
        self.last_use = _last_uses(self.steps)

    def finish(self, index: int) -> Actions:
        """What ends step `index`. What no later step needs is free afterwards."""
        self.wait(index)
        for part in self.kept:
            if self._is_done(part, index):
                self.block(part)
        for part in [part for part in {**self.blocks, **self.home} if self._is_done(part, index)]:
            self._forget(part)
        return self.recorder.collect()

    def block(self, part: Part) -> Numbers:
        """The tensors of a part of a block: as it arrived, or assembled from the parts that hold its rows."""
        if part not in self.blocks:
            buffer = self.recorder.take((part,), kept=part in self.kept)
            self._copy_part(part, buffer.view(part))
            self.blocks[part], self.home[part] = buffer.view(part), buffer
        return self.blocks[part]

    def is_new(self, part: Part) -> bool:
        """Whether nothing has been summed for a part of another rank's gradients."""
        return part.owner != self.rank and part not in self.home

    def sums(self, part: Part, *, zero: bool = True) -> Numbers:
        """The gradients summed so far for a part, in fp32 (fp64 for fp64 inputs); zeros at first.

        With zero=False new sums are arbitrary: the caller writes all of them.
        """
        if part.owner == self.rank:
            return self.own_sums[Part(part.kind, self.rank)]
        if part not in self.home:
            self.home[part] = self.recorder.take((part,))
            if zero:
                self.recorder.zero(part.kind, self.home[part].view(part))
        return self.home[part].view(part)

    def make_room(self, hop: Hop) -> Buffer:
        """The buffer that a message is received in."""
        # A kept part stays in the buffer that it arrives in, unless it must first be cast to a wider dtype.
        outlives = self.plan.comm_dtype is None and any(part in self.kept for part in hop.parts)
        return self.recorder.take(hop.parts, as_sent=True, kept=outlives)

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
        buffer = self.recorder.take(hop.parts, as_sent=True)
        return buffer, [part for part in hop.parts if not self._pack_part(part, buffer)]

    def unpack(self, hop: Hop, buffer: Buffer) -> None:
        """Take in the parts of a message that has arrived: blocks as they are, gradients added to the sums here."""
        for part in buffer.parts:
            self._take_in(part, buffer)

    def _given(self, part: Part) -> Numbers:
        """Numbers of the tensors of a part that the run is given."""
        return self.recorder.given(*(shape for shape, _ in tensor_specs(self.plan, part, as_sent=False)))

    def _pack_part(self, part: Part, buffer: Buffer) -> bool:
        """Pack the part; True if the buffer is now its only copy."""
        self._copy_part(part, buffer.view(part))
        previous = self.home.get(part)
        # A buffer that is being sent must not change until it has arrived.
        if previous is None or part in self.kept or previous in self.sending or self.plan.comm_dtype is not None:
            return False
        self.recorder.drop(previous, part)
        self.home[part] = buffer
        if part.kind in BLOCKS:
            self.blocks[part] = buffer.view(part)
        return True

    def _copy_part(self, part: Part, views: Numbers) -> None:
        """Copy the rows of a part to `views`, from those parts of its block, or of its sum, that are here."""
        is_block = part.kind in BLOCKS
        present = self.blocks if is_block else self.summed[part.owner]
        sources = [part] if part in present else [x for x in present if (x.kind, x.owner) == (part.kind, part.owner)]
        for source in sources:
            tensors = self.blocks[source] if is_block else self.sums(source)
            for rows in self._shared_rows(part, source):
                self.recorder.copy(views, tensors, rows)

    def _shared_rows(self, target: Part, source: Part) -> tuple[RowCopy, ...]:
        """The rows that a part shares with another part of its block."""
        heads, rows = self.plan.part_heads(target.kind), self.plan.layout_of(target.kind).rows(target.owner)
        return find_copies(target.row_set, source.row_set, heads, rows)

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
                self.recorder.add(part.kind, views, previous.view(part))
                self.recorder.drop(previous, part)
            self.home[part] = buffer
            return
        sums = [Part(part.kind, part.owner)] if part.owner == self.rank else self.summed[part.owner]
        for summed in sums:
            for rows in self._shared_rows(summed, part):
                self.recorder.add(part.kind, self.sums(summed), views, rows)
        self.recorder.drop(buffer, part)

    def _cast(self, part: Part, message: Buffer) -> Buffer:
        """A buffer with a part of a message in the dtype that kernels compute with."""
        buffer = self.recorder.take((part,), kept=part in self.kept)
        self.recorder.copy(buffer.view(part), message.view(part))
        self.recorder.drop(message, part)
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
    """Equal for parts that are used, and freed, together: all parts of an owner's block, or of the sum for it."""
    return part.kind in SUMS, part.owner
