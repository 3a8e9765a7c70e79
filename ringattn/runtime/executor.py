"""The executor: generators that run a rank's plan over any transport.

`overlapped` is the ring: in each step it posts the step's messages, computes the step's visits while the messages
travel, then waits for the messages that are due. `in_order` is the same ring without overlap; read it first. A test
compares the two. Each pass, forward or backward, defines how a visit is computed. The same code runs on a process group
and, for thousands of virtual ranks, in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.base import Kernel, as_dtype, wide
from ..kernels.pad import delta, delta_factor, times_unit, with_column, with_delta
from ..plan.plan import Plan
from ..plan.work import Work
from ..transport.base import PLAN_TAGS, Program, Tags, Wait
from ..transport.trace import named_range
from .accumulators import (
    OutputAccumulator,
    RowViews,
    accumulate,
    align_rows,
    finish_sums,
    make_output_sums,
    merge_partial,
    select_inputs,
)
from .centre import Centre, restore
from .program import RankProgram, RingStep, Visit, backward_program, batches, exchanges_heads, forward_program
from .tensors import NumberedPost, PassTensors, Tensors

#: Computes a visit.
Compute = Callable[[Visit], None]

#: Tensors that a Ulysses forward saves in addition to those of the ring: q, k, v, out and lse of this rank's heads.
SAVED_BY_EXCHANGE = 5


@dataclass(frozen=True)
class Job:
    """The task of one rank: a plan, the rank's number in it, the kernel, the softmax scale, and options.

    `lse`: whether the loss of any rank may depend on lse; all ranks give the same value. With `cast_grads=False`,
    gradients keep the dtype in which they were summed. `sinks` [H] are merged into the output, see
    `softmax.merge_sinks_`.
    """

    plan: Plan
    rank: int
    kernel: Kernel
    scale: float
    lse: bool = False
    cast_grads: bool = True
    sinks: Tensor | None = None


@dataclass(frozen=True)
class ForwardResult:
    """Result of a forward: out [B, H, n, Dv], lse [B, H, n], and the tensors saved for the backward."""

    out: Tensor
    lse: Tensor
    saved: tuple[Tensor, ...]


def count_saved(plan: Plan, rank: int) -> int:
    """The number of tensors that the forward of a rank saves for its backward."""
    return 2 * len(plan.for_rank(rank).saved) + (SAVED_BY_EXCHANGE if exchanges_heads(plan) else 0)


def overlapped(job: Job, program: RankProgram, run: PassTensors, name: str, compute: Compute) -> Program[None]:
    """Run the ring of one pass, called `name`, computing while messages travel; some travel for several steps."""
    for index, step in enumerate(program.steps, program.first):
        label = f"{name} step {index}"
        yield from run.perform(step.posts, label)
        yield from _compute_visits(job, run, step, label, compute)
        yield from run.perform(step.waits)


def in_order(job: Job, program: RankProgram, run: PassTensors, name: str, compute: Compute) -> Program[None]:
    """Run the ring of one pass without overlap: all messages of a step arrive before the step computes anything.

    Bit-identical to `overlapped`. The remaining work on messages, such as adding received gradients to computed ones,
    comes last.
    """
    for index, step in enumerate(program.steps, program.first):
        label = f"{name} step {index}"
        waits = [Wait(action.ticket) for action in step.posts if isinstance(action, NumberedPost)]
        yield from run.perform((*step.posts, *waits), label)
        yield from _compute_visits(job, run, step, label, compute)
        yield from run.perform(tuple(action for action in step.waits if not isinstance(action, Wait)))


def _compute_visits(job: Job, run: PassTensors, step: RingStep, label: str, compute: Compute) -> Program[None]:
    for visit in step.visits:
        with named_range(job.rank, f"{label}, block of rank {visit.part.owner}"):
            if visit.copies:
                yield from run.perform(visit.copies)
            compute(visit)


def forward(
    job: Job, q: Tensor, k: Tensor, v: Tensor, *, save: bool, out: Tensor | None = None, tags: Tags = PLAN_TAGS
) -> Program[ForwardResult]:
    """A program that computes attention of the local queries q [B, H, n, D] to the keys of all ranks.

    k, v [B, K, n, D | Dv] are the local keys and values. `save` keeps what the backward starts from. The output is
    written to `out` if given. `tags` maps the plan's tags to those of the messages.
    """
    program = forward_program(job.plan, job.rank, job.kernel, q.device, save=save)
    run = PassTensors(program.memory, q.device, tags)
    forward_ring = _pass_q if program.rotates == "q" else _pass_kv
    if program.enter is None or program.leave is None:
        return (yield from forward_ring(job, program, run, q, k, v, out))
    q, k, v = yield from program.enter.perform(run, (q, k, v), "forward step 0, exchange of q, k and v")
    if job.sinks is not None:
        job = replace(job, sinks=job.sinks.chunk(job.plan.ulysses_size)[job.rank % job.plan.ulysses_size])
    ring = yield from forward_ring(job, program, run, q, k, v, None)
    label = f"forward step {program.leave.index}, exchange of the output"
    lse, all_heads = yield from program.leave.perform(run, (ring.lse.unsqueeze(-1), ring.out), label)
    saved = (*ring.saved, q, k, v, ring.out, ring.lse) if save else ()
    return ForwardResult(all_heads if out is None else out.copy_(all_heads), lse.squeeze(-1), saved)


def backward(
    job: Job,
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: ForwardResult,
    *,
    tags: Tags = PLAN_TAGS,
) -> Program[tuple[Tensor, Tensor, Tensor]]:
    """A program that computes (dq, dk, dv) of the local shard from `grad` = d loss / d out.

    `grad_lse` is d loss / d lse, or None. Each block is differentiated with the *global* out and lse of the query rows,
    so no partial results need to be saved. In pass-KV, this rank sums dq, and dk and dv travel to the owner of the
    block. In pass-Q, this rank sums dk and dv, and dq travels. All sums are in fp32 (fp64 for fp64 inputs).
    """
    program = backward_program(job.plan, job.rank, job.kernel, q.device)
    run = PassTensors(program.memory, q.device, tags)
    if program.enter is None or program.leave is None:
        return (yield from _backward_ring(job, program, run, grad, grad_lse, (q, k, v), result))
    *saved, q, k, v, out, lse = result.saved
    # The plan always includes the bytes of a gradient of lse, even if there is none.
    column = torch.zeros_like(result.lse) if grad_lse is None else grad_lse.to(result.lse.dtype)
    label = "backward step 0, exchange of the output's gradient"
    column, grad = yield from program.enter.perform(run, (column.unsqueeze(-1), grad), label)
    grad_lse = None if grad_lse is None else column.squeeze(-1)
    result = ForwardResult(out, lse, tuple(saved))
    gradients = yield from _backward_ring(job, program, run, grad, grad_lse, (q, k, v), result)
    label = f"backward step {program.leave.index}, exchange of dq, dk and dv"
    dq, dk, dv = yield from program.leave.perform(run, gradients, label)
    return dq, _sum_copies(dk, job.plan.kv_heads), _sum_copies(dv, job.plan.kv_heads)


def _sum_copies(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of `heads` key/value heads, summed from the gradients [B, copies, n, D] of each head's copies."""
    return gradient if gradient.size(1) == heads else gradient.unflatten(1, (heads, -1)).sum(2)


def _pass_kv(
    job: Job, program: RankProgram, run: PassTensors, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None
) -> Program[ForwardResult]:
    """The forward of pass-KV: blocks of keys and values visit the queries of this rank."""
    q, k, v = map(align_rows, (q, k, v))
    run.give(program.own["kv"], (k, v))
    output, centre = OutputAccumulator(q, v.shape[-1], out), Centre(job.kernel, q, k, job.scale)
    own = RowViews(*centre.queries(q))

    def compute(visit: Visit) -> None:
        keys, values = run.get(visit.block)
        block = RowViews(centre.keys(keys, visit.part.row_set), values)
        choose = _choose_kernels(job, visit, q)
        for part in visit.parts:
            for call in part.calls:
                for batch in batches(call.work, q.size(0)):
                    inputs = select_inputs(call.work, batch, own, block)
                    kernel = job.kernel if choose is None else choose(call.work, batch)
                    partial = centre.attend(kernel, *inputs, call.work)
                    output.add(part.section, call, *partial, batch)
                    del partial  # free it before the next call allocates its own
            if part.last:
                output.close(part.section)

    yield from overlapped(job, program, run, "forward", compute)
    return ForwardResult(*output.finish(program.empty, job.sinks), run.get(program.saved))


def _pass_q(
    job: Job, program: RankProgram, run: PassTensors, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None
) -> Program[ForwardResult]:
    """The forward of pass-Q: blocks of queries, with their (out, lse) so far, visit the keys of this rank."""
    q, k, v = map(align_rows, (q, k, v))
    sums = make_output_sums(q, v.shape[-1])
    run.give(program.own["query"], (q,))
    run.give(program.sums["part"], sums)
    centre = Centre(job.kernel, q, k, job.scale)
    own = RowViews(centre.keys(k), v)

    def compute(visit: Visit) -> None:
        (queries,), totals = run.get(visit.block), RowViews(*run.get(visit.sums))
        block = RowViews(*centre.queries(queries, visit.part.row_set))
        choose = _choose_kernels(job, visit, q)
        for work in visit.works:
            for batch in batches(work, q.size(0)):
                kernel = job.kernel if choose is None else choose(work, batch)
                partial = centre.attend(kernel, *select_inputs(work, batch, block, own), work)
                merge_partial(totals, work, partial, batch, is_new=visit.is_new)
                del partial  # free it before the next call allocates its own

    yield from overlapped(job, program, run, "forward", compute)
    return ForwardResult(*finish_sums(*sums, q, job.sinks, out), ())


def _backward_ring(
    job: Job,
    program: RankProgram,
    run: PassTensors,
    grad: Tensor,
    grad_lse: Tensor | None,
    inputs: Tensors,
    result: ForwardResult,
) -> Program[tuple[Tensor, Tensor, Tensor]]:
    """`backward` of the ring: K/V blocks visit this rank's queries, or queries with dO, lse and delta visit its
    keys."""
    grad, q, k, v, out = map(align_rows, (grad, *inputs, result.out))
    dq, dk, dv = [torch.zeros_like(x, dtype=wide(x.dtype)) for x in (q, k, v)]
    centre = Centre(job.kernel, q, k, job.scale)
    if program.rotates == "q":
        assert grad_lse is None or job.lse, "the ranks have agreed that the loss does not depend on lse"
        # Queries travel with the factor of `times_unit` instead of delta, unless there may be a gradient of lse, which
        # needs delta itself, or messages round dO.
        has_factor, row = job.plan.comm_dtype is None and not job.lse, delta(grad, out, grad_lse)
        run.give(program.own["q"], (q, grad))
        run.give(program.own["row"], (result.lse, delta_factor(grad, row) if has_factor else row))
        run.give(program.sums["dq"], (dq,))
        wider = centre.moves or job.lse
        own = RowViews(centre.keys(k, wider=wider), with_column(v, 0.0) if job.lse else v)
        own_sums = RowViews(dk, dv)

        def compute(visit: Visit) -> None:
            (query, dout), (lse, row) = run.get(visit.block), run.get(visit.rows)
            rows = centre.rows(query, lse, visit.part.row_set)
            query = with_column(query, 0.0) if wider else query
            if has_factor:
                rows = (dout, query, times_unit(dout, row), *rows)
            else:
                dout, of_out = with_delta(dout, row, wider=job.lse)
                rows = (dout, query, of_out, *rows)
            sums = RowViews(*run.get(visit.sums)), own_sums
            _differentiate(job, visit, RowViews(*rows), own, sums, (visit.is_new, False))
    else:
        run.give(program.own["kv"], (k, v))
        run.give(program.saved, result.saved)
        run.give(program.sums["grad"], (dk, dv))
        wider = centre.moves or grad_lse is not None
        query = with_column(q, 0.0) if wider else q
        if grad_lse is not None and job.kernel.dropout is None:
            out, grad = with_column(out, 0.0), with_column(grad, grad_lse.to(grad.dtype))
        elif grad_lse is not None:  # dropout scales dO v^T but not dlse, so dlse goes into delta
            grad, out = with_delta(grad, delta(grad, out, grad_lse), wider=True)
        own = RowViews(grad, query, out, *centre.rows(q, result.lse))
        own_sums = RowViews(dq)

        def compute(visit: Visit) -> None:
            keys, values = run.get(visit.block)
            if grad_lse is not None:
                values = with_column(values, float(job.kernel.dropout is None))
            block = RowViews(centre.keys(keys, visit.part.row_set, wider=wider), values)
            sums = own_sums, RowViews(*run.get(visit.sums))
            _differentiate(job, visit, own, block, sums, (False, visit.is_new))

    yield from overlapped(job, program, run, "backward", compute)
    dq, dk, dv = [as_dtype(x, y.dtype) if job.cast_grads else x for x, y in zip((dq, dk, dv), inputs, strict=True)]
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
    is uninitialized, and the visit's only call overwrites all of it.
    """
    total = sums[0].tensors[0]
    choose = _choose_kernels(job, visit, total)
    for work in visit.works:
        for batch in batches(work, total.size(0)):
            (grad, q, out, lse, *key), (k, v) = select_inputs(work, batch, by_query, by_key)
            kernel = job.kernel if choose is None else choose(work, batch)
            dq, *of_keys = kernel.backward(grad, q, k, v, out, lse, work, job.scale)
            dq = restore(dq, *key) if key else dq
            accumulate(sums[0], work, batch, dq, is_new=is_new[0])
            accumulate(sums[1], work, batch, *of_keys, by_key=True, is_new=is_new[1])
            del dq, of_keys  # free them before the next call allocates its own


def _choose_kernels(job: Job, visit: Visit, like: Tensor) -> Callable[[Work, slice | None], Kernel] | None:
    """With dropout, a function that returns the kernel of each call of a visit; `like` gives batch and device."""
    if job.kernel.dropout is None:
        return None
    from .dropout import dropping_kernels  # few calls drop weights

    return dropping_kernels(job.plan, job.rank, visit.part, job.kernel, like.size(0), like.device)
