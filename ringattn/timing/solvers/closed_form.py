"""Solver closed_form: all ranks are alike, so that a step takes the longest of a visit and a message."""

from __future__ import annotations

from math import fsum

import numpy as np

from ..problem import RingProblem
from .base import RingSolver, RingTimes
from .recurrence import Ring, Value


class ClosedFormSolver(RingSolver):
    """Solves rings whose ranks and links are all alike, in O(phases)."""

    name = "closed_form"
    needs = "all ranks and links alike"

    def solve_ring(self, problem: RingProblem) -> RingTimes | None:
        return solve_closed_form(problem.ring, problem.copies)


def solve_closed_form(ring: Ring, copies: int = 1) -> RingTimes | None:
    """The sum over steps of max(c + mu, l), for any number of receive slots; None where ranks or links differ.

    All starts S(k) are equal, and a message begins at S(k): the message before it arrived by then, as g <= l. With
    `copies` > 1 the ring is one of so many equal groups of ranks.
    """
    if ring.stalls:
        return None
    times: list[float] = []
    for phase in ring.each_phase():
        lengths = [ring.busy(phase), *(sent.seconds for sent in phase.messages)]
        common_lengths = [_common(value) for value in lengths]
        common_gaps = [_common(sent.gap) for sent in phase.messages]
        if None in common_lengths or None in common_gaps:
            return None
        times.append(phase.steps * max(value for value in common_lengths if value is not None))
    seconds = fsum(times)
    return RingTimes(seconds, np.broadcast_to(np.asarray(seconds), (ring.ranks * copies,)), "all ranks and links alike")


def _common(value: Value) -> float | None:
    """The number that a value has on all ranks; None where ranks differ."""
    if not isinstance(value, np.ndarray):
        return float(value)
    return float(value[0]) if bool((value == value[0]).all()) else None
