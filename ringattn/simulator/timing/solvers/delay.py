"""The state of a ring between two steps, and its advance by the recurrence: every rank at every step, exactly.

The state is kept in delay form: D = S - k * reference stays small, so that float64 loses nothing over 262,144 steps. A
block of ranks stays in the cache for up to DEPTH steps, together with as many neighbors on either side as these steps
can reach.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...progress import track
from .changes import CoefficientChanges
from .direct_messages import advance_delayed_ranks
from .recurrence import NEVER, DirectMessages, NeighborMessages, Phase, Ring, Value, largest, shift_ranks

#: Ranks per block, and steps per visit to a block: three coefficients and two rows of times fit into a level-2 cache.
BLOCK, DEPTH = 16384, 128
#: A coefficient in delay form: of each rank, of all ranks, or None where it never decides a maximum.
Coefficient = np.ndarray | float | None


class DelayState:
    """The times at which ranks begin step `step`, relative to `step` x `reference`.

    `period` is a number of ranks after which coefficients often repeat, such as those of a node; it only saves time.
    """

    def __init__(self, ring: Ring, period: int = 1) -> None:
        self.ring, self.step, self.reference, self.period = ring, 0, 0.0, period
        #: Coefficients of the last step, where they change from step to step.
        self.coefficients: list[np.ndarray] = []
        self.now = np.zeros(ring.ranks)
        #: With several receive slots: the last starts, and by direction the last arrivals and when the link is free.
        self.starts: list[np.ndarray] = []
        self.arrived: dict[int, list[np.ndarray]] = {}
        self.link_free: dict[int, np.ndarray] = {}

    def finish(self) -> np.ndarray:
        """Seconds at which each rank has finished its last step, float64 [ranks]."""
        return self.now + self.step * self.reference

    def rows(self) -> list[np.ndarray]:
        """Everything that later steps depend on, relative to the step."""
        arrivals = [row for sign in sorted(self.arrived) for row in self.arrived[sign]]
        return [self.now, *self.starts, *arrivals, *(self.link_free[sign] for sign in sorted(self.link_free))]

    def skip(self, steps: int, gain: float) -> None:
        """Skip steps after which the state is the same, but for `gain` seconds relative to the reference."""
        self.step += steps
        self.now = self.now + gain
        self.starts = [row + gain for row in self.starts]
        self.arrived = {sign: [row + gain for row in rows] for sign, rows in self.arrived.items()}
        self.link_free = {sign: row + gain for sign, row in self.link_free.items()}

    def advance(self, phase: Phase, steps: int) -> None:
        """Advance by some steps of a phase."""
        if not self.step:
            longest = largest(self.ring.busy(phase), *(sent.seconds for sent in phase.messages))
            self.reference = float(np.max(longest))
        if self.ring.buffers > 1:
            for _ in track(range(steps), steps, "steps"):
                self._advance_with_slots(phase)
        else:
            coefficients = [_delay_form(value, self.reference) for value in self.ring.coefficients(phase)]
            direct = None if phase.direct is None else phase.direct.lengthened(-self.reference)
            self.now = advance_blocks(self.now, steps, coefficients, self.period, direct=direct)
            self.step += steps

    def advance_changes(self, changes: CoefficientChanges) -> None:
        """Advance by steps whose coefficients change. The largest initial coefficient becomes the new reference."""
        if changes.initial is not None:
            longest = max(float(value.max()) for value in changes.initial)
            # The same times, relative to another reference.
            self.now = self.now + self.step * (self.reference - longest)
            self.reference = longest
            self.coefficients = [value - longest for value in changes.initial]
        points = changes.lengthened(-self.reference)
        self.now = advance_blocks(self.now, changes.steps, self.coefficients, self.period, points, points.direct)
        self.step += changes.steps

    def _advance_with_slots(self, phase: Phase) -> None:
        """Advance by one step of a ring with several receive slots, all ranks at once."""
        assert phase.direct is None, "direct messages have one receive slot"
        ring, reference = self.ring, self.reference
        then = self.now + (ring.busy(phase) - reference)
        # Times of j steps ago are relative to a step that is j references earlier.
        slot_free = self.starts[0] - (ring.buffers - 1) * reference if len(self.starts) == ring.buffers - 1 else None
        messages = {sent.sign: sent for sent in phase.messages}
        for sign in sorted({*messages, *self.arrived}):
            sent = messages.get(sign)
            arrival = np.full(ring.ranks, NEVER) if sent is None else self._find_arrivals(sent, slot_free)
            then = np.maximum(then, shift_ranks(arrival, sign) - reference)
            arrivals = self.arrived.setdefault(sign, [])
            arrivals.append(arrival)
            if len(arrivals) == ring.buffers:
                oldest = arrivals.pop(0) - ring.buffers * reference
                then = np.maximum(then, oldest)
            self.link_free[sign] = np.where(np.isfinite(arrival), arrival, self.link_free[sign]) - reference
        self.starts = [*self.starts, self.now][-(ring.buffers - 1) :]
        self.now = then
        self.step += 1

    def _find_arrivals(self, sent: NeighborMessages, slot_free: np.ndarray | None) -> np.ndarray:
        """When messages of one direction arrive, by sender and relative to this step; -inf where none is sent."""
        begun = self.now if slot_free is None else np.maximum(self.now, shift_ranks(slot_free, -sent.sign))
        link_free = self.link_free.setdefault(sent.sign, np.full(self.ring.ranks, NEVER))
        gap = np.where(np.isfinite(sent.seconds), sent.gap, NEVER)
        return np.maximum(begun + sent.seconds, link_free + gap)


def _delay_form(value: Value, reference: float) -> Coefficient:
    """A coefficient relative to the reference; None where it never decides a maximum."""
    if np.all(np.equal(value, NEVER)):
        return None
    return value - reference


def advance_blocks(
    now: np.ndarray,
    steps: int,
    coefficients: Sequence[Coefficient],
    period: int = 1,
    changes: CoefficientChanges | None = None,
    direct: DirectMessages | None = None,
) -> np.ndarray:
    """Advance times float64 [ranks] by the stencil max(now + own, below + left, above + right) around the ring.

    With `changes`, coefficients are arrays, and become the coefficients of the last step in place. Of a block that
    repeats every `period` ranks, one period is computed. `direct` messages are added at the ranks that they may delay.
    """
    ranks = len(now)
    depth = max(1, min(DEPTH, steps, ranks))
    padded: list[Coefficient] = []
    buffers = [np.zeros(min(BLOCK, ranks) + 2 * depth) for _ in range(3)]
    then = np.empty_like(now)
    for done in track(range(0, steps, depth), -(-steps // depth), f"steps by {depth}"):
        count = min(depth, steps - done)
        around = _pad_ring(now, depth)
        if changes is not None or not padded:
            padded = [_pad_ring(c, depth) if isinstance(c, np.ndarray) else c for c in coefficients]
        computed_periods: dict[bytes, np.ndarray] = {}
        for low in range(0, ranks, BLOCK):
            size = min(BLOCK, ranks - low)
            part = slice(low, low + size + 2 * depth)
            block_coefficients = [c[part] if isinstance(c, np.ndarray) else c for c in padded]
            points = None
            if changes is not None:
                points = changes.inside(done, done + count, low - depth, size + 2 * depth, ranks)
                if points:
                    block_coefficients = [np.array(c) for c in block_coefficients]
                else:
                    block_coefficients = [_drop_never(np.asarray(c)) for c in block_coefficients]
            if points is None and _repeats([around[part], *block_coefficients], period):
                # The ranks of one period, with as many ranks around them as these steps reach.
                once = slice(depth - count, min(depth + period + count, size + 2 * depth))
                rows = [c[once] if isinstance(c, np.ndarray) else c for c in block_coefficients]
                advanced = _advance_period(around[part][once], count, rows, period, buffers, computed_periods)
                then[low : low + size] = np.resize(advanced, size)
            else:
                advanced = _advance_block(around[part], count, block_coefficients, buffers, points)
                then[low : low + size] = advanced[depth : depth + size]
        sent = None if direct is None else direct.between(done, done + count)
        if sent is not None and len(sent):
            points = None if changes is None else changes.between(done, done + count)
            delayed, times = advance_delayed_ranks(now, count, coefficients, sent, points)
            then[delayed] = times
        now, then = then, now
        if changes is not None:
            changes.apply(coefficients, done, done + count)
    return now


def _pad_ring(values: np.ndarray, depth: int) -> np.ndarray:
    """The values of all ranks, with the values of `depth` ranks around the ring before and after them."""
    return np.concatenate((values[len(values) - depth :], values, values[:depth]))


def _drop_never(coefficient: np.ndarray) -> np.ndarray | None:
    """The coefficient, or None where it never decides a maximum."""
    return None if coefficient[0] == NEVER and bool((coefficient == NEVER).all()) else coefficient


def _repeats(rows: Sequence[Coefficient], period: int) -> bool:
    """Whether all rows repeat every `period` ranks, and are longer than two periods."""
    arrays = [row for row in rows if isinstance(row, np.ndarray)]
    return len(arrays[0]) > 2 * period and all(
        row[-1] == row[-1 - period] and row[0] == row[period] and bool((row[period:] == row[:-period]).all())
        for row in arrays
    )


def _advance_period(
    around: np.ndarray,
    steps: int,
    coefficients: Sequence[Coefficient],
    period: int,
    buffers: list[np.ndarray],
    computed: dict[bytes, np.ndarray],
) -> np.ndarray:
    """Times of one period of ranks after some steps, float64 [period]; `computed` holds the equal periods of a step."""
    rows = (around, *coefficients)
    key = b"".join(row[:period].tobytes() if isinstance(row, np.ndarray) else b"." for row in rows)
    if key not in computed:
        computed[key] = _advance_block(around, steps, coefficients, buffers)[steps : steps + period].copy()
    return computed[key]


def _advance_block(
    around: np.ndarray,
    steps: int,
    coefficients: Sequence[Coefficient],
    buffers: list[np.ndarray],
    changes: CoefficientChanges | None = None,
) -> np.ndarray:
    """Times of a block and its neighbors after some steps. Errors at both ends move inward by one rank per step."""
    size = len(around)
    now, then, other = (buffer[:size] for buffer in buffers)
    now[:] = around
    then[:] = around
    own, left, right = (c[1:-1] if isinstance(c, np.ndarray) else c for c in coefficients)
    assert own is not None, "a rank is busy for at least 0 seconds"
    views = [(x[1:-1], x[:-2], x[2:]) for x in (now, then)]
    scratch = other[1:-1]
    first_point = [0] * (steps + 1) if changes is None else np.searchsorted(changes.step, np.arange(steps + 1)).tolist()
    for k in range(steps):
        if first_point[k] < first_point[k + 1] and changes is not None:
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
