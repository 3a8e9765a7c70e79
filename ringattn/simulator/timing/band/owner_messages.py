"""Direct messages between owners of blocks and the last receivers of rows of the blocks, of all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....plan.schedules.relay import Way
from .band import Band
from .traffic import BandTraffic

#: Ranks that are counted at a time, which bounds memory.
RANKS_AT_A_TIME = 16384


def find_last_receivers(band: Band, way: Way) -> np.ndarray:
    """(owner, distance, rows) of all rows whose last receiver on a way is at that distance, int64 [3, entries].

    Fewer rows are needed beyond a larger distance, so that distances between two with equally many rows are skipped.
    """
    entries = [np.zeros((3, 0), dtype=np.int64)]
    for first in range(0, band.ranks, RANKS_AT_A_TIME):
        owners = np.arange(first, min(first + RANKS_AT_A_TIME, band.ranks))
        rows_near, rows_far = (band.rows_beyond(owners, way.sign, distance, way.limit) for distance in (1, way.limit))
        near, far = np.full_like(owners, 1), np.full_like(owners, way.limit)
        # Intervals (owner, near distance, far distance, rows from the near one on, rows from the far one on); most
        # blocks go all the way.
        intervals = [
            np.stack([owners, near, far, rows_near, rows_far]),
            np.stack([owners, far, far + 1, rows_far, 0 * rows_far]),
        ]
        while intervals:
            unequal = np.concatenate(intervals, axis=1)
            unequal = unequal[:, unequal[3] != unequal[4]]
            adjacent = unequal[2] - unequal[1] == 1
            owner, low, high, rows_low, rows_high = unequal[:, adjacent]
            entries.append(np.stack([owner, low, rows_low - rows_high]))
            owner, low, high, rows_low, rows_high = unequal[:, ~adjacent]
            middle = (low + high) // 2
            rows_middle = band.rows_beyond(owner, way.sign, middle, way.limit)
            halves = (
                np.stack([owner, low, middle, rows_low, rows_middle]),
                np.stack([owner, middle, high, rows_middle, rows_high]),
            )
            intervals = [*halves] if len(owner) else []
    return np.concatenate(entries, axis=1)


@dataclass(frozen=True)
class OwnerMessages:
    """`bytes` that go directly between owners and last receivers, one int64 entry per message.

    Messages ascend by `step`, messages of one step by `source`.
    """

    ranks: int
    step: np.ndarray
    source: np.ndarray
    target: np.ndarray
    bytes: np.ndarray

    @classmethod
    def of(cls, band: Band, ways: Sequence[Way], traffic: BandTraffic, reach: int) -> OwnerMessages:
        """The messages of a band's traffic, where the block that goes farthest makes `reach` hops."""
        entries = [np.zeros((4, 0), dtype=np.int64)]
        for way in ways if traffic.direct_row_bytes else ():
            owner, distance, rows = find_last_receivers(band, way)
            receiver = (owner + way.sign * distance) % band.ranks
            step, size = distance + 1, rows * traffic.direct_row_bytes
            if traffic.homeward:
                sent_again = ~_find_kept(receiver, distance, rows, band.rows)
                entries.append(np.stack([reach - step, owner, receiver, size])[:, sent_again])
            else:
                entries.append(np.stack([step, receiver, owner, size]))
        messages = np.concatenate(entries, axis=1)
        messages = messages[:, messages[3] > 0]
        return cls(band.ranks, *messages[:, np.lexsort((messages[1], messages[0]))])

    @property
    def to_neighbor(self) -> np.ndarray:
        """Which messages go to a neighbor, where they join the sender's other rows: bool [messages]."""
        return np.isin((self.target - self.source) % self.ranks, (1, self.ranks - 1))

    def select(self, which: np.ndarray | slice) -> OwnerMessages:
        """The messages that a mask or a slice selects."""
        return OwnerMessages(self.ranks, self.step[which], self.source[which], self.target[which], self.bytes[which])

    def between(self, first: int, last: int) -> OwnerMessages:
        """The messages of steps first .. last - 1."""
        return self.select(slice(*np.searchsorted(self.step, (first, last))))

    def neighbor_keys(self, up: bool) -> tuple[np.ndarray, np.ndarray]:
        """Messages to the next rank (`up`) or to the previous rank: step * ranks + sender, ascending, and bytes.

        Of two ranks each is the next rank of the other.
        """
        sent = self.select((self.target - self.source) % self.ranks == (1 if up else self.ranks - 1))
        if self.ranks == 2 and not up:
            sent = sent.select(slice(0))
        return sent.step * self.ranks + sent.source, sent.bytes


def _find_kept(receiver: np.ndarray, distance: np.ndarray, rows: np.ndarray, block: int) -> np.ndarray:
    """Which rows their last receivers keep for the backward, as `Route.kept` says: bool [entries].

    A receiver keeps its latest rows, as many as a block has, and its very latest rows in any case.
    """
    order = np.lexsort((-distance, receiver))
    rows_before = np.cumsum(rows[order]) - rows[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = receiver[order][1:] != receiver[order][:-1]
    rows_before -= rows_before[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))]
    kept = np.zeros(len(order), dtype=bool)
    kept[order] = (rows_before == 0) | (rows_before + rows[order] <= block)
    return kept
