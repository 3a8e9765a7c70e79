"""The ring: blocks are relayed from neighbour to neighbour, as far as some rank needs them."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge

from ..demand import BlockDemand
from ..row_sets import WHOLE_BLOCK, RowSets
from .relay import RouteAlongWays, Way, choose_ways, halve_way, passing, ranks_beyond, reach, row_counts
from .route import Edge

#: The schedule remembers of this many blocks how far they travel whole.
REMEMBERED = 4096


class RingSchedule(RouteAlongWays):
    """Every block goes along each way; the edge at distance d serves the ranks from d to the limit of the way."""

    def __init__(self, demand: BlockDemand) -> None:
        super().__init__(demand)
        self.ways = [way for way in choose_ways(demand) if way.limit]
        self.rings = len(self.ways)
        #: By (owner, way): a distance up to which the whole block travels.
        self._whole_until: dict[tuple[int, int], int] = {}

    def carried(self, edge: Edge) -> RowSets:
        if self.demand.row_reach is not None:
            return super().carried(edge)
        # The rows that travel only shrink with the distance: a block that is whole at some distance was whole before.
        key = edge.owner, edge.ring
        if edge.step <= self._whole_until.get(key, 0):
            return WHOLE_BLOCK
        rows = super().carried(edge)
        if rows == WHOLE_BLOCK:
            if len(self._whole_until) >= REMEMBERED:
                self._whole_until.pop(next(iter(self._whole_until)))
            self._whole_until[key] = edge.step
        return rows

    def arcs(self, rank: int) -> tuple[Iterator[Edge], ...]:
        ranks = self.demand.layout.ranks
        return tuple(
            self._edges_to(rank, ring, half)
            for ring, way in enumerate(self.ways)
            for half in halve_way(rank, ranks, way)
        )

    def arrivals(self, rank: int) -> Iterator[Edge]:
        return merge(*(self._edges_to(rank, ring) for ring in range(self.rings)), key=lambda edge: -edge.step)

    def edges_at(self, rank: int, step: int) -> tuple[Edge, ...]:
        ranks, ways = self.demand.layout.ranks, enumerate(self.ways)
        return tuple(self.edge((rank - w.sign * step) % ranks, ring, step) for ring, w in ways if step <= w.limit)

    def first_edges(self, owner: int) -> tuple[Edge, ...]:
        return tuple(self.edge(owner, ring, 1) for ring, way in enumerate(self.ways) if reach(self.demand, owner, way))

    def next_edges(self, edge: Edge) -> tuple[Edge, ...]:
        if edge.step == reach(self.demand, edge.owner, self.ways[edge.ring]):
            return ()
        return (self.edge(edge.owner, edge.ring, edge.step + 1),)

    def last_edges(self, owner: int) -> Iterator[Edge]:
        for ring, way in enumerate(self.ways):
            for distance, _ in row_counts(self.demand, owner, way):
                yield self.edge(owner, ring, distance)

    def served(self, edge: Edge) -> tuple[range, ...]:
        return ranks_beyond(self.demand, edge.owner, self.ways[edge.ring], edge.step)

    def _edges_to(self, rank: int, ring: int, distances: range | None = None) -> Iterator[Edge]:
        way = self.ways[ring]
        for distance in passing(self.demand, rank, way, distances):
            yield self.edge((rank - way.sign * distance) % self.demand.layout.ranks, ring, distance)

    def edge(self, owner: int, ring: int, distance: int) -> Edge:
        way: Way = self.ways[ring]
        ranks, near = self.demand.layout.ranks, owner + way.sign * (distance - 1)
        return Edge(owner, near % ranks, (near + way.sign) % ranks, distance - 1, distance, ring)
