"""Tier D: every rank at every clock, exactly, in delay form; blocks of ranks stay in the cache for many clocks.

D = S - k * reference keeps numbers small, so that float64 loses nothing over 262,144 clocks. A block of ranks is
advanced by up to DEPTH clocks at once, together with as many neighbours on either side as those clocks can reach.
"""

from __future__ import annotations

import numpy as np

from .ring import NEVER, Lane, Phase, Ring, Solved, Value, largest, shifted

#: Ranks per block, and clocks per visit to a block: three coefficients and two rows of it fit into a level-2 cache.
BLOCK, DEPTH = 16384, 128


def dense(ring: Ring, why: str = "every rank at every clock") -> Solved:
    """Solve a ring by the recurrence itself: O(ranks x clocks) time, O(ranks x buffers) memory."""
    state = Delay(ring)
    for phase in ring.each():
        state.advance(phase, phase.clocks)
    finish = state.finish()
    return Solved("D", float(finish.max()), finish, why)


class Delay:
    """The state of a ring between two clocks, relative to `clock` x `reference`."""

    def __init__(self, ring: Ring) -> None:
        self.ring, self.clock, self.reference = ring, 0, 0.0
        self.now = np.zeros(ring.ranks)
        #: With several slots: the latest of the starts before, and when the last messages arrived by lane.
        self.starts: list[np.ndarray] = []
        self.arrived: dict[int, list[np.ndarray]] = {}
        self.free: dict[int, np.ndarray] = {}

    def finish(self) -> np.ndarray:
        """Seconds at which each rank is through, float64 [ranks]."""
        return self.now + self.clock * self.reference

    def rows(self) -> list[np.ndarray]:
        """All that later clocks depend on, relative to the clock."""
        sent = [row for sign in sorted(self.arrived) for row in self.arrived[sign]]
        return [self.now, *self.starts, *sent, *(self.free[sign] for sign in sorted(self.free))]

    def shift(self, clocks: int, gain: float) -> None:
        """Go on by some clocks after which the state is the same, but for `gain` seconds relative to the reference."""
        self.clock += clocks
        self.now = self.now + gain
        self.starts = [row + gain for row in self.starts]
        self.arrived = {sign: [row + gain for row in sent] for sign, sent in self.arrived.items()}
        self.free = {sign: row + gain for sign, row in self.free.items()}

    def advance(self, phase: Phase, clocks: int) -> None:
        """Go on by some clocks of a phase."""
        if not self.clock:
            self.reference = float(np.max(largest(self.ring.busy(phase), *(lane.seconds for lane in phase.lanes))))
        if self.ring.buffers > 1:
            for _ in range(clocks):
                self._slotted(phase)
        else:
            coefficients = [_delay(value, self.reference) for value in self.ring.stencil(phase)]
            self.now = _blocked(self.now, clocks, coefficients)
            self.clock += clocks

    def _slotted(self, phase: Phase) -> None:
        """One clock with several receive slots, row by row."""
        ring, reference = self.ring, self.reference
        later = self.now + (ring.busy(phase) - reference)
        # Times of j clocks ago count from j references earlier.
        slot = self.starts[0] - (ring.buffers - 1) * reference if len(self.starts) == ring.buffers - 1 else None
        lanes = {lane.sign: lane for lane in phase.lanes}
        for sign in sorted({*lanes, *self.arrived}):
            arrival = self._arrival(lanes[sign], slot) if sign in lanes else np.full(ring.ranks, NEVER)
            later = np.maximum(later, shifted(arrival, sign) - reference)
            sent = self.arrived.setdefault(sign, [])
            sent.append(arrival)
            if len(sent) == ring.buffers:
                gone = sent.pop(0) - ring.buffers * reference
                later = np.maximum(later, gone) if ring.waits else later
            self.free[sign] = np.where(np.isfinite(arrival), arrival, self.free[sign]) - reference
        self.starts = [*self.starts, self.now][-(ring.buffers - 1) :]
        self.now = later
        self.clock += 1

    def _arrival(self, lane: Lane, slot: np.ndarray | None) -> np.ndarray:
        """When the messages of a lane arrive, by sender, -inf where there is none, relative to this clock."""
        begun = self.now if slot is None else np.maximum(self.now, shifted(slot, -lane.sign))
        free = self.free.setdefault(lane.sign, np.full(self.ring.ranks, NEVER))
        gap = np.where(np.isfinite(lane.seconds), lane.gap, NEVER)
        return np.maximum(begun + lane.seconds, free + gap)


def _delay(value: Value, reference: float) -> np.ndarray | float | None:
    """A coefficient in delay form; None where it never decides."""
    if np.all(np.equal(value, NEVER)):
        return None
    return value - reference


def _blocked(now: np.ndarray, clocks: int, coefficients: list[np.ndarray | float | None]) -> np.ndarray:
    """`clocks` clocks of the stencil max(now + own, below + left, above + right) around the ring."""
    ranks = len(now)
    depth = max(1, min(DEPTH, clocks, ranks))
    padded = [_around(c, depth) if isinstance(c, np.ndarray) else c for c in coefficients]
    width = min(BLOCK, ranks) + 2 * depth
    buffers = [np.zeros(width) for _ in range(3)]
    then = np.empty_like(now)
    while clocks:
        step = min(depth, clocks)
        around = _around(now, depth)
        for low in range(0, ranks, BLOCK):
            size = min(BLOCK, ranks - low)
            part = slice(low, low + size + 2 * depth)
            here = [c[part] if isinstance(c, np.ndarray) else c for c in padded]
            then[low : low + size] = _block(around[part], step, here, buffers)[depth : depth + size]
        now, then = then, now
        clocks -= step
    return now


def _around(values: np.ndarray, depth: int) -> np.ndarray:
    """The values of all ranks with those of `depth` ranks, at most all, around the ring before and after them."""
    return np.concatenate((values[len(values) - depth :], values, values[:depth]))


def _block(
    around: np.ndarray, clocks: int, coefficients: list[np.ndarray | float | None], buffers: list[np.ndarray]
) -> np.ndarray:
    """A block with its neighbours, some clocks later. What is wrong at its ends moves inward by one rank per clock."""
    size = len(around)
    now, then, other = (buffer[:size] for buffer in buffers)
    now[:] = around
    then[:] = around
    own, left, right = (c[1:-1] if isinstance(c, np.ndarray) else c for c in coefficients)
    assert own is not None, "a rank is never busy for less than no time"
    views = [(x[1:-1], x[:-2], x[2:]) for x in (now, then)]
    scratch = other[1:-1]
    for k in range(clocks):
        (here, below, above), target = views[k % 2], views[1 - k % 2][0]
        np.add(here, own, out=target)
        if left is not None:
            np.add(below, left, out=scratch)
            np.maximum(target, scratch, out=target)
        if right is not None:
            np.add(above, right, out=scratch)
            np.maximum(target, scratch, out=target)
    return (now, then)[clocks % 2]
