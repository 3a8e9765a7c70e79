"""Which keys each rank needs, and the work of one visit: range algebra on a pattern and a layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from ..cache import cached
from ..layout.regular import Layout
from ..pattern import Pattern, Tile
from ..pattern.base import Run, Runs
from ..pattern.ranges import ceil_div, locate
from ..pattern.tile import make_tile
from .block_demand import BlockDemand
from .row_sets import (
    ALL_ROWS,
    WHOLE_BLOCK,
    AllRows,
    RowSet,
    RowSets,
    count_rows,
    group_heads,
    restrict_works,
    to_ranges,
)
from .work import Work, join_keys, join_repetitions

#: Tiles of one visit are joined pairwise only up to this many: the search is quadratic.
MAX_JOINED = 32

#: Blocks of more ranges are searched with a mask of their rows.
MAX_SYMBOLIC = 4


class KeyDemand(BlockDemand):
    """Which keys each rank of `layout` needs under `pattern`: `heads` query heads share `kv_heads` key/value heads."""

    def __init__(self, pattern: Pattern, layout: Layout, heads: int = 1, kv_heads: int = 1) -> None:
        super().__init__(layout, kv_heads)
        self._pattern, self.heads, self.kv_heads = pattern, heads, kv_heads

    @property
    def pattern(self) -> Pattern:
        """The pattern that says which queries see which keys."""
        return self._pattern

    def on_layout(self, layout: Layout) -> KeyDemand:
        """The demand of the same pattern and heads on another layout."""
        return KeyDemand(self.pattern, layout, self.heads, self.kv_heads)

    def share_answers(self, other: KeyDemand) -> None:
        """Use the cache of `other`, whose layout, heads and visible pairs are equal to those of this demand."""
        self.cache = other.cache

    @property
    def group(self) -> int:
        """The number of query heads that share a key/value head."""
        return self.heads // self.kv_heads

    def needs(self, ranks: range, owners: range) -> bool:
        """Whether some rank of `ranks` sees a key of some rank of `owners` (runs of consecutive ranks)."""
        if not ranks or not owners:
            return False
        reach = self.row_reach
        if reach is not None:
            return reach.needs(ranks, owners)
        q_rows, q_exact = self.layout.span(ranks)
        k_rows, k_exact = self.layout.span(owners)
        if not self._touch(q_rows, k_rows):
            return False
        if q_exact and k_exact:
            return True
        # A span that was widened proves absence only: halve the longer run until spans are exact.
        if (len(ranks) >= len(owners) and not q_exact) or k_exact:
            half = len(ranks) // 2
            return self.needs(ranks[:half], owners) or self.needs(ranks[half:], owners)
        half = len(owners) // 2
        return self.needs(ranks, owners[:half]) or self.needs(ranks, owners[half:])

    def _touch(self, q_rows: tuple[range, ...], k_rows: tuple[range, ...]) -> bool:
        """Whether some query of `q_rows` sees some key of `k_rows`; none of these ranges is empty."""
        for q in q_rows:
            run = self.pattern.key_run(q.start, q.stop - 1) if q.step == 1 else None
            for k in k_rows:
                if run is None or k.step != 1:
                    if next(self.pattern.tiles(q, k, range(self.heads)), None) is not None:
                        return True
                elif run[0] < k.stop and k.start <= run[1]:
                    return True
        return False

    def visits(self, rank: int, owner: int) -> bool:
        """Whether `rank` sees a key of `owner`."""
        reach = self.row_reach
        return self._touches(rank, owner) if reach is None else bool(reach.visits[rank, owner])

    @cached
    def _touches(self, rank: int, owner: int) -> bool:
        return self.needs(range(rank, rank + 1), range(owner, owner + 1))

    def needed_run(self, first: int, last: int) -> Run | None:
        """(first, last) key that queries first .. last see together, where the pattern knows one run (`key_run`)."""
        return self.pattern.key_run(first, last)

    def needed_runs(self, first: np.ndarray, last: np.ndarray) -> Runs | None:
        return self.pattern.key_spans(first, last)

    def reader_runs(self, positions: np.ndarray) -> Runs | None:
        return self.pattern.query_spans(positions, positions)

    def sees_all(self, mine: range, block: range) -> bool:
        return self._dense((mine,), (block,))

    def _dense(self, q_rows: tuple[range, ...], k_rows: tuple[range, ...]) -> bool:
        """Whether all heads see all pairs of these positions exactly once, with one tile for each two ranges."""
        heads = range(self.heads)
        for q in q_rows:
            for k in k_rows:
                tiles = self.pattern.tiles(q, k, heads)
                first = next(tiles, None)
                if first is None or not first.dense or (first.q, first.k, first.heads) != (q, k, heads):
                    return False
                if next(tiles, None) is not None:
                    return False
        return True

    def _needed_pieces(self, mine: range, block: range) -> Iterator[tuple[range, range]]:
        for heads, rows in self.keys(mine, block):
            for kv_heads in _kv_heads(heads, self.group):
                yield kv_heads, rows

    def keys(self, q: range, k: range) -> Iterator[tuple[range, range]]:
        """(query heads, keys): all keys of `k` that some query of `q` sees; pieces may overlap, and none is empty."""
        run = self.needed_run(q[0], q[-1]) if q.step == k.step == 1 else None
        if run is None:
            return self.pattern.keys(q, k, range(self.heads))
        return self._clip(k, run)

    def queries(self, q: range, k: range) -> Iterator[tuple[range, range]]:
        """(query heads, queries): all queries of `q` that see a key of `k`; pieces may overlap, and none is empty."""
        run = self.pattern.query_run(k[0], k[-1]) if q.step == k.step == 1 else None
        if run is None:
            return self.pattern.queries(q, k, range(self.heads))
        return self._clip(q, run)

    def _clip(self, rows: range, run: Run) -> Iterator[tuple[range, range]]:
        inside = range(max(rows.start, run[0]), min(rows.stop, run[1] + 1))
        if inside:
            yield range(self.heads), inside

    @cached
    def needed_rows(self, ranks: tuple[range, ...], owner: int) -> RowSets:
        """The key rows of the block of `owner` of which some rank of `ranks` (runs of ranks) sees a key."""
        if self.row_reach is not None:
            return self.row_reach.needed(ranks, owner, MAX_SYMBOLIC)
        many = len(self.layout.shard(owner)) > MAX_SYMBOLIC
        return self._union_of_masks(ranks, owner) if many else self._union(ranks, owner)

    def count_needed(self, ranks: tuple[range, ...], owner: int) -> int:
        """The number of rows of all key/value heads in `needed_rows`."""
        if len(self.layout.shard(owner)) > MAX_SYMBOLIC and self.row_reach is None:
            return count_rows(self.needed_rows(ranks, owner), self.kv_heads, self.layout.rows(owner))
        return super().count_needed(ranks, owner)

    def _union_of_masks(self, ranks: tuple[range, ...], owner: int) -> RowSets:
        """`needed_rows` of a block of many ranges: the union of one mask of the block per rank."""
        positions = self.layout.positions(owner)
        mask = np.zeros((self.kv_heads, len(positions)), dtype=bool)
        for rank in (rank for run in ranks for rank in run):
            if self.visits(rank, owner):
                mask |= np.unpackbits(self._needed_bits(rank, owner), axis=1, count=len(positions)).view(bool)
                if mask.all():
                    return WHOLE_BLOCK
        mask = mask[:, np.argsort(np.argsort(positions))]  # back from the order of positions to that of the shard
        return group_heads([to_ranges(np.flatnonzero(row)) for row in mask], len(positions))

    @cached
    def _needed_bits(self, rank: int, owner: int) -> np.ndarray:
        """Which rows of the block of `owner` `rank` needs, in the order of their positions: bits, [K, rows / 8]."""
        positions = np.sort(self.layout.positions(owner))
        hull = range(int(positions[0]), int(positions[-1]) + 1)
        mask = np.zeros((self.kv_heads, len(positions)), dtype=bool)
        for q in to_ranges(np.sort(self.layout.positions(rank))):
            for heads, k in self._needed_pieces(q, hull):
                first, last = np.searchsorted(positions, (k[0], k[-1] + 1))
                hit = True if k.step == 1 else (positions[first:last] - k[0]) % k.step == 0
                mask[heads.start : heads.stop : heads.step, first:last] |= hit
        return np.packbits(mask, axis=1)

    @cached
    def pairs(self, rank: int, owner: int) -> int:
        """The exact number of (query, key, head, branch) pairs that `rank` computes against the block of `owner`."""
        rows, keys = self.layout.shard(rank), self.layout.shard(owner)
        return sum(self.pattern.count(q, k, range(self.heads)) for q in rows for k in keys)

    @cached
    def batched(self, rank: int, owner: int, row_set: RowSet | AllRows = ALL_ROWS) -> tuple[Work, ...]:
        """The pairs of `works` as few works: short runs of keys are joined, and equal works repeated."""
        return tuple(join_repetitions(join_keys(self.works(rank, owner, row_set))))

    @cached
    def works(self, rank: int, owner: int, row_set: RowSet | AllRows = ALL_ROWS) -> tuple[Work, ...]:
        """The visit of `rank` to rows of the block of `owner`, lowered to local rows, one work per tile.

        Works of a `RowSet` hold the pairs of its heads, and index the tensor of the row set.
        """
        if isinstance(row_set, RowSet):
            return tuple(restrict_works(self.works(rank, owner, ALL_ROWS), row_set, self.group))
        q_rows, k_rows = self.layout.shard(rank), self.layout.shard(owner)
        if q_rows and k_rows and max(len(q_rows), len(k_rows)) <= MAX_SYMBOLIC and self._dense(q_rows, k_rows):
            return self._dense_works(sum(map(len, q_rows)), sum(map(len, k_rows)))
        return tuple(self._lower(_join_tiles(list(self._local_tiles(rank, owner)))))

    @cached
    def first_works(self, rank: int, owner: int, most: int | None) -> tuple[tuple[Work, ...], bool]:
        """(`batched` works of the first `most` tiles of a visit, or of all tiles; whether these are all tiles)."""
        tiles = [] if most is None else list(islice(self._local_tiles(rank, owner), most + 1))
        if most is None or len(tiles) <= most:
            return self.batched(rank, owner), True
        return tuple(join_repetitions(join_keys(self._lower(tiles[:most])))), False

    def _lower(self, tiles: Iterable[Tile]) -> Iterator[Work]:
        """The works of tiles in local row indices."""
        for tile in tiles:
            for heads, kv in split_heads(tile.heads, self.group):
                base = 0 if tile.dense else tile.q.start - tile.k.start
                step = tile.q.step
                lo = None if tile.lo is None else ceil_div(tile.lo - base, step)
                hi = None if tile.hi is None else (tile.hi - base) // step
                yield Work(heads, kv, tile.q, (tile.k,), lo, hi)

    @cached
    def _dense_works(self, rows: int, keys: int) -> tuple[Work, ...]:
        """The works of a visit in which every row sees every key."""
        parts = split_heads(range(self.heads), self.group)
        return tuple(Work(heads, kv, range(rows), (range(keys),)) for heads, kv in parts)

    def _local_tiles(self, rank: int, owner: int) -> Iterator[Tile]:
        """Tiles and their bands in local row indices; a tile with a band has equal q and k steps."""
        heads = range(self.heads)
        first_q = 0
        for q_rows in self.layout.shard(rank):
            first_k = 0
            for k_rows in self.layout.shard(owner):
                for tile in self.pattern.tiles(q_rows, k_rows, heads):
                    for part in tile.refine():
                        yield _localize(part, q_rows, k_rows, first_q, first_k)
                first_k += len(k_rows)
            first_q += len(q_rows)


def _kv_heads(heads: range, group: int) -> Iterator[range]:
    """The key/value heads of query heads, `group` of which share a key/value head."""
    if heads.step <= group:
        yield range(heads[0] // group, heads[-1] // group + 1)
    elif heads.step % group == 0:
        yield range(heads[0] // group, heads[-1] // group + 1, heads.step // group)
    else:
        for head in sorted({head // group for head in heads}):
            yield range(head, head + 1)


def _localize(tile: Tile, q_rows: range, k_rows: range, first_q: int, first_k: int) -> Tile:
    """A tile of positions in `q_rows` x `k_rows` in local indices, which begin at `first_q` and `first_k`."""
    q, k = locate(tile.q, q_rows), locate(tile.k, k_rows)
    q = range(q.start + first_q, q.stop + first_q, q.step)
    k = range(k.start + first_k, k.stop + first_k, k.step)
    if tile.dense:
        return Tile(tile.heads, q, k, branch=tile.branch)
    # The distance i - j counts rows of the tile, and is the same whether rows are positions or local indices.
    base = tile.q.start - tile.k.start
    lo = None if tile.lo is None else ceil_div(tile.lo - base, tile.q.step)
    hi = None if tile.hi is None else (tile.hi - base) // tile.q.step
    assert q.step == k.step, "shards of one layout share their steps"
    offset, step = q.start - k.start, q.step
    lo = None if lo is None else lo * step + offset
    hi = None if hi is None else hi * step + offset
    return Tile(tile.heads, q, k, lo, hi, tile.branch)


def _join_tiles(tiles: list[Tile]) -> list[Tile]:
    """Fewer, larger tiles with the same pairs: two tiles are joined where their hull holds exactly their pairs.

    The joining turns the cells of a zigzag shard into one causal triangle, and neighbouring dense cells into one cell.
    """
    if len(tiles) > MAX_JOINED:
        return tiles
    joined: list[Tile] = []
    for tile in tiles:
        again = True
        while again:
            again = False
            for i, other in enumerate(joined):
                hull = _hull(other, tile)
                if hull is not None and hull.pairs == other.pairs + tile.pairs:
                    joined.pop(i)
                    tile, again = hull, True
                    break
        joined.append(tile)
    return joined


def _hull(a: Tile, b: Tile) -> Tile | None:
    """The least tile that holds both; None where their heads, branches or steps differ."""
    if (a.heads, a.branch, a.q.step, a.k.step) != (b.heads, b.branch, b.q.step, b.k.step) or a.q.step != a.k.step:
        return None
    if (a.q.start - b.q.start) % a.q.step or (a.k.start - b.k.start) % a.k.step:
        return None
    q = range(min(a.q.start, b.q.start), max(a.q.stop, b.q.stop), a.q.step)
    k = range(min(a.k.start, b.k.start), max(a.k.stop, b.k.stop), a.k.step)
    los = [t.q[0] - t.k[-1] if t.lo is None else t.lo for t in (a, b)]
    his = [t.q[-1] - t.k[0] if t.hi is None else t.hi for t in (a, b)]
    return make_tile(a.heads, q, k, min(los), max(his), a.branch)


def split_heads(heads: range, group: int) -> Iterator[tuple[range, range]]:
    """(query heads, key/value heads that they use), in parts that one kernel call can take.

    `group` query heads share one key/value head; a part is whole groups, or a single query head.
    """
    if group == 1:
        yield heads, heads
    elif heads.step == 1 and heads.start % group == 0 and heads.stop % group == 0:
        yield heads, range(heads.start // group, heads.stop // group)
    else:
        for head in heads:
            yield range(head, head + 1), range(head // group, head // group + 1)
