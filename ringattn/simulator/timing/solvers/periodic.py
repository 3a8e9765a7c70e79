"""Solver periodic: for ranks that repeat with a period, solves one period and skips repeating steps.

If the numbers of a ring repeat every q ranks, so do its start times: S_{r+q}(k) = S_r(k), by induction over k. If the
state of a max-plus linear recurrence at step k + p is the state at step k plus a constant, it repeats for ever
(cyclicity: Baccelli, Cohen, Olsder, Quadrat, Synchronization and Linearity, section 3.7).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .base import RingTimes
from .delay import DelayState
from .recurrence import NeighborMessages, Phase, Ring, Value

#: The longest period in ranks to search for.
LONGEST_PERIOD = 1024
#: Two states are equal up to a constant if their differences spread by at most this fraction of a step's time. Each
#: skipped period adds at most this error.
SPREAD = 4e-16


def solve_periodic(ring: Ring, instant: bool = False) -> RingTimes | None:
    """When the ranks of a ring finish, if they repeat with a period of at most LONGEST_PERIOD; None for other rings.

    `instant`: as if messages took no time. Exact up to a relative error of `SPREAD` for each skipped period.
    """
    size = None if ring.stalls else _find_period(ring)
    if size is None:
        return None
    one_period = replace(ring, ranks=size, phases=tuple(_take_ranks(phase, size) for phase in ring.phases))
    state, skipped = DelayState(one_period, instant=instant), 0
    for phase in one_period.phases:
        skipped += _advance_phase(state, phase)
    finish = np.tile(state.finish(), ring.ranks // size)
    why = f"ranks repeat every {size}; {skipped:,} of {state.step:,} steps are skipped"
    return RingTimes(finish, why, one_period)


def _find_period(ring: Ring) -> int | None:
    """The smallest number of ranks after which all numbers repeat; None if there is none up to LONGEST_PERIOD."""
    arrays = [array for phase in ring.phases for array in phase.arrays]
    for size in range(1, min(max(ring.ranks // 2, 1), LONGEST_PERIOD) + 1):
        if ring.ranks % size == 0 and all(bool((a.reshape(-1, size) == a[:size]).all()) for a in arrays):
            return size
    return None


def _take_ranks(phase: Phase, size: int) -> Phase:
    """The phase of ranks 0 .. size - 1."""

    def take(value: Value) -> Value:
        return value[:size].copy() if isinstance(value, np.ndarray) else value

    messages = tuple(NeighborMessages(sent.sign, take(sent.seconds), take(sent.bytes)) for sent in phase.messages)
    return Phase(phase.steps, take(phase.compute), take(phase.merge), messages)


def _advance_phase(state: DelayState, phase: Phase) -> int:
    """Advance the state by a phase; returns the number of skipped steps.

    Compares the states after a marked step with the marked one, for as many steps as a period may have. Marks are set
    at growing distances, so most steps need no comparison.
    """
    remaining, apart = phase.steps, 2
    while remaining:
        mark = state.now
        for period in range(1, min(2 * state.ring.ranks, remaining) + 1):
            state.advance(phase, 1)
            remaining -= 1
            gains = state.now - mark
            if np.ptp(gains) <= SPREAD * state.reference:
                times = remaining // period
                state.skip(times * period, times * float(gains.mean()))
                state.advance(phase, remaining - times * period)
                return times * period
        count = min(apart, remaining)
        state.advance(phase, count)
        remaining, apart = remaining - count, 2 * apart
    return 0
