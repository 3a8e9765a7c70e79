"""Tier B: ranks that repeat with a period. One period stands for all, and once its state repeats, time is jumped over.

A ring whose numbers repeat every q ranks has starts that do so, too: S_{r+q}(k) = S_r(k), by induction over k. A
max-plus linear recurrence whose state at k + p is that at k plus a constant goes on so for ever (cyclicity: Baccelli,
Cohen, Olsder, Quadrat, Synchronization and Linearity, section 3.7).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .dense import Delay
from .ring import Lane, Phase, Ring, Solved, Value

#: Periods of more ranks are not looked for, and states are compared with as many before them.
LARGEST = 1024
#: Clocks after which a state that has not repeated is advanced without comparing.
PATIENCE = 4096
#: State differences are constant where their spread is at most this part of a clock's time; the jump adds at most as
#: much for every period that it leaves out.
SPREAD = 4e-16


def quotient(ring: Ring, copies: int = 1) -> Solved | None:
    """Solve a ring whose ranks repeat with a period of at most LARGEST; None where they do not. Exact but for SPREAD.

    With `copies` > 1 the ring is one period of so many.
    """
    if callable(ring.phases) or ring.stalls:
        return None
    size = ring.ranks if copies > 1 else _period(ring)
    if size is None or size > LARGEST:
        return None
    small = replace(ring, ranks=size, phases=tuple(_part(phase, size) for phase in ring.phases))
    state, jumped = Delay(small), 0
    for phase in small.each():
        jumped += _advance(state, phase)
    finish = np.tile(state.finish(), copies * ring.ranks // size)
    why = f"ranks repeat every {size}; {jumped:,} of {state.clock:,} clocks are jumped over"
    return Solved("B", float(finish.max()), finish, why)


def _period(ring: Ring) -> int | None:
    """The least period of ranks."""
    assert not callable(ring.phases)
    values = [value for phase in ring.phases for value in _values(phase) if isinstance(value, np.ndarray)]
    for size in range(1, min(ring.ranks // 2, LARGEST) + 1):
        if ring.ranks % size == 0 and all(bool((v.reshape(-1, size) == v[:size]).all()) for v in values):
            return size
    return None


def _values(phase: Phase) -> Iterator[Value]:
    yield from (phase.compute, phase.merge)
    for lane in phase.lanes:
        yield from (lane.seconds, lane.gap, lane.bytes)


def _part(phase: Phase, size: int) -> Phase:
    def cut(value: Value) -> Value:
        return value[:size].copy() if isinstance(value, np.ndarray) else value

    lanes = tuple(Lane(lane.sign, cut(lane.seconds), cut(lane.gap), cut(lane.bytes)) for lane in phase.lanes)
    return Phase(phase.clocks, cut(phase.compute), cut(phase.merge), lanes)


def _advance(state: Delay, phase: Phase) -> int:
    """Go through a phase; how many of its clocks were jumped over."""
    past: list[list[np.ndarray]] = []
    left = phase.clocks
    while left:
        if phase.clocks - left >= PATIENCE:
            state.advance(phase, left)
            return 0
        period, gain = _repeats(past, state.rows(), state.reference)
        if period:
            times = left // period
            state.shift(times * period, times * gain)
            state.advance(phase, left - times * period)
            return times * period
        past = [*past, state.rows()][-2 * state.ring.ranks - 1 :]
        state.advance(phase, 1)
        left -= 1
    return 0


def _repeats(past: list[list[np.ndarray]], rows: list[np.ndarray], reference: float) -> tuple[int, float]:
    """(p, gain): the state is that of p clocks ago, later by gain; (0, 0.0) where it is like none."""
    for period in range(1, len(past) + 1):
        before = past[-period]
        if len(before) != len(rows):
            break
        gone = [np.isfinite(row) for row in rows]
        if any(not np.array_equal(mask, np.isfinite(row)) for mask, row in zip(gone, before, strict=True)):
            continue
        moved = np.concatenate([(x - y)[mask] for x, y, mask in zip(rows, before, gone, strict=True)])
        if np.ptp(moved) <= SPREAD * reference:
            return period, float(moved.mean())
    return 0, 0.0
