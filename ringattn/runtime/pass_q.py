"""Pass-Q (arXiv:2411.01783): queries visit the keys of all ranks, and their sums travel along."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..kernels.contract import QueryRows, Tensors
from ..kernels.memory import align_rows, wide_zeros
from ..kernels.pad import delta, delta_factor
from ..kernels.sums import finish_sums, make_output_sums
from ..transport.base import Program
from . import ring
from .program import NumberedVisit
from .ring import BeginRun, ForwardResult, Job


def forward(job: Job, begin: BeginRun, q: Tensor, block: Tensors, out: Tensor | None) -> Program[ForwardResult]:
    """Attention of the local queries to the keys of all ranks: (out, lse) so far travel with the queries."""
    run = begin()
    q, *keys = map(align_rows, (q, *block))
    own, block = make_output_sums(q, job.plan.value_dim), tuple(keys)
    run.give(run.program.own["query"], (q,))
    run.give(run.program.sums["part"], own)
    kernel = job.begin(run.program, q, block)

    def tensors(visit: NumberedVisit) -> tuple[Any, ...]:
        (queries,) = run.get(visit.block)
        return queries, block, run.get(visit.sums)

    yield from ring.turn(run, kernel, tensors)
    return ForwardResult(*finish_sums(*own, q, job.own_sinks(run.program.heads), out), ())


def backward(
    job: Job, begin: BeginRun, grad: Tensor, grad_lse: Tensor | None, q: Tensor, block: Tensors, result: ForwardResult
) -> Program[Tensors]:
    """(dq, dk, dv): queries travel with dO, lse and delta, and dq with them; dk and dv stay, see `ring.backward`."""
    assert grad_lse is None or job.lse, "the ranks have agreed that the loss does not depend on lse"
    run = begin()
    grad, out, q, *keys = map(align_rows, (grad, result.out, q, *block))
    dq, number, block = wide_zeros(q), delta(grad, out, grad_lse), tuple(keys)
    kernel = job.begin(run.program, q, block)
    stay = kernel.new_grads()
    run.give(run.program.own["q"], (q, grad))
    run.give(run.program.own["row"], (result.lse, delta_factor(grad, number) if job.sends_factor else number))
    run.give(run.program.sums["dq"], (dq,))

    def tensors(visit: NumberedVisit) -> tuple[Any, ...]:
        (query, dout), (lse, number) = run.get(visit.block), run.get(visit.rows)
        return QueryRows(dout, query, lse, number=number), block, stay, run.get(visit.sums)

    yield from ring.turn(run, kernel, tensors, backward=True)
    return job.cast((dq, *kernel.finish_grads(stay)), q, *block)
