"""Solver A: all ranks alike. No rank waits for another, and a step takes the longest of a visit and a message."""

from __future__ import annotations

from math import fsum

import numpy as np

from .recurrence import Ring, Solved, Value, largest


def closed(ring: Ring, why: str = "all ranks and links alike") -> Solved | None:
    """The sum over steps of max(c + mu, l), for any number of slots; None where ranks or links differ.

    With all starts S(k) equal, a message begins at S(k): the one before it arrived by then, and g <= l.
    """
    if ring.stalls:
        return None
    times: list[float] = []
    for phase in ring.each():
        longest = [ring.busy(phase), *(lane.seconds for lane in phase.lanes)]
        alike = [_alike(value) for value in (*longest, *(lane.gap for lane in phase.lanes))]
        if None in alike:
            return None
        times.append(phase.steps * max(value for value in alike[: len(longest)] if value is not None))
    seconds = fsum(times)
    return Solved("closed_form", seconds, np.broadcast_to(np.asarray(seconds), (ring.ranks,)), why)


def _alike(value: Value) -> float | None:
    """The number that a value has on all ranks."""
    if not isinstance(value, np.ndarray):
        return float(value)
    return float(value[0]) if bool((value == value[0]).all()) else None


def rate(ring: Ring) -> float:
    """Seconds per step after many steps of the first phase, alike in all steps: the largest mean over a cycle.

    A cycle returns to its rank over steps: by staying (c + mu), by the link's own occupation (g), by a slot that must be
    free again (l / B), or all around the ring (mean of l). Baccelli, Cohen, Olsder, Quadrat, Synchronization and
    Linearity, theorem 3.28. For one direction without waiting for sends, or with one slot.
    """
    phase = next(ring.each())
    found = float(np.max(ring.busy(phase)))
    for lane in phase.lanes:
        seconds = np.broadcast_to(np.asarray(lane.seconds, dtype=np.float64), (ring.ranks,))
        slots = float(np.max(seconds)) / ring.buffers
        found = max(found, float(np.max(largest(lane.gap))), slots, fsum(seconds) / ring.ranks)
    return found
