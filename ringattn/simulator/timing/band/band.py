"""Exact pairs and rows of all ranks at once, in closed form, for a mask of a single band over equal chunks.

The whole mask is one tile lo <= q - k <= hi, and every rank owns one chunk of n tokens (contiguous) or two (zigzag).
The pairs of two chunks then depend only on their distance, so counting 262,144 ranks takes a few array operations.
`KeyDemand` counts the same numbers visit by visit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from ....cache import cached
from ....layout.regular import Contiguous, Zigzag
from ....plan.row_sets import RowSet
from ....plan.schedules.ring import Direction
from ....plan.steps import Kind, Part
from ....text import plural

if TYPE_CHECKING:
    from ....plan.plan import Plan

#: Pairs and rows change where the distance of two chunks is floor(limit / size) plus one of these, in either direction.
AROUND = np.arange(-1, 3, dtype=np.int64)
#: Limit on the pairs of a visit, and of one head in all visits of a rank, so that int64 does not overflow.
MOST_PAIRS = 1 << 62


@dataclass(frozen=True)
class Band:
    """A mask in which query q attends key k iff lo <= q - k <= hi, over ranks with equal chunks of `size` tokens.

    Each rank owns 1 chunk (contiguous), or 2 that mirror each other (zigzag). `lo` or `hi` is None for no limit. All
    `heads` have the same mask.
    """

    ranks: int
    size: int
    chunks: int
    lo: int | None
    hi: int | None
    heads: int

    @property
    def dense(self) -> bool:
        """True if every query sees every key."""
        return self.lo is None and self.hi is None

    @property
    def rows(self) -> int:
        """Tokens of each rank."""
        return self.size * self.chunks

    @property
    def transposed(self) -> Band:
        """The band with queries and keys exchanged."""
        lo, hi = (None if limit is None else -limit for limit in (self.lo, self.hi))
        return replace(self, lo=hi, hi=lo)

    def pairs_of_head(self, queriers: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """The number of pairs per head between the queries of `queriers` and the keys of `owners`, int64.

        Both are arrays of ranks that broadcast.
        """
        total = np.zeros(np.broadcast_shapes(queriers.shape, owners.shape), dtype=np.int64)
        for query_chunk in self._chunks_of(queriers):
            for key_chunk in self._chunks_of(owners):
                total += self.chunk_pairs(query_chunk - key_chunk)
        return total

    def rows_seeing(self, queriers: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """The number of query rows of `queriers` that see any key of `owners`, int64.

        Both are arrays of ranks that broadcast.
        """
        n, shape = self.size, np.broadcast_shapes(queriers.shape, owners.shape)
        total = np.zeros(shape, dtype=np.int64)
        for query_chunk in self._chunks_of(queriers):
            runs = []
            for key_chunk in self._chunks_of(owners):
                shift = np.broadcast_to((query_chunk - key_chunk) * n, shape)
                start = np.zeros_like(shift) if self.lo is None else np.clip(self.lo - shift, 0, n)
                stop = np.full_like(shift, n) if self.hi is None else np.clip(self.hi - shift + n, 0, n)
                runs.append((start, stop))
            total += _union_size(runs, n)
        return total

    def rows_beyond(self, owners: np.ndarray, sign: int, first: np.ndarray | int, last: int) -> np.ndarray:
        """How many of each owner's rows are seen by ranks `first` to `last` hops away, int64 [owners].

        `sign` is the direction of the hops (+1 or -1).
        """
        total = np.zeros(owners.shape, dtype=np.int64)
        low, high = (owners + first, owners + last) if sign > 0 else (owners - last, owners - first)
        # Runs of query chunks first .. last, split where ranks wrap around; empty runs end before they begin.
        runs: list[tuple[np.ndarray, np.ndarray]] = []
        for turn in (-self.ranks, 0, self.ranks):
            run = np.maximum(low, turn) - turn, np.minimum(high, turn + self.ranks - 1) - turn
            mirrored = 2 * self.ranks - 1 - run[1], 2 * self.ranks - 1 - run[0]
            runs += [run] if self.chunks == 1 else [run, mirrored]
        for key_chunk in self._chunks_of(owners):
            total += _union_size([self._rows_seen(key_chunk, *run) for run in runs], self.size)
        return total

    def chunk_pairs(self, distance: np.ndarray) -> np.ndarray:
        """The number of pairs per head between two chunks, int64; `distance` is (query chunk) - (key chunk)."""
        shift = distance * self.size
        pairs = np.full(shift.shape, self.size**2, dtype=np.int64)
        if self.hi is not None:
            pairs = _pairs_up_to(self.hi - shift, self.size)
        if self.lo is not None:
            pairs = pairs - _pairs_up_to(self.lo - 1 - shift, self.size)
        return pairs

    def _chunks_of(self, ranks: np.ndarray) -> list[np.ndarray]:
        ranks = np.asarray(ranks, dtype=np.int64)  # products with rows and pairs follow
        return [ranks] if self.chunks == 1 else [ranks, 2 * self.ranks - 1 - ranks]

    def _rows_seen(self, chunk: np.ndarray, first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows [start, stop) of a key chunk that query chunks first .. last see; none if start >= stop."""
        n = self.size
        start = np.zeros(chunk.shape, dtype=np.int64)
        stop = np.full(chunk.shape, n, dtype=np.int64)
        if self.hi is not None:
            start = np.maximum(start, (first - chunk) * n - self.hi)
        if self.lo is not None:
            stop = np.minimum(stop, (last - chunk + 1) * n - self.lo)
        return np.where(first <= last, start, n), np.where(first <= last, stop, 0)


def distinct(values: np.ndarray) -> np.ndarray:
    """The different values in an array, ascending; 7 times as fast as np.unique, which hashes them."""
    ordered = np.sort(values, axis=None)
    new = np.ones(ordered.shape, dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    return ordered[new]


def _pairs_up_to(limit: np.ndarray, n: int) -> np.ndarray:
    """The number of pairs (i, j) in 0 .. n-1 with i - j <= limit."""
    below = np.clip(n + limit, 0, n)  # limit < 0: the pairs are a triangle with this side
    above = np.clip(n - 1 - limit, 0, n)
    return np.where(limit < 0, below * (below + 1) // 2, n * n - above * (above + 1) // 2)


def _union_size(runs: list[tuple[np.ndarray, np.ndarray]], n: int) -> np.ndarray:
    """How many of 0 .. n-1 lie in at least one of the runs [start, stop); elementwise."""
    # In one number, so that they are sorted together: an empty run is (n, 0).
    both = np.sort(
        np.stack([np.where(start < stop, start * (n + 1) + stop, n * (n + 1)) for start, stop in runs]), axis=0
    )
    starts, stops = np.divmod(both, n + 1)
    total, reached = np.zeros(starts.shape[1:], dtype=np.int64), np.zeros(starts.shape[1:], dtype=np.int64)
    for start, stop in zip(starts, stops, strict=True):
        total += np.maximum(stop - np.maximum(start, reached), 0)
        reached = np.maximum(reached, stop)
    return total


def find_band(plan: Plan) -> Band | None:
    """The plan's mask as a `Band`; None if the mask is not a single band over equal chunks.

    Decided exactly, with integers: the mask must be a single tile that spans all heads, queries and keys, and the
    tokens must divide into equal chunks.
    """
    tokens, heads, layout = plan.tokens, plan.heads, plan.layout
    chunks = {Contiguous: 1, Zigzag: 2}.get(type(layout), 0)
    sequence = range(tokens)
    tiles = list(islice(plan.pattern.tiles(sequence, sequence, range(heads)), 2))
    if len(tiles) != 1 or (tiles[0].q, tiles[0].k, tiles[0].heads) != (sequence, sequence, range(heads)):
        return None
    tile = tiles[0]
    if tile.dense and not chunks and _has_even_shards(plan):
        chunks = 1  # for a dense mask it does not matter which tokens a rank owns
    if not chunks or tokens % (chunks * plan.ranks):
        return None
    size = tokens // (chunks * plan.ranks)
    if 4 * size**2 * heads > MOST_PAIRS or (not tile.dense and size * chunks * tokens > MOST_PAIRS):
        return None
    return Band(plan.ranks, size, chunks, tile.lo, tile.hi, heads)


def explain_unequal(plan: Plan) -> str:
    """The reason why ranks have unequal work whatever the mask is, such as unequal shards; "" if there is none."""
    tokens, ranks = plan.tokens, plan.ranks
    if ranks > tokens:
        return f"{ranks:,} ranks are more than {plural(tokens, 'token')}, so some ranks have none"
    chunks = 2 * ranks if isinstance(plan.layout, Zigzag) else ranks
    if tokens % chunks:
        return f"{tokens:,} tokens do not divide into {chunks:,} equal chunks, so shards are unequal"
    return ""


@cached
def _has_even_shards(plan: Plan) -> bool:
    """True if all ranks own the same number of tokens."""
    each, rest = divmod(plan.tokens, plan.ranks)
    return not rest and all(plan.layout.rows(rank) == each for rank in range(plan.ranks))


@dataclass(frozen=True)
class MovingRows:
    """Rows of blocks that move on by one rank at every step; a row has `row_bytes` bytes, over all heads.

    Hop h leads from the rank at distance h from the block's owner to the one at distance h + 1. `lag` is 0 or 1: while
    ranks compute with the blocks of owners t ranks away, rows make hop t - `lag`; they make no hop before hop `lag`.
    """

    lag: int
    row_bytes: int


@dataclass(frozen=True)
class BandTraffic:
    """Which rows move between ranks in a pass; rows with the same sender, receiver and step share one message.

    `to_owner`: hops lead toward the owner, and steps go from the farthest distance down to 0. `direct_row_bytes`: bytes
    of a row that is sent directly between its owner and the last rank that receives it, one step after that rank
    computes with it; 0 if there are no such rows. With `to_owner`, the direct rows are the keys and values that last
    receivers did not keep from the forward, sent by the owner; otherwise they are the gradient sums of all rows, sent
    to the owner.
    """

    moving: tuple[MovingRows, ...]
    to_owner: bool = False
    direct_row_bytes: int = 0

    @classmethod
    def of(cls, plan: Plan, backward: bool) -> BandTraffic:
        """The traffic of a plan with schedule "ring"; it equals what `Route` plans in its forward and backward."""

        def count_row_bytes(*kinds: Kind) -> int:
            one_row = RowSet((0,), ((range(1),),))
            return sum(plan.part_heads(kind) * plan.part_bytes(Part(kind, 0, one_row)) for kind in kinds)

        if not backward:
            return cls((MovingRows(0, count_row_bytes("kv")),))
        if plan.rotates == "kv":
            moving = MovingRows(1, count_row_bytes("kv")), MovingRows(0, count_row_bytes("grad"))
            return cls(moving, True, count_row_bytes("kv"))
        moving = MovingRows(0, count_row_bytes("q", "row")), MovingRows(1, count_row_bytes("dq"))
        return cls(moving, False, count_row_bytes("dq"))


# Breakpoints: the few ranks at which pairs or rows of a band may change from one rank to the next, for any number of
# ranks. Pairs and rows are sums of clipped distances between chunks: they change only where a distance crosses a limit
# of the band, or where ranks wrap around. A distance is a constant of the step plus 0, 1 or 2 times the rank; solving
# for the rank gives the breakpoints. There may be more breakpoints than changes, never fewer.


def find_rank_breakpoints(
    band: Band, directions: Sequence[Direction], traffic: BandTraffic, distance: np.ndarray
) -> np.ndarray:
    """The ranks at which counts of pairs and rows may change from one rank to the next, int64 [steps, points].

    At step i, ranks compute with the block `distance[i]` away. The points of a step are unordered, may repeat, and
    include rank 0.
    """
    points = [np.zeros((len(distance), 1), dtype=np.int64)]
    for direction in directions:
        # Ranks that send the rows of owners at which rows change; then ranks at which pairs change.
        for moving in traffic.moving:
            hops = distance - moving.lag
            turn = direction.sign * (hops + traffic.to_owner)[:, None]
            points.append((find_owner_breakpoints(band, direction, hops) + turn) % band.ranks)
        points.append(_join(_pair_points(band, direction.sign * distance[:, None]), len(distance), band.ranks))
    return np.concatenate(points, axis=1)


def find_owner_breakpoints(band: Band, direction: Direction, hops: np.ndarray) -> np.ndarray:
    """The owners at which the number of rows on a hop may change from one owner to the next, int64 [hops, points]."""
    return _join(_row_points(band, direction, hops[:, None]), len(hops), band.ranks)


def _join(points: Iterable[np.ndarray], steps: int, ranks: int) -> np.ndarray:
    """Concatenate points [1 or steps, ...] to [steps, points]; points outside of 0 .. ranks - 1 become rank 0."""
    joined = np.concatenate([np.broadcast_to(point, (steps, point.shape[1])) for point in points], axis=1)
    return np.where((joined >= 0) & (joined < ranks), joined, 0)


def _limit_distances(band: Band) -> np.ndarray:
    """Distances of a query chunk from a key chunk at which a limit of the band may lie, int64 [distances]."""
    limits = [limit // band.size for limit in (band.lo, band.hi) if limit is not None]
    return distinct(np.concatenate([limit + AROUND for limit in limits])) if limits else np.zeros(1, dtype=np.int64)


def _pair_points(band: Band, turn: np.ndarray) -> Iterator[np.ndarray]:
    """Ranks at which the pairs of visits change (owner = rank - turn, modulo the ranks), and ranks beside a wrap."""
    ranks, limits = band.ranks, _limit_distances(band)
    yield turn % ranks + np.arange(-1, 2, dtype=np.int64)
    if band.chunks == 2:
        # Chunks rank and 2 ranks - 1 - owner are at a limit: rank + owner - (2 ranks - 1) = +- limit.
        for around in (-ranks, 0, ranks):
            for limit in (limits, -limits):
                twice = turn + around + 2 * ranks - 1 + limit
                yield twice // 2
                yield (twice + 1) // 2


def _row_points(band: Band, direction: Direction, hops: np.ndarray) -> Iterator[np.ndarray]:
    """Owners at which the number of rows that ranks at distances hop + 1 .. direction.limit see may change."""
    ranks, limits = band.ranks, _limit_distances(band)
    yield np.zeros((1, 1), dtype=np.int64)
    # The nearest or farthest query chunk belongs to the first or last rank, or is its mirror; the key chunk is the
    # owner's or its mirror.
    for end in (0, ranks, 2 * ranks) if band.chunks == 2 else (0, ranks):
        for limit in (limits, -limits):
            yield end + limit[None]
    # The query chunk is at this distance from the owner: ranks wrap around, or it meets a mirrored chunk.
    for distance in (hops + 1, np.full((1, 1), direction.limit)):
        yield from _pair_points(band, -direction.sign * distance)
