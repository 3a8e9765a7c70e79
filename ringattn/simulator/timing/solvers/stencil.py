"""Solver stencil: the recurrence itself, every rank at every step."""

from __future__ import annotations

from ....errors import Unsupported
from ..problem import RingProblem, TimingProblem
from .base import RingSolver, RingTimes, Solved
from .delay import DelayState
from .incremental import solve_incremental
from .recurrence import Ring

#: The most ranks x steps that are advanced: with one receive slot, with several slots, and with several slots where
#: pairs and rows are counted at every step.
MOST, MOST_WITH_SLOTS, MOST_COUNTED = 1 << 38, 1 << 31, 1 << 28


class StencilSolver(RingSolver):
    """Solves every ring in O(ranks x steps). Bands with one receive slot are counted only where they change."""

    name = "stencil"
    needs = "a ring whose numbers are known of all ranks at once"

    def solve(self, problem: TimingProblem) -> Solved | None:
        ring = problem.ring
        if ring is None or ring.counts is None or ring.ring.buffers > 1:
            return super().solve(problem)
        check_size(ring, MOST)
        return solve_incremental(ring.counts, ring.compared)

    def solve_ring(self, problem: RingProblem) -> RingTimes:
        if problem.counts is not None:
            check_size(problem, MOST_COUNTED)
        else:
            check_size(problem, MOST if problem.ring.buffers == 1 else MOST_WITH_SLOTS)
        return solve_stencil(problem.ring)


def solve_stencil(ring: Ring) -> RingTimes:
    """The times of any ring, in O(ranks x steps) time and O(ranks x buffers) memory."""
    state = DelayState(ring)
    for phase in ring.each_phase():
        state.advance(phase, phase.steps)
    finish = state.finish()
    return RingTimes(float(finish.max()), finish, "every rank at every step")


def check_size(problem: RingProblem, most: int, what: str = "") -> None:
    """Raise Unsupported for more than `most` ranks x steps with `what`, or else with the receive slots of the ring."""
    what = what or f"{problem.ring.buffers} receive slots"
    ranks = problem.ring.ranks
    if ranks * problem.steps > most:
        raise Unsupported(
            f"{ranks:,} ranks x {problem.steps:,} steps with {what} are more than {most:,}, the most that solver "
            "stencil goes through; try fewer ranks, or leave machine.buffers and machine.jitter out"
        )
