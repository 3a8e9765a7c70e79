"""The double ring: rings inside nodes of `inner` ranks, and one ring of nodes between ranks of equal place.

A block goes from node to node on the outer ring, and around the inner ring of every node. The outer message is posted
when an inner cycle begins, and may take as long as the cycle.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..block_demand import BlockDemand
from .relay import runs
from .route import Edge, Route


class DoubleRingSchedule(Route):
    """At step t * inner + j a rank computes with a block of the node t before its own, j places before its own."""

    lanes = 2
    numbered = True

    def __init__(self, demand: BlockDemand, inner: int) -> None:
        super().__init__(demand)
        self.inner, self.nodes = inner, demand.layout.ranks // inner

    def arrivals(self, rank: int) -> Iterator[Edge]:
        node, place = divmod(rank, self.inner)
        for t in reversed(range(self.nodes)):
            home = (node - t) % self.nodes
            around = runs(node * self.inner, (self.nodes - t) * self.inner, self.demand.layout.ranks)
            owners = range(home * self.inner, (home + 1) * self.inner)
            if not any(self.demand.needs(run, owners) for run in around):
                continue
            for j in reversed(range(self.inner)):
                if t or j:
                    yield from self._made(home * self.inner + (place - j) % self.inner, t, j)

    def at(self, rank: int, time: int) -> tuple[Edge, ...]:
        (node, place), (t, j) = divmod(rank, self.inner), divmod(time, self.inner)
        return self._made((node - t) % self.nodes * self.inner + (place - j) % self.inner, t, j)

    def first(self, owner: int) -> tuple[Edge, ...]:
        return (*self._made(owner, 0, 1), *self._made(owner, 1, 0))

    def onward(self, edge: Edge) -> tuple[Edge, ...]:
        t, j = divmod(edge.time, self.inner)
        # The inner ring first: what it brings back in the backward need not come over the outer one.
        return (*self._made(edge.owner, t, j + 1), *(self._made(edge.owner, t + 1, 0) if j == 0 else ()))

    def behind(self, edge: Edge) -> tuple[range, ...]:
        node, place = divmod(edge.target, self.inner)
        t, j = divmod(edge.time, self.inner)
        if j == 0:
            return runs(node * self.inner, (self.nodes - t) * self.inner, self.demand.layout.ranks)
        around = runs(place, self.inner - j, self.inner)
        return tuple(range(run.start + node * self.inner, run.stop + node * self.inner) for run in around)

    def _made(self, owner: int, t: int, j: int) -> tuple[Edge, ...]:
        """The edge by which the block of `owner` gets to its step (t, j), or none where nobody behind it needs it."""
        if t >= self.nodes or j >= self.inner:
            return ()
        home, place = divmod(owner, self.inner)

        def at(t: int, j: int) -> int:
            return (home + t) % self.nodes * self.inner + (place + j) % self.inner

        time = t * self.inner + j
        source, post = (at(t, j - 1), time - 1) if j else (at(t - 1, 0), time - self.inner)
        edge = Edge(owner, source, at(t, j), post, time, lane=int(j == 0))
        needed = any(self.demand.needs(run, range(owner, owner + 1)) for run in self.behind(edge))
        return (edge,) if needed else ()
