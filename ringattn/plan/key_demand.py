"""Who needs whose rows, and the work of one visit: range algebra on a pattern and a layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..cache import Cache, Value
from ..layout.regular import Layout
from ..pattern import Pattern, Tile
from ..pattern.base import Run
from ..pattern.ranges import ceil_div, locate
from ..pattern.tile import make_tile
from .block_demand import ANSWERS, remembered
from .row_sets import WHOLE, RowSet, RowSets, cover, covered, decode, grouped, relocated, total
from .work import Work, gathered, repeated

#: Works of one visit are joined pairwise only up to this many: the search is quadratic.
MAX_JOINED = 32

#: Blocks of more ranges are searched with a mask of their rows.
MAX_SYMBOLIC = 4


@dataclass(frozen=True)
class KeyDemand(Value):
    """The pattern seen by the ranks of a layout, for `heads` query heads that share `kv_heads` key/value heads."""

    pattern: Pattern
    layout: Layout
    heads: int = 1
    kv_heads: int = 1

    def needs(self, queriers: range, owners: range) -> bool:
        """Whether some rank of `queriers` sees a key of some rank of `owners` (runs of consecutive ranks)."""
        if not queriers or not owners:
            return False
        q_rows, q_exact = self.layout.span(queriers)
        k_rows, k_exact = self.layout.span(owners)
        if not self._touch(q_rows, k_rows):
            return False
        if q_exact and k_exact:
            return True
        # A span that was widened proves absence only: halve the longer run until spans are exact.
        if (len(queriers) >= len(owners) and not q_exact) or k_exact:
            half = len(queriers) // 2
            return self.needs(queriers[:half], owners) or self.needs(queriers[half:], owners)
        half = len(owners) // 2
        return self.needs(queriers, owners[:half]) or self.needs(queriers, owners[half:])

    def all_needed(self, rank: int, owners: range) -> bool:
        """Whether `rank` is seen at once to see a key of every one of `owners`; False says nothing."""
        layout = self.layout
        return layout.regular and any(self._all_seen(q, k) for q in layout.shard(rank) for k in layout.span(owners)[0])

    def _all_seen(self, q: range, k: range) -> bool:
        """Whether every key of `k` is seen at once to be seen by some query of `q`; False says nothing."""
        run = self.run(q[0], q[-1]) if q.step == k.step == 1 else None
        return self.dense((q,), (k,)) if run is None else run[0] <= k.start and k.stop - 1 <= run[1]

    def dense(self, q_rows: tuple[range, ...], k_rows: tuple[range, ...]) -> bool:
        """Whether all heads see all of these pairs exactly once, by one tile for each two ranges."""
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

    def visits(self, rank: int, owner: int) -> bool:
        """Whether `rank` sees a key of `owner`."""
        return _visits(self, rank, owner)

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.heads // self.kv_heads

    def cuts(self, queriers: tuple[range, ...], owner: int) -> RowSets:
        """The rows of the block of `owner` of which some rank of `queriers` (runs of ranks) sees a key."""
        return _cuts(self, queriers, owner)

    def size(self, queriers: tuple[range, ...], owner: int) -> int:
        """How many rows of all heads those are."""
        rows = self.layout.rows(owner)
        if len(self.layout.shard(owner)) > MAX_SYMBOLIC:
            return total(self.cuts(queriers, owner), self.kv_heads, rows)
        return covered((piece for run in queriers for piece in _seen(self, run, owner)), self.kv_heads, rows)

    def run(self, first: int, last: int) -> Run | None:
        """The first and the last key that queries first .. last see together, where they see one run (`key_run`)."""
        return self.pattern.key_run(first, last)

    def keys(self, q: range, k: range) -> Iterator[tuple[range, range]]:
        """(heads, rows): the rows of `k` that some query of `q` sees, all of them; they may overlap. Neither is empty."""
        run = self.run(q[0], q[-1]) if q.step == k.step == 1 else None
        if run is None:
            return self.pattern.keys(q, k, range(self.heads))
        return self._within(k, run)

    def queries(self, q: range, k: range) -> Iterator[tuple[range, range]]:
        """(heads, rows): the rows of `q` that see some key of `k`, all of them; they may overlap. Neither is empty."""
        run = self.pattern.query_run(k[0], k[-1]) if q.step == k.step == 1 else None
        if run is None:
            return self.pattern.queries(q, k, range(self.heads))
        return self._within(q, run)

    def _within(self, rows: range, run: Run) -> Iterator[tuple[range, range]]:
        found = range(max(rows.start, run[0]), min(rows.stop, run[1] + 1))
        if found:
            yield range(self.heads), found

    def _touch(self, q_rows: tuple[range, ...], k_rows: tuple[range, ...]) -> bool:
        """Whether some query of these ranges, none of which is empty, sees some key of those."""
        for q in q_rows:
            run = self.pattern.key_run(q.start, q.stop - 1) if q.step == 1 else None
            for k in k_rows:
                if run is None or k.step != 1:
                    if next(self.pattern.tiles(q, k, range(self.heads)), None) is not None:
                        return True
                elif run[0] < k.stop and k.start <= run[1]:
                    return True
        return False

    @property
    def block_heads(self) -> int:
        """Heads of a block of keys and values."""
        return self.kv_heads

    @cached_property
    def memory(self) -> Cache:
        """Answers of the functions that are `remembered`, which live as long as this object."""
        return Cache(ANSWERS)

    def pairs(self, rank: int, owner: int) -> int:
        """Exact (query, key, head, branch) pairs that `rank` computes against the block of `owner`."""
        return _pairs(self, rank, owner)

    def works(self, rank: int, owner: int, cut: RowSet | None = None) -> tuple[Work, ...]:
        """The visit of `rank` to rows of the block of `owner`, lowered to local rows, one work per tile.

        Those of a cut hold the pairs of its heads, and index the tensor of the cut.
        """
        return _works(self, rank, owner, cut)

    def batched(self, rank: int, owner: int, cut: RowSet | None = None) -> tuple[Work, ...]:
        """The same pairs as few works: short runs of keys gathered, equal works repeated."""
        return _batched(self, rank, owner, cut)


@remembered
def _visits(demand: KeyDemand, rank: int, owner: int) -> bool:
    return demand.needs(range(rank, rank + 1), range(owner, owner + 1))


@remembered
def _pairs(demand: KeyDemand, rank: int, owner: int) -> int:
    rows, keys = demand.layout.shard(rank), demand.layout.shard(owner)
    return sum(demand.pattern.count(q, k, range(demand.heads)) for q in rows for k in keys)


@remembered
def _cuts(demand: KeyDemand, queriers: tuple[range, ...], owner: int) -> RowSets:
    if len(demand.layout.shard(owner)) > MAX_SYMBOLIC:
        return _marked(demand, queriers, owner)
    seen = (piece for run in queriers for piece in _seen(demand, run, owner))
    return cover(seen, demand.kv_heads, demand.layout.rows(owner))


def _marked(demand: KeyDemand, queriers: tuple[range, ...], owner: int) -> RowSets:
    """`_cuts` where the block is many ranges: a mask of its rows, of one rank's needs after another."""
    held = demand.layout.positions(owner)
    mask = np.zeros((demand.kv_heads, len(held)), dtype=bool)
    for rank in (rank for run in queriers for rank in run):
        if demand.visits(rank, owner):
            mask |= np.unpackbits(_bits(demand, rank, owner), axis=1, count=len(held)).view(bool)
            if mask.all():
                return WHOLE
    mask = mask[:, np.argsort(np.argsort(held))]  # back from the order of positions to that of the shard
    return grouped([decode(np.flatnonzero(row)) for row in mask], len(held))


@remembered
def _bits(demand: KeyDemand, rank: int, owner: int) -> np.ndarray:
    """The rows of the block of `owner` that `rank` needs, in the order of their positions: bits, [K, rows / 8]."""
    held = np.sort(demand.layout.positions(owner))
    around = range(int(held[0]), int(held[-1]) + 1)
    mask = np.zeros((demand.kv_heads, len(held)), dtype=bool)
    for q in decode(np.sort(demand.layout.positions(rank))):
        for seeing, k in demand.keys(q, around):
            first, last = np.searchsorted(held, (k[0], k[-1] + 1))
            hit = True if k.step == 1 else (held[first:last] - k[0]) % k.step == 0
            for heads in _kv_heads(seeing, demand.group):
                mask[heads.start : heads.stop : heads.step, first:last] |= hit
    return np.packbits(mask, axis=1)


def _seen(demand: KeyDemand, queriers: range, owner: int) -> Iterator[tuple[range, range]]:
    """(key/value heads, local key rows) of the block of `owner` that some rank of `queriers` sees."""
    if not demand.needs(queriers, range(owner, owner + 1)):
        return
    q_rows, exact = demand.layout.span(queriers)
    if not exact:
        half = len(queriers) // 2
        yield from _seen(demand, queriers[:half], owner)
        yield from _seen(demand, queriers[half:], owner)
        return
    first = 0
    for k_rows in demand.layout.shard(owner):
        for q in q_rows:
            for seeing, k in demand.keys(q, k_rows):
                local = locate(k, k_rows)
                for heads in _kv_heads(seeing, demand.group):
                    yield heads, range(local.start + first, local.stop + first, local.step)
        first += len(k_rows)


def _kv_heads(heads: range, group: int) -> Iterator[range]:
    """The key/value heads of query heads."""
    if heads.step <= group:
        yield range(heads[0] // group, heads[-1] // group + 1)
    elif heads.step % group == 0:
        yield range(heads[0] // group, heads[-1] // group + 1, heads.step // group)
    else:
        for head in sorted({head // group for head in heads}):
            yield range(head, head + 1)


@remembered
def _works(demand: KeyDemand, rank: int, owner: int, cut: RowSet | None) -> tuple[Work, ...]:
    if cut is not None:
        return tuple(relocated(demand.works(rank, owner), cut, demand.group))
    q_rows, k_rows = demand.layout.shard(rank), demand.layout.shard(owner)
    if q_rows and k_rows and max(len(q_rows), len(k_rows)) <= MAX_SYMBOLIC and demand.dense(q_rows, k_rows):
        return _all_pairs(demand, sum(map(len, q_rows)), sum(map(len, k_rows)))
    tiles = _joined(list(_local_tiles(demand, rank, owner)))
    works = []
    for tile in tiles:
        for heads, kv in split_heads(tile.heads, demand.group):
            base = 0 if tile.dense else tile.q.start - tile.k.start
            step = tile.q.step
            lo = None if tile.lo is None else ceil_div(tile.lo - base, step)
            hi = None if tile.hi is None else (tile.hi - base) // step
            works.append(Work(heads, kv, tile.q, (tile.k,), lo, hi))
    return tuple(works)


@remembered
def _all_pairs(demand: KeyDemand, rows: int, keys: int) -> tuple[Work, ...]:
    """The works of a visit in which every row sees every key."""
    return tuple(Work(*heads, range(rows), (range(keys),)) for heads in split_heads(range(demand.heads), demand.group))


@remembered
def _batched(demand: KeyDemand, rank: int, owner: int, cut: RowSet | None) -> tuple[Work, ...]:
    return tuple(repeated(gathered(demand.works(rank, owner, cut))))


def _local_tiles(demand: KeyDemand, rank: int, owner: int) -> Iterator[Tile]:
    """Tiles over local row indices. Their band, too, is in local indices; q and k steps are equal or there is no band."""
    heads = range(demand.heads)
    first_q = 0
    for q_rows in demand.layout.shard(rank):
        first_k = 0
        for k_rows in demand.layout.shard(owner):
            for tile in demand.pattern.tiles(q_rows, k_rows, heads):
                for part in tile.refine():
                    yield _localised(part, q_rows, k_rows, first_q, first_k)
            first_k += len(k_rows)
        first_q += len(q_rows)


def _localised(tile: Tile, q_rows: range, k_rows: range, first_q: int, first_k: int) -> Tile:
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


def _joined(tiles: list[Tile]) -> list[Tile]:
    """Fewer, larger tiles with the same pairs: two are joined where their hull holds exactly their pairs.

    This turns the cells of a zigzag shard into one causal triangle, and neighbouring dense cells into one.
    """
    if len(tiles) > MAX_JOINED:
        return tiles
    done: list[Tile] = []
    for tile in tiles:
        again = True
        while again:
            again = False
            for i, other in enumerate(done):
                hull = _hull(other, tile)
                if hull is not None and hull.pairs == other.pairs + tile.pairs:
                    done.pop(i)
                    tile, again = hull, True
                    break
        done.append(tile)
    return done


def _hull(a: Tile, b: Tile) -> Tile | None:
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
    """Query heads with the key/value heads they use, in parts that a kernel can take as they are.

    `group` query heads share one key/value head; a part is whole groups, or heads of one group.
    """
    if group == 1:
        yield heads, heads
    elif heads.step == 1 and heads.start % group == 0 and heads.stop % group == 0:
        yield heads, range(heads.start // group, heads.stop // group)
    else:
        for head in heads:
            yield range(head, head + 1), range(head // group, head // group + 1)
