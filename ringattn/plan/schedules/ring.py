"""The ring: blocks are relayed from neighbour to neighbour, as far as some rank needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from heapq import merge

import numpy as np

from ..demand import BlockDemand
from ..row_sets import RowSets
from .relay import choose_ways, halve_way, kept_by_hop, passing, ranks_beyond, reach, row_counts, rows_along
from .route import Edge, Route


class RingSchedule(Route):
    """Every block goes along each way; the edge at distance d serves the ranks from d to the limit of the way.

    What moves and what ranks keep is read from tables, where there are any.
    """

    def __init__(self, demand: BlockDemand) -> None:
        super().__init__(demand)
        self.ways = [way for way in choose_ways(demand) if way.limit]
        self.rings = len(self.ways)

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
        way = self.ways[ring]
        ranks, near = self.demand.layout.ranks, owner + way.sign * (distance - 1)
        return Edge(owner, near % ranks, (near + way.sign) % ranks, distance - 1, distance, ring)

    def arrival(self, rank: int, owner: int) -> Edge | None:
        ranks = self.demand.layout.ranks
        for ring, way in enumerate(self.ways):
            distance = way.sign * (rank - owner) % ranks
            if 0 < distance <= way.limit and distance <= reach(self.demand, owner, way):
                return self.edge(owner, ring, distance)
        return None

    def returned(self, edge: Edge, carried: RowSets, siblings: Iterable[Edge] | None = None) -> RowSets:
        return carried  # a ring has no sibling edges

    def count_moved(self, owners: Sequence[int]) -> int:
        return sum(rows_along(self.demand, owners, way) for way in self.ways)

    def count_kept(self, ranks: Sequence[int]) -> int:
        tables = self._kept_by_ring
        if tables is None:
            return super().count_kept(ranks)
        return sum(int(table.sum()) for table in tables) * self.demand.block_heads

    def is_kept(self, edge: Edge) -> bool:
        tables = self._kept_by_ring
        return super().is_kept(edge) if tables is None else bool(tables[edge.ring][edge.target, -edge.step])

    def find_kept_rows(self, rank: int, arrivals: int | None = None) -> dict[Edge, RowSets]:
        if arrivals is not None or self._kept_by_ring is None:
            return super().find_kept_rows(rank, arrivals)
        return {edge: self.stopping(edge) for edge in self.arrivals(rank) if self.is_kept(edge)}

    @cached_property
    def _kept_by_ring(self) -> list[np.ndarray] | None:
        """By ring, the answer of `kept_by_hop`; None where there is none."""
        tables = [kept_by_hop(self.demand, way) for way in self.ways]
        known = [table for table in tables if table is not None]
        return known if len(known) == len(tables) else None
