"""The ring: blocks are relayed from neighbour to neighbour, as far as somebody needs them."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge

from ..block_demand import BlockDemand
from ..row_sets import WHOLE, RowSets
from .relay import Way, beyond, halves, passing, reach, sizes, ways
from .route import Edge, Route

#: Blocks of which is remembered how far they travel whole.
REMEMBERED = 4096


class RingSchedule(Route):
    """Every block goes along each way of the ring; its edge at distance d serves the ranks from d to the way's limit."""

    def __init__(self, demand: BlockDemand) -> None:
        super().__init__(demand)
        self.ways = [way for way in ways(demand) if way.limit]
        self.lanes = len(self.ways)
        self._whole: dict[tuple[int, int], int] = {}

    def cuts(self, edge: Edge) -> RowSets:
        # What travels only shrinks: what is whole at some distance was whole before.
        key = edge.owner, edge.lane
        if edge.time <= self._whole.get(key, 0):
            return WHOLE
        found = super().cuts(edge)
        if found == WHOLE:
            if len(self._whole) >= REMEMBERED:
                self._whole.pop(next(iter(self._whole)))
            self._whole[key] = edge.time
        return found

    def arcs(self, rank: int) -> tuple[Iterator[Edge], ...]:
        ranks = self.demand.layout.ranks
        return tuple(
            self._along(rank, lane, half) for lane, way in enumerate(self.ways) for half in halves(rank, ranks, way)
        )

    def arrivals(self, rank: int) -> Iterator[Edge]:
        return merge(*(self._along(rank, lane) for lane in range(self.lanes)), key=lambda edge: -edge.time)

    def at(self, rank: int, time: int) -> tuple[Edge, ...]:
        ranks, ways = self.demand.layout.ranks, enumerate(self.ways)
        return tuple(self._edge((rank - w.sign * time) % ranks, lane, time) for lane, w in ways if time <= w.limit)

    def first(self, owner: int) -> tuple[Edge, ...]:
        return tuple(self._edge(owner, lane, 1) for lane, way in enumerate(self.ways) if reach(self.demand, owner, way))

    def onward(self, edge: Edge) -> tuple[Edge, ...]:
        if edge.time == reach(self.demand, edge.owner, self.ways[edge.lane]):
            return ()
        return (self._edge(edge.owner, edge.lane, edge.time + 1),)

    def stops(self, owner: int) -> Iterator[Edge]:
        for lane, way in enumerate(self.ways):
            for distance, _ in sizes(self.demand, owner, way):
                yield self._edge(owner, lane, distance)

    def behind(self, edge: Edge) -> tuple[range, ...]:
        return beyond(self.demand, edge.owner, self.ways[edge.lane], edge.time)

    def _along(self, rank: int, lane: int, distances: range | None = None) -> Iterator[Edge]:
        way = self.ways[lane]
        for distance in passing(self.demand, rank, way, distances):
            yield self._edge((rank - way.sign * distance) % self.demand.layout.ranks, lane, distance)

    def _edge(self, owner: int, lane: int, distance: int) -> Edge:
        way: Way = self.ways[lane]
        source, target = ((owner + way.sign * d) % self.demand.layout.ranks for d in (distance - 1, distance))
        return Edge(owner, source, target, distance - 1, distance, lane)
