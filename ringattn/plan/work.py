"""Works: the tiles of a visit, lowered to local rows. One kernel call, or several of one shape, compute a work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, islice
from typing import Any

import numpy as np

from ..cache import Value
from ..pattern.base import Pattern
from ..pattern.tile import Tile, append_run, ceil_div, index_ranges, locate, make_tile, shift_range
from .row_sets import Ranges, RowSet, as_range, to_numbers, to_ranges

#: Dense works with the same query rows are joined into one work if they have at most this many query rows.
GATHER_ROWS = 1024
#: Works with more keys than this multiple of their query rows are not joined: merging then costs less than copying.
GATHER_KEYS = 4


@dataclass(frozen=True)
class Work(Value):
    """A piece of work for the kernel: one or several tiles, in local rows of a rank's queries and of a block's keys.

    Query row q[i] attends key j iff lo <= i - j <= hi (None is unbounded), where j counts through the runs of `k`, one
    after another. The query heads `heads` use the key/value heads `kv`. Every row of `q` sees a key. The work is
    repeated `repeat` times; from one repetition to the next, query rows move on by q_shift and key rows by k_shift.
    Repetitions have disjoint query rows, but may share keys.

    `sequences` is set by `kernels.packing`: the works that were packed into this one. A row then attends only keys of
    its own sequence, and i and j count back from the last row and the last key of the sequence. If the sequences do not
    lie one after another, `q` and `k` are only ranges that enclose them.
    """

    heads: range
    kv: range
    q: range
    k: tuple[range, ...]
    lo: int | None = None
    hi: int | None = None
    repeat: int = 1
    q_shift: int = 0
    k_shift: int = 0
    sequences: tuple[Work, ...] = ()

    __hash__ = Value.kept_hash  # works are keys of many tables

    @cached_property
    def dense(self) -> bool:
        """Whether every query row sees every key row, or every key row of its sequence."""
        return self.lo is None and self.hi is None

    @property
    def causal(self) -> bool:
        """Whether row i sees key j iff j <= i, counted from the first row and the first key."""
        return self.lo == 0 and self.hi is None

    @cached_property
    def memo(self) -> dict[object, Any]:
        """Values that kernels store with this work, such as index tensors on a device, for as long as it lives."""
        return {}

    @cached_property
    def gathered(self) -> bool:
        """Whether a packed work must copy rows or keys together because its sequences do not follow each other."""
        row, key = self.q.start, self.k[0].start
        for work in self.sequences:
            adjacent = range(row, row + len(work.q)), (range(key, key + work.keys),)
            if (work.heads, work.q, work.k) != (self.heads, *adjacent):
                return True
            row, key = work.q.stop, work.k[0].stop
        return False

    @cached_property
    def copied_rows(self) -> int:
        """The number of rows, times heads, of q, k and v that a packed work copies; 0 if it need not copy."""
        parts = self.sequences if self.gathered else ()
        return sum(len(work.q) * len(work.heads) + 2 * work.keys * len(work.kv) for work in parts)

    @cached_property
    def keys(self) -> int:
        """The number of key rows of one repetition."""
        return sum(map(len, self.k))

    @property
    def pairs(self) -> int:
        """The (query, key, head, branch) pairs."""
        tile = Tile(self.heads, range(len(self.q)), range(self.keys), self.lo, self.hi)
        return len(self.heads) * self.repeat * tile.pairs

    @property
    def rows(self) -> range:
        """The local range from the first query row to the last, over all repetitions."""
        return range(self.q[0], self.q[-1] + 1 + (self.repeat - 1) * self.q_shift)

    def narrow(self, q: tuple[int, int], k: tuple[int, int]) -> Work:
        """This work limited to query rows number q[0] .. q[1]-1 and key rows number k[0] .. k[1]-1."""
        shift = q[0] - k[0]
        rows, keys = q[1] - q[0], k[1] - k[0]
        lo = None if self.lo is None or self.lo - shift <= 1 - keys else self.lo - shift
        hi = None if self.hi is None or self.hi - shift >= rows - 1 else self.hi - shift
        runs, first = [], 0
        for run in self.k:
            run, first = run[max(k[0] - first, 0) : max(k[1] - first, 0)], first + len(run)
            if run:
                runs.append(run)
        return replace(self, q=self.q[q[0] : q[1]], k=tuple(runs), lo=lo, hi=hi)

    def narrow_rows(self, first: int, last: int) -> Work:
        """This work limited to query rows number first .. last-1 and the keys that these rows see."""
        start = 0 if self.hi is None else max(0, first - self.hi)
        stop = self.keys if self.lo is None else min(self.keys, last - self.lo)
        return self.narrow((first, last), (start, stop))

    def repetitions(self, most: int = 1) -> Iterator[Work]:
        """The repetitions of the work, at most `most` at a time."""
        most = max(most, 1)
        if most >= self.repeat:
            yield self
            return
        for first in range(0, self.repeat, most):
            q = shift_range(self.q, first * self.q_shift)
            k = tuple(shift_range(run, first * self.k_shift) for run in self.k)
            repeat = min(most, self.repeat - first)
            shifts = (self.q_shift, self.k_shift) if repeat > 1 else (0, 0)
            yield replace(self, q=q, k=k, repeat=repeat, q_shift=shifts[0], k_shift=shifts[1])


def _is_short(work: Work) -> bool:
    return len(work.q) <= GATHER_ROWS and work.keys <= GATHER_KEYS * len(work.q)


def join_keys(works: Iterable[Work], joins: Callable[[Work], bool] = _is_short) -> list[Work]:
    """Fewer works for the same pairs: works on the same few query rows become one, with the keys of all of them.

    Copying keys together and calling the kernel once is faster than a call and a merge for each short run. At most one
    of the joined works has a band; its keys come last. Works for which `joins` is False stay as they are.
    """
    groups: dict[tuple[range, range], list[Work]] = {}
    for work in works:
        groups.setdefault((work.heads, work.q), []).append(work)
    result: list[Work] = []
    for group in groups.values():
        short = [w for w in group if w.hi is None and joins(w)]
        banded = [w for w in short if not w.dense][:1]
        joined = [w for w in short if w.dense] + banded
        if len(joined) < 2:
            result += group
            continue
        keys_before = sum(w.keys for w in joined if w.dense)
        lo = None if not banded else banded[0].lo - keys_before  # type: ignore[operator]
        result.append(replace(joined[0], k=tuple(run for w in joined for run in w.k), lo=lo))
        taken = {id(w) for w in joined}
        result += [w for w in group if id(w) not in taken]
    return result


def join_repetitions(works: Iterable[Work]) -> list[Work]:
    """Fewer works for the same pairs: works of equal shape at equal distances become one repeated work."""
    groups: dict[object, list[Work]] = {}
    for work in works:
        runs = tuple((run.start - work.k[0].start, len(run), run.step) for run in work.k)
        shape = (work.heads, work.kv, len(work.q), work.q.step, runs, work.lo, work.hi)
        groups.setdefault(shape, []).append(work)
    result: list[Work] = []
    for group in groups.values():
        group.sort(key=lambda w: (w.q.start, w.k[0].start))
        chain = [group[0]]
        for work in group[1:]:
            if not _continues(chain, work):
                result.append(_join_chain(chain))
                chain = []
            chain.append(work)
        result.append(_join_chain(chain))
    return result


def _shift(a: Work, b: Work) -> tuple[int, int]:
    """(query rows, key rows) from the start of `a` to the start of `b`."""
    return b.q.start - a.q.start, b.k[0].start - a.k[0].start


def _continues(chain: list[Work], work: Work) -> bool:
    """Whether `work` follows the last work of the chain at the chain's distance and shares no query row with it."""
    q_shift, k_shift = _shift(chain[-1], work)
    if q_shift < len(chain[-1].rows) or k_shift < 0:
        return False
    return len(chain) == 1 or (q_shift, k_shift) == _shift(chain[0], chain[1])


def _join_chain(chain: list[Work]) -> Work:
    if len(chain) == 1:
        return chain[0]
    q_shift, k_shift = _shift(chain[0], chain[1])
    return replace(chain[0], repeat=len(chain), q_shift=q_shift, k_shift=k_shift)


#: Up to this many ranges of keys, the pattern is queried once per range; for more, once for all of them.
FEW_RANGES = 4
#: Tiles of a visit are joined pairwise only if there are at most this many: the search is quadratic.
MAX_JOINED = 32
#: (query head in the row set, key/value head)
HeadPairs = list[tuple[int, int]]


def localize(tile: Tile, q_rows: range, k_rows: range, first_q: int, first_k: int) -> Tile:
    """Convert a tile from positions, in the ranges `q_rows` and `k_rows`, to local row indices.

    The indices start at `first_q` for queries and at `first_k` for keys.
    """
    q, k = shift_range(locate(tile.q, q_rows), first_q), shift_range(locate(tile.k, k_rows), first_k)
    if tile.dense:
        return Tile(tile.heads, q, k, branch=tile.branch)
    # The distance i - j counts rows of the tile, so it is the same for positions and local indices. If local steps
    # differ, `step` only has to be the one by which `lower` divides.
    base, offset = tile.q.start - tile.k.start, q.start - k.start
    lo = None if tile.lo is None else ceil_div(tile.lo - base, tile.q.step) * q.step + offset
    hi = None if tile.hi is None else (tile.hi - base) // tile.q.step * q.step + offset
    return Tile(tile.heads, q, k, lo, hi, tile.branch)


def sees_some(pattern: Pattern, q: range, k_shard: Sequence[range], heads: int) -> bool:
    """Whether a query of `q` sees a key of `k_shard`."""
    if len(k_shard) <= FEW_RANGES or q.step > 1:
        return any(next(pattern.tiles(q, keys, range(heads)), None) is not None for keys in k_shard)
    return next(find_tiles(pattern, (q,), k_shard, heads), None) is not None


def find_tiles(pattern: Pattern, q_shard: Sequence[range], k_shard: Sequence[range], heads: int) -> Iterator[Tile]:
    """Yield the tiles of two shards in local row indices.

    If queries and keys have one layout, a tile with a band has equal steps in q and k. The shards of a cache that was
    filled in chunks have many ranges, so the pattern is asked for many ranges of keys at once; if the answer has bands,
    or more tiles than ranges, it is asked again for each half of the ranges.
    """
    starts = [0, *accumulate(map(len, k_shard))]

    def visit(q: range, row: int, first: int, last: int) -> Iterator[Tile]:
        parts = k_shard[first:last]
        if len(parts) <= FEW_RANGES or q.step > 1:  # the ranges of striped rows interleave
            for keys, start in zip(parts, starts[first:last], strict=True):
                tiles = (part for tile in pattern.tiles(q, keys, range(heads)) for part in tile.refine())
                yield from (localize(tile, q, keys, row, start) for tile in tiles)
            return
        hull = range(min(r[0] for r in parts), max(r[-1] for r in parts) + 1)
        found = [*islice(pattern.tiles(q, hull, range(heads)), len(parts) + 1)]
        if len(found) <= len(parts) and all(tile.dense for tile in found):
            rows_of = index_ranges(parts, starts[first])
            for tile in found:
                rows = shift_range(locate(tile.q, q), row)
                yield from (Tile(tile.heads, rows, keys, branch=tile.branch) for keys in rows_of(tile.k))
        else:
            yield from visit(q, row, first, (first + last) // 2)
            yield from visit(q, row, (first + last) // 2, last)

    row = 0
    for q in q_shard if k_shard else ():
        yield from visit(q, row, 0, len(k_shard))
        row += len(q)


def join_dense(tiles: Iterable[Tile]) -> list[Tile]:
    """The tiles, after joining dense ones with the same queries and adjoining keys; dense tiles come last."""
    others: list[Tile] = []
    dense: dict[tuple[range, range, int], list[range]] = {}
    for tile in tiles:
        if tile.dense:
            append_run(dense.setdefault((tile.heads, tile.q, tile.branch), []), tile.k)
        else:
            others.append(tile)
    return others + [Tile(*key[:2], keys, branch=key[2]) for key, runs in dense.items() for keys in runs]


def join_tiles(tiles: list[Tile]) -> list[Tile]:
    """Fewer, larger tiles with the same pairs; two tiles become one if one tile can have exactly their pairs.

    For example, the parts of a zigzag shard become one causal triangle, and adjoining dense tiles become one.
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
    """The smallest tile that contains both; None if their heads, branches or steps differ."""
    if (a.heads, a.branch, a.q.step, a.k.step) != (b.heads, b.branch, b.q.step, b.k.step) or a.q.step != a.k.step:
        return None
    if (a.q.start - b.q.start) % a.q.step or (a.k.start - b.k.start) % a.k.step:
        return None
    q = range(min(a.q.start, b.q.start), max(a.q.stop, b.q.stop), a.q.step)
    k = range(min(a.k.start, b.k.start), max(a.k.stop, b.k.stop), a.k.step)
    los = [t.q[0] - t.k[-1] if t.lo is None else t.lo for t in (a, b)]
    his = [t.q[-1] - t.k[0] if t.hi is None else t.hi for t in (a, b)]
    return make_tile(a.heads, q, k, min(los), max(his), a.branch)


def lower(tiles: Iterable[Tile], group: int) -> Iterator[Work]:
    """Yield the kernel's works for tiles in local row indices; `group` query heads share one key/value head."""
    for tile in tiles:
        for heads, kv in split_heads(tile.heads, group):
            base = 0 if tile.dense else tile.q.start - tile.k.start
            step = tile.q.step
            lo = None if tile.lo is None else ceil_div(tile.lo - base, step)
            hi = None if tile.hi is None else (tile.hi - base) // step
            yield Work(heads, kv, tile.q, (tile.k,), lo, hi)


def split_heads(heads: range, group: int) -> Iterator[tuple[range, range]]:
    """Yield (query heads, the key/value heads they use) in portions that one kernel call can take.

    `group` query heads share one key/value head; a portion is whole groups, or a single query head.
    """
    if group == 1:
        yield heads, heads
    elif heads.step == 1 and heads.start % group == 0 and heads.stop % group == 0:
        yield heads, range(heads.start // group, heads.stop // group)
    else:
        for head in heads:
            yield range(head, head + 1), range(head // group, head // group + 1)


def _place_heads(
    works: Iterable[Work], row_set: RowSet, *, by_key: bool
) -> Iterator[tuple[Work, Ranges, list[tuple[range, range]]]]:
    """(work, indices of its rows in the tensor of `row_set`, the `_join_heads` with rows there) of works on a block.

    `by_key`: these rows and the heads of the row set are those of keys.
    """
    index, numbers = row_set.index, tuple(map(to_numbers, row_set.rows))
    locate = cache(lambda place, runs: tuple(part for run in runs for part in _locate_run(numbers[place], run)))
    for work in works:
        group = len(work.heads) // len(work.kv)
        pairs_by_rows: dict[Ranges, HeadPairs] = {}
        for number, head in enumerate(work.heads):
            kv = work.kv[number // group]
            place = index.get(kv if by_key else head)
            if place is not None:
                rows = locate(place if len(numbers) > 1 else 0, work.k if by_key else (work.q,))
                pairs_by_rows.setdefault(rows, []).append((head, place) if by_key else (place, kv))
        yield from ((work, rows, [*_join_heads(pairs)]) for rows, pairs in pairs_by_rows.items())


def _locate_run(numbers: np.ndarray, run: range) -> Ranges:
    """The indices of the members of `run` among ascending `numbers`."""
    first, last = np.searchsorted(numbers, (run[0], run[-1])).tolist()
    assert last < len(numbers) and numbers[last] == run[-1], "a work needs rows that the row set does not hold"
    if last - first == len(run) - 1:
        return (range(first, last + 1),)
    return to_ranges(np.searchsorted(numbers, np.arange(run.start, run.stop, run.step)))


def restrict_keys(works: Iterable[Work], row_set: RowSet) -> Iterator[Work]:
    """Convert works on a whole block to works on the tensor of `row_set`, which must hold all key rows they need.

    Heads whose rows are at different indices of the tensor get separate works.
    """
    for work, rows, joined in _place_heads(works, row_set, by_key=True):
        yield from (replace(work, heads=heads, kv=kv, k=rows) for heads, kv in joined)


def restrict_queries(works: Iterable[Work], row_set: RowSet) -> Iterator[Work]:
    """Convert works on a whole block to works on the tensor of `row_set`, which holds some of its query rows.

    Heads whose rows are at different indices of the tensor become separate works, and so do runs of rows that are not
    adjacent in it.
    """
    for work, rows, joined in _place_heads(works, row_set, by_key=False):
        first, parts = 0, []
        for run in rows:  # with the keys that these rows see
            part = work if len(run) == len(work.q) else work.narrow_rows(first, first + len(run))
            parts.append(replace(part, q=run))
            first += len(run)
        yield from (replace(part, heads=heads, kv=kv) for heads, kv in joined for part in parts)


def _join_heads(pairs: HeadPairs) -> Iterator[tuple[range, range]]:
    """(query heads in the row set, key/value heads that they use), in parts that one kernel call can take."""
    heads, kv_heads = [head for head, _ in pairs], sorted({kv for _, kv in pairs})
    group = len(heads) // len(kv_heads)
    shared = [kv_heads[i // group] for i in range(len(heads))] if group * len(kv_heads) == len(heads) else []
    head_range, kv_range = as_range(heads), as_range(kv_heads)
    if head_range is not None and kv_range is not None and shared == [kv for _, kv in pairs]:
        yield head_range, kv_range
        return
    for kv_head in kv_heads:
        users = [head for head, kv in pairs if kv == kv_head]
        users_range = as_range(users)
        if users_range is not None:
            yield users_range, range(kv_head, kv_head + 1)
        else:
            yield from ((range(head, head + 1), range(kv_head, kv_head + 1)) for head in users)
