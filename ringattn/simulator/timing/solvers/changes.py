"""Steps of a ring whose stencil coefficients change at a few ranks from one step to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .recurrence import NEVER, DirectMessages


@dataclass(frozen=True)
class CoefficientChanges:
    """`steps` steps of a stencil whose coefficients change at a few ranks: (own, below, above), and maybe busy seconds.

    The steps begin with the coefficients `initial`, float64 [ranks] each, or keep the previous coefficients where
    `initial` is None. From step `step[i]` on, rank `rank[i]` has the coefficients `values[:, i]`; points ascend with
    their step. `direct` are the direct messages of the same steps.
    """

    steps: int
    initial: tuple[np.ndarray, ...] | None
    step: np.ndarray
    rank: np.ndarray
    values: np.ndarray
    direct: DirectMessages | None = None

    def timed(self) -> CoefficientChanges:
        """The changes without busy seconds."""
        return replace(self, initial=None if self.initial is None else self.initial[:3], values=self.values[:3])

    def instant(self) -> CoefficientChanges:
        """The changes without busy seconds, where messages take no time."""

        def change(own: np.ndarray, below: np.ndarray, above: np.ndarray, busy: np.ndarray) -> list[np.ndarray]:
            return [busy, *(np.where(np.isfinite(value), 0.0, NEVER) for value in (below, above))]

        return replace(
            self,
            initial=None if self.initial is None else tuple(change(*self.initial)),
            values=np.stack(change(*self.values)),
            direct=None if self.direct is None else self.direct.instant(),
        )

    def lengthened(self, seconds: float) -> CoefficientChanges:
        """The same points and direct messages with `seconds` added to every wait, and without `initial`."""
        direct = None if self.direct is None else self.direct.lengthened(seconds)
        return replace(self, initial=None, values=self.values + seconds, direct=direct)

    def between(self, begin: int, end: int) -> CoefficientChanges:
        """The points at steps begin .. end - 1, whose steps then count from `begin`."""
        part = slice(*np.searchsorted(self.step, (begin, end)))
        return CoefficientChanges(end - begin, None, self.step[part] - begin, self.rank[part], self.values[:, part])

    def inside(self, begin: int, end: int, first: int, width: int, ranks: int) -> CoefficientChanges | None:
        """The points at steps begin .. end - 1 among `width` ranks from rank `first` on around the ring.

        The ranks of the result count from `first`; a rank that the width covers twice has its points twice. None where
        there are no points.
        """
        selected = self.between(begin, end)
        offset = (selected.rank - first) % ranks
        images = [offset + turn for turn in range(0, width, ranks)]
        covered = [np.flatnonzero(image < width) for image in images]
        if not any(map(len, covered)):
            return None
        index = np.concatenate(covered)
        offset = np.concatenate([image[part] for image, part in zip(images, covered, strict=True)])
        order = np.argsort(selected.step[index], kind="stable")
        index, offset = index[order], offset[order]
        return replace(selected, step=selected.step[index], rank=offset, values=selected.values[:, index])

    def among(self, ranks: np.ndarray) -> CoefficientChanges:
        """The points of some ranks. `ranks` ascend, and count as 0, 1, .. in the result."""
        place = np.minimum(np.searchsorted(ranks, self.rank), len(ranks) - 1)
        part = np.flatnonzero(ranks[place] == self.rank)
        return replace(self, step=self.step[part], rank=place[part], values=self.values[:, part], direct=None)

    def apply(self, coefficients: Sequence[np.ndarray | float | None], begin: int, end: int) -> None:
        """Set coefficients in place to their values after steps begin .. end - 1; the last point of a rank holds."""
        low, high = np.searchsorted(self.step, (begin, end))
        for coefficient, values in zip(coefficients, self.values[:, low:high], strict=True):
            assert isinstance(coefficient, np.ndarray)
            coefficient[self.rank[low:high]] = values
