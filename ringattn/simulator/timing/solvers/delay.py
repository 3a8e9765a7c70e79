"""The state of a ring between two steps, advanced by the recurrence: every rank at every step, exactly.

The state is kept as a delay, D = S - k * reference, which stays small: float64 loses nothing over 262,144 steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...progress import track
from ..band.band import distinct
from .recurrence import NO_DIRECT, DirectMessages, Phase, Ring, Value, instant

#: Steps between two progress reports.
DEPTH = 256
#: Fewer steps are computed for all ranks.
FEWEST = 32
#: Two ranks gain the same in a step if the difference is at most this fraction of a step's time.
STEADY = 3e-14
#: For the neighbor below and the one above: (ranks, their neighbors, the rank at one end, its neighbor at the other).
NEIGHBORS = ((slice(1, None), slice(None, -1), 0, -1), (slice(None, -1), slice(1, None), -1, 0))


@dataclass(frozen=True)
class CoefficientChanges:
    """How the coefficients and busy seconds of a stencil change, at a few ranks, in the course of `steps` steps.

    A stencil computes when each rank begins a step from when it (own) and its neighbors (rank - 1, rank + 1) began the
    last one. The steps begin with the numbers `initial`, float64 [4, ranks]: three coefficients and the busy seconds;
    None keeps the previous ones. From step `step[i]` on, rank `rank[i]` has the numbers `values[:, i]`; `step` is
    ascending. `direct` are the direct messages.
    """

    steps: int
    initial: np.ndarray | None
    step: np.ndarray
    rank: np.ndarray
    values: np.ndarray
    direct: DirectMessages = NO_DIRECT


#: No changes: empty `step`, `rank` and `values`.
NO_POINTS = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros((4, 0))


class DelayState:
    """Simulates a ring step by step: how late each rank begins a step, compared with typical steps until then.

    A rank begins step `step` at its delay + `step` * `reference` seconds, where `reference` is the time of a typical
    step. `instant`: as if messages took no time; ranks still wait until both ends have begun a step, and are busy as
    long.
    """

    def __init__(self, ring: Ring, *, instant: bool = False) -> None:
        self.ring, self.instant, self.step, self.reference = ring, instant, 0, 0.0
        #: Seconds subtracted from all delays, to keep them small.
        self.passed = 0.0
        #: Coefficients of the last step, minus `reference`, float64 [3, ranks].
        self.coefficients = np.zeros((3, ring.ranks))
        #: The delays, float64 [ranks]: all that later steps depend on.
        self.now = np.zeros(ring.ranks)

    def finish(self) -> np.ndarray:
        """Seconds at which each rank has finished its last step, float64 [ranks]."""
        return self.now + (self.passed + self.step * self.reference)

    def skip(self, steps: int, gain: float) -> None:
        """Go `steps` steps ahead, in which the delay of every rank grows by `gain` seconds."""
        self.step += steps
        self.now = self.now + gain

    def advance(self, phase: Phase, steps: int) -> None:
        """Simulate `steps` steps of a phase; `steps` must be 1 if the phase has direct messages."""
        coefficients = self._choose(*self.ring.coefficients(phase))
        if not self.step:
            self.reference = float(np.max(coefficients[0]))
        for value, row in zip(coefficients, self.coefficients, strict=True):
            row[:] = value - self.reference
        for done in track(range(0, steps, DEPTH), -(-steps // DEPTH), f"steps by {DEPTH}"):
            self.advance_changes(CoefficientChanges(min(DEPTH, steps - done), None, *NO_POINTS, phase.direct))

    def _choose(self, own: Value, below: Value, above: Value, busy: Value) -> tuple[Value, Value, Value]:
        """The stencil of a step, from the numbers of a phase or of `CoefficientChanges`."""
        return (busy, instant(below), instant(above)) if self.instant else (own, below, above)

    def advance_changes(self, changes: CoefficientChanges) -> None:
        """Simulate all steps of `changes`: the stencil (see recurrence.py), and waiting for direct messages.

        The largest initial coefficient, if any, becomes the new reference.
        """
        if changes.initial is not None:
            initial = np.stack(self._choose(*changes.initial))
            longest = float(initial.max())
            # The same times, relative to another reference.
            self.now = self.now + self.step * (self.reference - longest)
            self.reference = longest
            self.coefficients = initial - longest
        every = np.arange(self.ring.ranks)
        if changes.steps < FEWEST or 4 * changes.steps >= len(every):  # windows would not be much smaller
            self._run(changes, every, range(changes.steps), np.zeros(1))
            return
        latest = float(self.now.max())
        self.now, self.passed = self.now - latest, self.passed + latest
        before = self.now
        self._run(changes, every, range(1), np.zeros(1))
        gains = self.now - before
        rounding = STEADY * max(self.reference, float(np.abs(self.now).max()))
        differ = np.abs(gains - np.roll(gains, 1)) > rounding
        firsts = np.flatnonzero(differ)  # ranks between two of these gain the same
        some = firsts if firsts.size else every[:1]
        own, gains = self.coefficients[0, some], gains[some]
        gains = np.where(np.abs(gains - own) <= rounding, own, gains)
        # Around the ring, the ranks below the first of these follow the last of these.
        gains = np.repeat(np.append(gains[-1:], gains), np.diff(some, prepend=0, append=len(every)))
        self._run(changes, self._find_unsteady(changes, firsts), range(1, changes.steps), gains)

    def _run(self, changes: CoefficientChanges, ranks: np.ndarray, steps: range, gains: np.ndarray) -> None:
        """Compute `ranks`, ascending, in the given steps of the changes; all other ranks gain `gains` in each step.

        The first and last rank of each run of consecutive `ranks` gain `gains`, too, as a neighbor of theirs is not
        computed; if `ranks` are the whole ring, it has no such ends.
        """
        size, direct = self.ring.ranks, changes.direct
        values = np.stack(self._choose(*changes.values)) - self.reference
        direct_seconds = np.zeros(len(direct)) if self.instant else direct.seconds
        changed, ends, edges = changes.rank, np.stack([direct.source, direct.target]), ranks[:0]
        now, held, coefficients = self.now, self.now.copy(), self.coefficients
        if len(ranks) < size:
            now, held, coefficients = now + len(steps) * gains, now[ranks], coefficients[:, ranks]
            # A rank that is not computed gets an arbitrary place, which none of these steps reads.
            changed, ends = (np.searchsorted(ranks, x) % max(len(ranks), 1) for x in (changed, ends))
            breaks = np.flatnonzero(np.diff(ranks, append=ranks[:1]) % size != 1)
            edges = np.concatenate([breaks, (breaks + 1) % max(len(ranks), 1)])
        then, scratch = np.empty((2, len(ranks)))
        own, *others = coefficients
        first_point = np.searchsorted(changes.step, np.arange(steps.start, steps.stop + 1)).tolist()
        first_message = np.searchsorted(direct.step, self.step + np.arange(len(steps) + 1)).tolist()
        sides = [
            (coefficient, *side)
            for coefficient, later, side in zip(others, values[1:], NEIGHBORS, strict=True)
            if len(ranks) and (np.isfinite(coefficient).any() or np.isfinite(later).any())
        ]
        for k in range(len(steps)):
            if first_point[k] < first_point[k + 1]:
                part = slice(first_point[k], first_point[k + 1])
                coefficients[:, changed[part]] = values[:, part]
            np.add(held, own, out=then)
            for coefficient, mine, neighbors, end, other_end in sides:
                np.add(held[neighbors], coefficient[mine], out=scratch[mine])
                scratch[end] = held[other_end] + coefficient[end]
                np.maximum(then, scratch, out=then)
            if first_message[k] < first_message[k + 1]:
                part = slice(first_message[k], first_message[k + 1])
                ended = held[ends[:, part]].max(axis=0) + (direct_seconds[part] - self.reference)
                # Do not broadcast: np.maximum.at of numpy 2.4 reads beyond the end of broadcast values.
                np.maximum.at(then, ends[:, part].ravel(), np.concatenate([ended, ended]))
            if len(edges):
                then[edges] = held[edges] + gains[ranks[edges]]
            held, then = then, held
        self.step += len(steps)
        if len(ranks) == size:
            self.now = held
            return
        now[ranks] = held
        self.now, self.coefficients[:, ranks] = now, coefficients

    def _find_unsteady(self, changes: CoefficientChanges, firsts: np.ndarray) -> np.ndarray:
        """The ranks whose gain in a later step may differ from that in the first of these steps.

        `firsts` are the ranks whose gain differs from that of the rank below. A rank that gains the same as its
        neighbors gains it again in the next step, as the recurrence is max-plus linear. A difference or a change
        reaches one rank further in each step.
        """
        size, far = self.ring.ranks, changes.steps + 1
        later = changes.rank[changes.step > 0]
        origins = np.concatenate([firsts, firsts - 1, later, changes.direct.source, changes.direct.target])
        origins = distinct(origins % size)
        apart = np.flatnonzero(np.diff(origins) > 2 * far)
        begins, ends = origins[np.append(0, apart + 1)[: len(origins)]], origins[np.append(apart, -1)[: len(origins)]]
        windows = [np.arange(begin - far, end + far + 1) for begin, end in zip(begins, ends, strict=True)]
        return distinct(np.concatenate([origins[:0], *windows]) % size)  # a window may pass the end of the ring
