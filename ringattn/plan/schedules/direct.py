"""Direct: every rank gets the rows that it needs straight from their owners, with the fewest bytes and no relays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from ..row_sets import RowSets
from .base import EXACT_RANKS, LATEST, Edge, Route
from .ring import runs, search


class DirectSchedule(Route):
    """A schedule in which owners send each rank directly the rows that it needs.

    The rank at distance d up the ring gets them for its step d.
    """

    def arrivals(self, rank: int) -> Iterator[Edge]:
        return self._edges_to(rank, 1, self.demand.layout.ranks - 1)

    def edges_at(self, rank: int, step: int) -> tuple[Edge, ...]:
        ranks = self.demand.layout.ranks
        return (_edge((rank - step) % ranks, step, ranks),) if step < ranks else ()

    def arcs(self, rank: int) -> tuple[Iterator[Edge], ...]:
        return self._edges_to(rank, rank + 1, self.demand.layout.ranks - 1), self._edges_to(rank, 1, rank)

    def _edges_to(self, rank: int, near: int, far: int) -> Iterator[Edge]:
        """The edges to `rank` from the owners at distances far .. near before it."""
        ranks = self.demand.layout.ranks
        return (_edge((rank - d) % ranks, d, ranks) for d in self._search(rank, -1, near, far))

    def first_edges(self, owner: int) -> tuple[Edge, ...]:
        return tuple(self._edges_from(owner))[::-1]

    def sends(self, edge: Edge) -> bool:
        distance = (edge.target - edge.owner) % self.demand.layout.ranks
        return edge in self._edges_from(edge.owner, range(distance, distance + 1))

    def _edges_from(self, owner: int, distances: range | None = None) -> Iterator[Edge]:
        """The edges on which the block of `owner` leaves it, latest first; only those of `distances` if given."""
        ranks = self.demand.layout.ranks
        near, far = (1, ranks - 1) if distances is None else (distances[0], distances[-1])
        return (_edge(owner, d, ranks) for d in self._search(owner, +1, near, far))

    def _search(self, rank: int, sign: int, near: int, far: int) -> Iterator[int]:
        """The distances from far to near over which a block must travel, largest first.

        With sign +1 the block of `rank` travels to the ranks up the ring; with -1 those down the ring send theirs to
        `rank`.
        """
        demand, ranks, here = self.demand, self.demand.layout.ranks, range(rank, rank + 1)
        if demand.row_reach is not None:
            visits, others = demand.row_reach.visits, (rank + sign * np.arange(far, near - 1, -1)) % ranks
            needed = visits[others, rank] if sign > 0 else visits[rank, others]
            return iter((far - needed.nonzero()[0]).tolist())

        def some(near: int, far: int) -> bool:
            others = runs(rank + near if sign > 0 else rank - far, far - near + 1, ranks)
            return any(demand.needs(run, here) if sign > 0 else demand.needs(here, run) for run in others)

        return search(some, near, far)

    def next_edges(self, edge: Edge) -> tuple[Edge, ...]:
        return ()

    def served(self, edge: Edge) -> tuple[range, ...]:
        return (range(edge.target, edge.target + 1),)

    def count_moved(self, owners: Sequence[int]) -> int:
        return sum(map(self._count_sent, owners))

    def _count_sent(self, owner: int) -> int:
        """The number of rows that an owner sends, summed over heads.

        With more than EXACT_RANKS ranks, if more than LATEST need rows, LATEST evenly spaced ones stand for all.
        """
        demand, ranks = self.demand, self.demand.layout.ranks
        edges = list(islice(self._edges_from(owner), LATEST + 1 if ranks > EXACT_RANKS else None))
        if ranks <= EXACT_RANKS or len(edges) <= LATEST:
            return sum(demand.count_needed(self.served(edge), owner) for edge in edges)
        others = [(owner + 1 + (ranks - 1) * i // LATEST) % ranks for i in range(LATEST)]
        return sum(demand.count_needed((range(r, r + 1),), owner) for r in others) * (ranks - 1) // LATEST


def _edge(owner: int, distance: int, ranks: int) -> Edge:
    return Edge(owner, owner, (owner + distance) % ranks, distance - 1, distance)


class PullSchedule(DirectSchedule):
    """A schedule for ranks that run one by one: each reads the rows it needs from storage, and writes gradients there.

    Ranks compute with the same blocks in the same order as under `direct`, send nothing to each other, and keep no rows
    for the backward. It is not in `SCHEDULES`, because it plans receives without matching sends.
    """

    def departures(self, rank: int) -> list[Edge]:
        return []

    def sends(self, edge: Edge) -> bool:
        return False

    def last_edges(self, owner: int) -> Iterator[Edge]:
        return iter(())

    def saved_rows(self, rank: int) -> dict[Edge, RowSets]:
        return {}
