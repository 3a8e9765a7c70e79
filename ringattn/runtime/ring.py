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

from ..kernels.contract import CallData, Chosen, KernelPass, QueryRows, Tensors, VisitKernel
from ..kernels.memory import align_rows, as_dtype, differentiable
from ..plan.plan import Plan
from ..transport.base import Program
from .buffers import find_places
from .program import NumberedVisit, RankProgram, RingRun

#: Begins an execution of the rank's program, with its memory: when its turn comes, not when it is asked for.
BeginRun = Callable[[], RingRun]
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

    def begin(self, program: RankProgram, q: Tensor, block: Tensors) -> KernelPass:
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
            self.chosen,
        )
        return self.kernel.begin(call, q, block)

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


#: A forward, and a backward, of a ring; Ulysses has them between its exchanges.
Forward = Callable[[Job, BeginRun, Tensor, Tensors, Tensor | None], Program[ForwardResult]]
Backward = Callable[[Job, BeginRun, Tensor, Tensor | None, Tensor, Tensors, ForwardResult], Program[Tensors]]


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


def forward(job: Job, begin: BeginRun, q: Tensor, block: Tensors, out: Tensor | None) -> Program[ForwardResult]:
    """Attention of the local queries to the keys of all ranks, written to `out` if given."""
    run = begin()
    q, *own = map(align_rows, (q, *block))
    run.give(run.program.own["kv"], own)
    kernel = job.begin(run.program, q, tuple(own))
    sums = kernel.new_sums(out)

    def tensors(visit: NumberedVisit) -> tuple[Any, ...]:
        return q, run.get(visit.block), sums

    yield from turn(run, kernel, tensors)
    return ForwardResult(*kernel.finish(sums), run.get(run.program.saved))


def backward(
    job: Job, begin: BeginRun, grad: Tensor, grad_lse: Tensor | None, q: Tensor, block: Tensors, result: ForwardResult
) -> Program[Tensors]:
    """(dq, dk, dv) from dO and, if given, the gradient of lse; dk and dv travel to the owner of their block.

    With the lse of whole rows the weights of each visit are final, so that gradients of visits add up. Of another block
    than (k, v), the gradients of its tensors that have one, and then those of the weights that expand it.
    """
    run = begin()
    grad, out, q, *own = map(align_rows, (grad, result.out, q, *block))
    kernel = job.begin(run.program, q, tuple(own))
    stay, travel = kernel.new_grads(), kernel.new_travel(tuple(own))
    run.give(run.program.own["kv"], own)
    run.give(run.program.saved, result.saved)
    run.give(run.program.sums["grad"], travel)
    rows = QueryRows(grad, q, result.lse, out=out, grad_lse=grad_lse)

    def tensors(visit: NumberedVisit) -> tuple[Any, ...]:
        return rows, run.get(visit.block), stay, run.get(visit.sums)

    yield from turn(run, kernel, tensors, backward=True)
    dq, *of_weights = kernel.finish_grads(stay)
    return job.cast((dq, *kernel.finish_travel(travel), *of_weights), q, *own)
