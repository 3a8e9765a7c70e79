"""solver stencil: every rank at every step, exactly, in delay form; blocks of ranks stay in the cache for many steps.

D = S - k * reference keeps numbers small, so that float64 loses nothing over 262,144 steps. A block of ranks is
advanced by up to DEPTH steps at once, together with as many neighbours on either side as those steps can reach.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...progress import track
from .changes import Changes
from .direct_messages import joined
from .recurrence import NEVER, DirectMessages, Lane, Phase, Ring, Solved, Value, largest, shifted

#: Ranks per block, and steps per visit to a block: three coefficients and two rows of it fit into a level-2 cache.
BLOCK, DEPTH = 16384, 128
#: A coefficient in delay form: of each rank, of all of them, or None where it never decides.
Coefficient = np.ndarray | float | None


def dense(ring: Ring, why: str = "every rank at every step") -> Solved:
    """Solve a ring by the recurrence itself: O(ranks x steps) time, O(ranks x buffers) memory."""
    state = Delay(ring)
    for phase in ring.each():
        state.advance(phase, phase.steps)
    finish = state.finish()
    return Solved("stencil", float(finish.max()), finish, why)


class Delay:
    """The state of a ring between two steps, relative to `step` x `reference`."""

    def __init__(self, ring: Ring, period: int = 1) -> None:
        self.ring, self.step, self.reference, self.period = ring, 0, 0.0, period
        #: Of the step before, where they change from step to step.
        self.coefficients: list[np.ndarray] = []
        self.now = np.zeros(ring.ranks)
        #: With several slots: the latest of the starts before, and when the last messages arrived by lane.
        self.starts: list[np.ndarray] = []
        self.arrived: dict[int, list[np.ndarray]] = {}
        self.free: dict[int, np.ndarray] = {}

    def finish(self) -> np.ndarray:
        """Seconds at which each rank is through, float64 [ranks]."""
        return self.now + self.step * self.reference

    def rows(self) -> list[np.ndarray]:
        """All that later steps depend on, relative to the step."""
        sent = [row for sign in sorted(self.arrived) for row in self.arrived[sign]]
        return [self.now, *self.starts, *sent, *(self.free[sign] for sign in sorted(self.free))]

    def shift(self, steps: int, gain: float) -> None:
        """Go on by some steps after which the state is the same, but for `gain` seconds relative to the reference."""
        self.step += steps
        self.now = self.now + gain
        self.starts = [row + gain for row in self.starts]
        self.arrived = {sign: [row + gain for row in sent] for sign, sent in self.arrived.items()}
        self.free = {sign: row + gain for sign, row in self.free.items()}

    def advance(self, phase: Phase, steps: int) -> None:
        """Go on by some steps of a phase."""
        if not self.step:
            self.reference = float(np.max(largest(self.ring.busy(phase), *(lane.seconds for lane in phase.lanes))))
        if self.ring.buffers > 1:
            for _ in track(range(steps), steps, "steps"):
                self._slotted(phase)
        else:
            coefficients = [_delay(value, self.reference) for value in self.ring.stencil(phase)]
            chords = None if phase.chords is None else phase.chords.later(-self.reference)
            self.now = _blocked(self.now, steps, coefficients, self.period, chords=chords)
            self.step += steps

    def change(self, changes: Changes) -> None:
        """Go on by some steps whose coefficients change. The reference is the longest of the first that are given."""
        if changes.whole is not None:
            longest = max(float(value.max()) for value in changes.whole)
            # A new reference is a new unit of the same times.
            self.now = self.now + self.step * (self.reference - longest)
            self.reference = longest
            self.coefficients = [value - longest for value in changes.whole]
        points = changes.later(-self.reference)
        self.now = _blocked(self.now, changes.steps, self.coefficients, self.period, points, points.chords)
        self.step += changes.steps

    def _slotted(self, phase: Phase) -> None:
        """One step with several receive slots, row by row."""
        assert phase.chords is None, "messages that go straight have one slot"
        ring, reference = self.ring, self.reference
        later = self.now + (ring.busy(phase) - reference)
        # Times of j steps ago count from j references earlier.
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
        self.step += 1

    def _arrival(self, lane: Lane, slot: np.ndarray | None) -> np.ndarray:
        """When the messages of a lane arrive, by sender, -inf where there is none, relative to this step."""
        begun = self.now if slot is None else np.maximum(self.now, shifted(slot, -lane.sign))
        free = self.free.setdefault(lane.sign, np.full(self.ring.ranks, NEVER))
        gap = np.where(np.isfinite(lane.seconds), lane.gap, NEVER)
        return np.maximum(begun + lane.seconds, free + gap)


def _delay(value: Value, reference: float) -> np.ndarray | float | None:
    """A coefficient in delay form; None where it never decides."""
    if np.all(np.equal(value, NEVER)):
        return None
    return value - reference


def _blocked(
    now: np.ndarray, steps: int, coefficients: Sequence[Coefficient], period: int = 1, changes: Changes | None = None,
    chords: DirectMessages | None = None,
) -> np.ndarray:  # fmt: skip
    """`steps` steps of the stencil max(now + own, below + left, above + right) around the ring, and of chords.

    With `changes`, coefficients are arrays, and are those of the last step in the end. Blocks in which all repeats every
    `period` ranks are gone through by one period.
    """
    ranks = len(now)
    depth = max(1, min(DEPTH, steps, ranks))
    padded: list[Coefficient] = []
    buffers = [np.zeros(min(BLOCK, ranks) + 2 * depth) for _ in range(3)]
    then = np.empty_like(now)
    for done in track(range(0, steps, depth), -(-steps // depth), f"steps by {depth}"):
        count = min(depth, steps - done)
        around = _around(now, depth)
        if changes is not None or not padded:
            padded = [_around(c, depth) if isinstance(c, np.ndarray) else c for c in coefficients]
        known: dict[bytes, np.ndarray] = {}
        for low in range(0, ranks, BLOCK):
            size = min(BLOCK, ranks - low)
            part = slice(low, low + size + 2 * depth)
            here = [c[part] if isinstance(c, np.ndarray) else c for c in padded]
            points = None
            if changes is not None:
                points = changes.inside(done, done + count, low - depth, size + 2 * depth, ranks)
                here = [np.array(c) for c in here] if points else [_deciding(np.asarray(c)) for c in here]
            whole = slice(depth, depth + size)
            if points is None and _repeats([around[part], *here], period):
                # The ranks of one period, with as many around them as these steps reach.
                one = slice(depth - count, min(depth + period + count, size + 2 * depth))
                rows = [x[one] if isinstance(x, np.ndarray) else x for x in here]
                alone = around[part][one]
                key = b"".join(x[:period].tobytes() if isinstance(x, np.ndarray) else b"." for x in (alone, *rows))
                if key not in known:
                    known[key] = _block(alone, count, rows, buffers)[count : count + period].copy()
                then[low : low + size] = np.resize(known[key], size)
            else:
                then[low : low + size] = _block(around[part], count, here, buffers, points)[whole]
        across = None if chords is None else chords.inside(done, done + count)
        if across is not None and len(across):
            points = None if changes is None else changes.between(done, done + count)
            delayed, times = joined(now, count, coefficients, across, points)
            then[delayed] = times
        now, then = then, now
        if changes is not None:
            changes.apply(coefficients, done, done + count)
    return now


def _around(values: np.ndarray, depth: int) -> np.ndarray:
    """The values of all ranks with those of `depth` ranks, at most all, around the ring before and after them."""
    return np.concatenate((values[len(values) - depth :], values, values[:depth]))


def _deciding(coefficient: np.ndarray) -> np.ndarray | None:
    """None for a coefficient that never decides."""
    return None if coefficient[0] == NEVER and bool((coefficient == NEVER).all()) else coefficient


def _repeats(rows: Sequence[Coefficient], period: int) -> bool:
    """Whether all rows repeat every `period` ranks, and are longer than that."""
    arrays = [row for row in rows if isinstance(row, np.ndarray)]
    return len(arrays[0]) > 2 * period and all(
        row[-1] == row[-1 - period] and row[0] == row[period] and bool((row[period:] == row[:-period]).all())
        for row in arrays
    )


def _block(
    around: np.ndarray, steps: int, coefficients: Sequence[Coefficient], buffers: list[np.ndarray],
    changes: Changes | None = None,
) -> np.ndarray:  # fmt: skip
    """A block with its neighbours, some steps later. What is wrong at its ends moves inward by one rank per step."""
    size = len(around)
    now, then, other = (buffer[:size] for buffer in buffers)
    now[:] = around
    then[:] = around
    own, left, right = (c[1:-1] if isinstance(c, np.ndarray) else c for c in coefficients)
    assert own is not None, "a rank is never busy for less than no time"
    views = [(x[1:-1], x[:-2], x[2:]) for x in (now, then)]
    scratch = other[1:-1]
    ends = [0] * (steps + 1) if changes is None else np.searchsorted(changes.at, np.arange(steps + 1)).tolist()
    for k in range(steps):
        if ends[k] < ends[k + 1] and changes is not None:
            changes.apply(coefficients, k, k + 1)
        (here, below, above), target = views[k % 2], views[1 - k % 2][0]
        np.add(here, own, out=target)
        if left is not None:
            np.add(below, left, out=scratch)
            np.maximum(target, scratch, out=target)
        if right is not None:
            np.add(above, right, out=scratch)
            np.maximum(target, scratch, out=target)
    return (now, then)[steps % 2]
