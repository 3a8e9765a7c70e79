"""Which rank needs which rows of which block, computed by range algebra from a pattern and a layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..cache import Cache, cached
from ..layout.regular import Layout
from ..pattern.base import Pattern, Side
from ..pattern.tile import Tile, clip, find_runs, join_runs, locate, merge_runs, shift_range
from .row_sets import ALL_ROWS, WHOLE_BLOCK, AllRows, RowSet, RowSets, count_rows, group_heads, to_ranges, union
from .work import (
    Work,
    find_tiles,
    join_dense,
    join_keys,
    join_repetitions,
    join_tiles,
    lower,
    restrict_keys,
    restrict_queries,
    sees_some,
)

if TYPE_CHECKING:
    from .row_reach import RowReach

#: Bytes of the results that a demand caches.
ANSWERS = 1 << 27
#: A choice looks at all blocks of up to MOST_BLOCKS ranks. With more ranks, about MOST_BLOCKS**2 / ranks blocks, at
#: least FEWEST_BLOCKS, stand for all.
MOST_BLOCKS, FEWEST_BLOCKS = 32, 2
#: Blocks of keys with more ranges are searched with a mask of their rows.
MOST_RANGES = 4


def sampled_ranks(ranks: int, most: int, fewest: int | None = None, work: int = 0, *, ends: bool = False) -> list[int]:
    """A sample of evenly spaced ranks: at most `most` of them, or all ranks if there are fewer.

    With `fewest`, for callers whose work per sampled rank grows with `ranks`, the sample has about `work` / `ranks`
    ranks, but at least `fewest`. With `ends`, it includes the first and the last rank; otherwise it consists of the
    middles of equal sections.
    """
    count = min(ranks, most if fewest is None else max(fewest, min(most, work // ranks)))
    if ends:
        return [(ranks - 1) * i // max(count - 1, 1) for i in range(count)]
    return [ranks * (2 * i + 1) // (2 * count) for i in range(count)]


def sampled_blocks(ranks: int) -> list[int]:
    """A sample of ranks; their blocks are examined to choose the direction in which all blocks travel."""
    return sampled_ranks(ranks, MOST_BLOCKS, FEWEST_BLOCKS, MOST_BLOCKS**2)


class BlockDemand(ABC):
    """Which rows of each rank's block every other rank needs under `pattern`.

    The block of a rank, its owner, is its shard under `layout`: keys and values in a `KeyDemand`, queries in a
    `QueryDemand`. A rank needs the rows that form a pair with its own rows of the other side, which it owns under the
    layout `readers` (default: `layout`). `heads` query heads share `kv_heads` key/value heads. `block_heads`: 1 if all
    heads of a block of keys travel together, so that a row is needed by all of them or by none. Arguments called
    `ranks` and `owners` are runs of consecutive ranks. Methods marked `cached` keep their results in `cache`.
    """

    #: What the blocks hold.
    side: ClassVar[Side]
    #: Blocks with more ranges are searched with a mask of their rows.
    most_ranges: ClassVar[int]

    def __init__(
        self,
        pattern: Pattern,
        layout: Layout,
        heads: int = 1,
        kv_heads: int = 1,
        readers: Layout | None = None,
        block_heads: int | None = None,
    ) -> None:
        self.pattern, self.layout, self.heads, self.kv_heads = pattern, layout, heads, kv_heads
        self.readers = layout if readers is None else readers
        #: The number of heads of the row sets of a block.
        self.block_heads = block_heads or (kv_heads if self.side == "keys" else heads)
        self.cache = Cache(ANSWERS)

    @property
    def group(self) -> int:
        """The number of query heads that share a key/value head."""
        return self.heads // self.kv_heads

    @abstractmethod
    def grouped(self, size: int) -> BlockDemand:
        """The demand of a smaller ring in which each group of `size` adjacent ranks is one rank."""

    @abstractmethod
    def needs(self, ranks: range, owners: range) -> bool:
        """Whether any rank in `ranks` needs a row of any block owned by `owners`."""

    @abstractmethod
    def visits(self, rank: int, owner: int) -> bool:
        """Whether `rank` needs any row of the block owned by `owner`."""

    @cached_property
    def sampled_reach(self) -> RowReach | None:
        """A table of the rows that each rank needs from all blocks, or from `sampled_blocks` if all would be too many.

        None if there is no such table, so that needed rows must be found with the pattern's tiles.
        """
        return self._find_reach()

    @cached_property
    def row_reach(self) -> RowReach | None:
        """A table of the rows that each rank needs from all blocks; None if no table covers them all."""
        reach = self.sampled_reach
        return reach if reach is not None and len(reach.blocks) == self.layout.ranks else None

    @cached
    def _find_reach(self) -> RowReach | None:
        if self.readers is not self.layout:  # a reach assumes that every rank needs its own block
            return None
        from .row_reach import find_row_reach  # loaded only to plan

        return find_row_reach(self.pattern, self.side, self.layout, sampled_blocks(self.layout.ranks), self.block_heads)

    @cached
    def needed_rows(self, ranks: tuple[range, ...], owner: int) -> RowSets:
        """The rows of the block of `owner` that at least one rank in `ranks` needs."""
        if self.row_reach is not None:
            return self.row_reach.needed(ranks, owner, self.most_ranges)
        if self.readers is not self.layout:
            runs = self._needed_runs(ranks, owner)
            if runs is not None:
                return group_heads([runs] * self.block_heads, self.layout.rows(owner))
            seen = (rows for run in ranks for rank in run for rows in self._seen_rows(rank, owner))
            return union(seen, self.block_heads, self.layout.rows(owner))
        if len(self.layout.shard(owner)) > MOST_RANGES:
            return self._union_of_masks(ranks, owner)
        return union(self._local_pieces(ranks, owner), self.block_heads, self.layout.rows(owner))

    def _needed_runs(self, ranks: tuple[range, ...], owner: int) -> tuple[range, ...] | None:
        """The local rows of a block that some rank of `ranks` needs; None unless each run of positions needs one run.

        Meant for a cache and its chunks: their rows have many ranges, and all ranks need the same ones.
        """
        mine: list[range] = []
        for run in ranks:
            positions, exact = self.readers.span(run)
            mine += positions if exact else (r for rank in run for r in self.readers.shard(rank))
        block = self.layout.shard(owner)
        if not block or any(r.step != 1 for r in (*mine, *block)):
            return None
        wanted: list[range] = []
        for r in mine:
            needed = self.pattern.run(self.side, r[0], r[-1])
            if needed is None:
                return None
            wanted.append(range(needed[0], needed[1] + 1))
        runs, parts, start = merge_runs(wanted), [], 0
        for r in block:
            inside = (clip(r, run.start, run[-1]) for run in runs)
            parts += [shift_range(part, start - r.start) for part in inside if part]
            start += len(r)
        return tuple(join_runs(parts))

    @abstractmethod
    def _seen_rows(self, rank: int, owner: int) -> Iterator[tuple[range, range]]:
        """(heads of the block, local rows) of the block of `owner` that the works of `rank` use."""

    def count_needed(self, ranks: tuple[range, ...], owner: int) -> int:
        """The number of rows of the block of `owner` that a rank in `ranks` needs, summed over heads."""
        if self.row_reach is not None:
            return self.row_reach.count(ranks, owner) * self.block_heads
        return count_rows(self.needed_rows(ranks, owner), self.block_heads, self.layout.rows(owner))

    def _local_pieces(self, ranks: tuple[range, ...], owner: int) -> Iterator[tuple[range, range]]:
        """(heads of the block, local rows) of the block of `owner` that some rank of `ranks` needs."""
        for run in ranks:
            if not self.needs(run, range(owner, owner + 1)):
                continue
            positions, exact = self.readers.span(run)
            if not exact:
                half = len(run) // 2
                yield from self._local_pieces((run[:half], run[half:]), owner)
                continue
            first = 0
            for block in self.layout.shard(owner):
                for mine in positions:
                    for heads, rows in self._needed_pieces(mine, block):
                        yield heads, shift_range(locate(rows, block), first)
                first += len(block)

    def _needed_pieces(self, mine: range, block: range) -> Iterator[tuple[range, range]]:
        """(heads of the block, positions): all positions of `block` that `mine` needs; pieces may overlap."""
        run = self.pattern.run(self.side, mine[0], mine[-1]) if mine.step == block.step == 1 else None
        if run is not None:
            inside = range(max(block.start, run[0]), min(block.stop, run[1] + 1))
            if inside:
                yield range(self.block_heads), inside
            return
        sides = (mine, block) if self.side == "keys" else (block, mine)
        for heads, rows in self.pattern.paired(self.side, *sides, range(self.heads)):
            for block_heads in self._heads_of_block(heads):
                yield block_heads, rows

    def _heads_of_block(self, heads: range) -> Iterable[range]:
        """The heads of the block that these query heads use."""
        return (heads,)

    def _union_of_masks(self, ranks: tuple[range, ...], owner: int) -> RowSets:
        """`needed_rows` for a block with many ranges: the union of one mask per rank."""
        positions = self.layout.positions(owner)
        mask = np.zeros((self.block_heads, len(positions)), dtype=bool)
        for rank in (rank for run in ranks for rank in run):
            if self.visits(rank, owner):
                mask |= np.unpackbits(self._needed_bits(rank, owner), axis=1, count=len(positions)).view(bool)
                if mask.all():
                    return WHOLE_BLOCK
        mask = mask[:, np.argsort(np.argsort(positions))]  # from ascending positions back to the order of the shard
        # In the form that a table of rows gives, if there may be one: see `RowReach.needed`.
        runs = len(self.layout.shard(owner)) <= self.most_ranges and self.pattern.run(self.side, 0, 0) is not None
        return group_heads([find_runs(row) if runs else to_ranges(np.flatnonzero(row)) for row in mask], len(positions))

    @cached
    def _needed_bits(self, rank: int, owner: int) -> np.ndarray:
        """Which rows of the block of `owner` a rank needs, by ascending position: bits, uint8 [heads, rows / 8]."""
        positions = np.sort(self.layout.positions(owner))
        hull = range(int(positions[0]), int(positions[-1]) + 1)
        mask = np.zeros((self.block_heads, len(positions)), dtype=bool)
        for mine in to_ranges(np.sort(self.readers.positions(rank))):
            for heads, rows in self._needed_pieces(mine, hull):
                first, last = np.searchsorted(positions, (rows[0], rows[-1] + 1))
                hit = True if rows.step == 1 else (positions[first:last] - rows[0]) % rows.step == 0
                mask[heads.start : heads.stop : heads.step, first:last] |= hit
        return np.packbits(mask, axis=1)


class KeyDemand(BlockDemand):
    """Which keys each rank needs, and the computations of a rank with each block of keys (as `Work` objects)."""

    side = "keys"
    most_ranges = MOST_RANGES

    def grouped(self, size: int) -> KeyDemand:
        readers = None if self.readers is self.layout else self.readers.grouped(size)
        return KeyDemand(self.pattern, self.layout.grouped(size), self.heads, self.kv_heads, readers, self.block_heads)

    def share_answers(self, other: KeyDemand) -> None:
        """Use the cache of `other`, which must have the same layout, heads and visible pairs."""
        self.cache = other.cache

    def needs(self, ranks: range, owners: range) -> bool:
        """Whether any rank in `ranks` sees a key of any rank in `owners`; both are runs of consecutive ranks."""
        if not ranks or not owners:
            return False
        reach = self.row_reach
        if reach is not None:
            return reach.needs(ranks, owners)
        q_rows, q_exact = self.readers.span(ranks)
        k_rows, k_exact = self.layout.span(owners)
        if q_exact and k_exact and len(k_rows) > MOST_RANGES:  # there are too many pairs of ranges
            pairs = ((rank, owner) for rank in ranks for owner in owners if self.layout.rows(owner))
            return any(self._needed_bits(*pair).any() for pair in pairs)
        if not self._touch(q_rows, k_rows):
            return False
        if q_exact and k_exact:
            return True
        # A widened span can only prove that there is no pair: halve the longer run until spans are exact.
        if (len(ranks) >= len(owners) and not q_exact) or k_exact:
            half = len(ranks) // 2
            return self.needs(ranks[:half], owners) or self.needs(ranks[half:], owners)
        half = len(owners) // 2
        return self.needs(ranks, owners[:half]) or self.needs(ranks, owners[half:])

    def _touch(self, q_rows: tuple[range, ...], k_rows: tuple[range, ...]) -> bool:
        """Whether some query of `q_rows` sees some key of `k_rows`; none of these ranges is empty."""
        for q in q_rows:
            run = self.pattern.run("keys", q.start, q.stop - 1) if q.step == 1 else None
            if run is None or any(k.step != 1 for k in k_rows):
                touches = sees_some(self.pattern, q, k_rows, self.heads)
            else:
                touches = any(run[0] < k.stop and k.start <= run[1] for k in k_rows)
            if touches:
                return True
        return False

    def visits(self, rank: int, owner: int) -> bool:
        """Whether `rank` sees a key of `owner`."""
        reach = self.row_reach
        return self._touches(rank, owner) if reach is None else bool(reach.visits[rank, owner])

    @cached
    def _touches(self, rank: int, owner: int) -> bool:
        return self.needs(range(rank, rank + 1), range(owner, owner + 1))

    @cached
    def pairs(self, rank: int, owner: int) -> int:
        """The exact number of (query, key, head, branch) pairs that `rank` computes with the block of `owner`."""
        rows, keys = self.readers.shard(rank), self.layout.shard(owner)
        if self.readers is self.layout or len(keys) <= MOST_RANGES:
            return sum(self.pattern.count(q, k, range(self.heads)) for q in rows for k in keys)
        works = self.works(rank, owner, ALL_ROWS)
        return sum(work.pairs for work in works)

    def _find_tiles(self, rank: int, owner: int) -> Iterator[Tile]:
        return find_tiles(self.pattern, self.readers.shard(rank), self.layout.shard(owner), self.heads)

    def _seen_rows(self, rank: int, owner: int) -> Iterator[tuple[range, range]]:
        works = self.works(rank, owner, ALL_ROWS)
        return ((range(1) if self.whole_rows else work.kv, run) for work in works for run in work.k)

    @property
    def whole_rows(self) -> bool:
        """Whether all heads of a block travel together; heads of row sets are then no key/value heads."""
        return self.block_heads != self.kv_heads

    def _heads_of_block(self, heads: range) -> Iterable[range]:
        return (range(1),) if self.whole_rows else _kv_heads(heads, self.group)

    @cached
    def joined_works(self, rank: int, owner: int, row_set: RowSet | AllRows = ALL_ROWS) -> tuple[Work, ...]:
        """The computations of `works` as fewer works: short runs of keys are joined, equal works become one."""
        return tuple(join_repetitions(join_keys(self.works(rank, owner, row_set))))

    @cached
    def works(self, rank: int, owner: int, row_set: RowSet | AllRows = ALL_ROWS) -> tuple[Work, ...]:
        """What `rank` computes with the block of `owner`: one `Work` per tile, in local row numbers.

        With a `RowSet`, only the pairs of its heads; key rows are then numbered as in the tensor of the row set.
        """
        if isinstance(row_set, RowSet):
            works = self.works(rank, owner, ALL_ROWS)
            if not self.whole_rows:
                return tuple(restrict_keys(works, row_set))
            found = tuple(restrict_keys(works, RowSet(tuple(range(self.kv_heads)), row_set.rows)))
            assert sum(work.pairs for work in found) == sum(work.pairs for work in works), "the row set loses pairs"
            return found
        return tuple(lower(join_tiles(join_dense(self._find_tiles(rank, owner))), self.group))

    @cached
    def first_works(self, rank: int, owner: int, most: int | None) -> tuple[tuple[Work, ...], bool]:
        """(works, complete): the joined works of the first `most` tiles that `rank` computes with the block of `owner`.

        `complete` is True if there are no further tiles. With most=None, all tiles are included.
        """
        if most is None:
            return self.joined_works(rank, owner), True
        first = list(islice(self._find_tiles(rank, owner), most + 1))
        if len(first) <= most:
            return self.joined_works(rank, owner), True
        return tuple(join_repetitions(join_keys(lower(first[:most], self.group)))), False


class QueryDemand(BlockDemand):
    """Which queries each rank needs for its keys; derived from the `KeyDemand` called `keys`."""

    side = "queries"
    most_ranges = 1 << 62

    def __init__(self, keys: KeyDemand) -> None:
        super().__init__(keys.pattern, keys.readers, keys.heads, keys.kv_heads, keys.layout)
        self.keys = keys

    def grouped(self, size: int) -> QueryDemand:
        return QueryDemand(self.keys.grouped(size))

    def needs(self, ranks: range, owners: range) -> bool:
        return self.keys.needs(owners, ranks)

    def visits(self, rank: int, owner: int) -> bool:
        return self.keys.visits(owner, rank)

    def _seen_rows(self, rank: int, owner: int) -> Iterator[tuple[range, range]]:
        return ((work.heads, work.q) for work in self.keys.works(owner, rank, ALL_ROWS))

    @cached
    def joined_works(self, rank: int, owner: int, row_set: RowSet | AllRows = ALL_ROWS) -> tuple[Work, ...]:
        """The computations of `works` as fewer works: short runs of keys are joined, equal works become one."""
        return tuple(join_repetitions(join_keys(self.works(rank, owner, row_set))))

    def works(self, rank: int, owner: int, row_set: RowSet | AllRows = ALL_ROWS) -> tuple[Work, ...]:
        """What `rank` computes with its own keys and the query rows of `owner`.

        With a `RowSet`, query heads and rows are numbered as in the tensor of the row set.
        """
        works = self.keys.works(owner, rank, ALL_ROWS)
        return tuple(restrict_queries(works, row_set)) if isinstance(row_set, RowSet) else works


def _kv_heads(heads: range, group: int) -> Iterator[range]:
    """The key/value heads of query heads, `group` of which share a key/value head."""
    if heads.step <= group:
        yield range(heads[0] // group, heads[-1] // group + 1)
    elif heads.step % group == 0:
        yield range(heads[0] // group, heads[-1] // group + 1, heads.step // group)
    else:
        for head in sorted({head // group for head in heads}):
            yield range(head, head + 1)
