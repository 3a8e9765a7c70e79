"""Where rows of a band's blocks stop, and what goes straight between these ranks and the owners; of all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...plan.schedules.relay import Way
from .banded import Banded
from .traffic import BandTraffic

#: Ranks that are counted at a time, which bounds the memory that it takes.
PART = 16384


def stops(band: Banded, way: Way) -> np.ndarray:
    """(owner, distance, rows) of all rows that go so far along a way and no farther, int64 [3, stops].

    Rows beyond a distance only shrink, so that distances between two of equal rows need not be looked at.
    """
    found = [np.zeros((3, 0), dtype=np.int64)]
    for first in range(0, band.ranks, PART):
        owners = np.arange(first, min(first + PART, band.ranks))
        whole, end = (band.rows_beyond(owners, way.sign, distance, way.limit) for distance in (1, way.limit))
        near, far = np.full_like(owners, 1), np.full_like(owners, way.limit)
        # Rows (owner, distance, farther distance, rows beyond the one, beyond the other); most blocks go all the way.
        parts = [np.stack([owners, near, far, whole, end]), np.stack([owners, far, far + 1, end, 0 * end])]
        while parts:
            todo = np.concatenate(parts, axis=1)
            todo = todo[:, todo[3] != todo[4]]
            ends = todo[2] - todo[1] == 1
            owner, low, high, more, less = todo[:, ends]
            found.append(np.stack([owner, low, more - less]))
            owner, low, high, more, less = todo[:, ~ends]
            middle = (low + high) // 2
            at = band.rows_beyond(owner, way.sign, middle, way.limit)
            halves = np.stack([owner, low, middle, more, at]), np.stack([owner, middle, high, at, less])
            parts = [*halves] if len(owner) else []
    return np.concatenate(found, axis=1)


@dataclass(frozen=True)
class LastReceivers:
    """Messages that go straight, by step and then by sender: int64 [messages] each. `bytes` are those of each."""

    ranks: int
    step: np.ndarray
    source: np.ndarray
    target: np.ndarray
    bytes: np.ndarray

    @classmethod
    def of(cls, band: Banded, ways: Sequence[Way], course: BandTraffic, reach: int) -> LastReceivers:
        """Those of a course of the blocks of a band, the farthest of which makes `reach` hops."""
        found = [np.zeros((4, 0), dtype=np.int64)]
        for way in ways if course.straight else ():
            owner, distance, rows = stops(band, way)
            end = (owner + way.sign * distance) % band.ranks
            step, size = distance + 1, rows * course.straight
            if course.back:
                again = ~_kept(end, distance, rows, band.rows)
                found.append(np.stack([reach - step, owner, end, size])[:, again])
            else:
                found.append(np.stack([step, end, owner, size]))
        every = np.concatenate(found, axis=1)
        every = every[:, every[3] > 0]
        return cls(band.ranks, *every[:, np.lexsort((every[1], every[0]))])

    @property
    def beside(self) -> np.ndarray:
        """Which messages go to a neighbour, in the message that the sender may have for it anyway: bool [messages]."""
        return np.isin((self.target - self.source) % self.ranks, (1, self.ranks - 1))

    def some(self, which: np.ndarray | slice) -> LastReceivers:
        """Some of the messages."""
        return LastReceivers(
            self.ranks, self.step[which], self.source[which], self.target[which], self.bytes[which]
        )  # fmt: skip

    def between(self, first: int, last: int) -> LastReceivers:
        """The messages of steps first .. last - 1."""
        return self.some(slice(*np.searchsorted(self.step, (first, last))))

    def keys(self, up: bool) -> tuple[np.ndarray, np.ndarray]:
        """Messages to the next rank (`up`) or to the one before, of neighbours: step * ranks + sender, ascending, and
        bytes. Of two ranks each is the next one of the other."""
        mine = self.some((self.target - self.source) % self.ranks == (1 if up else self.ranks - 1))
        if self.ranks == 2 and not up:
            mine = mine.some(slice(0))
        return mine.step * self.ranks + mine.source, mine.bytes


def _kept(end: np.ndarray, distance: np.ndarray, rows: np.ndarray, block: int) -> np.ndarray:
    """Which rows the ranks where they stop hold on to, as `Route.kept`: of the latest at most as many as a block has."""
    order = np.lexsort((-distance, end))
    before = np.cumsum(rows[order]) - rows[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = end[order][1:] != end[order][:-1]
    before -= before[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))]
    found = np.zeros(len(order), dtype=bool)
    found[order] = (before == 0) | (before + rows[order] <= block)
    return found
