"""The executor: one generator that runs a rank's plan over any transport.

In each step the generator posts the step's messages, computes the step's visits while the messages travel, then waits
for the messages that are due. The same code runs on a process group and, for thousands of virtual ranks, in one
process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.base import Kernel, as_dtype
from ..kernels.pad import delta, delta_factor, times_unit, with_column, with_delta
from ..plan.plan import Plan
from ..plan.row_sets import AllRows, RowSet
from ..transport.base import PLAN_TAGS, Program, Tags
from ..transport.trace import named_range
from .accumulators import (
    OutputAccumulator,
    RowViews,
    accumulate,
    align_rows,
    finish_sums,
    make_output_sums,
    make_sums,
    merge_partial,
    select_inputs,
)
from .centre import Centre, restore
from .memory import empty
from .rank_program import RankProgram, Visit, backward_program, batches, exchanges_heads, forward_program
from .rank_run import PassTensors, Tensors

if TYPE_CHECKING:
    from .dropout import DroppingKernels
    from .head_exchange import ExchangeStep

#: Tensors that a Ulysses forward keeps in addition to those of the ring: q, k, v, out and lse of this rank's heads.
KEPT_BY_EXCHANGE = 5


@dataclass(frozen=True)
class Job:
    """What one rank computes: its place in a plan, the kernel and the softmax scale.

    `lse`: the loss may depend on lse, on this rank or on another one; equal on all ranks. `cast_grads=False` leaves the
    gradients in the dtype of their sums, else they are cast to the dtype of the inputs. `sinks` [H] are merged into the
    output, see `softmax.merge_sinks_`.
    """

    plan: Plan
    rank: int
    kernel: Kernel
    scale: float
    lse: bool = False
    cast_grads: bool = True
    sinks: Tensor | None = None


@dataclass(frozen=True)
class Forward:
    """Result of a forward: out [B, H, n, Dv], lse [B, H, n], and the tensors kept for the backward."""

    out: Tensor
    lse: Tensor
    kept: tuple[Tensor, ...]


def count_kept(plan: Plan, rank: int) -> int:
    """How many tensors the forward of a rank keeps for its backward."""
    return 2 * len(plan.for_rank(rank).kept) + (KEPT_BY_EXCHANGE if exchanges_heads(plan) else 0)


def forward(
    job: Job, q: Tensor, k: Tensor, v: Tensor, *, keep: bool, out: Tensor | None = None, tags: Tags = PLAN_TAGS
) -> Program[Forward]:
    """Attention of the local queries q [B, H, n, D] to all keys; k, v [B, K, n, D | Dv] are the local block.

    `keep`: keep what the backward starts from. The result is written to `out` where that is given. Messages have the
    tags of the plan, or those that `tags` gives them.
    """
    program = forward_program(job.plan, job.rank, job.kernel, q.device, keep=keep)
    run = PassTensors(program.memory, q.device, tags)
    if program.enter is None or program.leave is None:
        return (yield from _forward_ring(job, program, run, q, k, v, out))
    q, k, v = yield from _exchange(run, program.enter, (q, k, v), "forward step 0, exchange of q, k and v")
    if job.sinks is not None:
        job = replace(job, sinks=job.sinks.chunk(job.plan.ulysses_size)[job.rank % job.plan.ulysses_size])
    ring = yield from _forward_ring(job, program, run, q, k, v, None)
    label = f"forward step {program.leave.index}, exchange of the output"
    lse, all_heads = yield from _exchange(run, program.leave, (ring.lse.unsqueeze(-1), ring.out), label)
    kept = (*ring.kept, q, k, v, ring.out, ring.lse) if keep else ()
    return Forward(all_heads if out is None else out.copy_(all_heads), lse.squeeze(-1), kept)


def backward(
    job: Job,
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Forward,
    *,
    tags: Tags = PLAN_TAGS,
) -> Program[tuple[Tensor, Tensor, Tensor]]:
    """(dq, dk, dv) of the local shard, given d loss / d out and, or None, d loss / d lse.

    Every visit is differentiated with the *global* out and lse of its rows, so that no partial has to be kept. Where
    keys rotate, this rank sums dq, and dk and dv travel to the owner of the block. Where queries rotate, this rank sums
    dk and dv, and dq travels. All sums are in fp32 (fp64 for fp64 inputs).
    """
    program = backward_program(job.plan, job.rank, job.kernel, q.device)
    run = PassTensors(program.memory, q.device, tags)
    if program.enter is None or program.leave is None:
        return (yield from _backward_ring(job, program, run, grad, grad_lse, (q, k, v), result))
    *kept, q, k, v, out, lse = result.kept
    # The plan counts the bytes of a gradient of lse, whether there is such a gradient or not.
    column = torch.zeros_like(result.lse) if grad_lse is None else grad_lse.to(result.lse.dtype)
    label = "backward step 0, exchange of the output's gradient"
    column, grad = yield from _exchange(run, program.enter, (column.unsqueeze(-1), grad), label)
    grad_lse = None if grad_lse is None else column.squeeze(-1)
    result = Forward(out, lse, tuple(kept))
    gradients = yield from _backward_ring(job, program, run, grad, grad_lse, (q, k, v), result)
    label = f"backward step {program.leave.index}, exchange of dq, dk and dv"
    dq, dk, dv = yield from _exchange(run, program.leave, gradients, label)
    return dq, _sum_copies(dk, job.plan.kv_heads), _sum_copies(dv, job.plan.kv_heads)


def _sum_copies(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of `heads` key/value heads, from those of the copies of each head, [B, copies, n, D]."""
    return gradient if gradient.size(1) == heads else gradient.unflatten(1, (heads, -1)).sum(2)


def _exchange(run: PassTensors, exchange: ExchangeStep, tensors: Tensors, label: str) -> Program[Tensors]:
    """The tensors that this rank has after an exchange of tokens for heads, or back. `label` names it in errors."""
    run.give(exchange.given, tensors)
    run.give(exchange.received, [empty(shape, dtype, tensors[0].device) for shape, dtype in exchange.specs])
    yield from run.perform(exchange.actions, label)
    return run.get(exchange.received)


def _forward_ring(
    job: Job, program: RankProgram, run: PassTensors, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None
) -> Program[Forward]:
    """The forward of the ring: rows of queries as its plan deals them out."""
    q, k, v = map(align_rows, (q, k, v))
    if program.rotates == "queries":
        return (yield from _forward_by_queries(job, program, run, q, k, v, out))
    run.give(program.own["kv"], (k, v))
    output, count = OutputAccumulator(q, v.shape[-1], out), q.size(0)
    centre = Centre(job.kernel, q, k, job.scale)
    own = RowViews(*centre.queries(q))
    for index, step in enumerate(program.steps, program.first):
        yield from run.perform(step.posts, f"forward step {index}")
        for visit in step.visits:
            with named_range(job.rank, f"forward step {index}, block of rank {visit.part.owner}"):
                yield from run.perform(visit.copies)
                keys, values = run.get(visit.block)
                block = RowViews(centre.keys(keys, visit.part.row_set), values)
                dropping = _dropping(job, visit, q)
                for part in visit.parts:
                    for call in part.calls:
                        for batch in batches(call.work, count):
                            inputs = select_inputs(call.work, batch, own, block)
                            kernel = job.kernel if dropping is None else dropping.select(call.work, batch)
                            partial = centre.attend(kernel, *inputs, call.work)
                            output.add(part.section, call, *partial, batch)
                            del partial  # free it before the next call allocates its own
                    if part.last:
                        output.close(part.section)
        yield from run.perform(step.waits)
    return Forward(*output.finish(program.empty, job.sinks), run.get(program.kept))


def _forward_by_queries(
    job: Job, program: RankProgram, run: PassTensors, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None
) -> Program[Forward]:
    """The forward of a ring in which blocks of queries come to the keys of this rank, with their (out, lse) so far."""
    sums = make_output_sums(q, v.shape[-1])
    run.give(program.own["query"], (q,))
    run.give(program.sums["part"], sums)
    centre = Centre(job.kernel, q, k, job.scale)
    own, count = RowViews(centre.keys(k), v), q.size(0)
    for index, step in enumerate(program.steps, program.first):
        yield from run.perform(step.posts, f"forward step {index}")
        for visit in step.visits:
            with named_range(job.rank, f"forward step {index}, block of rank {visit.part.owner}"):
                yield from run.perform(visit.copies)
                (queries,), totals = run.get(visit.block), RowViews(*run.get(visit.sums))
                block = RowViews(*centre.queries(queries, visit.part.row_set))
                dropping = _dropping(job, visit, q)
                for work in visit.works:
                    for batch in batches(work, count):
                        inputs = select_inputs(work, batch, block, own)
                        kernel = job.kernel if dropping is None else dropping.select(work, batch)
                        partial = centre.attend(kernel, *inputs, work)
                        merge_partial(totals, work, partial, batch, is_new=visit.is_new)
                        del partial  # free it before the next call allocates its own
        yield from run.perform(step.waits)
    return Forward(*finish_sums(*sums, q, job.sinks, out), ())


def _backward_ring(
    job: Job,
    program: RankProgram,
    run: PassTensors,
    grad: Tensor,
    grad_lse: Tensor | None,
    inputs: Tensors,
    result: Forward,
) -> Program[tuple[Tensor, Tensor, Tensor]]:
    """`backward` of the ring: blocks of keys and values come to the queries of this rank, or queries, with their dO,
    lse and delta, come to the keys of this rank."""
    grad, q, k, v, out = map(align_rows, (grad, *inputs, result.out))
    dq, dk, dv = make_sums(q, k, v)
    by_queries = program.rotates == "queries"
    centre = Centre(job.kernel, q, k, job.scale)
    wider = centre.moves or (job.lse if by_queries else grad_lse is not None)
    if by_queries:
        assert grad_lse is None or job.lse, "the ranks have agreed that the loss does not depend on lse"
        row_delta = delta(grad, out, grad_lse)
        run.give(program.own["q"], (q, grad))
        run.give(program.own["row"], (result.lse, delta_factor(grad, row_delta) if _sends_factors(job) else row_delta))
        run.give(program.sums["dq"], (dq,))
        own = RowViews(centre.keys(k, wider=wider), with_column(v, 0.0) if job.lse else v)
    else:
        run.give(program.own["kv"], (k, v))
        run.give(program.kept, result.kept)
        run.give(program.sums["grad"], (dk, dv))
        query = with_column(q, 0.0) if wider else q
        if grad_lse is not None and job.kernel.dropout is None:
            out, grad = with_column(out, 0.0), with_column(grad, grad_lse.to(grad.dtype))
        elif grad_lse is not None:  # dropout scales dO v^T but not dlse, which therefore becomes a part of delta
            grad, out = with_delta(grad, delta(grad, out, grad_lse), wider=True)
        own = RowViews(grad, query, out, *centre.rows(q, result.lse))
    own_sums = RowViews(dk, dv) if by_queries else RowViews(dq)
    for index, step in enumerate(program.steps, program.first):
        yield from run.perform(step.posts, f"backward step {index}")
        for visit in step.visits:
            with named_range(job.rank, f"backward step {index}, block of rank {visit.part.owner}"):
                yield from run.perform(visit.copies)
                block, sums = run.get(visit.block), RowViews(*run.get(visit.sums))
                if by_queries:
                    rows = RowViews(*_query_inputs(job, centre, block, run.get(visit.rows), visit.part.row_set))
                    _differentiate(job, visit, rows, own, (sums, own_sums), (visit.is_new, False))
                    continue
                keys, values = block
                if grad_lse is not None:
                    values = with_column(values, float(job.kernel.dropout is None))
                block_views = RowViews(centre.keys(keys, visit.part.row_set, wider=wider), values)
                _differentiate(job, visit, own, block_views, (own_sums, sums), (False, visit.is_new))
        yield from run.perform(step.waits)
    dq, dk, dv = (as_dtype(x, y.dtype) if job.cast_grads else x for x, y in zip((dq, dk, dv), inputs, strict=True))
    return dq, dk, dv


def _differentiate(
    job: Job,
    visit: Visit,
    by_query: RowViews,
    by_key: RowViews,
    sums: tuple[RowViews, RowViews],
    is_new: tuple[bool, bool],
) -> None:
    """Add a visit's share of dq to `sums[0]`, and of dk and dv to `sums[1]`.

    `by_query` are (dO, q, out) with `Centre.rows`, and `by_key` are (k, v). `is_new`: for each of the sums, whether it
    is arbitrary, and the visit's only call writes all of it.
    """
    total = sums[0].tensors[0]
    count, dropping = total.size(0), _dropping(job, visit, total)
    for work in visit.works:
        for batch in batches(work, count):
            (grad, q, out, lse, *key), (k, v) = select_inputs(work, batch, by_query, by_key)
            kernel = job.kernel if dropping is None else dropping.select(work, batch)
            dq, *of_keys = kernel.backward(grad, q, k, v, out, lse, work, job.scale)
            dq = restore(dq, *key) if key else dq
            accumulate(sums[0], work, batch, dq, is_new=is_new[0])
            accumulate(sums[1], work, batch, *of_keys, by_key=True, is_new=is_new[1])
            del dq, of_keys  # free them before the next call allocates its own


def _dropping(job: Job, visit: Visit, like: Tensor) -> DroppingKernels | None:
    """The kernels of a visit's calls with dropout, for the batch and the device of `like`; None without dropout."""
    if job.kernel.dropout is None:
        return None
    from .dropout import DroppingKernels  # few calls drop weights

    return DroppingKernels(job.plan, job.rank, visit.part, job.kernel, like.size(0), like.device)


def _sends_factors(job: Job) -> bool:
    """Whether queries travel with the factor of `times_unit` in place of delta.

    A gradient of lse needs delta itself, and so does dO that is rounded on its way.
    """
    return job.plan.comm_dtype is None and not job.lse


def _query_inputs(job: Job, centre: Centre, block: Tensors, row: Tensors, of: AllRows | RowSet) -> Tensors:
    """(dO, q, out) of query rows as a kernel takes them, and `Centre.rows`."""
    (query, grad), (lse, row_delta) = block, row
    rows = centre.rows(query, lse, of)
    query = with_column(query, 0.0) if job.lse or centre.moves else query
    if _sends_factors(job):
        return grad, query, times_unit(grad, row_delta), *rows
    grad, out = with_delta(grad, row_delta, wider=job.lse)
    return grad, query, out, *rows
