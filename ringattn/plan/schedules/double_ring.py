"""The double ring: rings inside nodes of `ranks_per_node` ranks, and an outer ring of nodes between ranks of one place.

A block goes from node to node on the outer ring, and around the inner ring of every node. The outer message is posted
when a cycle of the inner ring begins, and is in flight for the whole cycle.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..demand import BlockDemand
from .base import EXACT_RANKS, Edge, Route, sampled_owners
from .ring import Direction, rows_along, runs


class DoubleRingSchedule(Route):
    """A schedule with a ring inside each node and a ring of nodes, so that each block enters a node only once.

    With n ranks per node, at step t * n + j a rank computes with the block from t nodes and j places before it.
    """

    rings = 2
    numbered = True

    def __init__(self, demand: BlockDemand, ranks_per_node: int) -> None:
        super().__init__(demand)
        self.ranks_per_node, self.nodes = ranks_per_node, demand.layout.ranks // ranks_per_node

    def arrivals(self, rank: int) -> Iterator[Edge]:
        node, place = divmod(rank, self.ranks_per_node)
        for t in reversed(range(self.nodes)):
            home = (node - t) % self.nodes
            receivers = runs(
                node * self.ranks_per_node, (self.nodes - t) * self.ranks_per_node, self.demand.layout.ranks
            )
            owners = range(home * self.ranks_per_node, (home + 1) * self.ranks_per_node)
            if not any(self.demand.needs(run, owners) for run in receivers):
                continue
            for j in reversed(range(self.ranks_per_node)):
                if t or j:
                    yield from self._edge(home * self.ranks_per_node + (place - j) % self.ranks_per_node, t, j)

    def edges_at(self, rank: int, step: int) -> tuple[Edge, ...]:
        (node, place), (t, j) = divmod(rank, self.ranks_per_node), divmod(step, self.ranks_per_node)
        return self._edge((node - t) % self.nodes * self.ranks_per_node + (place - j) % self.ranks_per_node, t, j)

    def arrival(self, rank: int, owner: int) -> Edge | None:
        size = self.ranks_per_node
        t, j = (rank // size - owner // size) % self.nodes, (rank - owner) % size
        return next(iter(self._edge(owner, t, j)), None) if t or j else None

    def first_edges(self, owner: int) -> tuple[Edge, ...]:
        return (*self._edge(owner, 0, 1), *self._edge(owner, 1, 0))

    def next_edges(self, edge: Edge) -> tuple[Edge, ...]:
        t, j = divmod(edge.step, self.ranks_per_node)
        # The inner ring comes first: what it returns in the backward need not come over the outer ring.
        return (*self._edge(edge.owner, t, j + 1), *(self._edge(edge.owner, t + 1, 0) if j == 0 else ()))

    def served(self, edge: Edge) -> tuple[range, ...]:
        node, place = divmod(edge.target, self.ranks_per_node)
        t, j = divmod(edge.step, self.ranks_per_node)
        if j == 0:
            return runs(node * self.ranks_per_node, (self.nodes - t) * self.ranks_per_node, self.demand.layout.ranks)
        places = runs(place, self.ranks_per_node - j, self.ranks_per_node)
        return tuple(
            range(run.start + node * self.ranks_per_node, run.stop + node * self.ranks_per_node) for run in places
        )

    def count_backward_bytes(self, block: int, sums: int, *, queries: bool) -> tuple[int, int] | None:
        """(bytes between nodes, all bytes) of a backward; None with at most EXACT_RANKS ranks, to count from the steps.

        With more ranks, an estimate from the rows that travel in a ring of whole nodes: making the steps of even a
        single rank could involve the rows of all ranks. Arguments as in `Schedule`.
        """
        if self.demand.layout.ranks <= EXACT_RANKS:
            return None
        demand = self.demand.grouped(self.ranks_per_node)
        direction = Direction(+1, demand.layout.ranks - 1)
        sent = 0
        for owner in sampled_owners(demand):
            rows = rows_along(demand, [owner], direction)
            saved = 0 if queries or not self.saves else min(rows, demand.block_heads * demand.layout.rows(owner))
            sent += rows * (block + sums) - saved * block
        return sent, sent

    def _edge(self, owner: int, t: int, j: int) -> tuple[Edge, ...]:
        """The edge on which the block of `owner` gets to its step (t, j); () if no rank that it serves needs it."""
        if t >= self.nodes or j >= self.ranks_per_node:
            return ()
        home, place = divmod(owner, self.ranks_per_node)

        def rank_at(t: int, j: int) -> int:
            return (home + t) % self.nodes * self.ranks_per_node + (place + j) % self.ranks_per_node

        step = t * self.ranks_per_node + j
        source, post = (rank_at(t, j - 1), step - 1) if j else (rank_at(t - 1, 0), step - self.ranks_per_node)
        edge = Edge(owner, source, rank_at(t, j), post, step, ring=int(j == 0))
        needed = any(self.demand.needs(run, range(owner, owner + 1)) for run in self.served(edge))
        return (edge,) if needed else ()
