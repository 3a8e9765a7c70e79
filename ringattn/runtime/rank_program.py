"""A rank's forward and backward, resolved from its plan before the first message: steps, kernel calls and sizes."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.base import Kernel
from ..plan.plan import Plan
from ..plan.steps import Part, Step
from ..plan.work import Work
from .merge_plan import MergePlan, make_merge_plan


@dataclass(frozen=True)
class RankProgram:
    """One pass of one rank. Kernel calls and sizes are cached by the plan, so that making a program costs no work.

    With the schedule ulysses the first and the last step exchange tokens for heads inside a group of ranks, and the
    steps between them run the ring of `ring_plan`. Without the schedule ulysses `ring_plan` is `plan`.
    """

    plan: Plan
    ring_plan: Plan
    #: This rank's number in `ring_plan`, which is also its number among the owners of blocks.
    owner: int
    steps: tuple[Step, ...]
    #: The steps of the ring, which are those that compute.
    ring_steps: range
    #: What the forward keeps for the backward to start from.
    kept: tuple[Part, ...]
    #: Bytes of the largest message, or of the largest part in the dtype that kernels compute with.
    largest_message: int

    @property
    def exchanges_heads(self) -> bool:
        """Whether the first and the last step exchange tokens for heads."""
        return len(self.ring_steps) < len(self.steps)


@dataclass(frozen=True)
class ForwardProgram(RankProgram):
    """The forward of one rank."""

    merge_plan: MergePlan


@dataclass(frozen=True)
class BackwardProgram(RankProgram):
    """The backward of one rank: the kernel calls of every visit, in the order of the visits."""

    visits: tuple[tuple[Work, ...], ...]


def forward_program(plan: Plan, rank: int, kernel: Kernel) -> ForwardProgram:
    """The forward of `rank` with the calls that `kernel` makes."""
    ring_plan, owner = _ring_plan(plan, rank)
    rank_plan = plan.for_rank(rank)
    steps, kept = rank_plan.forward, rank_plan.kept
    merge_plan = make_merge_plan(ring_plan, owner, kernel)
    return ForwardProgram(
        plan, ring_plan, owner, steps, _ring_steps(plan, steps), kept, _largest_message(plan, rank), merge_plan
    )


def backward_program(plan: Plan, rank: int, kernel: Kernel) -> BackwardProgram:
    """The backward of `rank` with the calls that `kernel` makes."""
    ring_plan, owner = _ring_plan(plan, rank)
    rank_plan = plan.for_rank(rank)
    steps, kept = rank_plan.backward, rank_plan.kept
    visits = ring_plan.cache.answer(
        (_backward_calls, owner, kernel.name), lambda: _backward_calls(ring_plan, owner, kernel)
    )
    return BackwardProgram(
        plan, ring_plan, owner, steps, _ring_steps(plan, steps), kept, _largest_message(plan, rank), visits
    )


def exchanges_heads(plan: Plan) -> bool:
    """Whether the ranks of a plan exchange tokens for heads around the ring. Without a batch nothing is sent."""
    return plan.ulysses_size > 1 and plan.batch > 0


def _ring_plan(plan: Plan, rank: int) -> tuple[Plan, int]:
    return plan.ring_plan(rank) if exchanges_heads(plan) else (plan, rank)


def _ring_steps(plan: Plan, steps: tuple[Step, ...]) -> range:
    return range(1, len(steps) - 1) if exchanges_heads(plan) else range(len(steps))


def _backward_calls(plan: Plan, rank: int, kernel: Kernel) -> tuple[tuple[Work, ...], ...]:
    demand = plan.query_demand if plan.rotates == "queries" else plan.demand
    blocks = [block for step in plan.for_rank(rank).backward for block in step.visits]
    works = [demand.batched(rank, block.owner, block.row_set) for block in blocks]
    return tuple(tuple(call for work in visit for call in kernel.split(work)) for visit in works)


def _largest_message(plan: Plan, rank: int) -> int:
    """Bytes of the largest message of a rank in either pass, so that both passes use buffers of the same sizes."""

    def compute() -> int:
        rank_plan = plan.for_rank(rank)
        hops = [hop for step in (*rank_plan.forward, *rank_plan.backward) for hop in (*step.sends, *step.recvs)]
        sizes = [sum(map(plan.part_bytes, hop.parts)) for hop in hops]
        sizes += [plan.part_bytes(part, as_sent=False) for hop in hops for part in hop.parts]
        return max(sizes, default=0)

    return plan.cache.answer((_largest_message, rank), compute)
