"""solver periodic: ranks that repeat with a period. One period stands for all, and once its state repeats, time is jumped over.

A ring whose numbers repeat every q ranks has starts that do so, too: S_{r+q}(k) = S_r(k), by induction over k. A
max-plus linear recurrence whose state at k + p is that at k plus a constant goes on so for ever (cyclicity: Baccelli,
Cohen, Olsder, Quadrat, Synchronization and Linearity, section 3.7).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .recurrence import Lane, Phase, Ring, Solved, Value
from .stencil import Delay

#: Periods of more ranks are not looked for.
LARGEST = 1024
#: State differences are constant where their spread is at most this part of a step's time; the jump adds at most as
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
    why = f"ranks repeat every {size}; {jumped:,} of {state.step:,} steps are jumped over"
    return Solved("periodic", float(finish.max()), finish, why)


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
    return Phase(phase.steps, cut(phase.compute), cut(phase.merge), lanes)


def _advance(state: Delay, phase: Phase) -> int:
    """Go through a phase; how many of its steps were jumped over.

    The state is compared with that of a marked step for as many steps as a period may have, and marks are set ever
    farther apart, so that most steps are gone through without comparing.
    """
    left, apart = phase.steps, 2 * state.ring.buffers
    while left:
        mark = state.rows()
        for period in range(1, min(2 * state.ring.ranks, left) + 1):
            state.advance(phase, 1)
            left -= 1
            gain = _gain(mark, state.rows(), state.reference)
            if gain is not None:
                times = left // period
                state.shift(times * period, times * gain)
                state.advance(phase, left - times * period)
                return times * period
        count = min(apart, left)
        state.advance(phase, count)
        left, apart = left - count, 2 * apart
    return 0


def _gain(before: list[np.ndarray], rows: list[np.ndarray], reference: float) -> float | None:
    """How much later the state is than one before, relative to the reference; None where it is not the same state."""
    if len(before) != len(rows):
        return None
    known = [np.isfinite(row) for row in rows]
    if any(not np.array_equal(mask, np.isfinite(row)) for mask, row in zip(known, before, strict=True)):
        return None
    moved = np.concatenate([(x - y)[mask] for x, y, mask in zip(rows, before, known, strict=True)])
    return float(moved.mean()) if np.ptp(moved) <= SPREAD * reference else None
