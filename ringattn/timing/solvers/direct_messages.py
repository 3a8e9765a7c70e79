"""Messages between ranks of a ring that are no neighbours: chords, and the ranks that they delay within some steps.

A delay moves by one rank per step, or jumps along a chord. So within some steps all that chords change lies around
their ends, and these ranks are gone through together, beside the blocks of solver stencil that know nothing of chords.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .changes import Changes
from .recurrence import NEVER, DirectMessages


def joined(
    now: np.ndarray,
    steps: int,
    coefficients: Sequence[np.ndarray | float | None],
    chords: DirectMessages,
    changes: Changes | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The ranks that chords may delay within `steps` steps of the stencil max(now + own, below + left, above + right),
    ascending, and their times after these steps. `changes` are those of all ranks at the same steps.
    """
    ranks = len(now)
    ends = np.concatenate([chords.source, chords.target])
    # What is wrong at the ends of runs of ranks moves inward by one rank per step, too.
    taken = _around(ends, 2 * steps, ranks)
    here = now[taken]
    own, left, right = (np.array(np.broadcast_to(NEVER if c is None else c, (ranks,))[taken]) for c in coefficients)
    points = None if changes is None else changes.among(taken)
    source, target = np.searchsorted(taken, chords.source), np.searchsorted(taken, chords.target)
    both, seconds = np.stack([source, target]), chords.seconds
    first = np.searchsorted(chords.at, np.arange(steps + 1)).tolist()
    begins = [0] * (steps + 1) if points is None else np.searchsorted(points.at, np.arange(steps + 1)).tolist()
    for k in range(steps):
        if points is not None and begins[k] < begins[k + 1]:
            points.apply((own, left, right), k, k + 1)
        # The last of these ranks stands before the first, as it does where they are all.
        then = here + own
        np.maximum(then[1:], here[:-1] + left[1:], out=then[1:])
        np.maximum(then[:-1], here[1:] + right[:-1], out=then[:-1])
        then[0], then[-1] = max(then[0], here[-1] + left[0]), max(then[-1], here[0] + right[-1])
        some = slice(first[k], first[k + 1])
        if some.start < some.stop:
            ended = np.maximum(here[source[some]], here[target[some]]) + seconds[some]
            # Not broadcast: maximum.at of numpy 2.4 reads beyond values that are.
            np.maximum.at(then, both[:, some].ravel(), np.concatenate([ended, ended]))
        here = then
    reached = _around(ends, steps, ranks)
    return reached, here[np.searchsorted(taken, reached)]


def _around(ends: np.ndarray, away: int, ranks: int) -> np.ndarray:
    """The ranks at most `away` around the ring from some, ascending."""
    if 2 * away + 1 >= ranks:
        return np.arange(ranks)
    places = np.unique(ends)
    gap = np.flatnonzero(np.diff(places) > 2 * away)
    starts, stops = places[np.append(0, gap + 1)] - away, places[np.append(gap, len(places) - 1)] + away + 1
    runs = [np.arange(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    return np.unique(np.concatenate(runs) % ranks)
