"""The state of a ring between two steps, advanced by the recurrence: every rank at every step, exactly.

The state is kept as a delay, D = S - k * reference, which stays small: float64 loses nothing over 262,144 steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...progress import track
from .recurrence import NO_DIRECT, DirectMessages, Phase, Ring, instant, largest

#: Steps between two progress reports.
DEPTH = 128
#: For the neighbor below and the one above: (ranks, their neighbors, the rank at one end, its neighbor at the other).
NEIGHBORS = ((slice(1, None), slice(None, -1), 0, -1), (slice(None, -1), slice(1, None), -1, 0))


@dataclass(frozen=True)
class CoefficientChanges:
    """`steps` steps of a stencil whose coefficients (own, below, above) and busy seconds change at a few ranks.

    The steps begin with the numbers `initial`, float64 [4, ranks]; None keeps the previous ones. From step `step[i]`
    on, rank `rank[i]` has the numbers `values[:, i]`; `step` is ascending. `direct` are the direct messages.
    """

    steps: int
    initial: np.ndarray | None
    step: np.ndarray
    rank: np.ndarray
    values: np.ndarray
    direct: DirectMessages = NO_DIRECT

    def instant(self) -> CoefficientChanges:
        """The changes if messages took no time; ranks are busy as long as before."""

        def change(values: np.ndarray) -> np.ndarray:
            return np.stack([values[3], instant(values[1]), instant(values[2]), values[3]])

        initial = None if self.initial is None else change(self.initial)
        values = change(self.values)
        return CoefficientChanges(self.steps, initial, self.step, self.rank, values, self.direct.instant())


#: No changes: empty `step`, `rank` and `values`.
NO_POINTS = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros((4, 0))


class DelayState:
    """When each rank begins step `step`, relative to `step` x `reference`."""

    def __init__(self, ring: Ring) -> None:
        self.ring, self.step, self.reference = ring, 0, 0.0
        #: Coefficients of the last step, minus `reference`, float64 [3, ranks].
        self.coefficients = np.zeros((3, ring.ranks))
        #: The delays, float64 [ranks]: all that later steps depend on.
        self.now = np.zeros(ring.ranks)

    def finish(self) -> np.ndarray:
        """Seconds at which each rank has finished its last step, float64 [ranks]."""
        return self.now + self.step * self.reference

    def skip(self, steps: int, gain: float) -> None:
        """Skip steps that change the state only by a constant: `gain` seconds relative to the reference."""
        self.step += steps
        self.now = self.now + gain

    def advance(self, phase: Phase, steps: int) -> None:
        """Advance by `steps` steps of a phase; only one step if it has direct messages."""
        if not self.step:
            longest = largest(self.ring.busy(phase), *(sent.seconds for sent in phase.messages))
            self.reference = float(np.max(longest))
        for value, row in zip(self.ring.coefficients(phase), self.coefficients, strict=True):
            row[:] = value - self.reference
        for done in track(range(0, steps, DEPTH), -(-steps // DEPTH), f"steps by {DEPTH}"):
            self.advance_changes(CoefficientChanges(min(DEPTH, steps - done), None, *NO_POINTS, phase.direct))

    def advance_changes(self, changes: CoefficientChanges) -> None:
        """Advance by the stencil (see recurrence.py), and to the ends of direct messages.

        The largest initial coefficient, if any, becomes the new reference.
        """
        if changes.initial is not None:
            longest = float(changes.initial[:3].max())
            # The same times, relative to another reference.
            self.now = self.now + self.step * (self.reference - longest)
            self.reference = longest
            self.coefficients = changes.initial[:3] - longest
        steps, direct, values = changes.steps, changes.direct, changes.values[:3] - self.reference
        busy = self._find_busy(changes, values)
        self.now = self.now.copy()  # the old array may be in use elsewhere
        self.now[: busy.start] += steps * self.coefficients[0, : busy.start]
        self.now[busy.stop :] += steps * self.coefficients[0, busy.stop :]
        coefficients = self.coefficients[:, busy]
        now, then, scratch = self.now[busy], *np.empty((2, coefficients.shape[1]))
        own, *others = coefficients
        first_point = np.searchsorted(changes.step, np.arange(steps + 1)).tolist()
        first_message = np.searchsorted(direct.step, self.step + np.arange(steps + 1)).tolist()
        sides = [
            (coefficient, *side)
            for coefficient, later, side in zip(others, values[1:], NEIGHBORS, strict=True)
            if np.isfinite(coefficient).any() or np.isfinite(later).any()
        ]
        for k in range(steps):
            if first_point[k] < first_point[k + 1]:
                part = slice(first_point[k], first_point[k + 1])
                coefficients[:, changes.rank[part] - busy.start] = values[:, part]
            np.add(now, own, out=then)
            for coefficient, ranks, neighbors, end, other_end in sides:
                np.add(now[neighbors], coefficient[ranks], out=scratch[ranks])
                scratch[end] = now[other_end] + coefficient[end]
                np.maximum(then, scratch, out=then)
            if first_message[k] < first_message[k + 1]:
                part = slice(first_message[k], first_message[k + 1])
                ends = np.stack([direct.source[part], direct.target[part]]) - busy.start
                ended = now[ends].max(axis=0) + (direct.seconds[part] - self.reference)
                # Do not broadcast: np.maximum.at of numpy 2.4 reads beyond the end of broadcast values.
                np.maximum.at(then, ends.ravel(), np.concatenate([ended, ended]))
            now, then = then, now
        self.now[busy] = now
        self.step += steps

    def _find_busy(self, changes: CoefficientChanges, values: np.ndarray) -> slice:
        """A run of ranks that includes all ranks that do anything in these steps, and their neighbors.

        All ranks if the last exchanges messages with the first. `values` are relative to the reference.
        """
        own, below, above = self.coefficients
        works = np.flatnonzero((own != -self.reference) | np.isfinite(below) | np.isfinite(above))
        ranks = np.concatenate([works, changes.rank, changes.direct.source, changes.direct.target])
        if not len(ranks):
            return slice(0, 0)
        ends = below[:1], above[-1:], values[1, changes.rank == 0], values[2, changes.rank == self.ring.ranks - 1]
        if np.isfinite(np.concatenate(ends)).any():
            return slice(0, self.ring.ranks)
        return slice(max(int(ranks.min()) - 1, 0), int(ranks.max()) + 2)
