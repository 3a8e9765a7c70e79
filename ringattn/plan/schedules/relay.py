"""How far each block travels around the ring, and which blocks pass a rank: searches that skip what no rank needs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ...cache import cached
from ...layout.regular import Layout
from ..block_demand import BlockDemand
from ..row_sets import RowSets
from .route import Edge, MovedRows, Route

if TYPE_CHECKING:
    from ..row_reach import RowReach

#: The direction is chosen from all blocks of up to ALL_BLOCKS ranks. Of more ranks, about ALL_BLOCKS**2 / ranks blocks
#: stand for all, at least FEWEST_BLOCKS.
ALL_BLOCKS, FEWEST_BLOCKS = 32, 2
#: Up to TABLE_RANKS ranks, a table of at most TABLE_CELLS cells lists what each rank needs of the sampled blocks; up to
#: TABLE_ALL ranks, of all blocks.
TABLE_RANKS, TABLE_CELLS, TABLE_ALL = 512, 1 << 18, 64
#: Sums of at most this many rows are exact in fp64.
EXACT_ROWS = 1 << 53


@dataclass(frozen=True)
class Way:
    """A direction of travel: +1 toward higher ranks, -1 toward lower, for at most `limit` hops."""

    sign: int
    limit: int


def runs(start: int, length: int, ranks: int) -> tuple[range, ...]:
    """Ranks start .. start + length - 1 around the ring, as runs of consecutive numbers."""
    start %= ranks
    if start + length > ranks:
        return range(start, ranks), range(start + length - ranks)
    return (range(start, start + length),) if length > 0 else ()


def ranks_beyond(demand: BlockDemand, owner: int, way: Way, distance: int) -> tuple[range, ...]:
    """The ranks on a way of the block of `owner`, from `distance` to the limit of the way, as runs."""
    length = way.limit - distance + 1
    start = owner + distance if way.sign > 0 else owner - way.limit
    return runs(start, length, demand.layout.ranks)


def search(
    some: Callable[[int, int], bool], near: int, far: int, every: Callable[[int, int], bool] | None = None
) -> Iterator[int]:
    """The distances far .. near that hold something, descending, found by halving.

    `some(near, far)` says whether some distance of a part holds something. `every(near, far)` is a cheap sufficient
    test that every distance of the part does.
    """
    if near > far or not some(near, far):
        return
    if near == far or (every is not None and every(near, far)):
        yield from range(far, near - 1, -1)
        return
    middle = (near + far) // 2
    yield from search(some, middle + 1, far, every)
    yield from search(some, near, middle, every)


def _needed(demand: BlockDemand, way: Way, first: int, ranks: int, owner: int, owners: int) -> bool:
    """Whether some of `ranks` ranks first, first + sign, .. needs some of `owners` blocks owner, owner - sign, .."""
    size = demand.layout.ranks
    if way.sign > 0:
        owner -= owners - 1
    else:
        first -= ranks - 1
    return any(demand.needs(q, k) for q in runs(first, ranks, size) for k in runs(owner, owners, size))


@cached
def reach(demand: BlockDemand, owner: int, way: Way) -> int:
    """The number of hops of the block of `owner`: the distance of the farthest rank on a way that needs the block."""

    def reached(distance: int) -> bool:  # monotone: some rank at this distance or beyond needs the block
        return _needed(demand, way, owner + way.sign * distance, way.limit - distance + 1, owner, 1)

    # Most blocks go all the way or not far: look there before halving.
    by_hop = _count_all_carried(demand, way)
    if by_hop is not None:
        return int(np.count_nonzero(by_hop[owner]))
    if not way.limit or reached(way.limit):
        return way.limit
    low, high = 0, 1
    while high < way.limit and reached(high):
        low, high = high, 2 * high
    high = min(high, way.limit) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if reached(middle):
            low = middle
        else:
            high = middle - 1
    return low


def halve_way(rank: int, ranks: int, way: Way) -> tuple[range, range]:
    """The distances of a way, descending, split where the owners rank - sign * distance pass rank 0."""
    before = min(rank if way.sign > 0 else ranks - 1 - rank, way.limit)
    return range(way.limit, before, -1), range(before, 0, -1)


def passing(demand: BlockDemand, rank: int, way: Way, distances: range | None = None) -> Iterator[int]:
    """The distances d, descending, at which the block of rank - sign * d arrives at `rank`; of `distances` if given.

    A block arrives where this rank, or a rank farther on its way, needs the block. The search halves the distances, and
    skips a part as soon as it is known to hold no need: so a local pattern is planned without looking at every rank.
    """

    def arrives(near: int, far: int) -> bool:
        return _needed(demand, way, rank, way.limit - near + 1, rank - way.sign * near, far - near + 1)

    def all_arrive(near: int, far: int) -> bool:
        start = rank - (far if way.sign > 0 else -near)
        return all(demand.all_needed(rank, owners) for owners in runs(start, far - near + 1, demand.layout.ranks))

    by_hop = _count_all_carried(demand, way)
    if by_hop is not None:
        hops = np.arange(way.limit, 0, -1) if distances is None else np.array(distances, dtype=np.int64)
        arriving = by_hop[(rank - way.sign * hops) % demand.layout.ranks, way.limit - hops] > 0
        return iter(hops[arriving].tolist())
    if distances is None:
        return search(arrives, 1, way.limit, all_arrive)
    return search(arrives, distances[-1], distances[0], all_arrive) if distances else iter(())


def sampled(ranks: int) -> list[int]:
    """Ranks whose blocks stand for all blocks: all of up to ALL_BLOCKS ranks, of more ranks evenly spaced ones."""
    count = min(ranks, max(FEWEST_BLOCKS, ALL_BLOCKS**2 // ranks))
    return [ranks * (2 * i + 1) // (2 * count) for i in range(count)]


@cached
def row_counts(demand: BlockDemand, owner: int, way: Way) -> tuple[tuple[int, int], ...]:
    """(distance, rows) pairs along a way of the block of `owner`: how many rows of all heads go up to each distance.

    The rows that are needed beyond a distance only shrink as the distance grows. So equal counts are the same rows, and
    the distances between them are not looked at.
    """

    def size(distance: int) -> int:
        return demand.count_needed(ranks_beyond(demand, owner, way, distance), owner)

    def changes(low: int, high: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The last (distance, rows) of each count between `low` and `high`, whose counts are `first` and `last`."""
        if first == last:
            return
        if high - low == 1:
            yield low, first
            return
        middle = (low + high) // 2
        rows = size(middle)
        yield from changes(low, middle, first, rows)
        yield from changes(middle, high, rows, last)

    last = reach(demand, owner, way)
    if not last:
        return ()
    by_hop = _count_all_carried(demand, way)
    if by_hop is not None:
        counts = by_hop[owner, way.limit - last :][::-1] * demand.block_heads  # by hop, from distance 1 on
        ends = np.flatnonzero(np.diff(counts, append=0)) + 1
        return tuple(zip(ends.tolist(), counts[ends - 1].tolist(), strict=True))
    end = size(last)
    return (*changes(1, last, size(1), end), (last, end))


@dataclass(frozen=True)
class EndTable:
    """What every rank needs of the runs of rows of some blocks: the first rows of a run, its last rows, or both.

    A rank whose rows lie left of a run needs rows from the start of the run, a rank to the right rows up to its end.
    """

    #: The owners of the blocks.
    blocks: list[int]
    #: For each run, the index in `blocks` of its owner, and its number of rows: int64 [runs].
    block_index: np.ndarray
    length: np.ndarray
    #: How many of the first and of the last rows of a run a rank needs: int64 [runs, ranks].
    first: np.ndarray
    last: np.ndarray

    def count_carried(self, sign: int, limit: int) -> np.ndarray:
        """Rows of one head that each block sends on each hop of a way, the farthest hop first: int64 [blocks, hops]."""
        runs, ranks = self.first.shape
        distances = np.arange(limit, 0, -1)  # the farthest first: a hop carries what its target or a rank beyond needs
        passed = (np.array(self.blocks)[self.block_index][:, None] + sign * distances) % ranks
        passed += np.arange(0, runs * ranks, ranks)[:, None]
        first, last = (np.maximum.accumulate(needed.take(passed), 1) for needed in (self.first, self.last))
        rows = np.minimum(first + last, self.length[:, None])
        carried = np.zeros((len(self.blocks), limit), dtype=np.int64)
        firsts = np.flatnonzero(np.diff(self.block_index, prepend=-1))  # the first run of each block that has runs
        carried[self.block_index[firsts]] = np.add.reduceat(rows, firsts)
        return carried


@dataclass(frozen=True)
class _Runs:
    """The runs of a layout as arrays: of all ranks, by their starts, and of the blocks of an `EndTable`."""

    #: Of each run: its positions, its rank, and its index among the runs of the rank. `most` runs has a rank.
    start: np.ndarray
    stop: np.ndarray
    rank: np.ndarray
    place: np.ndarray
    most: int
    blocks: list[int]
    #: Of each run of a block: the index in `blocks` of its owner, and its positions.
    block_index: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


@lru_cache(maxsize=16)
def _list_runs(layout: Layout) -> _Runs | None:
    """The runs of a layout; None where ranges have steps, or where the table would be too large."""
    shards = [layout.shard(rank) for rank in range(layout.ranks)]
    blocks = list(range(layout.ranks)) if layout.ranks <= TABLE_ALL else sampled(layout.ranks)
    most = max(map(len, shards))
    block_runs = [(index, run.start, run.stop) for index, rank in enumerate(blocks) for run in shards[rank]]
    cells = len(block_runs) * layout.ranks * most
    if not block_runs or cells > TABLE_CELLS or any(run.step != 1 for shard in shards for run in shard):
        return None
    own = [(run.start, run.stop, rank, place) for rank, shard in enumerate(shards) for place, run in enumerate(shard)]
    start, stop, rank, place = np.array(sorted(own)).T
    return _Runs(start, stop, rank, place, most, blocks, *np.array(block_runs).T)


@cached
def _end_table(demand: BlockDemand) -> EndTable | RowReach | None:
    """What ranks need of all blocks, or of the blocks of the `sampled` ranks.

    None where ranks do not need runs of rows, or where the table would be too large.
    """
    layout, row_reach = demand.layout, demand.row_reach
    if row_reach is not None:
        return row_reach
    if layout.ranks > TABLE_RANKS or layout.tokens * layout.ranks > EXACT_ROWS:
        return None
    runs = _list_runs(layout)
    if runs is None:
        return None
    needed = demand.needed_runs(runs.start, runs.stop - 1)
    if needed is None:
        return None
    table = np.zeros((layout.ranks, runs.most, 4), dtype=np.int64)
    table[runs.rank, runs.place] = np.stack((runs.start, runs.stop, needed[0], needed[1] + 1), -1)
    begins, ends = runs.begins[:, None], runs.ends[:, None]
    length = ends - begins
    first = last = np.zeros((len(begins), layout.ranks), dtype=np.int64)
    for start, stop, low, high in table.transpose(1, 2, 0):  # range i of every rank
        # A rank without a range i has an empty range at 0, which needs nothing.
        first = np.maximum(first, np.where(stop <= begins, np.minimum(high - begins, length), 0))
        last = np.maximum(last, np.where(start >= ends, np.minimum(ends - low, length), 0))
    return EndTable(runs.blocks, runs.block_index, length.ravel(), first, last)


@cached
def _count_carried(demand: BlockDemand, way: Way) -> np.ndarray | None:
    """Rows of one head that the blocks of `_end_table` send on each hop; None where there is no table."""
    table = _end_table(demand)
    return None if table is None else table.count_carried(way.sign, way.limit)


def _count_all_carried(demand: BlockDemand, way: Way) -> np.ndarray | None:
    """The answer of `_count_carried` where the table lists the blocks of all ranks; else None."""
    table = _end_table(demand) if way.limit else None
    return None if table is None or len(table.blocks) < demand.layout.ranks else _count_carried(demand, way)


@cached
def _rows_along_by_owner(demand: BlockDemand, way: Way) -> dict[int, int]:
    """By owner, the answer of `rows_along`, for the blocks of `_end_table`; empty where there is no table."""
    table, carried = _end_table(demand), _count_carried(demand, way)
    if table is None or carried is None:
        return {}
    rows = carried.sum(1) * demand.block_heads
    return dict(zip(table.blocks, rows.tolist(), strict=True))


def rows_along(demand: BlockDemand, owner: int, way: Way) -> int:
    """The number of rows of all heads that the block of `owner` sends along a way, summed over its hops."""
    by_owner = _rows_along_by_owner(demand, way)
    if owner in by_owner:
        return by_owner[owner]
    hops = moved = 0
    for distance, rows in row_counts(demand, owner, way):
        moved += (distance - hops) * rows
        hops = distance
    return moved


def sum_rows_along(demand: BlockDemand, owners: Sequence[int], way: Way) -> int:
    """The sum of `rows_along` over the blocks of `owners`."""
    carried = _count_all_carried(demand, way)
    if carried is not None:
        return int(carried[list(owners)].sum()) * demand.block_heads
    by_owner = _rows_along_by_owner(demand, way)
    return sum(by_owner[owner] if owner in by_owner else rows_along(demand, owner, way) for owner in owners)


@lru_cache(maxsize=16)
def _count_rows(layout: Layout) -> np.ndarray:
    """The rows of each rank: int64 [ranks]."""
    return np.array([layout.rows(rank) for rank in range(layout.ranks)])


@cached
def kept_by_hop(demand: BlockDemand, way: Way) -> np.ndarray | None:
    """Rows of one head that each rank keeps of those that stop there on a way, by hop, see `Route.kept_rows`.

    int64 [ranks, hops], the farthest hop first; None where `_end_table` does not list all blocks.
    """
    carried, ranks = _count_all_carried(demand, way), demand.layout.ranks
    if carried is None:
        return None
    rows = _count_rows(demand.layout)[:, None]
    stopping = np.diff(carried, axis=1, prepend=0)  # rows that arrive at a distance and go no further
    owners = (np.arange(ranks)[:, None] - way.sign * np.arange(way.limit, 0, -1)) % ranks
    size = stopping[owners, np.arange(way.limit)]
    # A rank looks at rows as long as there is room, which the rows that came before have taken.
    room = rows - np.cumsum(size, 1) + size
    return np.where((room > 0) & ((size <= room) | (room == rows)), size, 0)


@cached
def choose_ways(demand: BlockDemand) -> tuple[Way, ...]:
    """The direction in which the fewest rows of `sampled` blocks travel, or both directions with half the ring each."""
    ranks = demand.layout.ranks
    blocks = sampled(ranks)
    half = (Way(+1, ranks // 2), Way(-1, (ranks - 1) // 2))
    choices = [(Way(+1, ranks - 1),), (Way(-1, ranks - 1),), half]
    totals = [sum(sum_rows_along(demand, blocks, way) for way in choice) for choice in choices]
    full = sum(map(demand.layout.rows, blocks)) * demand.block_heads * ranks
    one_way = min(totals[:2])
    # On a tie a dense pattern takes one direction, which needs only two receive buffers; a local pattern takes the
    # shorter arcs, whose blocks are found without looking at the whole ring.
    if one_way < totals[2] or (one_way == totals[2] and 2 * one_way > full):
        return choices[totals.index(one_way)]
    return half


class RouteAlongWays(Route):
    """A route along `ways`, with a ring for each: what moves and what ranks keep is read from tables, where there are
    any."""

    ways: list[Way]

    @abstractmethod
    def edge(self, owner: int, ring: int, distance: int) -> Edge:
        """The edge of the block of `owner` at a distance along the way `ring`."""

    def arrival(self, rank: int, owner: int) -> Edge | None:
        ranks = self.demand.layout.ranks
        for ring, way in enumerate(self.ways):
            distance = way.sign * (rank - owner) % ranks
            if 0 < distance <= way.limit and distance <= reach(self.demand, owner, way):
                return self.edge(owner, ring, distance)
        return None

    def returned(self, edge: Edge, siblings: Iterable[Edge] | None = None) -> RowSets:
        return self.carried(edge)  # a ring has no sibling edges

    def count_moved(self, owners: Sequence[int]) -> MovedRows:
        return MovedRows(sum(sum_rows_along(self.demand, owners, way) for way in self.ways))

    def count_kept(self, ranks: Sequence[int]) -> tuple[int, int]:
        tables = self._kept_by_ring
        if tables is None:
            return super().count_kept(ranks)
        return sum(int(table.sum()) for table in tables) * self.demand.block_heads, 0

    def is_kept(self, edge: Edge) -> bool:
        tables = self._kept_by_ring
        if tables is None:
            return super().is_kept(edge)
        return bool(tables[edge.ring][edge.target, -edge.step])

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
