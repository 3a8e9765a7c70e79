"""Attention of one rank of a plan, with the exchange of tokens for heads around it where the schedule asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TypeVar

import numpy as np
import torch

from ..plan.plan import Plan
from ..transport.base import Message, Post, Program, Wait, readdressed
from . import executor
from .executor import Forward, Job
from .memory_pool import memory_pool

T = TypeVar("T")
#: q, k, v, out and lse of the heads of a member, kept beside what the ring keeps.
MEMBER_KEPT = 5


def kept_tensors(plan: Plan, rank: int) -> int:
    """How many tensors a forward keeps for its backward."""
    return 2 * len(plan.for_rank(rank).kept) + (MEMBER_KEPT if plan.ulysses_size > 1 and plan.batch else 0)


def forward(
    job: Job, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, keep: bool, out: torch.Tensor | None = None
) -> Program[Forward]:
    """As `executor.forward`."""
    if job.plan.ulysses_size == 1 or not job.plan.batch:
        return (yield from executor.forward(job, q, k, v, keep=keep, out=out))
    group = _UlyssesGroup(job)
    mine = yield from group.heads_for_tokens((q, k, v), "exchange of q, k and v")
    result: Forward = yield from group.inside(executor.forward(group.job, *mine, keep=keep))
    lse, found = yield from group.tokens_for_heads((result.lse.unsqueeze(-1), result.out), "exchange of the output")
    kept = (*result.kept, *mine, result.out, result.lse) if keep else ()
    return Forward(found if out is None else out.copy_(found), lse.squeeze(-1), kept)


def backward(
    job: Job, grad: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    result: Forward,
) -> Program[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:  # fmt: skip
    """As `executor.backward`."""
    if job.plan.ulysses_size == 1 or not job.plan.batch:
        return (yield from executor.backward(job, grad, grad_lse, q, k, v, result))
    group = _UlyssesGroup(job)
    *kept, x, y, z, out, lse = result.kept
    # The plan counts a gradient of lse whether there is one or not.
    column = torch.zeros_like(result.lse) if grad_lse is None else grad_lse.to(result.lse.dtype)
    wide, dout = yield from group.heads_for_tokens((column.unsqueeze(-1), grad), "exchange of the output's gradient")
    dlse = None if grad_lse is None else wide.squeeze(-1)
    inner = Forward(out, lse, tuple(kept))
    gradients = yield from group.inside(executor.backward(group.job, dout, dlse, x, y, z, inner))
    dq, dk, dv = yield from group.tokens_for_heads(gradients, "exchange of dq, dk and dv")
    return dq, dk, dv


class _UlyssesGroup:
    """The team of a rank: which of its rows are where among the rows of the whole team, and the messages inside it."""

    def __init__(self, job: Job) -> None:
        plan = job.plan
        inner, place = plan.ring_plan(job.rank)
        self.job = Job(inner, place, job.kernel, job.scale, job.lse)
        self.size, self.me = plan.ulysses_size, job.rank % plan.ulysses_size
        self.first = job.rank - self.me
        self.rows = _places(plan, place)
        self.total = inner.layout.rows(place)

    def heads_for_tokens(self, tensors: Sequence[torch.Tensor], label: str) -> Program[list[torch.Tensor]]:
        """From this rank's rows of all heads [B, H, n, D] to the team's rows of this member's heads."""
        shares = [x.chunk(self.size, 1) for x in tensors]
        outgoing = [[share[peer] for share in shares] for peer in range(self.size)]
        found = [share[0].new_empty(*share[0].shape[:2], self.total, share[0].shape[3]) for share in shares]

        def place(peer: int, arrived: list[torch.Tensor]) -> None:
            for whole, x in zip(found, arrived, strict=True):
                whole.index_copy_(2, self.rows[peer].to(x.device), x)

        shapes = [[(*x.shape[:2], len(rows), x.shape[3]) for x in outgoing[0]] for rows in self.rows]
        yield from self._exchange(outgoing, shapes, place, 0, label)
        return found

    def tokens_for_heads(self, tensors: Sequence[torch.Tensor], label: str) -> Program[list[torch.Tensor]]:
        """From the team's rows of this member's heads to this rank's rows of all heads: the inverse."""
        outgoing = [[x.index_select(2, rows.to(x.device)) for x in tensors] for rows in self.rows]
        shapes = [[x.shape for x in outgoing[self.me]]] * self.size
        found = [x.new_empty(x.shape[0], x.shape[1] * self.size, x.shape[2], x.shape[3]) for x in outgoing[self.me]]

        def place(peer: int, arrived: list[torch.Tensor]) -> None:
            for whole, x in zip(found, arrived, strict=True):
                whole.chunk(self.size, 1)[peer].copy_(x)

        yield from self._exchange(outgoing, shapes, place, 1, label)
        return found

    def inside(self, program: Program[T]) -> Program[T]:
        """The program of a rank between the teams, with peers as ranks of all."""
        return readdressed(program, lambda m: Message(m.peer * self.size + self.me, m.tag, m.data))

    def _exchange(
        self, outgoing: list[list[torch.Tensor]], shapes: Sequence[Sequence[Sequence[int]]],
        place: Callable[[int, list[torch.Tensor]], None], tag: int, label: str,
    ) -> Program[None]:  # fmt: skip
        """One message to and one from every other member; `place(member, tensors)` takes in what came from each.

        Tensors of wider dtypes come first, so that all are aligned.
        """
        pool = memory_pool(outgoing[0][0].device)
        like = [x.dtype for x in outgoing[0]]
        sends: list[Message] = []
        recvs: list[Message] = []
        arrived: dict[int, list[torch.Tensor]] = {}
        for peer in range(self.size):
            if peer == self.me:
                continue
            for kind, sizes in (("send", [x.shape for x in outgoing[peer]]), ("receive", shapes[peer])):
                size = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(sizes, like, strict=True))
                if not size:
                    continue
                data = pool.take(size)
                views = _views(data, sizes, like)
                if kind == "send":
                    for view, x in zip(views, outgoing[peer], strict=True):
                        view.copy_(x)
                    sends.append(Message(self.first + peer, tag, data))
                else:
                    arrived[peer] = views
                    recvs.append(Message(self.first + peer, tag, data))
        ticket = (yield Post(tuple(sends), tuple(recvs), label)) if sends or recvs else None
        place(self.me, outgoing[self.me])
        if ticket is not None:
            yield Wait(ticket)
        for peer, views in arrived.items():
            place(peer, views)
        for message in (*sends, *recvs):
            pool.give(message.data)


def _views(data: torch.Tensor, shapes: Sequence[Sequence[int]], dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    found, start = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        size = prod(shape) * dtype.itemsize
        found.append(data[start : start + size].view(dtype).view(*shape))
        start += size
    return found


def _places(plan: Plan, place: int) -> list[torch.Tensor]:
    """Where the local rows of each member stand among the rows of the team, int64 [rows] each."""

    def find() -> list[torch.Tensor]:
        held = plan.layout.grouped(plan.ulysses_size).positions(place)
        order = np.argsort(held)
        ranks = range(place * plan.ulysses_size, (place + 1) * plan.ulysses_size)
        return [
            torch.from_numpy(order[np.searchsorted(held, plan.layout.positions(rank), sorter=order)]) for rank in ranks
        ]

    return plan.cache.answer((_places, place), find)
