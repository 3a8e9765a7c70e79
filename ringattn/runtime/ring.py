"""The ring: blocks of keys and values visit the queries of all ranks, and in the backward bring their gradients home.

A pass is a generator that asks a transport to post messages, to compute a visit, and to wait; the same code runs on a
process group and, for thousands of virtual ranks, in one process. `turn_in_order` is the ring as in a textbook; read it
first. In `pass_q`, queries visit keys; `ulysses` exchanges tokens for heads around a ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ..kernels.contract import CallData, Chosen, KernelPass, QueryRows, Tensors, VisitKernel
from ..kernels.memory import align_rows, as_dtype, differentiable, wide_zeros
from ..plan.plan import Plan
from ..plan.steps import Part
from ..transport.base import Program
from .buffers import find_places
from .program import NumberedVisit, RingRun

#: The tensors of a visit, as arguments of the kernel.
TensorsOf = Callable[[NumberedVisit], tuple[Any, ...]]


@dataclass(frozen=True)
class Job:
    """The task of one rank: a plan, the rank's number in it, the kernel, the softmax scale, and options.

    `lse`: whether the loss of any rank may depend on lse; all ranks give the same value. With `cast_grads=False`,
    gradients keep the dtype in which they were summed. `sinks` [H] are merged into the output, see
    `softmax.merge_sinks_`. `chosen` are the keys that the rank's queries have chosen.
    """

    plan: Plan
    rank: int
    kernel: VisitKernel
    scale: float
    lse: bool = False
    cast_grads: bool = True
    sinks: Tensor | None = None
    chosen: Chosen | None = None

    def begin(self, q: Tensor, block: Tensors, *, stays: Literal["q", "kv"]) -> KernelPass:
        """The kernel in one pass of this rank; `stays` is "q" if keys visit, and "kv" if queries visit."""
        plan, owner = self.plan.ring_plan(self.rank)
        call = CallData(
            self.scale,
            Part(stays, owner),
            self.heads,
            lambda part: find_places(plan, part, q.device),
            "factor" if self.sends_factor else "delta",
            self.lse,
            self.own_sinks,
            self.chosen,
        )
        return self.kernel.begin(call, q, block)

    @property
    def heads(self) -> range:
        """Which of the call's query heads this rank computes: all, or its share in a Ulysses group."""
        count = self.plan.ring_plan(self.rank)[0].heads
        first = self.rank % self.plan.ulysses_size * count
        return range(first, first + count)

    @property
    def own_sinks(self) -> Tensor | None:
        """The sinks of `heads`."""
        return None if self.sinks is None else self.sinks[self.heads.start : self.heads.stop]

    @property
    def sends_factor(self) -> bool:
        """Whether visiting queries bring the factor of `pad.times_unit` instead of delta.

        It saves receivers work. A gradient of lse is part of delta but of no factor of dO, and rounded messages change
        dO: both need delta itself.
        """
        return self.plan.comm_dtype is None and not self.lse

    def cast(self, gradients: Tensors, *inputs: Tensor) -> Tensors:
        """The gradients in the dtypes of the inputs, unless the job keeps them as they were summed.

        Gradients of weights follow; they stay as they were summed, because virtual ranks add them up.
        """
        if not self.cast_grads:
            return gradients
        like = differentiable(inputs)
        return *(as_dtype(x, y.dtype) for x, y in zip(gradients, like, strict=False)), *gradients[len(like) :]


@dataclass(frozen=True)
class ForwardResult:
    """Result of a forward: out [B, H, n, Dv], lse [B, H, n], and the tensors saved for the backward."""

    out: Tensor
    lse: Tensor
    saved: tuple[Tensor, ...]


def turn_in_order(run: RingRun, kernel: KernelPass, tensors: TensorsOf, *, backward: bool = False) -> Program[None]:
    """Turn the ring once: in each step, exchange the messages, compute the step's visits, add the sums that arrived."""
    for step in run.steps:
        yield from run.post(step)
        yield from run.arrive(step)
        yield from run.compute(step, kernel, tensors, backward)
        yield from run.take_in(step)


def turn(run: RingRun, kernel: KernelPass, tensors: TensorsOf, *, backward: bool = False) -> Program[None]:
    """Turn the ring once, computing while messages travel; some travel for several steps.

    The bits are those of `turn_in_order`: the same visits in the same order, and sums are added after them in both.
    """
    for step in run.steps:
        yield from run.post(step)
        yield from run.compute(step, kernel, tensors, backward)
        yield from run.wait(step)


def forward(job: Job, run: RingRun, q: Tensor, block: Tensors, out: Tensor | None) -> Program[ForwardResult]:
    """Attention of the local queries to the keys of all ranks, written to `out` if given."""
    q, *own = map(align_rows, (q, *block))
    run.give(run.program.own["kv"], own)
    kernel = job.begin(q, tuple(own), stays="q")
    sums = kernel.new_sums(out)

    def tensors(visit: NumberedVisit) -> tuple[Any, ...]:
        return q, run.get(visit.block), sums

    yield from turn(run, kernel, tensors)
    return ForwardResult(*kernel.finish(sums, run.program.unseen), run.get(run.program.saved))


def backward(
    job: Job, run: RingRun, grad: Tensor, grad_lse: Tensor | None, q: Tensor, block: Tensors, result: ForwardResult
) -> Program[Tensors]:
    """(dq, dk, dv) from dO and, if given, the gradient of lse; dk and dv travel to the owner of their block.

    With the lse of whole rows the weights of each visit are final, so that gradients of visits add up. Of another block
    than (k, v), the gradients of its tensors that have one, and then those of the weights that expand it.
    """
    grad, out, q, *own = map(align_rows, (grad, result.out, q, *block))
    kernel = job.begin(q, tuple(own), stays="q")
    stay, travel = kernel.new_grads(), tuple(map(wide_zeros, differentiable(own)))
    run.give(run.program.own["kv"], own)
    run.give(run.program.saved, result.saved)
    run.give(run.program.sums["grad"], travel)
    rows = QueryRows(grad, q, result.lse, out=out, grad_lse=grad_lse)

    def tensors(visit: NumberedVisit) -> tuple[Any, ...]:
        return rows, run.get(visit.block), stay, run.get(visit.sums)

    yield from turn(run, kernel, tensors, backward=True)
    dq, *of_weights = kernel.finish_grads(stay)
    return job.cast((dq, *travel, *of_weights), q, *own)
