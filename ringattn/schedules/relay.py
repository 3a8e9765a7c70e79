"""How far each block travels around the ring, and which blocks pass a rank: searches that skip what nobody needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..cut import total
from ..demand import Wanted, remembered

#: The direction is chosen from the exact reach of at most this many blocks, evenly spaced.
SAMPLE = 64


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


def beyond(demand: Wanted, owner: int, way: Way, distance: int) -> tuple[range, ...]:
    """The ranks on a way of the block of `owner`, from `distance` to its limit."""
    length = way.limit - distance + 1
    start = owner + distance if way.sign > 0 else owner - way.limit
    return runs(start, length, demand.layout.ranks)


def _needed(demand: Wanted, way: Way, first: int, queriers: int, owner: int, owners: int) -> bool:
    """Whether ranks first, first + sign, .. (`queriers` of them) need blocks owner, owner - sign, .. (`owners`)."""
    ranks = demand.layout.ranks
    if way.sign > 0:
        owner -= owners - 1
    else:
        first -= queriers - 1
    return any(demand.needs(q, k) for q in runs(first, queriers, ranks) for k in runs(owner, owners, ranks))


@remembered(65536)
def reach(demand: Wanted, owner: int, way: Way) -> int:
    """Hops that the block of `owner` makes: the distance of the farthest rank on this way that needs it."""
    low, high = 0, way.limit
    while low < high:  # a rank at distance >= d needs the block: monotone in d
        middle = (low + high + 1) // 2
        if _needed(demand, way, owner + way.sign * middle, way.limit - middle + 1, owner, 1):
            low = middle
        else:
            high = middle - 1
    return low


@remembered(4096)
def passing(demand: Wanted, rank: int, way: Way) -> tuple[int, ...]:
    """Distances d, ascending, at which the block of rank - sign * d arrives at `rank`.

    A block arrives where this rank or one farther on its way needs it. The distances are halved until a
    part is seen to hold no need, so that a local pattern is planned without looking at every rank.
    """

    def search(near: int, far: int) -> Iterator[int]:
        if near > far:
            return
        owner = rank - way.sign * near
        if not _needed(demand, way, rank, way.limit - near + 1, owner, far - near + 1):
            return
        if near == far:
            yield near
            return
        middle = (near + far) // 2
        yield from search(near, middle)
        yield from search(middle + 1, far)

    return tuple(search(1, way.limit))


def sampled(ranks: int) -> list[int]:
    """Ranks that stand for all: all of them, or SAMPLE evenly spaced."""
    count = min(ranks, SAMPLE)
    return [ranks * i // count for i in range(count)]


@remembered(4096)
def rows_along(demand: Wanted, owner: int, way: Way) -> int:
    """Rows of all heads that the block of `owner` sends along a way, summed over its hops."""
    rows = demand.layout.rows(owner)

    def size(distance: int) -> int:
        return total(demand.cuts(beyond(demand, owner, way, distance), owner), demand.block_heads, rows)

    def between(low: int, high: int, first: int, last: int) -> int:
        """The sum over distances low .. high, given its ends. Sizes only fall: equal ends hide nothing."""
        if first == last or high - low < 2:
            return first * (high - low) + last if high > low else first
        middle = (low + high) // 2
        at = size(middle)
        return between(low, middle, first, at) + between(middle, high, at, last) - at

    last = reach(demand, owner, way)
    return between(1, last, size(1), size(last)) if last else 0


@remembered(1024)
def ways(demand: Wanted) -> tuple[Way, ...]:
    """The direction, or both directions with the shorter arc each, in which the fewest rows travel.

    Counted on all blocks up to 64 ranks, on 64 evenly spaced blocks above.
    """
    ranks = demand.layout.ranks
    blocks = sampled(ranks)
    half = (Way(+1, ranks // 2), Way(-1, (ranks - 1) // 2))
    choices = [(Way(+1, ranks - 1),), (Way(-1, ranks - 1),), half]
    totals = [sum(rows_along(demand, block, way) for block in blocks for way in choice) for choice in choices]
    full = sum(map(demand.layout.rows, blocks)) * demand.block_heads * ranks
    one_way = min(totals[:2])
    # On a tie a dense pattern takes one direction (two receive buffers do), a local one the shorter arcs,
    # whose blocks are found without a look around the whole ring.
    if one_way < totals[2] or (one_way == totals[2] and 2 * one_way > full):
        return choices[totals.index(one_way)]
    return half
