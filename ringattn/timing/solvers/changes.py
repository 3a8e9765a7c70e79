"""Steps of a ring whose numbers change at a few ranks from one step to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .recurrence import DirectMessages


@dataclass(frozen=True)
class Changes:
    """`steps` steps of a stencil whose coefficients (own, below, above) change at a few ranks from step to step.

    They begin with `whole`, float64 [ranks] each, or with those before where that is None. Point i sets those of rank
    `rank[i]` to `values[:, i]` from step `at[i]` on; points ascend with their step. `chords` are of these steps, too.
    """

    steps: int
    whole: tuple[np.ndarray, ...] | None
    at: np.ndarray
    rank: np.ndarray
    values: np.ndarray
    chords: DirectMessages | None = None

    def later(self, seconds: float) -> Changes:
        """The same points and chords, where all that ranks wait for takes `seconds` longer. Without `whole`."""
        chords = None if self.chords is None else self.chords.later(seconds)
        return replace(self, whole=None, values=self.values + seconds, chords=chords)

    def between(self, begin: int, end: int) -> Changes:
        """The points at steps begin .. end - 1, which count from `begin`."""
        some = slice(*np.searchsorted(self.at, (begin, end)))
        return Changes(end - begin, None, self.at[some] - begin, self.rank[some], self.values[:, some])

    def inside(self, begin: int, end: int, first: int, width: int, ranks: int) -> Changes | None:
        """The points at steps begin .. end - 1 among `width` ranks from `first` on around the ring, whose ranks count
        from `first`; None where there are none."""
        found = self.between(begin, end)
        away = (found.rank - first) % ranks
        images = [away + turn for turn in range(0, width, ranks)]
        taken = [np.flatnonzero(image < width) for image in images]
        if not any(map(len, taken)):
            return None
        index = np.concatenate(taken)
        away = np.concatenate([image[some] for image, some in zip(images, taken, strict=True)])
        order = np.argsort(found.at[index], kind="stable")
        index, away = index[order], away[order]
        return replace(found, at=found.at[index], rank=away, values=found.values[:, index])

    def among(self, ranks: np.ndarray) -> Changes:
        """The points of some ranks, which ascend and become 0, 1, .."""
        place = np.minimum(np.searchsorted(ranks, self.rank), len(ranks) - 1)
        some = np.flatnonzero(ranks[place] == self.rank)
        return replace(self, at=self.at[some], rank=place[some], values=self.values[:, some], chords=None)

    def apply(self, coefficients: Sequence[np.ndarray | float | None], begin: int, end: int) -> None:
        """Set the coefficients to those after the points of steps begin .. end - 1: of a rank with several, the last."""
        low, high = np.searchsorted(self.at, (begin, end))
        for coefficient, values in zip(coefficients, self.values[:, low:high], strict=True):
            assert isinstance(coefficient, np.ndarray)
            coefficient[self.rank[low:high]] = values
