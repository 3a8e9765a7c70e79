"""Row sets: which local rows of which heads of a block travel, and which rows two sets share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, final

import numpy as np

from ..cache import Value
from ..pattern.tile import merge_runs

#: A copy of rows uses up to this many slices; with more, it uses an index list.
MAX_SLICES = 16
#: Numbers in ascending order, as ranges that do not interleave.
Ranges = tuple[range, ...]


@final
class AllRows:
    """All rows of all heads of a block. `ALL_ROWS` is the only instance."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "ALL_ROWS"

    def __reduce__(self) -> str:  # pickled and copied as a reference to the one object
        return "ALL_ROWS"


ALL_ROWS: Final = AllRows()


@dataclass(frozen=True)
class RowSet(Value):
    """Some rows, by local index, of some heads of a block; every head has equally many.

    The heads are key/value heads in a block of keys, and query heads in a block of queries. `rows` has one entry for
    all heads, or one entry per head. The rows themselves are stored as a tensor [B, len(heads), count, D].
    """

    heads: tuple[int, ...]
    rows: tuple[Ranges, ...]

    @cached_property
    def count(self) -> int:
        """The number of rows of one head."""
        return sum(map(len, self.rows[0]))

    @property
    def size(self) -> int:
        """The number of rows of all heads together."""
        return len(self.heads) * self.count

    @cached_property
    def index(self) -> dict[int, int]:
        """The index of each head in the tensor of the row set."""
        return {head: i for i, head in enumerate(self.heads)}

    @property
    def nbytes(self) -> int:
        """Approximate size of the set in bytes, for `cache.estimate_bytes`: plans hold very many sets."""
        return 512 + 150 * len(self.heads) + 150 * sum(map(len, self.rows))

    def rows_of(self, head: int) -> Ranges:
        """The rows of one head of the set."""
        return self.rows[0] if len(self.rows) == 1 else self.rows[self.index[head]]

    __hash__ = Value.kept_hash


#: The rows of one block, as disjoint sets: either `WHOLE_BLOCK`, or any number of `RowSet`s, or `NO_ROWS`.
RowSets = tuple[RowSet | AllRows, ...]
WHOLE_BLOCK: Final[RowSets] = (ALL_ROWS,)
NO_ROWS: Final[RowSets] = ()
#: A single row of a single head, to compute sizes per row.
ONE_ROW: Final = RowSet((0,), ((range(1),),))


def union(pieces: Iterable[tuple[range, range]], heads: int, rows: int) -> RowSets:
    """The union of pieces (heads, local rows) of a block of `heads` heads and `rows` rows."""
    by_heads: dict[range, set[range]] = {}
    for piece_heads, piece_rows in pieces:
        if len(piece_rows) == rows and len(piece_heads) == heads:
            return WHOLE_BLOCK  # further pieces can add nothing
        by_heads.setdefault(piece_heads, set()).add(piece_rows)
    per_head = [
        frozenset(part for piece_heads, parts in by_heads.items() if head in piece_heads for part in parts)
        for head in range(heads)
    ]
    ascending = {ranges: _ascending(ranges) for ranges in set(per_head)}
    return group_heads([ascending[ranges] for ranges in per_head], rows)


def subtract(row_sets: RowSets, others: Sequence[RowSets], heads: int, rows: int) -> RowSets:
    """The rows in `row_sets` that are in none of `others`, for a block of `heads` heads and `rows` rows."""
    others = [other for other in others if other != NO_ROWS]
    if not others:
        return row_sets
    if row_sets in others or WHOLE_BLOCK in others:
        return NO_ROWS
    per_head: list[Ranges] = []
    for head in range(heads):
        kept = _rows_of_head(row_sets, head, rows)
        removed = [part for other in others for part in _rows_of_head(other, head, rows)]
        if all(part.step == 1 for part in (*kept, *removed)):  # a mask would be as long as the block
            runs = _subtract_runs(kept, removed)
            if all(len(run) > 2 for run in runs):  # `to_ranges` may join shorter runs to ranges of a larger step
                per_head.append(runs)
                continue
        mask = np.zeros(rows, dtype=bool)
        for parts, held in ((kept, True), (removed, False)):
            for part in parts:
                mask[part.start : part.stop : part.step] = held
        per_head.append(to_ranges(np.flatnonzero(mask)))
    return group_heads(per_head, rows)


def count_rows(row_sets: RowSets, heads: int, rows: int) -> int:
    """The number of rows in the sets, summed over heads, for a block of `heads` heads and `rows` rows."""
    return sum(row_set.size if isinstance(row_set, RowSet) else heads * rows for row_set in row_sets)


def to_ranges(numbers: np.ndarray) -> Ranges:
    """Ascending integers as few ranges, each a run of equal distances."""
    count = len(numbers)
    if not count:
        return ()
    if count < 3:
        start, last = int(numbers[0]), int(numbers[-1])
        return (range(start, last + 1, max(last - start, 1)),)
    steps = np.diff(numbers)
    if numbers[-1] - numbers[0] == (count - 1) * steps[0] and (steps == steps[0]).all():
        return (range(int(numbers[0]), int(numbers[-1]) + 1, int(steps[0])),)
    # `ends` has the last number of each run of equal distances. Adjacent runs share a number; it belongs to the earlier
    # run. A run with a single distance is then left with one number, which the next run takes: among consecutive runs
    # of this kind, every second one gives no range.
    ends = np.append(np.flatnonzero(np.diff(steps)) + 1, count - 1)
    number = np.arange(len(ends))
    longer = np.diff(ends, prepend=-1) > 1  # the first run has all its numbers
    ends = ends[(number - np.maximum.accumulate(np.where(longer, number, 0))) % 2 == 0]
    first = np.append(0, ends + 1)
    starts = numbers[first[:-1]].tolist()
    ranges = [*map(range, starts, (numbers[ends] + 1).tolist(), steps[ends - 1].tolist())]
    if first[-1] < count:
        ranges.append(range(int(numbers[-1]), int(numbers[-1]) + 1))
    return tuple(ranges)


def as_range(numbers: Sequence[int]) -> range | None:
    """Ascending integers as one range, or None if their distances differ."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if any(b - a != step for a, b in pairwise(numbers)):
        return None
    return range(numbers[0], numbers[-1] + 1, step)


def to_numbers(ranges: Ranges) -> np.ndarray:
    """The members of ranges, int64, in the order of the ranges."""
    parts = [np.arange(r.start, r.stop, r.step) for r in ranges]
    return np.concatenate(parts) if len(parts) != 1 else parts[0]


def _rows_of_head(row_sets: RowSets, head: int, rows: int) -> list[range]:
    """The rows of one head in the sets, as ranges."""
    if row_sets == WHOLE_BLOCK:
        return [range(rows)]
    partial = (row_set for row_set in row_sets if isinstance(row_set, RowSet) and head in row_set.index)
    return [part for row_set in partial for part in row_set.rows_of(head)]


def _subtract_runs(kept: list[range], removed: list[range]) -> Ranges:
    """The members of `kept` that are not in `removed`, ascending. All ranges have step 1."""
    left: list[range] = []
    holes = merge_runs(frozenset(removed)) if removed else ()
    for part in merge_runs(frozenset(kept)) if kept else ():
        start = part.start
        for hole in holes:
            if hole.stop > start and hole.start < part.stop:
                if hole.start > start:
                    left.append(range(start, hole.start))
                start = hole.stop
        if start < part.stop:
            left.append(range(start, part.stop))
    return tuple(left)


def _ascending(ranges: frozenset[range]) -> Ranges:
    """The union of ranges, as ranges in ascending order that do not interleave."""
    if len(ranges) < 2:
        return tuple(ranges)
    if all(r.step == 1 for r in ranges):
        return merge_runs(ranges)
    first, stop = min(r.start for r in ranges), max(r[-1] for r in ranges) + 1
    mask = np.zeros(stop - first, dtype=bool)
    for r in ranges:
        mask[r.start - first : r[-1] + 1 - first : r.step] = True
    return to_ranges(np.flatnonzero(mask) + first)


def group_heads(per_head: list[Ranges], rows: int) -> RowSets:
    """Make row sets from the rows of each head of a block of `rows` rows; heads with equally many rows share one."""
    if not rows or not any(per_head):
        return NO_ROWS
    if all(ranges == (range(rows),) for ranges in per_head):
        return WHOLE_BLOCK
    heads_by_count: dict[int, list[int]] = {}
    for head, ranges in enumerate(per_head):
        if ranges:
            heads_by_count.setdefault(sum(map(len, ranges)), []).append(head)
    row_sets = []
    for heads in heads_by_count.values():
        rows_of_heads = [per_head[head] for head in heads]
        shared = len(set(rows_of_heads)) == 1
        row_sets.append(RowSet(tuple(heads), (rows_of_heads[0],) if shared else tuple(rows_of_heads)))
    return tuple(row_sets)


@dataclass(frozen=True)
class RowCopy:
    """Where to copy from and to: the heads and rows that two row sets share, as indices into the tensors of both."""

    to_heads: range
    to_rows: range | np.ndarray
    from_heads: range
    from_rows: range | np.ndarray


def find_copies(target: RowSet | AllRows, source: RowSet | AllRows, heads: int, rows: int) -> tuple[RowCopy, ...]:
    """The copies that move every row shared by both row sets from the tensor of `source` to the tensor of `target`.

    Both are row sets of the same block of `heads` heads and `rows` rows.
    """
    whole = RowSet(tuple(range(heads)), ((range(rows),),))
    to, of = (row_set if isinstance(row_set, RowSet) else whole for row_set in (target, source))
    shared_heads = [head for head in to.heads if head in of.index]
    if len(to.rows) == len(of.rows) == 1 and shared_heads:
        to_heads, of_heads = (as_range([side.index[head] for head in shared_heads]) for side in (to, of))
        if to_heads is not None and of_heads is not None:
            return tuple(RowCopy(to_heads, a, of_heads, b) for a, b in _shared_rows(to.rows[0], of.rows[0]))
    copies: list[RowCopy] = []
    for head in shared_heads:
        x, y = to.index[head], of.index[head]
        rows_of_head = _shared_rows(to.rows_of(head), of.rows_of(head))
        copies += [RowCopy(range(x, x + 1), a, range(y, y + 1), b) for a, b in rows_of_head]
    return tuple(copies)


def _shared_rows(to: Ranges, of: Ranges) -> Iterator[tuple[range | np.ndarray, range | np.ndarray]]:
    """(indices in `to`, indices in `of`) of the rows that both ascending lists share."""
    if to == of:
        yield range(sum(map(len, to))), range(sum(map(len, of)))
        return
    if _indexes_itself(of, to):
        yield from _index(to)
        return
    if _indexes_itself(to, of):
        yield from ((b, a) for a, b in _index(of))
        return
    _, a, b = np.intersect1d(to_numbers(to), to_numbers(of), assume_unique=True, return_indices=True)
    x, y = to_ranges(a), to_ranges(b)
    if max(len(x), len(y)) > MAX_SLICES:
        yield a, b
        return
    # Split both where either of them starts a new range, so that each slice of `to` is one slice of `of`.
    ends = sorted({0, *np.cumsum([len(r) for r in x]).tolist(), *np.cumsum([len(r) for r in y]).tolist()})
    for start, stop in pairwise(ends):
        yield to_ranges(a[start:stop])[0], to_ranges(b[start:stop])[0]


def _indexes_itself(rows: Ranges, others: Ranges) -> bool:
    """Whether `rows` are 0, 1, 2, .. at least up to the last of `others`: each of `others` is then its own index."""
    return len(rows) == 1 and (rows[0].start, rows[0].step) == (0, 1) and others[-1][-1] < len(rows[0])


def _index(rows: Ranges) -> Iterator[tuple[range | np.ndarray, range | np.ndarray]]:
    """(indices among `rows`, rows), as slices or as index lists."""
    if len(rows) > MAX_SLICES:
        yield np.arange(sum(map(len, rows))), to_numbers(rows)
        return
    first = 0
    for run in rows:
        yield range(first, first + len(run)), run
        first += len(run)
