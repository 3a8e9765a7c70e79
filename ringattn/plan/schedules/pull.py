"""Pull: `direct` for ranks that run one at a time, and find all blocks where each of them can reach for itself."""

from __future__ import annotations

from collections.abc import Iterator

from ..row_sets import RowSets
from ..steps import RankPlan
from .direct import DirectSchedule
from .route import Edge


class PullSchedule(DirectSchedule):
    """A rank takes the rows that it needs and brings back their gradients; it serves nobody, and keeps nothing.

    Its visits are those of `direct`, in the same order. No name stands for it: ranks that wait for each other need
    both ends of a hop.
    """

    def departing(self, rank: int) -> list[Edge]:
        return []

    def stops(self, owner: int) -> Iterator[Edge]:
        return iter(())

    def kept(self, rank: int) -> dict[Edge, RowSets]:
        return {}

    def steps(self, rank: int) -> RankPlan:
        """The steps of a rank; keys rotate."""
        return RankPlan(rank, self.forward(rank), self.backward(rank))
