"""The stencil of a ring together with direct messages, at the ranks that these messages may delay.

A delay moves by one rank per step, or jumps along a direct message. So all that direct messages change within some
steps lies around their ends. These ranks are advanced together, beside the blocks of ranks that ignore direct messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .changes import CoefficientChanges
from .recurrence import NEVER, DirectMessages


def advance_delayed_ranks(
    now: np.ndarray,
    steps: int,
    coefficients: Sequence[np.ndarray | float | None],
    direct: DirectMessages,
    changes: CoefficientChanges | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The ranks that direct messages may delay within `steps` steps, ascending, and their times after the steps.

    A step is max(now + own, below + left, above + right), and for both ends of a direct message max(source, target) +
    seconds. `changes` are the changed coefficients of all ranks at the same steps.
    """
    ranks = len(now)
    ends = np.concatenate([direct.source, direct.target])
    # Errors at the ends of runs of ranks move inward by one rank per step, so that twice as many ranks are advanced.
    advanced = _ranks_around(ends, 2 * steps, ranks)
    here = now[advanced]
    own, left, right = (np.array(np.broadcast_to(NEVER if c is None else c, (ranks,))[advanced]) for c in coefficients)
    points = None if changes is None else changes.among(advanced)
    source, target = np.searchsorted(advanced, direct.source), np.searchsorted(advanced, direct.target)
    both_ends = np.stack([source, target])
    first_message = np.searchsorted(direct.step, np.arange(steps + 1)).tolist()
    first_point = [0] * (steps + 1)
    if points is not None:
        first_point = np.searchsorted(points.step, np.arange(steps + 1)).tolist()
    for k in range(steps):
        if points is not None and first_point[k] < first_point[k + 1]:
            points.apply((own, left, right), k, k + 1)
        # The last advanced rank is the neighbor of the first: true where all ranks are advanced, else an end of a run.
        then = here + own
        np.maximum(then[1:], here[:-1] + left[1:], out=then[1:])
        np.maximum(then[:-1], here[1:] + right[:-1], out=then[:-1])
        then[0], then[-1] = max(then[0], here[-1] + left[0]), max(then[-1], here[0] + right[-1])
        sent = slice(first_message[k], first_message[k + 1])
        if sent.start < sent.stop:
            ended = np.maximum(here[source[sent]], here[target[sent]]) + direct.seconds[sent]
            # Not broadcast: np.maximum.at of numpy 2.4 reads beyond the end of broadcast values.
            np.maximum.at(then, both_ends[:, sent].ravel(), np.concatenate([ended, ended]))
        here = then
    delayed = _ranks_around(ends, steps, ranks)
    return delayed, here[np.searchsorted(advanced, delayed)]


def _ranks_around(ends: np.ndarray, distance: int, ranks: int) -> np.ndarray:
    """The ranks at most `distance` around the ring from some of `ends`, ascending."""
    if 2 * distance + 1 >= ranks:
        return np.arange(ranks)
    places = np.unique(ends)
    gaps = np.flatnonzero(np.diff(places) > 2 * distance)
    starts = places[np.append(0, gaps + 1)] - distance
    stops = places[np.append(gaps, len(places) - 1)] + distance + 1
    runs = [np.arange(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    return np.unique(np.concatenate(runs) % ranks)
