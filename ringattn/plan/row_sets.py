"""Sets of rows of a block: which local rows of which heads travel, without the rows that no rank needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final, final

import numpy as np

from ..cache import Value
from ..pattern.ranges import merge_runs
from .work import Work

#: Numbers in ascending order, as ranges of which none begins before the range before it has ended.
Ranges = tuple[range, ...]


@final
class AllRows:
    """All rows of all heads of a block, whatever their number. `ALL_ROWS` is the only object of this class."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "ALL_ROWS"

    def __reduce__(self) -> str:  # pickled and copied as a reference to the one object
        return "ALL_ROWS"


ALL_ROWS: Final = AllRows()


@dataclass(frozen=True)
class RowSet(Value):
    """Local rows of some heads of a block; all heads have equally many rows.

    The heads are key/value heads in a block of keys, and query heads in a block of queries. `rows` has one entry, the
    rows of every head, or one entry per head. The tensor of a row set is [B, len(heads), count, D].
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
        """By head, the index of the head in the tensor of the row set."""
        return {head: i for i, head in enumerate(self.heads)}

    @property
    def nbytes(self) -> int:
        """About how many bytes the set takes, for `cache.estimate_bytes`: plans hold very many sets."""
        return 512 + 150 * len(self.heads) + 150 * sum(map(len, self.rows))

    def rows_of(self, head: int) -> Ranges:
        """The rows of one head of the set."""
        return self.rows[0] if len(self.rows) == 1 else self.rows[self.index[head]]

    @cached_property
    def _hash(self) -> int:
        return hash((self.heads, self.rows))

    def __hash__(self) -> int:
        return self._hash


#: The rows of one block, as disjoint sets: either `WHOLE_BLOCK`, or any number of `RowSet`s, or `NO_ROWS`.
RowSets = tuple[RowSet | AllRows, ...]
WHOLE_BLOCK: Final[RowSets] = (ALL_ROWS,)
NO_ROWS: Final[RowSets] = ()
#: A single row of a single head, for sizes per row.
ONE_ROW: Final = RowSet((0,), ((range(1),),))


def union(pieces: Iterable[tuple[range, range]], heads: int, rows: int) -> RowSets:
    """The union of pieces (heads, local rows) of a block of `heads` heads and `rows` rows."""
    per_head = _ranges_per_head(pieces, heads, rows)
    if per_head is None:
        return WHOLE_BLOCK
    ascending = {ranges: _ascending(ranges) for ranges in set(per_head)}
    return group_heads([ascending[ranges] for ranges in per_head], rows)


def count_union(pieces: Iterable[tuple[range, range]], heads: int, rows: int) -> int:
    """The number of rows of all heads in `union`, without making the ranges that hold the rows."""
    per_head = _ranges_per_head(pieces, heads, rows)
    if per_head is None:
        return heads * rows
    counts = {ranges: _count(ranges) for ranges in set(per_head)}
    return sum(counts[ranges] for ranges in per_head)


def _ranges_per_head(pieces: Iterable[tuple[range, range]], heads: int, rows: int) -> list[frozenset[range]] | None:
    """The ranges of each head, which may overlap; None where one piece is the whole block."""
    by_heads: dict[range, set[range]] = {}
    for piece_heads, piece_rows in pieces:
        if len(piece_rows) == rows and len(piece_heads) == heads:
            return None  # further pieces can add nothing
        by_heads.setdefault(piece_heads, set()).add(piece_rows)
    return [
        frozenset(part for piece_heads, parts in by_heads.items() if head in piece_heads for part in parts)
        for head in range(heads)
    ]


def subtract(row_sets: RowSets, others: Sequence[RowSets], heads: int, rows: int) -> RowSets:
    """The rows that `row_sets` hold and none of `others` does, of a block of `heads` heads and `rows` rows."""
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
        mask = _mask(row_sets, head, rows)
        for other in others:
            mask &= ~_mask(other, head, rows)
        per_head.append(to_ranges(np.flatnonzero(mask)))
    return group_heads(per_head, rows)


def count_rows(row_sets: RowSets, heads: int, rows: int) -> int:
    """The number of rows of all heads together, of a block of `heads` heads and `rows` rows."""
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
    changes = np.flatnonzero(np.diff(steps)) + 1  # the first distance of each run
    run_ends = [*changes.tolist(), count - 1]
    values, distances = numbers.tolist(), steps.tolist()
    ranges, first = [], 0
    for last in run_ends:
        if last > first:  # else the range before has taken the only number left of this run
            ranges.append(range(values[first], values[last] + 1, distances[last - 1]))
            first = last + 1
    if first < count:
        ranges.append(range(values[first], values[first] + 1))
    return tuple(ranges)


def as_range(numbers: Sequence[int]) -> range | None:
    """Ascending integers as one range, or None where their distances differ."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if any(b - a != step for a, b in pairwise(numbers)):
        return None
    return range(numbers[0], numbers[-1] + 1, step)


def to_numbers(ranges: Ranges) -> np.ndarray:
    """The members of ranges, int64, in the order of the ranges."""
    parts = [np.arange(r.start, r.stop, r.step) for r in ranges]
    return np.concatenate(parts) if len(parts) != 1 else parts[0]


class RowPlaces:
    """Where rows of a block are in the tensor of a row set, kept from work to work."""

    def __init__(self, row_set: RowSet) -> None:
        self.index = row_set.index
        self._numbers = tuple(map(to_numbers, row_set.rows))
        self._located: dict[tuple[int, Ranges], Ranges] = {}

    def locate(self, head: int, runs: Ranges) -> Ranges:
        """The indices among the rows of a head of the members of `runs`, as ranges in the same order."""
        key = 0 if len(self._numbers) == 1 else self.index[head], runs
        if key not in self._located:
            numbers = self._numbers[key[0]]
            self._located[key] = tuple(part for run in runs for part in _locate_run(numbers, run))
        return self._located[key]


def _locate_run(numbers: np.ndarray, run: range) -> Ranges:
    """The indices among ascending `numbers` of the members of `run`."""
    first, last = np.searchsorted(numbers, (run[0], run[-1])).tolist()
    assert last < len(numbers) and numbers[last] == run[-1], "a work needs rows that the row set does not hold"
    if last - first == len(run) - 1:
        return (range(first, last + 1),)
    return to_ranges(np.searchsorted(numbers, np.arange(run.start, run.stop, run.step)))


def restrict_works(works: Iterable[Work], row_set: RowSet, group: int) -> Iterator[Work]:
    """Works on a whole block as works on the tensor of `row_set`, which must hold the key rows that they need.

    `group` query heads share a key/value head. Heads whose rows have different places in the tensor become works of
    their own.
    """
    places = RowPlaces(row_set)
    for work in works:
        whole_groups = len(work.heads) != len(work.kv)  # else one query head for each key/value head
        chain: list[tuple[int, int, Ranges]] = []
        for place, head in enumerate(work.kv):
            if head not in row_set.index:
                continue
            link = (place, row_set.index[head], places.locate(head, work.k))
            if chain and not _continues(chain, link, whole_groups):
                yield _restrict(work, chain, group if whole_groups else 0)
                chain = []
            chain.append(link)
        if chain:
            yield _restrict(work, chain, group if whole_groups else 0)


def _continues(chain: list[tuple[int, int, Ranges]], link: tuple[int, int, Ranges], consecutive: bool) -> bool:
    """Whether a head has the rows of the chain, and equal distances in the work and in the row set.

    A link is (index of the head in the work, index of the head in the row set, rows).
    """
    step = link[0] - chain[-1][0], link[1] - chain[-1][1]
    if link[2] != chain[-1][2] or step[1] < 1 or (consecutive and step[0] != 1):
        return False
    return len(chain) == 1 or step == (chain[1][0] - chain[0][0], chain[1][1] - chain[0][1])


def _restrict(work: Work, chain: list[tuple[int, int, Ranges]], group: int) -> Work:
    """The work for the key/value heads of a chain; `group` = 0: one query head for each key/value head."""
    (first, place, runs), (last, end, _) = chain[0], chain[-1]
    kv = range(place, end + 1, (end - place) // max(len(chain) - 1, 1) or 1)
    step = (last - first) // max(len(chain) - 1, 1) or 1
    heads = work.heads[first * group : (last + 1) * group] if group else work.heads[first : last + 1 : step]
    return replace(work, heads=heads, kv=kv, k=runs)


def _mask(row_sets: RowSets, head: int, rows: int) -> np.ndarray:
    """Which rows of one head the sets hold: bool [rows]."""
    mask = np.zeros(rows, dtype=bool)
    for part in _rows_of_head(row_sets, head, rows):
        mask[part.start : part.stop : part.step] = True
    return mask


def _rows_of_head(row_sets: RowSets, head: int, rows: int) -> list[range]:
    """The rows of one head that the sets hold, as ranges."""
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
    first, mask = _mark_members(ranges)
    return to_ranges(np.flatnonzero(mask) + first)


def _count(ranges: frozenset[range]) -> int:
    """How many numbers the union of ranges holds."""
    if len(ranges) < 2:
        return sum(map(len, ranges))
    if all(r.step == 1 for r in ranges):  # a mask would be as long as the block
        return sum(map(len, merge_runs(ranges)))
    return int(np.count_nonzero(_mark_members(ranges)[1]))


def _mark_members(ranges: frozenset[range]) -> tuple[int, np.ndarray]:
    """(first, mask) of the union of ranges: its least member, and which first + i are members: bool [span]."""
    first, stop = min(r.start for r in ranges), max(r[-1] for r in ranges) + 1
    mask = np.zeros(stop - first, dtype=bool)
    for r in ranges:
        mask[r.start - first : r[-1] + 1 - first : r.step] = True
    return first, mask


def group_heads(per_head: list[Ranges], rows: int) -> RowSets:
    """The rows of each head of a block of `rows` rows as row sets, one for all heads that have equally many rows."""
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
