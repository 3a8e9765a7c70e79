"""Which ranks need which rows of which block, by arithmetic on all rows at once.

If each query attends one run of keys, these tables replace tiles. That makes it cheap to plan packed documents anew in
every training step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..cache import Cache
from ..layout.regular import Layout, Striped
from ..pattern.base import Pattern, Run, Side
from ..pattern.tile import find_runs, join_runs
from .row_sets import NO_ROWS, WHOLE_BLOCK, Ranges, RowSet, RowSets, to_numbers, to_ranges

#: Striped layouts with more tokens or ranks are planned by ranges, as a `StripedReach` holds a few numbers per token.
MOST_TOKENS, MOST_RANKS = 1 << 21, 512
#: Arrays over tokens are computed this many tokens at a time: larger ones would allocate new memory in every plan.
PART = 1 << 14
#: Up to TABLE_RANKS ranks, a table of at most TABLE_CELLS cells lists what each rank needs of some blocks. Up to
#: TABLE_ALL ranks, it lists all blocks.
TABLE_RANKS, TABLE_CELLS, TABLE_ALL = 512, 1 << 18, 64
#: Sums of up to this many rows are exact in fp64.
EXACT_ROWS = 1 << 53
#: Bytes of the layout tables that this process caches.
LAYOUTS = 1 << 24
#: Some ranks, as runs of consecutive ranks.
Ranks = Sequence[range]

_layouts = Cache(LAYOUTS)


class RowReach(ABC):
    """A table of the rows that each rank needs from the blocks of some owners; the same for all `heads` heads.

    Every rank needs all rows of its own block.
    """

    #: Whether a rank needs a row of the block of an owner: bool [ranks, blocks].
    visits: np.ndarray

    def __init__(self, layout: Layout, blocks: list[int], heads: int) -> None:
        self.layout, self.heads = layout, heads
        #: The owners of the blocks.
        self.blocks = blocks

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Approximate size of the tables in bytes."""

    @abstractmethod
    def count_carried(self, sign: int, limit: int) -> np.ndarray:
        """How many rows of one head each block sends on each hop: int64 [blocks, hops], farthest hop first.

        A hop carries the rows that the receiving rank, or any rank beyond it, needs. `sign` is the direction (+1 or
        -1), `limit` the number of hops.
        """

    @abstractmethod
    def needed(self, ranks: Ranks, owner: int, most: int, others: Sequence[Ranks] = ()) -> RowSets:
        """The rows of the block of `owner` that a rank in `ranks` needs, without those that a rank in `others` needs.

        The result has contiguous ranges, or the fewest possible ranges (of any step) if the block has more than `most`
        ranges of positions. The tables must cover all blocks.
        """

    @abstractmethod
    def count(self, ranks: Ranks, owner: int, others: Sequence[Ranks] = ()) -> int:
        """The number of rows per head that `needed` would return, computed without listing them."""

    def needs(self, ranks: range, owners: range) -> bool:
        """Whether any rank in `ranks` needs a row of any block in `owners`. The tables must cover all blocks."""
        return bool(self.visits[ranks.start : ranks.stop, owners.start : owners.stop].any())

    def _row_sets(self, ranges: Ranges, rows: int) -> RowSets:
        """A row set with the same ranges for every head of a block of `rows` rows."""
        if not ranges:
            return NO_ROWS
        return WHOLE_BLOCK if ranges == (range(rows),) else (RowSet(tuple(range(self.heads)), (ranges,)),)


@dataclass(frozen=True)
class _Runs:
    """The runs of a layout, numbered by position, and the runs of the blocks of some owners."""

    first: np.ndarray
    last: np.ndarray
    #: The owners of the blocks, and the index of the first run of each block, plus the total number of runs.
    blocks: list[int]
    borders: list[int]
    #: The first position and the length of each run of the blocks: int64 [runs, 1] each.
    begin: np.ndarray
    length: np.ndarray
    #: For each run of a block and each distance from its owner up to a rank, int64 [runs, ranks]: the rank's nearest
    #: run that is not to the right of it (-1 if none), and its nearest run to the right (the number of runs if none).
    left: np.ndarray
    right: np.ndarray

    def sum_blocks(self, by_run: np.ndarray) -> np.ndarray:
        """Sum numbers [runs, columns] over the runs of each block: returns [blocks, columns]."""
        borders = np.array(self.borders)
        filled = np.flatnonzero(borders[1:] > borders[:-1])
        if len(filled) == len(by_run) == len(self.blocks):
            return by_run
        sums = np.zeros((len(self.blocks), by_run.shape[1]), dtype=np.int64)
        sums[filled] = np.add.reduceat(by_run, borders[filled])
        return sums


def _list_runs(layout: Layout, owners: Sequence[int]) -> _Runs | None:
    """The runs of a layout; None if ranges have steps, or if the table would be too large."""
    shards = [layout.shard(rank) for rank in range(layout.ranks)]
    most, count = max(map(len, shards)), sum(len(shards[owner]) for owner in owners)
    if not count or count * layout.ranks * most > TABLE_CELLS or any(r.step != 1 for shard in shards for r in shard):
        return None
    runs = sorted((run.start, run.stop - 1) for shard in shards for run in shard)
    number = {first: index for index, (first, _) in enumerate(runs)}
    places = np.full((layout.ranks, most), -1)  # the numbers of the runs of each rank
    for rank, shard in enumerate(shards):
        places[rank, : len(shard)] = [number[run.start] for run in shard]
    block_runs = [(owner, run.start, len(run), number[run.start]) for owner in owners for run in shards[owner]]
    owner, begin, length, own = np.array(block_runs, dtype=np.int64).T[:, :, None]
    by_distance = places[(owner + np.arange(layout.ranks)) % layout.ranks]
    left = np.full((count, layout.ranks), -1)
    right = np.full_like(left, len(runs))
    for place in np.moveaxis(by_distance, 2, 0):
        left = np.maximum(left, np.where(place <= own, place, -1))
        right = np.minimum(right, np.where(place > own, place, len(runs)))
    borders = np.cumsum([0, *(len(shards[owner]) for owner in owners)]).tolist()
    first, last = np.array(runs, dtype=np.int64).T
    return _Runs(first, last, list(owners), borders, begin, length, left, right)


class RunReach(RowReach):
    """A table for layouts whose shards are runs of positions: how many rows each rank needs at either end of each run.

    A rank with positions before a run needs the run's rows from the first on; a rank with positions after it needs rows
    up to the last.
    """

    def __init__(self, layout: Layout, runs: _Runs, needed: Run, heads: int) -> None:
        super().__init__(layout, runs.blocks, heads)
        lows, highs = (np.broadcast_to(x, runs.first.shape) for x in needed)
        # Later runs need as much or more to their right, so the nearest of a rank's runs decides.
        first = np.append(highs + 1, 0).take(runs.left) - runs.begin
        last = runs.begin + runs.length - np.append(lows, layout.tokens).take(runs.right)
        #: How many of the first and of the last rows of a run a rank at each distance needs: int64 [2, runs, ranks].
        self._ends = np.maximum(np.minimum((first, last), runs.length), 0)
        self._runs, ranks = runs, layout.ranks
        needing = runs.sum_blocks(self._ends.any(0)) > 0
        distance = (np.arange(ranks)[:, None] - runs.blocks) % ranks
        self.visits = needing[np.arange(len(runs.blocks)), distance]

    @property
    def nbytes(self) -> int:
        return int(self._ends.nbytes + self.visits.nbytes)

    def count_carried(self, sign: int, limit: int) -> np.ndarray:
        ranks = self.layout.ranks
        farthest_first = self._ends[:, :, limit:0:-1] if sign > 0 else self._ends[:, :, ranks - limit :]
        first, last = np.maximum.accumulate(farthest_first, 2)
        return self._runs.sum_blocks(np.minimum(first + last, self._runs.length))

    def needed(self, ranks: Ranks, owner: int, most: int, others: Sequence[Ranks] = ()) -> RowSets:
        parts, lengths, start = [], self._lengths(owner), 0
        for length, first, last, left, right in zip(lengths.tolist(), *self._cut(ranks, owner, others), strict=True):
            parts += [range(start + left, start + first), range(max(start + last, start + left), start + right)]
            start += length
        ranges = tuple(join_runs(parts))
        # Short runs may be joined into ranges with a larger step.
        if len(lengths) > most and any([len(run) < 3 for run in ranges]):
            ranges = to_ranges(to_numbers(ranges))
        return self._row_sets(ranges, start)

    def count(self, ranks: Ranks, owner: int, others: Sequence[Ranks] = ()) -> int:
        if not others and len(ranks) == 1 and len(ranks[0]) == 1:
            return int(self._counts[owner, (ranks[0].start - owner) % self.layout.ranks])
        first, last, left, right = self._cut(ranks, owner, others)
        ends = np.maximum(first - left, 0) + np.maximum(right - np.maximum(last, left), 0)
        return int(np.minimum(ends, np.maximum(right - left, 0)).sum())

    @cached_property
    def _counts(self) -> np.ndarray:
        """How many rows of each block a rank at each distance needs: int64 [blocks, ranks]."""
        counts = self._runs.sum_blocks(np.minimum(self._ends.sum(0), self._runs.length))
        counts[:, 0] = self._runs.sum_blocks(self._runs.length)[:, 0]  # the owner needs all rows
        return counts

    def _cut(self, ranks: Ranks, owner: int, others: Sequence[Ranks]) -> tuple[np.ndarray, ...]:
        """(first, last, left, right), int64 [runs] each: `needed` has the rows left .. first - 1 and last .. right - 1.

        Rows count from the start of each run of the block.
        """
        lengths = self._lengths(owner)
        outer, hole = self._find_ends(ranks, owner), self._find_ends([run for each in others for run in each], owner)
        right = lengths - hole[1]
        return np.minimum(outer[0], right), lengths - outer[1], hole[0], right

    def _lengths(self, owner: int) -> np.ndarray:
        """The lengths of the runs of a block, int64 [runs]."""
        return self._runs.length[self._runs.borders[owner] : self._runs.borders[owner + 1], 0]

    def _find_ends(self, ranks: Ranks, owner: int) -> np.ndarray:
        """How many of the first and of the last rows of each run of a block any rank of `ranks` needs: [2, runs]."""
        ends = self._ends[:, self._runs.borders[owner] : self._runs.borders[owner + 1]]
        found = np.zeros(ends.shape[:2], dtype=np.int64)
        for run in ranks:
            start = 0 if owner in run else (run.start - owner) % self.layout.ranks  # the owner needs all rows
            found = np.maximum(found, ends[:, :, start : start + len(run)].max(2))
        return found


class StripedReach(RowReach):
    """A table for striped layouts: how many ranks away from its owner each row is needed, in either direction.

    It replaces tiles because the ranges of a striped block have a step, so a document with a few rows per rank would
    need many small tiles. `places` holds for each position the largest distance up (+1) and down (-1) the ring at which
    ranks need the row, at most the number of ranks: int16 [tokens] each.
    """

    def __init__(self, layout: Striped, places: dict[int, np.ndarray], heads: int) -> None:
        super().__init__(layout, list(range(layout.ranks)), heads)
        self._owner, self._rows_of_blocks = _layouts.answer((_deal, layout), lambda: _deal(layout))
        #: How many rows of each block are needed at each distance or farther: int64 [ranks, ranks + 1].
        self._counts = {sign: self._count_rows(reached) for sign, reached in places.items()}
        self._places = {sign: reached for sign, reached in places.items() if self._counts[sign][:, 1].any()}
        #: By owner, the distances of its rows in local order, and its number of ranges.
        self._rows: dict[int, tuple[dict[int, np.ndarray], int]] = {}
        ranks = np.arange(layout.ranks)
        up = (ranks[:, None] - ranks) % layout.ranks
        self.visits = (self._counts[+1][ranks, up] > 0) | (self._counts[-1][ranks, -up % layout.ranks] > 0)

    @property
    def nbytes(self) -> int:
        kept = (*self._places.values(), *self._places.values())  # by position and, in `_rows`, by owner
        return int(sum(array.nbytes for array in (*kept, *self._counts.values(), self.visits)))

    def count_carried(self, sign: int, limit: int) -> np.ndarray:
        ranks = self.layout.ranks
        if -sign not in self._places:
            return self._counts[sign][:, limit:0:-1]
        # A row may also reach a rank the other way around the ring.
        if sign not in self._places:
            return np.repeat(self._counts[-sign][:, ranks - limit, None], limit, 1)
        hops = np.where(self._places[-sign] >= ranks - limit, limit, np.minimum(self._places[sign], limit))
        counts = np.bincount(self._owner * (limit + 1) + limit - hops, minlength=ranks * (limit + 1))
        return counts.reshape(ranks, limit + 1).cumsum(1)[:, :limit]

    def needed(self, ranks: Ranks, owner: int, most: int, others: Sequence[Ranks] = ()) -> RowSets:
        mask = self._needed_mask(ranks, owner, others)
        ranges = find_runs(mask) if self._rows[owner][1] <= most else to_ranges(mask.nonzero()[0])
        return self._row_sets(ranges, len(mask))

    def count(self, ranks: Ranks, owner: int, others: Sequence[Ranks] = ()) -> int:
        return int(np.count_nonzero(self._needed_mask(ranks, owner, others)))

    def _needed_mask(self, ranks: Ranks, owner: int, others: Sequence[Ranks]) -> np.ndarray:
        """The rows of `needed` as a mask of the block in local order: bool [rows]."""
        mask = self._mask(ranks, owner)
        for other in others:
            mask &= ~self._mask(other, owner)
        return mask

    def _mask(self, ranks: Ranks, owner: int) -> np.ndarray:
        """Which rows of the block of `owner`, in local order, some rank of `ranks` needs: bool [rows]."""
        if owner not in self._rows:
            rows = [slice(r.start, r.stop, r.step) for r in self.layout.shard(owner)] or [slice(0)]
            places = {sign: np.concatenate([x[part] for part in rows]) for sign, x in self._places.items()}
            self._rows[owner] = places, len(rows)
        own = any([owner in run for run in ranks])
        if own or not self._places:
            return np.full(self.layout.rows(owner), own)
        masks = []
        for sign, reached in self._rows[owner][0].items():
            nearest = [(run.start - owner if sign > 0 else owner - run.stop + 1) % self.layout.ranks for run in ranks]
            masks.append(reached >= min(nearest, default=MOST_RANKS + 1))
        return masks[0] if len(masks) == 1 else masks[0] | masks[1]

    def _count_rows(self, reached: np.ndarray) -> np.ndarray:
        """The number of rows of each block that are needed at each distance or farther: int64 [ranks, ranks + 1]."""
        ranks = self.layout.ranks
        common = ranks if 2 * np.count_nonzero(reached) > len(reached) else 0  # most rows go all the way or nowhere
        others = (reached != common).nonzero()[0]
        cells = self._owner[others] * (ranks + 1) + reached[others]
        counts = np.bincount(cells, minlength=ranks * (ranks + 1)).reshape(ranks, -1)
        counts[:, common] += self._rows_of_blocks - counts.sum(1)
        return counts[:, ::-1].cumsum(1)[:, ::-1]


def _deal(layout: Striped) -> tuple[np.ndarray, np.ndarray]:
    """The owner of each position, and the number of rows of each block."""
    owner = np.arange(layout.tokens) // layout.block % layout.ranks
    return owner, np.bincount(owner, minlength=layout.ranks)


def _parts(tokens: int) -> Iterator[slice]:
    """The positions, split into parts whose arrays fit in the processor's cache."""
    return (slice(start, min(start + PART, tokens)) for start in range(0, tokens, PART))


def find_row_reach(pattern: Pattern, side: Side, layout: Layout, owners: Sequence[int], heads: int) -> RowReach | None:
    """A table of the rows that each rank needs from the blocks of `owners`, or from all blocks.

    None if a rank's needs are not runs of rows, or if the table would be too large. The blocks hold keys or queries
    (`side`) with `heads` heads.
    """
    ranks, tokens = layout.ranks, layout.tokens
    if isinstance(layout, Striped) and 0 < tokens <= MOST_TOKENS and ranks <= MOST_RANKS:
        up, down = np.empty((2, tokens), dtype=np.int16)
        for part in _parts(tokens):
            positions = np.arange(part.start, part.stop, dtype=np.int64)
            readers = pattern.run("queries" if side == "keys" else "keys", positions, positions)
            if readers is None:
                return None
            places = np.maximum(readers[0], 0), positions, np.minimum(readers[1], tokens - 1)
            low, own, high = places if layout.block == 1 else (x // layout.block for x in places)
            up[part], down[part] = np.minimum(high - own, ranks), np.minimum(own - low, ranks)
        return StripedReach(layout, {+1: up, -1: down}, heads)
    if ranks > TABLE_RANKS or tokens * ranks > EXACT_ROWS:
        return None
    owners = range(ranks) if ranks <= TABLE_ALL else tuple(owners)
    runs = _layouts.answer((layout, owners), lambda: _list_runs(layout, owners))
    needed = None if runs is None else pattern.run(side, runs.first, runs.last)
    return None if runs is None or needed is None else RunReach(layout, runs, needed, heads)
