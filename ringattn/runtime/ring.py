"""The ring: blocks of keys and values visit the queries of all ranks, and in the backward bring their gradients home.

A pass is a generator that asks a transport to post messages, to compute a visit, and to wait; the same code runs on a
process group and, for thousands of virtual ranks, in one process. `turn_in_order` is the ring as in a textbook; read it
first. In `pass_q`, queries visit keys; `ulysses` exchanges tokens for heads around a ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.contract import CallData, KernelPass, QueryRows, VisitKernel
from ..kernels.memory import align_rows, as_dtype, wide
from ..plan.plan import Plan
from ..plan.steps import Part
from ..transport.base import Program
from .buffers import find_places
from .program import RingRun, Stop

#: (dq, dk, dv).
Gradients = tuple[Tensor, Tensor, Tensor]
#: The tensors of a visit, as arguments of the kernel.
TensorsOf = Callable[[Stop], tuple[Any, ...]]


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

    def begin(self, q: Tensor, k: Tensor, v: Tensor, *, stays: str) -> KernelPass:
        """The kernel in one pass of this rank; `stays` is "q" if keys visit, and "kv" if queries visit."""
        plan, owner = self.plan.ring_plan(self.rank)
        call = CallData(
            self.scale,
            Part("q" if stays == "q" else "kv", owner),
            self.heads,
            lambda part: find_places(plan, part, q.device),
            "factor" if self.sends_factor else "delta",
            self.lse,
            self.own_sinks,
        )
        return self.kernel.begin(call, q, (k, v))

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

        It saves receivers work, but a gradient of lse, or messages that round dO, need delta itself.
        """
        return self.plan.comm_dtype is None and not self.lse

    def cast(self, gradients: Gradients, like: Gradients) -> Gradients:
        """The gradients in the dtypes of the inputs, unless the job keeps them as they were summed."""
        if not self.cast_grads:
            return gradients
        dq, dk, dv = (as_dtype(x, y.dtype) for x, y in zip(gradients, like, strict=True))
        return dq, dk, dv


@dataclass(frozen=True)
class ForwardResult:
    """Result of a forward: out [B, H, n, Dv], lse [B, H, n], and the tensors saved for the backward."""

    out: Tensor
    lse: Tensor
    saved: tuple[Tensor, ...]


def turn_in_order(run: RingRun, kernel: KernelPass, tensors: TensorsOf, *, backward: bool = False) -> Program[None]:
    """Turn the ring once: in each step, blocks move on, and then those that are here are computed."""
    for step in run.steps:
        yield from run.post(step)
        yield from run.arrive(step)
        yield from run.compute(step, kernel, tensors, backward)
        yield from run.take_in(step)


def turn(run: RingRun, kernel: KernelPass, tensors: TensorsOf, *, backward: bool = False) -> Program[None]:
    """Turn the ring once, with overlap: the next blocks travel while those that are here are computed. Same bits."""
    for step in run.steps:
        yield from run.post(step)
        yield from run.compute(step, kernel, tensors, backward)
        yield from run.wait(step)


def forward(job: Job, run: RingRun, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> Program[ForwardResult]:
    """Attention of the local queries to the keys of all ranks, written to `out` if given."""
    q, k, v = map(align_rows, (q, k, v))
    run.give(run.program.own["kv"], (k, v))
    kernel = job.begin(q, k, v, stays="q")
    sums = kernel.new_sums(out)

    def tensors(stop: Stop) -> tuple[Any, ...]:
        return q, run.get(stop.block), sums

    yield from turn(run, kernel, tensors)
    return ForwardResult(*kernel.finish(sums, run.program.unseen), run.get(run.program.saved))


def backward(
    job: Job, run: RingRun, grad: Tensor, grad_lse: Tensor | None, inputs: Gradients, result: ForwardResult
) -> Program[Gradients]:
    """(dq, dk, dv) from dO and, if given, the gradient of lse; dk and dv travel to the owner of their block.

    The lse of whole rows gives each visit its final weights, so gradients of visits are summed, not merged.
    """
    grad, q, k, v, out = map(align_rows, (grad, *inputs, result.out))
    kernel = job.begin(q, k, v, stays="q")
    grads, sums = kernel.new_grads(), (wide_zeros(k), wide_zeros(v))
    run.give(run.program.own["kv"], (k, v))
    run.give(run.program.saved, result.saved)
    run.give(run.program.sums["grad"], sums)
    rows = QueryRows(grad, q, result.lse, out=out, grad_lse=grad_lse)

    def tensors(stop: Stop) -> tuple[Any, ...]:
        return rows, run.get(stop.block), grads, run.get(stop.sums)

    yield from turn(run, kernel, tensors, backward=True)
    (dq,) = kernel.finish_grads(grads)
    return job.cast((dq, *sums), inputs)


def wide_zeros(x: Tensor) -> Tensor:
    """Zeros to sum gradients of x: fp32, or fp64 for fp64."""
    return torch.zeros_like(x, dtype=wide(x.dtype))
