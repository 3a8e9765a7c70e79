"""The executor: one generator that runs a rank's plan over any transport.

Each step posts its messages, computes its visits while they travel, then waits. The same code runs on a process
group and, thousands of times in turns, on virtual ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from ..kernels.base import Kernel, finite, finite_rows, marked, wide
from ..kernels.base import backward as kernel_backward
from ..kernels.base import forward as kernel_forward
from ..kernels.pad import delta, with_column, with_delta
from ..plan.plan import Plan
from ..plan.steps import Part
from ..plan.work import Work
from ..transport.base import Program
from .accumulators import KernelInputs, OutputAccumulator, add_, batches, lined_up
from .memory_pool import memory_pool, retried
from .merge_plan import hides, make_script
from .message_buffers import Tensors
from .rank_state import RankState, zeros


@dataclass(frozen=True)
class Job:
    """What one rank computes: its place in a plan, the kernel and the softmax scale.

    `lse`: the loss may depend on lse, on some rank if not on this one. All ranks say the same. `rounded`: gradients are
    given in the dtype of the inputs, else in the one that they are gathered in, for others to be added to them.
    """

    plan: Plan
    rank: int
    kernel: Kernel
    scale: float
    lse: bool = False
    rounded: bool = True

    def gradients(self, sums: Tensors, inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) as the backward gives them, from what it has gathered for the inputs q, k, v."""
        dq, dk, dv = (x.to(like.dtype) if self.rounded else x for x, like in zip(sums, inputs, strict=True))
        return dq, dk, dv


@dataclass(frozen=True)
class Forward:
    """Result of a forward: out [B, H, n, Dv], lse [B, H, n], and tensors kept for the backward."""

    out: torch.Tensor
    lse: torch.Tensor
    kept: tuple[torch.Tensor, ...]


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
    q, k, v = map(lined_up, (q, k, v))
    k, v, whole = marked(k, v)
    query, bad = finite_rows(q)
    state = RankState(job.plan, job.rank, {"kv": (k, v)}, steps, kept=rank_plan.kept if keep else ())
    rows, inputs = OutputAccumulator(q, v.shape[-1], out), KernelInputs(memory_pool(q.device))
    own = Part("kv", job.rank)
    for index, step in enumerate(steps):
        yield from state.start(index, f"forward step {index}")
        for block in step.visits:
            key, value = state.block(block)
            portions = next(visits)
            clean = hides(portions) and (whole if block == own else finite(key, value))
            for portion in portions:
                for piece in portion.pieces:
                    for batch in batches(piece.work, q):
                        x, y, z = inputs.of(piece.work, batch, (query,), (key, value))
                        call = partial(kernel_forward, job.kernel, x, y, z, piece.work, job.scale, clean=clean)
                        rows.add(portion.section, piece, *retried(call, q.device), batch)
                if portion.last:
                    rows.close(portion.section)
        yield from state.finish(index)
    state.buffers.close()
    inputs.close()
    return Forward(*rows.finish(script.empty, bad), tuple(x for part in state.kept for x in state.blocks[part]))


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

    Every visit is differentiated with the *global* out and lse of its rows, so no partial has to be kept. Where keys
    rotate, dq is gathered here and dk, dv travel to the owner of the block; where queries do, it is the other way
    round. All are gathered in fp32 (fp64 for fp64 inputs).
    """
    grad, q, k, v, out = map(lined_up, (grad, q, k, v, result.out))
    result = replace(result, out=out)
    if job.plan.rotates == "queries":
        return (yield from _by_queries(job, grad, grad_lse, q, k, v, result))
    rank_plan = job.plan.for_rank(job.rank)
    steps = rank_plan.backward
    held = tuple(zip(result.kept[::2], result.kept[1::2], strict=True))
    state = RankState(job.plan, job.rank, {"kv": (k, v)}, steps, kept=rank_plan.kept, held=held)
    hidden = result.lse == -torch.inf
    whole = finite(grad, q, out, result.lse.masked_fill(hidden, 0.0))
    lse = result.lse.masked_fill(hidden, torch.inf)
    inputs = KernelInputs(memory_pool(q.device))
    dq = retried(partial(torch.zeros, q.shape, dtype=wide(q.dtype), device=q.device), q.device)
    query = q
    if grad_lse is not None:
        query, out = with_column(q, 0.0), with_column(out, 0.0)
        grad = with_column(grad, grad_lse.to(grad.dtype))
    for index, step in enumerate(steps):
        yield from state.start(index, f"backward step {index}")
        for block in step.visits:
            key, value = state.block(block)
            if grad_lse is not None:
                key, value = with_column(key, 0.0), with_column(value, 1.0)
            dk, dv = state.gathered(Part("grad", block.owner, block.row_set))
            batched = job.plan.demand.batched(job.rank, block.owner, block.row_set)
            works = [call for work in batched for call in job.kernel.split(work)]
            clean = whole and any(not work.dense for work in works) and finite(key, value)
            _differentiate(job, works, inputs, (grad, query, out, lse), (key, value), (dq, dk, dv), clean=clean)
        yield from state.finish(index)
    state.buffers.close()
    inputs.close()
    dk, dv = state.gathered(Part("grad", job.rank))
    return job.gradients((dq, dk, dv), (q, k, v))


def _by_queries(
    job: Job, grad: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    result: Forward,
) -> Program[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:  # fmt: skip
    """`backward` where queries come to the keys of this rank, with the gradient of their output, lse and delta."""
    assert grad_lse is None or job.lse, "the ranks have agreed that the loss does not depend on lse"
    steps = job.plan.for_rank(job.rank).backward
    row = (result.lse.unsqueeze(-1), delta(grad, result.out, grad_lse))
    state = RankState(job.plan, job.rank, {"q": (q, grad), "row": row}, steps)
    inputs = KernelInputs(memory_pool(q.device))
    dk, dv = retried(partial(zeros, (k, v)), q.device)
    key, value = (with_column(k, 0.0), with_column(v, 0.0)) if job.lse else (k, v)
    whole = finite(k, v)
    for index, step in enumerate(steps):
        yield from state.start(index, f"backward step {index}")
        for block in step.visits:
            batched = job.plan.query_demand.batched(job.rank, block.owner, block.row_set)
            works = [call for work in batched for call in job.kernel.split(work)]
            if not works:
                continue
            (dq,) = state.gathered(Part("dq", block.owner, block.row_set))
            tensors, clean = _prepared(
                state.block(block), state.block(Part("row", block.owner, block.row_set)), job.lse
            )
            clean = whole and any(not work.dense for work in works) and clean
            _differentiate(job, works, inputs, tensors, (key, value), (dq, dk, dv), clean=clean)
        yield from state.finish(index)
    state.buffers.close()
    inputs.close()
    (dq,) = state.gathered(Part("dq", job.rank))
    return job.gradients((dq, dk, dv), (q, k, v))


def _differentiate(
    job: Job, works: list[Work], inputs: KernelInputs, queries: Tensors, keys: Tensors, sums: Tensors, *, clean: bool
) -> None:
    """Add a visit's part of dq, dk and dv to `sums`; `queries` are dO, q, out and lse, `keys` k and v."""
    dq, dk, dv = sums
    for work in works:
        for batch in batches(work, dq):
            g, x, o, total, y, z = inputs.of(work, batch, queries, keys)
            call = partial(kernel_backward, job.kernel, g, x, y, z, o, total, work, job.scale, clean=clean)
            parts = retried(call, dq.device)
            add_(dq[batch], work.heads, (work.q,), work, work.q_shift, parts[0])
            add_(dk[batch], work.kv, work.k, work, work.k_shift, parts[1])
            add_(dv[batch], work.kv, work.k, work, work.k_shift, parts[2])
            del parts  # gone before the next call makes its own


def _prepared(block: Tensors, row: Tensors, lse: bool) -> tuple[Tensors, bool]:
    """(dO, q, out, lse) of query rows as a kernel takes them, and whether all are known to be finite."""
    (query, grad), (total, trace) = block, row
    hidden = total == -torch.inf
    whole = finite(grad, query, trace, total.masked_fill(hidden, 0.0))
    grad, out = with_delta(grad, trace, wider=lse)
    query = with_column(query, 0.0) if lse else query
    return (grad, query, out, total.masked_fill(hidden, torch.inf).squeeze(-1)), whole
