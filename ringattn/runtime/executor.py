"""The executor: one generator that runs a rank's plan over any transport.

In each step the generator posts the step's messages, computes the step's visits while the messages travel, then waits
for the messages that are due. The same code runs on a process group and, for thousands of virtual ranks, in one
process.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..kernels.base import (
    Kernel,
    finite_rows,
    hide_bad_keys,
    hide_bad_rows,
    mark_bad_keys,
    mark_bad_rows,
    spread_marks,
    wide,
)
from ..kernels.base import backward as kernel_backward
from ..kernels.base import forward as kernel_forward
from ..kernels.pad import delta, with_column, with_delta
from ..plan.plan import Plan
from ..plan.steps import Part
from ..plan.work import Work
from ..transport.base import Program
from .accumulators import KernelInputs, OutputAccumulator, accumulate, align_rows, batches
from .head_exchange import HeadsToTokens, TokensToHeads
from .memory_pool import memory_pool, retried
from .merge_plan import has_band
from .message_buffers import Buffers, Tensors
from .rank_program import (
    BackwardProgram,
    ForwardProgram,
    RankProgram,
    backward_program,
    exchanges_heads,
    forward_program,
)
from .rank_state import RankState, zeros

#: Tensors that a Ulysses forward keeps in addition to those of the ring: q, k, v, out and lse of this rank's heads.
KEPT_BY_EXCHANGE = 5


@dataclass(frozen=True)
class Job:
    """What one rank computes: its place in a plan, the kernel and the softmax scale.

    `lse`: the loss may depend on lse, on this rank or on another one; equal on all ranks. `cast_grads=False` leaves the
    gradients in the dtype of their sums, else they are cast to the dtype of the inputs.
    """

    plan: Plan
    rank: int
    kernel: Kernel
    scale: float
    lse: bool = False
    cast_grads: bool = True

    def gradients(self, sums: Tensors, inputs: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) as the backward returns them, from their sums and the inputs q, k, v."""
        dq, dk, dv = (x.to(like.dtype) if self.cast_grads else x for x, like in zip(sums, inputs, strict=True))
        return dq, dk, dv


@dataclass(frozen=True)
class Forward:
    """Result of a forward: out [B, H, n, Dv], lse [B, H, n], and the tensors kept for the backward."""

    out: Tensor
    lse: Tensor
    kept: tuple[Tensor, ...]


def count_kept(plan: Plan, rank: int) -> int:
    """How many tensors the forward of a rank keeps for its backward."""
    return 2 * len(plan.for_rank(rank).kept) + (KEPT_BY_EXCHANGE if exchanges_heads(plan) else 0)


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor, *, keep: bool, out: Tensor | None = None) -> Program[Forward]:
    """Attention of the local queries q [B, H, n, D] to all keys; k, v [B, K, n, D | Dv] are the local block.

    `keep`: keep what the backward starts from. The result is written to `out` where that is given.
    """
    program = forward_program(job.plan, job.rank, job.kernel)
    buffers = Buffers(program.plan, program.largest_message, q.device)
    if not program.exchanges_heads:
        return (yield from _forward_ring(job, program, buffers, q, k, v, keep=keep, out=out))
    to_heads = TokensToHeads(program, buffers, job.rank, (q, k, v))
    q, k, v = yield from to_heads.run("forward step 0, exchange of q, k and v")
    ring = yield from _forward_ring(job, program, buffers, q, k, v, keep=keep, out=None)
    to_tokens = HeadsToTokens(program, buffers, job.rank, (ring.lse.unsqueeze(-1), ring.out))
    lse, all_heads = yield from to_tokens.run(f"forward step {to_tokens.index}, exchange of the output")
    buffers.close()
    kept = (*ring.kept, q, k, v, ring.out, ring.lse) if keep else ()
    return Forward(all_heads if out is None else out.copy_(all_heads), lse.squeeze(-1), kept)


def backward(
    job: Job, grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, result: Forward
) -> Program[tuple[Tensor, Tensor, Tensor]]:
    """(dq, dk, dv) of the local shard, given d loss / d out and, or None, d loss / d lse.

    Every visit is differentiated with the *global* out and lse of its rows, so that no partial has to be kept. Where
    keys rotate, this rank sums dq, and dk and dv travel to the owner of the block. Where queries rotate, this rank sums
    dk and dv, and dq travels. All sums are in fp32 (fp64 for fp64 inputs).
    """
    program = backward_program(job.plan, job.rank, job.kernel)
    buffers = Buffers(program.plan, program.largest_message, q.device)
    run_ring = _backward_by_queries if program.ring_plan.rotates == "queries" else _backward_by_keys
    if not program.exchanges_heads:
        return (yield from run_ring(job, program, buffers, grad, grad_lse, q, k, v, result))
    *kept, q, k, v, out, lse = result.kept
    # The plan counts the bytes of a gradient of lse, whether there is such a gradient or not.
    column = torch.zeros_like(result.lse) if grad_lse is None else grad_lse.to(result.lse.dtype)
    to_heads = TokensToHeads(program, buffers, job.rank, (column.unsqueeze(-1), grad))
    column, grad = yield from to_heads.run("backward step 0, exchange of the output's gradient")
    grad_lse = None if grad_lse is None else column.squeeze(-1)
    result = Forward(out, lse, tuple(kept))
    gradients = yield from run_ring(job, program, buffers, grad, grad_lse, q, k, v, result)
    to_tokens = HeadsToTokens(program, buffers, job.rank, gradients)
    dq, dk, dv = yield from to_tokens.run(f"backward step {to_tokens.index}, exchange of dq, dk and dv")
    buffers.close()
    return dq, dk, dv


def _forward_ring(
    job: Job,
    program: ForwardProgram,
    buffers: Buffers,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    keep: bool,
    out: Tensor | None,
) -> Program[Forward]:
    """The forward of the ring: rows of queries as `program.ring_plan` deals them out."""
    visits = iter(program.merge_plan.visits)
    q, k, v = map(align_rows, (q, k, v))
    query, bad = finite_rows(q)
    state = RankState(program, buffers, {"kv": mark_bad_keys(k, v)}, keep=keep)
    output, inputs = OutputAccumulator(q, v.shape[-1], out), KernelInputs(memory_pool(q.device))
    for index in program.ring_steps:
        yield from state.start(index, f"forward step {index}")
        for block in program.steps[index].visits:
            marked = state.block(block)
            if _is_rounded(program, block):
                marked = mark_bad_keys(*marked)
            visit = next(visits)
            hidden = hide_bad_keys(*marked) if has_band(visit) else marked
            for part in visit:
                for call in part.calls:
                    for batch in batches(call.work, q):
                        x, *keys = inputs.select(call.work, batch, (query,), marked if call.work.dense else hidden)
                        run = partial(kernel_forward, job.kernel, x, keys, call.work, job.scale)
                        output.add(part.section, call, *retried(run, q.device), batch)
                if part.last:
                    output.close(part.section)
        yield from state.finish(index)
    buffers.close()
    inputs.close()
    kept = tuple(x for part in state.kept for x in state.blocks[part])
    return Forward(*output.finish(program.merge_plan.empty, bad), kept)


def _backward_by_keys(
    job: Job,
    program: BackwardProgram,
    buffers: Buffers,
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Forward,
) -> Program[tuple[Tensor, Tensor, Tensor]]:
    """`backward` of the ring where blocks of keys and values come to the queries of this rank."""
    grad, q, k, v, out = map(align_rows, (grad, q, k, v, result.out))
    visits = iter(program.visits)
    kept = tuple(zip(result.kept[::2], result.kept[1::2], strict=True))
    state = RankState(program, buffers, {"kv": mark_bad_keys(k, v)}, kept=kept)
    inputs = KernelInputs(memory_pool(q.device))
    dq = retried(partial(torch.zeros, q.shape, dtype=wide(q.dtype), device=q.device), q.device)
    query = q
    if grad_lse is not None:
        query, out = with_column(q, 0.0), with_column(out, 0.0)
        grad = with_column(grad, grad_lse.to(grad.dtype))
    lse, grad, query, out = mark_bad_rows(result.lse, grad, query, out)
    marked_rows = (grad, query, out, lse.masked_fill(lse == -torch.inf, torch.inf))
    hidden_rows = hide_bad_rows(*marked_rows)
    for index in program.ring_steps:
        yield from state.start(index, f"backward step {index}")
        for block in program.steps[index].visits:
            marked = state.block(block)
            if _is_rounded(program, block):
                marked = mark_bad_keys(*marked)
            if grad_lse is not None:
                marked = with_column(marked[0], 0.0), with_column(marked[1], 1.0)
            dk, dv = state.sums(Part("grad", block.owner, block.row_set))
            calls = next(visits)
            hidden = hide_bad_keys(*marked) if _has_band(calls) else marked
            _differentiate(job, calls, inputs, (marked_rows, marked), (hidden_rows, hidden), (dq, dk, dv))
        yield from state.finish(index)
    buffers.close()
    inputs.close()
    dk, dv = state.sums(Part("grad", program.owner))
    spread_marks(lse.isnan(), dq)
    spread_marks(dv[..., 0].isnan(), dk, dv)
    return job.gradients((dq, dk, dv), (q, k, v))


def _backward_by_queries(
    job: Job,
    program: BackwardProgram,
    buffers: Buffers,
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Forward,
) -> Program[tuple[Tensor, Tensor, Tensor]]:
    """`backward` of the ring where queries, with their dO, lse and delta, come to the keys of this rank."""
    assert grad_lse is None or job.lse, "the ranks have agreed that the loss does not depend on lse"
    grad, q, k, v, out = map(align_rows, (grad, q, k, v, result.out))
    visits = iter(program.visits)
    lse, query, grad, row_delta = mark_bad_rows(result.lse, q, grad, delta(grad, out, grad_lse))
    state = RankState(program, buffers, {"q": (query, grad), "row": (lse.unsqueeze(-1), row_delta)}, keep=False)
    inputs = KernelInputs(memory_pool(q.device))
    dk, dv = retried(partial(zeros, (k, v)), q.device)
    marked_keys = mark_bad_keys(k, v)
    if job.lse:
        marked_keys = with_column(marked_keys[0], 0.0), with_column(marked_keys[1], 0.0)
    hidden_keys = hide_bad_keys(*marked_keys)
    for index in program.ring_steps:
        yield from state.start(index, f"backward step {index}")
        for block in program.steps[index].visits:
            calls = next(visits)
            if not calls:
                continue
            (dq,) = state.sums(Part("dq", block.owner, block.row_set))
            row = state.block(Part("row", block.owner, block.row_set))
            marked = _query_inputs(state.block(block), row, job.lse, rounded=_is_rounded(program, block))
            hidden = hide_bad_rows(*marked) if _has_band(calls) else marked
            _differentiate(job, calls, inputs, (marked, marked_keys), (hidden, hidden_keys), (dq, dk, dv))
        yield from state.finish(index)
    buffers.close()
    inputs.close()
    (dq,) = state.sums(Part("dq", program.owner))
    spread_marks(lse.isnan(), dq)
    spread_marks(dv[..., 0].isnan(), dk, dv)
    return job.gradients((dq, dk, dv), (q, k, v))


def _has_band(calls: tuple[Work, ...]) -> bool:
    """Whether some call hides a key from some of its rows and not from others."""
    return any(not work.dense for work in calls)


def _is_rounded(program: RankProgram, block: Part) -> bool:
    """Whether a block arrived in a narrower dtype, in which large numbers become infinite."""
    return program.plan.comm_dtype is not None and block.owner != program.owner


def _differentiate(
    job: Job,
    calls: tuple[Work, ...],
    inputs: KernelInputs,
    marked: tuple[Tensors, Tensors],
    hidden: tuple[Tensors, Tensors],
    sums: Tensors,
) -> None:
    """Add a visit's share of dq, dk and dv to `sums`. `marked` are (dO, q, out, lse) and (k, v), for dense calls;
    `hidden` are their forms for calls with a band, from `hide_bad_rows` and `hide_bad_keys`.
    """
    dq, dk, dv = sums
    for work in calls:
        for batch in batches(work, dq):
            by_query, by_key = marked if work.dense else hidden
            selected = inputs.select(work, batch, by_query, by_key)
            rows, keys = selected[: len(by_query)], selected[len(by_query) :]
            run = partial(kernel_backward, job.kernel, rows, keys, work, job.scale)
            gradients = retried(run, dq.device)
            accumulate(dq[batch], work.heads, (work.q,), work, work.q_shift, gradients[0])
            accumulate(dk[batch], work.kv, work.k, work, work.k_shift, gradients[1])
            accumulate(dv[batch], work.kv, work.k, work, work.k_shift, gradients[2])
            del gradients  # free them before the next call allocates its own


def _query_inputs(block: Tensors, row: Tensors, lse_column: bool, *, rounded: bool) -> Tensors:
    """(dO, q, out, lse) of query rows as a kernel takes them; see `_is_rounded` for `rounded`."""
    (query, grad), (lse, row_delta) = block, row
    lse = lse.squeeze(-1)
    if rounded:
        lse, query, grad, row_delta = mark_bad_rows(lse, query, grad, row_delta)
    grad, out = with_delta(grad, row_delta, wider=lse_column)
    query = with_column(query, 0.0) if lse_column else query
    return grad, query, out, lse.masked_fill(lse == -torch.inf, torch.inf)
