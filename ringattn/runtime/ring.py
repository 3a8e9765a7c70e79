"""The ring: blocks of keys and values visit the queries of all ranks, and in the backward bring their gradients home.

A pass is a generator that asks a transport to post messages, to compute a visit, and to wait; the same code runs on a
process group and, for thousands of virtual ranks, in one process. `turn_in_order` is the ring as in a textbook; read it
first. In `pass_q`, queries visit keys; `ulysses` exchanges tokens for heads around a ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..kernels.contract import CallData, KernelPass, QueryRows, VisitKernel
from ..kernels.memory import align_rows, as_dtype, wide_zeros
from ..plan.plan import Plan
from ..transport.base import Program
from .buffers import find_places
from .program import NumberedVisit, RankProgram, RingRun

#: (dq, dk, dv).
Gradients = tuple[Tensor, Tensor, Tensor]
#: Begins an execution of the rank's program, with its memory: when its turn comes, not when it is asked for.
BeginRun = Callable[[], RingRun]
#: The tensors of a visit, as arguments of the kernel.
TensorsOf = Callable[[NumberedVisit], tuple[Any, ...]]


@dataclass(frozen=True)
class Job:
    """The task of one rank: a plan, the rank's number in it, the kernel, the softmax scale, and options.

    `lse`: whether the loss of any rank may depend on lse; all ranks give the same value. With `cast_grads=False`,
    gradients keep the dtype in which they were summed. `sinks` [H] are merged into the output, see
    `softmax.merge_sinks_`.
    """

    plan: Plan
    rank: int
    kernel: VisitKernel
    scale: float
    lse: bool = False
    cast_grads: bool = True
    sinks: Tensor | None = None

    def begin(self, program: RankProgram, q: Tensor, k: Tensor, v: Tensor) -> KernelPass:
        """The kernel in the pass of this rank that the program describes."""
        call = CallData(
            self.scale,
            program.stays,
            program.heads,
            lambda part: find_places(self.plan.ring_plan(self.rank)[0], part, q.device),
            "factor" if program.rotates == "q" and self.sends_factor else "delta",
            self.lse,
            self.own_sinks(program.heads),
            program.prepared,
        )
        return self.kernel.begin(call, q, (k, v))

    def own_sinks(self, heads: range) -> Tensor | None:
        """The sinks of these query heads."""
        return None if self.sinks is None else self.sinks[heads.start : heads.stop]

    @property
    def sends_factor(self) -> bool:
        """Whether visiting queries bring the factor of `pad.times_unit` instead of delta.

        It saves receivers work. A gradient of lse is part of delta but of no factor of dO, and rounded messages change
        dO: both need delta itself.
        """
        return self.plan.comm_dtype is None and not self.lse

    def cast(self, gradients: Gradients, like: Gradients) -> Gradients:
        """The gradients in the dtypes of the inputs, unless the job keeps them as they were summed."""
        if not self.cast_grads:
            return gradients
        dq, dk, dv = [as_dtype(x, y.dtype) for x, y in zip(gradients, like, strict=True)]
        return dq, dk, dv


@dataclass(frozen=True)
class ForwardResult:
    """Result of a forward: out [B, H, n, Dv], lse [B, H, n], and the tensors saved for the backward."""

    out: Tensor
    lse: Tensor
    saved: tuple[Tensor, ...]


#: A forward, and a backward, of a ring; Ulysses has them between its exchanges.
Forward = Callable[[Job, BeginRun, Tensor, Tensor, Tensor, Tensor | None], Program[ForwardResult]]
Backward = Callable[[Job, BeginRun, Tensor, Tensor | None, Gradients, ForwardResult], Program[Gradients]]


def turn_in_order(run: RingRun, kernel: KernelPass, tensors: TensorsOf, *, backward: bool = False) -> Program[None]:
    """Turn the ring once: in each step, exchange the messages, compute the step's visits, add the sums that arrived."""
    for step in run.steps:
        yield from run.perform(step.posts, step.label)
        yield from run.arrive(step)
        yield from run.compute(step, kernel, tensors, backward)
        yield from run.take_in(step)


def turn(run: RingRun, kernel: KernelPass, tensors: TensorsOf, *, backward: bool = False) -> Program[None]:
    """Turn the ring once, computing while messages travel; some travel for several steps.

    The bits are those of `turn_in_order`: the same visits in the same order, and sums are added after them in both.
    """
    for step in run.steps:
        yield from run.perform(step.posts, step.label)
        yield from run.compute(step, kernel, tensors, backward)
        yield from run.perform(step.waits)


def forward(job: Job, begin: BeginRun, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> Program[ForwardResult]:
    """Attention of the local queries to the keys of all ranks, written to `out` if given."""
    run = begin()
    q, k, v = map(align_rows, (q, k, v))
    run.give(run.program.own["kv"], (k, v))
    kernel = job.begin(run.program, q, k, v)
    sums = kernel.new_sums(out)

    def tensors(visit: NumberedVisit) -> tuple[Any, ...]:
        return q, run.get(visit.block), sums

    yield from turn(run, kernel, tensors)
    return ForwardResult(*kernel.finish(sums), run.get(run.program.saved))


def backward(
    job: Job, begin: BeginRun, grad: Tensor, grad_lse: Tensor | None, inputs: Gradients, result: ForwardResult
) -> Program[Gradients]:
    """(dq, dk, dv) from dO and, if given, the gradient of lse; dk and dv travel to the owner of their block.

    With the lse of whole rows the weights of each visit are final, so that gradients of visits add up.
    """
    run = begin()
    grad, q, k, v, out = map(align_rows, (grad, *inputs, result.out))
    kernel = job.begin(run.program, q, k, v)
    stay, travel = kernel.new_grads(), (wide_zeros(k), wide_zeros(v))
    run.give(run.program.own["kv"], (k, v))
    run.give(run.program.saved, result.saved)
    run.give(run.program.sums["grad"], travel)
    rows = QueryRows(grad, q, result.lse, out=out, grad_lse=grad_lse)

    def tensors(visit: NumberedVisit) -> tuple[Any, ...]:
        return rows, run.get(visit.block), stay, run.get(visit.sums)

    yield from turn(run, kernel, tensors, backward=True)
    (dq,) = kernel.finish_grads(stay)
    return job.cast((dq, *travel), inputs)
