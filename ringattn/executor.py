"""The executor: one generator that runs a rank's plan over any transport.

Each step posts its messages, computes its visits while they travel, then waits. The same code runs on a process
group and, thousands of times in turns, on virtual ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from .buffers import Buffer, Buffers
from .kernels.base import Kernel, finite, wide
from .kernels.base import backward as kernel_backward
from .kernels.base import forward as kernel_forward
from .kernels.pad import with_column
from .plan import Plan
from .pool import memory_pool, retried
from .rows import Inputs, Rows, add_, batches
from .script import make_script
from .steps import Hop, Part, Step
from .transport.base import Message, Post, Program, Wait

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """What one rank computes: its place in a plan, the kernel and the softmax scale."""

    plan: Plan
    rank: int
    kernel: Kernel
    scale: float


@dataclass(frozen=True)
class Forward:
    """Result of a forward: out [B, H, n, Dv], lse [B, H, n], and the K/V blocks kept for the backward."""

    out: torch.Tensor
    lse: torch.Tensor
    kept: tuple[Pair, ...]


def forward(
    job: Job, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, keep: bool, out: torch.Tensor | None = None
) -> Program[Forward]:
    """Attention of the local queries q [B, H, n, D] to all keys; k, v [B, K, n, D | Dv] are the local block.

    `keep` holds on to the blocks that the backward starts from. The result is written to `out` where it is given.
    """
    rank_plan = job.plan.for_rank(job.rank)
    steps = rank_plan.forward
    script = make_script(job.plan, job.rank, job.kernel)
    visits = iter(script.visits)
    state = _State(job, k, v, steps, kept=rank_plan.kept if keep else ())
    rows, inputs = Rows(q, v.shape[-1], out), Inputs(memory_pool(q.device))
    for index, step in enumerate(steps):
        ticket = yield from state.start(index, f"forward step {index}")
        for owner in step.visits:
            key, value = state.blocks[owner]
            clean = script.hides and finite(key, value)
            for portion in next(visits):
                for piece in portion.pieces:
                    for batch in batches(piece.work, q):
                        x, y, z = inputs.of(piece.work, batch, (q,), (key, value))
                        call = partial(kernel_forward, job.kernel, x, y, z, piece.work, job.scale, clean=clean)
                        rows.add(portion.section, piece, *retried(call, q.device), batch)
                if portion.last:
                    rows.close(portion.section)
        yield from state.finish(index, ticket)
    state.buffers.close()
    inputs.close()
    return Forward(*rows.finish(script.empty), tuple(state.blocks[owner] for owner in state.kept))


def backward(
    job: Job,
    grad: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    result: Forward,
) -> Program[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(dq, dk, dv) of the local shard, given d loss / d out and, or None, d loss / d lse.

    Every visit is differentiated with the *global* out and lse of its rows, so no partial has to be kept; dq is
    gathered here and dk, dv travel to the owner of the block, all in fp32 (fp64 for fp64 inputs).
    """
    rank_plan = job.plan.for_rank(job.rank)
    steps = rank_plan.backward
    state = _State(job, k, v, steps, kept=rank_plan.kept, held=result.kept)
    out, hidden = result.out, result.lse == -torch.inf
    whole = finite(grad, q, out, result.lse.masked_fill(hidden, 0.0))
    lse = result.lse.masked_fill(hidden, torch.inf)
    inputs = Inputs(memory_pool(q.device))
    dq = retried(partial(torch.zeros, q.shape, dtype=wide(q.dtype), device=q.device), q.device)
    query = q
    if grad_lse is not None:
        query, out = with_column(q, 0.0), with_column(out, 0.0)
        grad = with_column(grad, grad_lse.to(grad.dtype))
    for index, step in enumerate(steps):
        ticket = yield from state.start(index, f"backward step {index}")
        for owner in step.visits:
            key, value = state.blocks[owner]
            if grad_lse is not None:
                key, value = with_column(key, 0.0), with_column(value, 1.0)
            dk, dv = state.gathered(owner)
            works = [call for work in job.plan.demand.batched(job.rank, owner) for call in job.kernel.split(work)]
            clean = whole and any(not work.dense for work in works) and finite(key, value)
            for work in works:
                for batch in batches(work, q):
                    g, x, o, total, y, z = inputs.of(work, batch, (grad, query, out, lse), (key, value))
                    call = partial(kernel_backward, job.kernel, g, x, y, z, o, total, work, job.scale, clean=clean)
                    parts = retried(call, q.device)
                    add_(dq[batch], work.heads, (work.q,), work, work.q_shift, parts[0])
                    add_(dk[batch], work.kv, work.k, work, work.k_shift, parts[1])
                    add_(dv[batch], work.kv, work.k, work, work.k_shift, parts[2])
        yield from state.finish(index, ticket)
    state.buffers.close()
    inputs.close()
    dk, dv = state.gathered(job.rank)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _State:
    """What a rank holds while it runs: K/V blocks, gradients gathered for blocks, and the buffers they live in."""

    def __init__(
        self, job: Job, k: torch.Tensor, v: torch.Tensor, steps: Sequence[Step], *,
        kept: tuple[int, ...], held: tuple[Pair, ...] = (),
    ) -> None:  # fmt: skip
        self.job, self.steps, self.kept = job, steps, kept
        plan = job.plan
        hops = [hop for step in steps for hop in (*step.sends, *step.recvs)]
        sizes = [sum(map(plan.part_bytes, hop.parts)) for hop in hops]
        if any(part.kind == "grad" for hop in hops for part in hop.parts):
            sizes += [plan.part_bytes(Part("grad", owner)) for step in steps for owner in step.visits]
        self.buffers = Buffers(plan, max(sizes, default=0), k.device)
        self.blocks: dict[int, Pair] = {job.rank: (k, v), **dict(zip(kept, held, strict=False))}
        self.mine: Pair | None = None
        self.where: dict[Part, Buffer] = {}
        self.last = _last_uses(steps)

    def start(self, index: int, label: str) -> Program[object]:
        """Post the messages of a step; returns its ticket, or None where it has none."""
        step = self.steps[index]
        if not step.sends and not step.recvs:
            return None
        self.packed: list[Buffer] = []
        self.arriving = [
            (self.buffers.fresh if self._outlives(hop) else self.buffers.take)(hop.parts) for hop in step.recvs
        ]
        sends = tuple(Message(hop.peer, hop.tag, self._outgoing(hop).data) for hop in step.sends)
        recvs = tuple(Message(h.peer, h.tag, b.data) for h, b in zip(step.recvs, self.arriving, strict=True))
        return (yield Post(sends, recvs, label))

    def finish(self, index: int, ticket: object) -> Program[None]:
        """Wait for the messages of a step, take in what arrived, and free what is not needed any more."""
        if ticket is not None:
            yield Wait(ticket)
            for buffer in self.packed:
                for part in buffer.parts:
                    self.buffers.drop(buffer, part)
            for buffer in self.arriving:
                for part in buffer.parts:
                    self._arrived(part, buffer)
        for part, buffer in list(self.where.items()):
            if self.last.get(part, -1) <= index and not (part.kind == "kv" and part.owner in self.kept):
                self._forget(part, buffer)

    def gathered(self, owner: int) -> Pair:
        """(dK, dV) gathered so far for the block of `owner`, in fp32 or fp64; zeros at first."""
        part = Part("grad", owner)
        if owner == self.job.rank:
            if self.mine is None:
                k, v = self.blocks[owner]
                self.mine = tuple(torch.zeros_like(x, dtype=wide(x.dtype)) for x in (k, v))  # type: ignore[assignment]
            assert self.mine is not None
            return self.mine
        if part not in self.where:
            self.where[part] = self.buffers.take((part,))
            for view in self.where[part].view(part):
                view.zero_()
        return self.where[part].view(part)

    def _outlives(self, hop: Hop) -> bool:
        """Whether a message brings a block that the backward starts from."""
        return any(part.kind == "kv" and part.owner in self.kept for part in hop.parts)

    def _outgoing(self, hop: Hop) -> Buffer:
        """The buffer to send: the one that holds exactly these parts, or a packed copy."""
        buffer = self.where.get(hop.parts[0])
        if buffer is not None and buffer.parts == hop.parts and buffer.live == set(hop.parts):
            return buffer
        buffer = self.buffers.take(hop.parts)
        for part in hop.parts:
            source = self.blocks[part.owner] if part.kind == "kv" else self.gathered(part.owner)
            for target, x in zip(buffer.view(part), source, strict=True):
                target.copy_(x)
        self.packed.append(buffer)
        return buffer

    def _arrived(self, part: Part, buffer: Buffer) -> None:
        views = buffer.view(part)
        if part.kind == "kv":
            self.blocks[part.owner] = views
            self.where[part] = buffer
            return
        if part.owner == self.job.rank:
            for target, x in zip(self.gathered(part.owner), views, strict=True):
                target.add_(x)
            self.buffers.drop(buffer, part)
            return
        here = self.where.get(part)
        if here is not None:  # gathered by this rank's own visit; the sum goes on in the buffer that arrived
            for target, x in zip(views, here.view(part), strict=True):
                target.add_(x)
            self.buffers.drop(here, part)
        self.where[part] = buffer

    def _forget(self, part: Part, buffer: Buffer) -> None:
        del self.where[part]
        if part.kind == "kv":
            del self.blocks[part.owner]
        self.buffers.drop(buffer, part)


def _last_uses(steps: Sequence[Step]) -> dict[Part, int]:
    """The last step that sends each part, or visits its block."""
    last: dict[Part, int] = {}
    for index, step in enumerate(steps):
        for hop in step.sends:
            last.update((part, index) for part in hop.parts)
        last.update((Part("kv", owner), index) for owner in step.visits)
    return last
