"""Direct: every rank gets the rows that it needs straight from their owners. The fewest bytes, and no relay."""

from __future__ import annotations

from collections.abc import Iterator

from .relay import runs, search
from .route import Edge, Route


class DirectSchedule(Route):
    """A star around every owner: the edge to the rank at distance d up the ring has time d."""

    def arrivals(self, rank: int) -> Iterator[Edge]:
        return self._from(rank, 1, self.demand.layout.ranks - 1)

    def at(self, rank: int, time: int) -> tuple[Edge, ...]:
        ranks = self.demand.layout.ranks
        return (_edge((rank - time) % ranks, time, ranks),) if time < ranks else ()

    def arcs(self, rank: int) -> tuple[Iterator[Edge], ...]:
        return self._from(rank, rank + 1, self.demand.layout.ranks - 1), self._from(rank, 1, rank)

    def _from(self, rank: int, near: int, far: int) -> Iterator[Edge]:
        """The edges to `rank` from the owners far .. near places before it."""
        ranks = self.demand.layout.ranks
        here = range(rank, rank + 1)

        def needed(near: int, far: int) -> bool:
            return any(self.demand.needs(here, owners) for owners in runs(rank - far, far - near + 1, ranks))

        return (_edge((rank - d) % ranks, d, ranks) for d in search(needed, near, far))

    def first(self, owner: int) -> tuple[Edge, ...]:
        return tuple(self.leaving(owner))[::-1]

    def leaving(self, owner: int) -> Iterator[Edge]:
        """The edges on which the block of `owner` leaves it, the latest first."""
        ranks = self.demand.layout.ranks
        here = range(owner, owner + 1)

        def wanted(near: int, far: int) -> bool:
            return any(self.demand.needs(queriers, here) for queriers in runs(owner + near, far - near + 1, ranks))

        return (_edge(owner, d, ranks) for d in search(wanted, 1, ranks - 1))

    def onward(self, edge: Edge) -> tuple[Edge, ...]:
        return ()

    def behind(self, edge: Edge) -> tuple[range, ...]:
        return (range(edge.target, edge.target + 1),)


def _edge(owner: int, distance: int, ranks: int) -> Edge:
    return Edge(owner, owner, (owner + distance) % ranks, distance - 1, distance)
