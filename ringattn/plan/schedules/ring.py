"""The ring: ranks relay blocks from neighbour to neighbour, as far as some rank needs them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from heapq import merge
from typing import NamedTuple

import numpy as np

from ...cache import cached
from ...layout.regular import Layout
from ..demand import BlockDemand, sampled_blocks
from ..row_sets import RowSets
from .base import Edge, Route


class Direction(NamedTuple):
    """A direction of travel: `sign` +1 toward higher ranks or -1 toward lower, for at most `limit` hops."""

    sign: int
    limit: int


def runs(start: int, length: int, ranks: int) -> tuple[range, ...]:
    """The `length` ranks that follow each other around the ring from rank `start` on, as runs of consecutive ranks."""
    start %= ranks
    if start + length > ranks:
        return range(start, ranks), range(start + length - ranks)
    return (range(start, start + length),) if length > 0 else ()


def ranks_beyond(demand: BlockDemand, owner: int, direction: Direction, distance: int) -> tuple[range, ...]:
    """Ranges of the ranks that are at least `distance` hops from `owner`, up to the farthest in this direction."""
    length = direction.limit - distance + 1
    start = owner + distance if direction.sign > 0 else owner - direction.limit
    return runs(start, length, demand.layout.ranks)


def search(some: Callable[[int, int], bool], near: int, far: int) -> Iterator[int]:
    """Yield the matching distances from `far` down to `near`; `some(a, b)` says whether any of a .. b matches.

    Uses bisection, so that parts without a match take one call.
    """
    if near > far or not some(near, far):
        return
    if near == far:
        yield near
        return
    middle = (near + far) // 2
    yield from search(some, middle + 1, far)
    yield from search(some, near, middle)


def _needed(demand: BlockDemand, direction: Direction, first: int, ranks: int, owner: int, owners: int) -> bool:
    """Whether some of `ranks` ranks first, first + sign, .. needs some of `owners` blocks owner, owner - sign, .."""
    size = demand.layout.ranks
    if direction.sign > 0:
        owner -= owners - 1
    else:
        first -= ranks - 1
    return any(demand.needs(q, k) for q in runs(first, ranks, size) for k in runs(owner, owners, size))


@cached
def count_hops(demand: BlockDemand, owner: int, direction: Direction) -> int:
    """How many hops the block of `owner` travels in a direction: as far as the last rank that needs some of it.

    Found by bisection unless `demand` has tables.
    """
    by_hop = _count_all_carried(demand, direction)
    if by_hop is not None:
        return int(np.count_nonzero(by_hop[owner]))

    def reached(distance: int) -> bool:  # monotone: some rank at this distance or beyond needs the block
        return _needed(demand, direction, owner + direction.sign * distance, direction.limit - distance + 1, owner, 1)

    # Most blocks go all the way or not far: try these before halving.
    if not direction.limit or reached(direction.limit):
        return direction.limit
    high = 1
    while high < direction.limit and reached(high):
        high *= 2
    between = range(high // 2 + 1, min(high, direction.limit))
    return high // 2 + bisect_left(between, True, key=lambda distance: not reached(distance))


def passing(demand: BlockDemand, rank: int, direction: Direction, distances: range) -> Iterator[int]:
    """Yield those of the descending `distances` d at which `rank` gets rows of the block owned d hops back.

    A rank gets rows if it needs them, or if a rank farther along the way does. The search uses bisection and skips
    parts in which no block is needed, so planning a local pattern does not look at every rank.
    """

    def arrives(near: int, far: int) -> bool:
        return _needed(
            demand, direction, rank, direction.limit - near + 1, rank - direction.sign * near, far - near + 1
        )

    by_hop = _count_all_carried(demand, direction)
    if by_hop is not None:
        hops = np.arange(distances.start, distances.stop, distances.step)
        arriving = by_hop[(rank - direction.sign * hops) % demand.layout.ranks, direction.limit - hops] > 0
        return iter(hops[arriving].tolist())
    return search(arrives, distances[-1], distances[0]) if distances else iter(())


@cached
def row_counts(demand: BlockDemand, owner: int, direction: Direction) -> tuple[tuple[int, int], ...]:
    """How many rows of the block of `owner`, over all heads, travel how far: (distance, rows) pairs.

    Each pair says that `rows` rows travel on the hops up to `distance`, from the previous pair's distance on. Fewer
    rows are needed the farther the block gets, so two distances with equal counts have the same rows, and the search
    skips the distances between them.
    """

    def size(distance: int) -> int:
        return demand.count_needed(ranks_beyond(demand, owner, direction, distance), owner)

    def changes(low: int, high: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield (largest distance with this number of rows, number of rows), for the distances low .. high - 1.

        `first` and `last` are the numbers of rows at `low` and `high`.
        """
        if first == last:
            return
        if high - low == 1:
            yield low, first
            return
        middle = (low + high) // 2
        rows = size(middle)
        yield from changes(low, middle, first, rows)
        yield from changes(middle, high, rows, last)

    last = count_hops(demand, owner, direction)
    if not last:
        return ()
    by_hop = _count_all_carried(demand, direction)
    if by_hop is not None:
        counts = by_hop[owner, direction.limit - last :][::-1] * demand.block_heads  # by hop, from distance 1 on
        ends = np.flatnonzero(np.diff(counts, append=0)) + 1
        return tuple(zip(ends.tolist(), counts[ends - 1].tolist(), strict=True))
    end = size(last)
    return (*changes(1, last, size(1), end), (last, end))


@cached
def _count_carried(demand: BlockDemand, direction: Direction) -> np.ndarray | None:
    """Rows of one head that the blocks of `sampled_reach` send on each hop; None if there is no table."""
    reach = demand.sampled_reach
    return None if reach is None else reach.count_carried(*direction)


def _count_all_carried(demand: BlockDemand, direction: Direction) -> np.ndarray | None:
    """The result of `_count_carried` if the table lists the blocks of all ranks; else None."""
    return _count_carried(demand, direction) if direction.limit and demand.row_reach is not None else None


def rows_along(demand: BlockDemand, owners: Sequence[int], direction: Direction) -> int:
    """The number of rows sent when the blocks of `owners` travel in a direction, summed over hops and heads."""
    reach, carried, moved = demand.sampled_reach, _count_carried(demand, direction), 0
    by_owner = {} if reach is None or carried is None else dict(zip(reach.blocks, carried.sum(1).tolist(), strict=True))
    for owner in owners:
        if owner in by_owner:
            moved += by_owner[owner] * demand.block_heads
            continue
        hops = 0
        for distance, rows in row_counts(demand, owner, direction):
            moved += (distance - hops) * rows
            hops = distance
    return moved


@lru_cache(maxsize=16)
def _count_rows(layout: Layout) -> np.ndarray:
    """The number of rows of each rank: int64 [ranks, 1]."""
    return np.array([[layout.rows(rank)] for rank in range(layout.ranks)])


@cached
def saved_by_hop(demand: BlockDemand, direction: Direction) -> np.ndarray | None:
    """How many rows per head each rank keeps for the backward from each hop, see `Route.saved_rows`.

    int64 [ranks, hops], the farthest hop first; None if `row_reach` is None.
    """
    carried, ranks = _count_all_carried(demand, direction), demand.layout.ranks
    if carried is None:
        return None
    rows = _count_rows(demand.layout)
    stopping = np.diff(carried, axis=1, prepend=0)  # rows that arrive at a distance and go no further
    owners = (np.arange(ranks)[:, None] - direction.sign * np.arange(direction.limit, 0, -1)) % ranks
    size = stopping[owners, np.arange(direction.limit)]
    # A rank saves rows as long as there is room; `room` is what the rows before have left.
    room = rows - np.cumsum(size, 1) + size
    return np.where((room > 0) & ((size <= room) | (room == rows)), size, 0)


@cached
def choose_directions(demand: BlockDemand) -> tuple[Direction, ...]:
    """The directions in which blocks travel: one way around the ring, or half of the ring each way.

    Chooses what sends fewer rows of the blocks of `sampled_blocks`.
    """
    ranks = demand.layout.ranks
    blocks = sampled_blocks(ranks)
    half = (Direction(+1, ranks // 2), Direction(-1, (ranks - 1) // 2))
    choices = [(Direction(+1, ranks - 1),), (Direction(-1, ranks - 1),), half]
    totals = [sum(rows_along(demand, blocks, direction) for direction in choice) for choice in choices]
    full = sum(map(demand.layout.rows, blocks)) * demand.block_heads * ranks
    one_way = min(totals[:2])
    # On a tie, use one direction for a dense pattern, as it needs only two receive buffers, and both for a local
    # pattern, as the blocks of the shorter arcs are found without looking at the whole ring.
    if one_way < totals[2] or (one_way == totals[2] and 2 * one_way > full):
        return choices[totals.index(one_way)]
    return half


class RingSchedule(Route):
    """A schedule in which each block travels around the ring from neighbour to neighbour, in one or both directions.

    The edge at distance d serves the ranks from d to the direction's limit. How many rows travel and how many are kept
    is read from tables, if there are any.
    """

    def __init__(self, demand: BlockDemand) -> None:
        super().__init__(demand)
        self.directions = [direction for direction in choose_directions(demand) if direction.limit]
        self.rings = len(self.directions)

    def arcs(self, rank: int) -> tuple[Iterator[Edge], ...]:
        arcs: list[Iterator[Edge]] = []
        for ring, (sign, limit) in enumerate(self.directions):
            wrap = min(rank if sign > 0 else self.demand.layout.ranks - 1 - rank, limit)  # then past rank 0
            arcs += self._edges_to(rank, ring, limit, wrap), self._edges_to(rank, ring, wrap, 0)
        return tuple(arcs)

    def arrivals(self, rank: int) -> Iterator[Edge]:
        rings = (self._edges_to(rank, ring, way.limit, 0) for ring, way in enumerate(self.directions))
        return merge(*rings, key=lambda edge: -edge.step)

    def edges_at(self, rank: int, step: int) -> tuple[Edge, ...]:
        ranks, directions = self.demand.layout.ranks, enumerate(self.directions)
        return tuple(self.edge((rank - w.sign * step) % ranks, ring, step) for ring, w in directions if step <= w.limit)

    def first_edges(self, owner: int) -> tuple[Edge, ...]:
        return tuple(
            self.edge(owner, ring, 1) for ring, one in enumerate(self.directions) if count_hops(self.demand, owner, one)
        )

    def next_edges(self, edge: Edge) -> tuple[Edge, ...]:
        if edge.step == count_hops(self.demand, edge.owner, self.directions[edge.ring]):
            return ()
        return (self.edge(edge.owner, edge.ring, edge.step + 1),)

    def last_edges(self, owner: int) -> Iterator[Edge]:
        for ring, direction in enumerate(self.directions):
            for distance, _ in row_counts(self.demand, owner, direction):
                yield self.edge(owner, ring, distance)

    def served(self, edge: Edge) -> tuple[range, ...]:
        return ranks_beyond(self.demand, edge.owner, self.directions[edge.ring], edge.step)

    def _edges_to(self, rank: int, ring: int, far: int, near: int) -> Iterator[Edge]:
        """The edges to `rank` from the owners at distances far .. near + 1."""
        direction = self.directions[ring]
        for distance in passing(self.demand, rank, direction, range(far, near, -1)):
            yield self.edge((rank - direction.sign * distance) % self.demand.layout.ranks, ring, distance)

    def edge(self, owner: int, ring: int, distance: int) -> Edge:
        direction = self.directions[ring]
        ranks, near = self.demand.layout.ranks, owner + direction.sign * (distance - 1)
        return Edge(owner, near % ranks, (near + direction.sign) % ranks, distance - 1, distance, ring)

    def arrival(self, rank: int, owner: int) -> Edge | None:
        ranks = self.demand.layout.ranks
        for ring, direction in enumerate(self.directions):
            distance = direction.sign * (rank - owner) % ranks
            if 0 < distance <= direction.limit and distance <= count_hops(self.demand, owner, direction):
                return self.edge(owner, ring, distance)
        return None

    def returned(self, edge: Edge, carried: RowSets) -> RowSets:
        return carried  # a ring has no sibling edges

    def count_moved(self, owners: Sequence[int]) -> int:
        return sum(rows_along(self.demand, owners, direction) for direction in self.directions)

    def count_saved(self, ranks: Sequence[int]) -> int:
        tables = self._saved_by_ring
        if tables is None:
            return super().count_saved(ranks)
        return sum(int(table.sum()) for table in tables) * self.demand.block_heads

    def is_saved(self, edge: Edge) -> bool:
        tables = self._saved_by_ring
        return super().is_saved(edge) if tables is None else bool(tables[edge.ring][edge.target, -edge.step])

    def find_saved_rows(self, rank: int) -> dict[Edge, RowSets]:
        if self._saved_by_ring is None:
            return super().find_saved_rows(rank)
        return {edge: self.stopping(edge) for edge in self.arrivals(rank) if self.is_saved(edge)}

    @cached_property
    def _saved_by_ring(self) -> list[np.ndarray] | None:
        """The results of `saved_by_hop` by ring; None if there are none."""
        if not self.saves:
            return None
        tables = [saved_by_hop(self.demand, direction) for direction in self.directions]
        known = [table for table in tables if table is not None]
        return known if len(known) == len(tables) else None
