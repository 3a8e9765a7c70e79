"""Pull: `direct` for ranks that run one at a time, and read all blocks from a storage that each of them can reach."""

from __future__ import annotations

from collections.abc import Iterator

from ..row_sets import RowSets
from ..steps import RankPlan
from .direct import DirectSchedule
from .route import Edge


class PullSchedule(DirectSchedule):
    """A rank fetches the rows that it needs and stores their gradients; it serves no other rank, and keeps no parts.

    The visits are the visits of `direct`, in the same order. `SCHEDULES` has no name for this schedule: ranks that run
    together need both ends of each message.
    """

    def departures(self, rank: int, block: tuple[int, int] | None = None) -> list[Edge]:
        return []

    def last_edges(self, owner: int) -> Iterator[Edge]:
        return iter(())

    def kept_rows(self, rank: int) -> dict[Edge, RowSets]:
        return {}

    def steps(self, rank: int) -> RankPlan:
        """The steps of a rank; in the backward keys travel."""
        return RankPlan(rank, self.forward(rank), self.backward(rank))
