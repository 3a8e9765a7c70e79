"""How far each block travels around the ring, and which blocks pass a rank: searches that skip what nobody needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..block_demand import BlockDemand, remembered

#: The direction is chosen from all blocks of up to EXACT ranks, from fewer the more there are above, LEAST at least.
EXACT, LEAST = 32, 2
#: Up to so many ranks what each of them needs of the sampled blocks is listed, in tables of at most so many cells. Up to
#: WHOLE ranks it is listed of all blocks.
LISTED, CELLS, WHOLE = 512, 1 << 18, 64
#: Sums of at most so many rows are exact in fp64.
SUMMED = 1 << 53


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


def beyond(demand: BlockDemand, owner: int, way: Way, distance: int) -> tuple[range, ...]:
    """The ranks on a way of the block of `owner`, from `distance` to its limit."""
    length = way.limit - distance + 1
    start = owner + distance if way.sign > 0 else owner - way.limit
    return runs(start, length, demand.layout.ranks)


def search(
    some: Callable[[int, int], bool], near: int, far: int, every: Callable[[int, int], bool] | None = None
) -> Iterator[int]:
    """The distances far .. near at which there is something, by halving the parts in which there is; but for those in
    which there is something `every`where, as far as that is known."""
    if near > far or not some(near, far):
        return
    if near == far or (every is not None and every(near, far)):
        yield from range(far, near - 1, -1)
        return
    middle = (near + far) // 2
    yield from search(some, middle + 1, far, every)
    yield from search(some, near, middle, every)


def _needed(demand: BlockDemand, way: Way, first: int, queriers: int, owner: int, owners: int) -> bool:
    """Whether ranks first, first + sign, .. (`queriers` of them) need blocks owner, owner - sign, .. (`owners`)."""
    ranks = demand.layout.ranks
    if way.sign > 0:
        owner -= owners - 1
    else:
        first -= queriers - 1
    return any(demand.needs(q, k) for q in runs(first, queriers, ranks) for k in runs(owner, owners, ranks))


@remembered
def reach(demand: BlockDemand, owner: int, way: Way) -> int:
    """Hops that the block of `owner` makes: the distance of the farthest rank on this way that needs it."""

    def reached(distance: int) -> bool:  # monotone: some rank at this distance or beyond needs the block
        return _needed(demand, way, owner + way.sign * distance, way.limit - distance + 1, owner, 1)

    # Most blocks go all the way or not far: look there before halving.
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


def halves(rank: int, ranks: int, way: Way) -> tuple[range, range]:
    """The distances of a way, descending, before and after the owners rank - sign * distance pass rank 0."""
    before = min(rank if way.sign > 0 else ranks - 1 - rank, way.limit)
    return range(way.limit, before, -1), range(before, 0, -1)


def passing(demand: BlockDemand, rank: int, way: Way, distances: range | None = None) -> Iterator[int]:
    """Distances d, descending, at which the block of rank - sign * d arrives at `rank`; of `distances` where given.

    A block arrives where this rank or one farther on its way needs it. The distances are halved until a
    part is seen to hold no need, so that a local pattern is planned without looking at every rank.
    """

    def arrives(near: int, far: int) -> bool:
        return _needed(demand, way, rank, way.limit - near + 1, rank - way.sign * near, far - near + 1)

    def all_arrive(near: int, far: int) -> bool:
        start = rank - (far if way.sign > 0 else -near)
        return all(demand.all_needed(rank, owners) for owners in runs(start, far - near + 1, demand.layout.ranks))

    if distances is None:
        return search(arrives, 1, way.limit, all_arrive)
    return search(arrives, distances[-1], distances[0], all_arrive) if distances else iter(())


def sampled(ranks: int) -> list[int]:
    """Ranks that stand for all: all of up to EXACT, evenly spaced ones above."""
    count = min(ranks, max(LEAST, EXACT**2 // ranks))
    return [ranks * (2 * i + 1) // (2 * count) for i in range(count)]


@remembered
def sizes(demand: BlockDemand, owner: int, way: Way) -> tuple[tuple[int, int], ...]:
    """(distance, rows) along a way of the block of `owner`: so many rows, of all heads, go up to this distance.

    What is needed beyond a distance only shrinks with it, so that equal sizes are the same rows, and distances between
    them need not be looked at.
    """

    def size(distance: int) -> int:
        return demand.size(beyond(demand, owner, way, distance), owner)

    def changes(low: int, high: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Where the size at `low` .. `high` is about to change."""
        if first == last:
            return
        if high - low == 1:
            yield low, first
            return
        middle = (low + high) // 2
        at = size(middle)
        yield from changes(low, middle, first, at)
        yield from changes(middle, high, at, last)

    last = reach(demand, owner, way)
    if not last:
        return ()
    end = size(last)
    return (*changes(1, last, size(1), end), (last, end))


@dataclass(frozen=True)
class Ends:
    """What every rank needs of runs of rows that `blocks` own: the first rows of a run, the last ones, or both.

    A rank whose rows are left of a run needs rows from its start, one to the right rows up to its end.
    """

    blocks: list[int]
    #: Where in `blocks` the owner of each run stands, and how many rows the run has: int64 [runs].
    owner: np.ndarray
    length: np.ndarray
    #: How many of the first and of the last rows of a run a rank needs: int64 [runs, ranks].
    first: np.ndarray
    last: np.ndarray

    def carried(self, way: Way) -> np.ndarray:
        """Rows of one head that each block sends on its hop of each distance, the farthest first: int64 [blocks, hops]."""
        ranks = self.first.shape[1]
        away = np.arange(way.limit, 0, -1)  # the farthest first: a hop carries what this rank or one beyond it needs
        passed = (np.array(self.blocks)[self.owner][:, None] + way.sign * away) % ranks
        first, last = (
            np.maximum.accumulate(np.take_along_axis(needed, passed, 1), 1) for needed in (self.first, self.last)
        )
        found = np.zeros((len(self.blocks), way.limit), dtype=np.int64)
        np.add.at(found, self.owner, np.minimum(first + last, self.length[:, None]))
        return found

    def kept(self, way: Way, rows: np.ndarray) -> int:
        """Rows of one head that all ranks together keep of what ends with them on a way, see `Route.kept`.

        `rows` are those of the block of each rank, int64 [ranks]. All ranks must be among `blocks`.
        """
        ranks = len(rows)
        carried = self.carried(way)
        ends = np.diff(carried, axis=1, prepend=0)  # of what arrives at a distance, what goes no further
        room, found = rows.copy(), 0
        for place, distance in enumerate(range(way.limit, 0, -1)):
            size = np.where(room > 0, ends[(np.arange(ranks) - way.sign * distance) % ranks, place], 0)
            found += int(size[(size <= room) | (room == rows)].sum())
            room -= size
        return found


@remembered
def _ends(demand: BlockDemand) -> Ends | None:
    """What ranks need of all blocks, or of those of the `sampled` ranks; None where it is not runs, or ranks are too many to list."""
    layout = demand.layout
    if layout.ranks > LISTED or layout.tokens * layout.ranks > SUMMED:
        return None
    shards = [layout.shard(rank) for rank in range(layout.ranks)]
    blocks = list(range(layout.ranks)) if layout.ranks <= WHOLE else sampled(layout.ranks)
    most = max(map(len, shards))
    mine = [(place, run) for place, rank in enumerate(blocks) for run in shards[rank]]
    if not mine or len(mine) * layout.ranks * most > CELLS or any(run.step != 1 for shard in shards for run in shard):
        return None
    start, stop, low, high = np.zeros((4, layout.ranks, most), dtype=np.int64)
    for rank, shard in enumerate(shards):
        for i, run in enumerate(shard):
            needed = demand.run(run.start, run.stop - 1)
            if needed is None:
                return None
            start[rank, i], stop[rank, i], low[rank, i], high[rank, i] = run.start, run.stop, needed[0], needed[1] + 1
    filled = stop > start
    begins, ends = (np.array(side)[:, None, None] for side in ([r.start for _, r in mine], [r.stop for _, r in mine]))
    length = ends - begins
    first = np.where(filled & (stop <= begins), np.clip(high - begins, 0, length), 0).max(2)
    last = np.where(filled & (start >= ends), np.clip(ends - low, 0, length), 0).max(2)
    return Ends(blocks, np.array([place for place, _ in mine]), length.ravel(), first, last)


@remembered
def _along(demand: BlockDemand, way: Way) -> dict[int, int]:
    """`rows_along` by owner, of the blocks that `_ends` lists; empty where it lists none."""
    ends = _ends(demand)
    if ends is None:
        return {}
    rows = ends.carried(way).sum(1) * demand.block_heads
    return dict(zip(ends.blocks, rows.tolist(), strict=True))


def rows_along(demand: BlockDemand, owner: int, way: Way) -> int:
    """Rows of all heads that the block of `owner` sends along a way, summed over its hops."""
    known = _along(demand, way)
    if owner in known:
        return known[owner]
    done = found = 0
    for distance, rows in sizes(demand, owner, way):
        found += (distance - done) * rows
        done = distance
    return found


def all_along(demand: BlockDemand, owners: Sequence[int], way: Way) -> int:
    """`rows_along` of some blocks, summed."""
    known = _along(demand, way)
    return sum(known[owner] if owner in known else rows_along(demand, owner, way) for owner in owners)


def kept_along(demand: BlockDemand, chosen: Sequence[Way]) -> int | None:
    """Rows of all heads that all ranks together keep of what ends with them on these ways, see `Route.kept`; None where
    that is not found for all ranks at once."""
    ends, ranks = _ends(demand), demand.layout.ranks
    if ends is None or len(ends.blocks) < ranks:
        return None
    rows = np.array([demand.layout.rows(rank) for rank in range(ranks)])
    return sum(ends.kept(way, rows) for way in chosen) * demand.block_heads


@remembered
def ways(demand: BlockDemand) -> tuple[Way, ...]:
    """The direction, or both directions with the shorter arc each, in which the fewest rows travel.

    Counted on all blocks up to EXACT ranks, on evenly spaced ones above.
    """
    ranks = demand.layout.ranks
    blocks = sampled(ranks)
    half = (Way(+1, ranks // 2), Way(-1, (ranks - 1) // 2))
    choices = [(Way(+1, ranks - 1),), (Way(-1, ranks - 1),), half]
    totals = [sum(all_along(demand, blocks, way) for way in choice) for choice in choices]
    full = sum(map(demand.layout.rows, blocks)) * demand.block_heads * ranks
    one_way = min(totals[:2])
    # On a tie a dense pattern takes one direction (two receive buffers do), a local one the shorter arcs,
    # whose blocks are found without a look around the whole ring.
    if one_way < totals[2] or (one_way == totals[2] and 2 * one_way > full):
        return choices[totals.index(one_way)]
    return half
