"""The exchange of tokens for heads inside a Ulysses group, which a plan lists as its first and its last step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from ..plan.plan import Plan
from ..plan.steps import Hop, Part
from ..transport.base import Program
from .message_buffers import Buffer, Buffers, StepMessages, Tensors
from .rank_program import RankProgram


class HeadExchange(StepMessages):
    """One exchange of a rank with the other members of its group.

    `received` are the tensors that this rank has after the exchange. A subclass allocates `received` and says which
    rows and heads each member gets (`outgoing`) and gives (`receive`).
    """

    received: Tensors

    def __init__(self, program: RankProgram, buffers: Buffers, rank: int, index: int) -> None:
        super().__init__(program.steps, buffers)
        self.index, self.size = index, program.plan.ulysses_size
        self.member = rank % self.size
        #: The local rows of each member, as places among the rows of the whole group.
        self.places = _places(program.plan, program.owner, buffers.pool.device)

    def run(self, label: str) -> Program[Tensors]:
        """Exchange the messages, and return `received`. `label` names the exchange in errors."""
        yield from self.start(self.index, label)
        self.receive(self.member, self.outgoing(self.member))
        yield from self.wait(self.index)
        return self.received

    def pack(self, hop: Hop) -> tuple[Buffer, list[Part]]:
        (part,) = hop.parts
        buffer = self.buffers.take(hop.parts, as_sent=True)
        for view, x in zip(buffer.view(part), self.outgoing(hop.peer % self.size), strict=True):
            view.copy_(x)
        return buffer, [part]

    def unpack(self, hop: Hop, buffer: Buffer) -> None:
        (part,) = hop.parts
        self.receive(hop.peer % self.size, buffer.view(part))
        self.buffers.drop(buffer, part)

    @abstractmethod
    def outgoing(self, member: int) -> Tensors:
        """The tensors for a member of the group."""

    @abstractmethod
    def receive(self, member: int, tensors: Tensors) -> None:
        """Copy the tensors of a member of the group into `received`."""


class TokensToHeads(HeadExchange):
    """From this rank's rows of all heads [B, H, n, D] to the group's rows of this member's heads: the first step."""

    def __init__(self, program: RankProgram, buffers: Buffers, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(program, buffers, rank, 0)
        rows = program.ring_plan.layout.rows(program.owner)
        self._shares = [x.chunk(self.size, 1) for x in tensors]
        own = [share[self.member] for share in self._shares]
        self.received = tuple(x.new_empty(*x.shape[:2], rows, x.shape[3]) for x in own)

    def outgoing(self, member: int) -> Tensors:
        return tuple(share[member] for share in self._shares)

    def receive(self, member: int, tensors: Tensors) -> None:
        for target, x in zip(self.received, tensors, strict=True):
            target.index_copy_(2, self.places[member], x)


class HeadsToTokens(HeadExchange):
    """From the group's rows of this member's heads to this rank's rows of all heads: the last step."""

    def __init__(self, program: RankProgram, buffers: Buffers, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(program, buffers, rank, len(program.steps) - 1)
        rows = len(self.places[self.member])
        self._tensors = tensors
        self.received = tuple(x.new_empty(x.shape[0], x.shape[1] * self.size, rows, x.shape[3]) for x in tensors)

    def outgoing(self, member: int) -> Tensors:
        return tuple(x.index_select(2, self.places[member]) for x in self._tensors)

    def receive(self, member: int, tensors: Tensors) -> None:
        for target, x in zip(self.received, tensors, strict=True):
            target.chunk(self.size, 1)[member].copy_(x)


def _places(plan: Plan, group: int, device: torch.device) -> list[torch.Tensor]:
    """Where the local rows of each member stand among the rows of its group, int64 [rows] each. Cached by the plan on
    the device, to which a copy would make the host wait."""

    def compute() -> list[torch.Tensor]:
        positions = plan.layout.grouped(plan.ulysses_size).positions(group)
        order = np.argsort(positions)
        members = range(group * plan.ulysses_size, (group + 1) * plan.ulysses_size)
        return [
            torch.as_tensor(order[np.searchsorted(positions, plan.layout.positions(rank), sorter=order)], device=device)
            for rank in members
        ]

    return plan.cache.answer(("head_exchange.places", group, device), compute)
