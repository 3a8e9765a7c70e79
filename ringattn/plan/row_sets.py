"""The rows of a block that travel: which local rows of which key/value heads, without those that nobody needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..cache import Value
from ..pattern.ranges import merge_runs
from .work import Work


@dataclass(frozen=True)
class RowSet(Value):
    """Local rows of some key/value heads of a block: all heads have equally many.

    `rows` has one entry, the rows of every head, or one entry per head; an entry is ranges in ascending order, none
    of which begins before the one before it has ended. A tensor of the cut is [B, len(heads), count, D].
    """

    heads: tuple[int, ...]
    rows: tuple[tuple[range, ...], ...]

    @cached_property
    def count(self) -> int:
        """Rows of one head."""
        return sum(map(len, self.rows[0]))

    @property
    def size(self) -> int:
        """Rows of all heads together."""
        return len(self.heads) * self.count

    @cached_property
    def index(self) -> dict[int, int]:
        """Where a key/value head stands in the tensor of the cut."""
        return {head: i for i, head in enumerate(self.heads)}

    def of(self, head: int) -> tuple[range, ...]:
        """The rows of a key/value head of the cut."""
        return self.rows[0] if len(self.rows) == 1 else self.rows[self.index[head]]

    @cached_property
    def _hash(self) -> int:
        return hash((self.heads, self.rows))

    def __hash__(self) -> int:
        return self._hash


#: Disjoint cuts of a block; (None,) is the whole block, () nothing.
RowSets = tuple[RowSet | None, ...]
WHOLE: RowSets = (None,)
Rows = tuple[range, ...]


def cover(seen: Iterable[tuple[range, range]], kv_heads: int, rows: int) -> RowSets:
    """The union of pieces (key/value heads, local rows) of a block of `rows` rows."""
    found = _by_head(seen, kv_heads, rows)
    if found is None:
        return WHOLE
    known = {ranges: _ascending(ranges) for ranges in set(found)}
    return grouped([known[ranges] for ranges in found], rows)


def covered(seen: Iterable[tuple[range, range]], kv_heads: int, rows: int) -> int:
    """Rows of all heads in that union: `total` of `cover`, without making the ranges that hold them."""
    found = _by_head(seen, kv_heads, rows)
    if found is None:
        return kv_heads * rows
    known = {ranges: _count(ranges) for ranges in set(found)}
    return sum(known[ranges] for ranges in found)


def _by_head(seen: Iterable[tuple[range, range]], kv_heads: int, rows: int) -> list[frozenset[range]] | None:
    """The ranges seen of each head, which may overlap; None once all rows of all heads are."""
    found: dict[range, set[range]] = {}
    for heads, part in seen:
        if len(part) == rows and len(heads) == kv_heads:
            return None  # nothing can be added: the rest is not looked at
        found.setdefault(heads, set()).add(part)
    return [
        frozenset(part for heads, parts in found.items() if head in heads for part in parts) for head in range(kv_heads)
    ]


def minus(cuts: RowSets, others: Sequence[RowSets], kv_heads: int, rows: int) -> RowSets:
    """What `cuts` hold and none of `others` does."""
    others = [other for other in others if other]
    if not others:
        return cuts
    if cuts in others or WHOLE in others:
        return ()
    left: list[Rows] = []
    for head in range(kv_heads):
        held, gone = _parts(cuts, head, rows), [part for other in others for part in _parts(other, head, rows)]
        if all(part.step == 1 for part in (*held, *gone)):  # a mask would be as long as the block
            runs = _without(held, gone)
            if all(len(run) > 2 for run in runs):  # shorter ones might be written as steps
                left.append(runs)
                continue
        mask = _mask(cuts, head, rows)
        for other in others:
            mask &= ~_mask(other, head, rows)
        left.append(decode(np.flatnonzero(mask)))
    return grouped(left, rows)


def total(cuts: RowSets, kv_heads: int, rows: int) -> int:
    """Rows of all heads together."""
    return sum(kv_heads * rows if cut is None else cut.size for cut in cuts)


def decode(places: np.ndarray) -> Rows:
    """Ascending numbers as few ranges, each a run of equal distances."""
    count = len(places)
    if not count:
        return ()
    if count == 1 or places[-1] - places[0] == (count - 1) * (places[1] - places[0]):
        steps = np.diff(places)
        if count < 3 or (steps == steps[0]).all():
            step = int(steps[0]) if count > 1 else 1
            return (range(int(places[0]), int(places[-1]) + 1, step),)
    steps = np.diff(places)
    changes = np.flatnonzero(np.diff(steps)) + 1  # the first distance of each run
    edges = [*changes.tolist(), count - 1]
    values, distances = places.tolist(), steps.tolist()
    found, first = [], 0
    for stop in edges:
        if stop > first:  # else the only place left of this run was taken by the one before
            found.append(range(values[first], values[stop] + 1, distances[stop - 1]))
            first = stop + 1
    if first < count:
        found.append(range(values[first], values[first] + 1))
    return tuple(found)


def places(rows: Rows) -> np.ndarray:
    """The numbers of ranges, int64."""
    parts = [np.arange(r.start, r.stop, r.step) for r in rows]
    return np.concatenate(parts) if len(parts) != 1 else parts[0]


def relocated(works: Iterable[Work], cut: RowSet, group: int) -> Iterator[Work]:
    """Works on a whole block as works on the tensor of a cut that holds the rows they need.

    `group` query heads share a key/value head. Heads whose rows are found in other places become works of their own.
    """
    known: dict[tuple[int, tuple[range, ...]], Rows] = {}

    def found(head: int, runs: tuple[range, ...]) -> Rows:
        key = (0 if len(cut.rows) == 1 else head, runs)
        if key not in known:
            known[key] = located(cut.of(head), runs)
        return known[key]

    for work in works:
        shared = len(work.heads) != len(work.kv)  # whole groups, else one query head for each key/value head
        chain: list[tuple[int, int, Rows]] = []
        for place, head in enumerate(work.kv):
            if head not in cut.index:
                continue
            link = (place, cut.index[head], found(head, work.k))
            if chain and not _follows(chain, link, shared):
                yield _linked(work, chain, group if shared else 0)
                chain = []
            chain.append(link)
        if chain:
            yield _linked(work, chain, group if shared else 0)


def _follows(chain: list[tuple[int, int, Rows]], link: tuple[int, int, Rows], consecutive: bool) -> bool:
    """Whether a head continues the chain: same rows, equal distances in the work and in the cut."""
    step = link[0] - chain[-1][0], link[1] - chain[-1][1]
    if link[2] != chain[-1][2] or step[1] < 1 or (consecutive and step[0] != 1):
        return False
    return len(chain) == 1 or step == (chain[1][0] - chain[0][0], chain[1][1] - chain[0][1])


def _linked(work: Work, chain: list[tuple[int, int, Rows]], group: int) -> Work:
    (first, place, runs), (last, end, _) = chain[0], chain[-1]
    kv = range(place, end + 1, (end - place) // max(len(chain) - 1, 1) or 1)
    step = (last - first) // max(len(chain) - 1, 1) or 1
    heads = work.heads[first * group : (last + 1) * group] if group else work.heads[first : last + 1 : step]
    return replace(work, heads=heads, kv=kv, k=runs)


def located(rows: Rows, runs: tuple[range, ...]) -> Rows:
    """Indices among `rows` of the members of `runs`, as ranges in the same order."""
    held = places(rows)
    found: list[range] = []
    for run in runs:
        index = np.searchsorted(held, np.arange(run.start, run.stop, run.step))
        assert len(index) and index[-1] < len(held) and held[index[-1]] == run[-1], (
            "a work needs rows that are not here"
        )
        found += decode(index)
    return tuple(found)


def _mask(cuts: RowSets, head: int, rows: int) -> np.ndarray:
    mask = np.zeros(rows, dtype=bool)
    for cut in cuts:
        if cut is None:
            mask[:] = True
        elif head in cut.index:
            for part in cut.of(head):
                mask[part.start : part.stop : part.step] = True
    return mask


def _parts(cuts: RowSets, head: int, rows: int) -> list[range]:
    """The rows of a head that cuts hold, as ranges."""
    parts = (cut.of(head) if cut is not None and head in cut.index else () for cut in cuts if cut is not None)
    return [range(rows)] if None in cuts else [part for found in parts for part in found]


def _without(held: list[range], gone: list[range]) -> Rows:
    """Ranges of step 1 without the members of others, in ascending order."""
    left: list[range] = []
    away = merge_runs(frozenset(gone)) if gone else ()
    for part in merge_runs(frozenset(held)) if held else ():
        at = part.start
        for other in away:
            if other.stop > at and other.start < part.stop:
                if other.start > at:
                    left.append(range(at, other.start))
                at = other.stop
        if at < part.stop:
            left.append(range(at, part.stop))
    return tuple(left)


def _ascending(ranges: frozenset[range]) -> Rows:
    """The union of ranges, as ranges in ascending order that do not interleave."""
    if len(ranges) < 2:
        return tuple(ranges)
    if all(r.step == 1 for r in ranges):
        return merge_runs(ranges)
    first, mask = _marks(ranges)
    return decode(np.flatnonzero(mask) + first)


def _count(ranges: frozenset[range]) -> int:
    """Numbers in the union of ranges."""
    if len(ranges) < 2:
        return sum(map(len, ranges))
    if all(r.step == 1 for r in ranges):  # a mask would be as long as the block
        return sum(map(len, merge_runs(ranges)))
    return int(np.count_nonzero(_marks(ranges)[1]))


def _marks(ranges: frozenset[range]) -> tuple[int, np.ndarray]:
    """The least number in the union of ranges, and which of those from it on are in it."""
    first, stop = min(r.start for r in ranges), max(r[-1] for r in ranges) + 1
    mask = np.zeros(stop - first, dtype=bool)
    for r in ranges:
        mask[r.start - first : r[-1] + 1 - first : r.step] = True
    return first, mask


def grouped(per_head: list[Rows], rows: int) -> RowSets:
    """Cuts of the heads that have equally many rows."""
    if not rows or not any(per_head):
        return ()
    if all(found == (range(rows),) for found in per_head):
        return WHOLE
    groups: dict[int, list[int]] = {}
    for head, found in enumerate(per_head):
        if found:
            groups.setdefault(sum(map(len, found)), []).append(head)
    cuts = []
    for heads in groups.values():
        listed = [per_head[head] for head in heads]
        cuts.append(RowSet(tuple(heads), (listed[0],) if len(set(listed)) == 1 else tuple(listed)))
    return tuple(cuts)
