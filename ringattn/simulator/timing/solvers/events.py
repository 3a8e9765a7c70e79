"""Solver events: every step and message of a plan, or of a smaller plan with the same times."""

from __future__ import annotations

from ..problem import TimingProblem
from .base import Solved, Solver
from .event_loop import simulate_events
from .folding import simulate_folded

#: Plans of up to this many ranks are simulated whole.
SIMULATED_WHOLE = 64


class EventSolver(Solver):
    """Solves any plan of a few thousand ranks, or of more ranks where the plan repeats."""

    name = "events"
    needs = "a plan of a few thousand ranks"

    def solve(self, problem: TimingProblem) -> Solved:
        rates, faults = problem.rates, problem.faults
        if problem.ring is not None:
            return simulate_events(rates, faults, "asked for")
        if rates.plan.ranks <= SIMULATED_WHOLE:
            return simulate_events(rates, faults, f"{problem.not_a_ring}; few ranks")
        if faults or rates.machine.jitter:
            obstacle = "slow ranks, stalls and jitter have no copies in a smaller plan"
            return simulate_events(rates, faults, f"{problem.not_a_ring}; {obstacle}")
        folded = simulate_folded(rates, problem.not_a_ring)
        if isinstance(folded, Solved):
            return folded
        return simulate_events(rates, faults, f"{problem.not_a_ring}; {folded}")
