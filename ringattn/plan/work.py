"""The work of one visit, lowered to local rows: what one kernel call computes, or several calls of the same shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..cache import Value
from ..pattern.ranges import shift_range

#: Dense works of the same query rows are joined into one work up to this many query rows.
GATHER_ROWS = 1024
#: Works with more keys than this multiple of their query rows are not joined: merging costs less than copying the keys.
GATHER_KEYS = 4


@dataclass(frozen=True)
class Work(Value):
    """One or several tiles, lowered to the local query rows of a rank and the local key rows of a block.

    Query row q[i] attends key j iff lo <= i - j <= hi (None is unbounded), where j counts through the runs of `k`
    one after another. Query heads `heads` share the key/value heads `kv`. Every row of `q` sees a key. The work is
    repeated `repeat` times, with query rows q_shift and key rows k_shift further each time; the query rows of
    different repetitions are disjoint, their keys may overlap.

    `sequences`, of works that `kernels.packing` makes, are works of which the work is made up: a row attends keys of
    its own sequence only, and i and j count from the end of their sequence. Where the sequences do not lie one after
    another, `q` and `k` only bound their rows and keys.
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

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))

    def __hash__(self) -> int:  # kept, as works are keys of many tables
        return self._hash

    @property
    def dense(self) -> bool:
        """Whether every query row sees every key row, or every key row of its sequence."""
        return self.lo is None and self.hi is None

    @cached_property
    def kept(self) -> dict[object, Any]:
        """What kernels keep for the work as long as it lives, such as index tensors on a device."""
        return {}

    @cached_property
    def gathered(self) -> bool:
        """Whether the rows or keys of the sequences do not lie one after another, so that they have to be copied."""
        row, key = self.q.start, self.k[0].start
        for work in self.sequences:
            adjacent = range(row, row + len(work.q)), (range(key, key + work.keys),)
            if (work.heads, work.q, work.k) != (self.heads, *adjacent):
                return True
            row, key = work.q.stop, work.k[0].stop
        return False

    @cached_property
    def copied_rows(self) -> int:
        """Rows times heads of q, k and v that are copied for a gathered work; 0 for others."""
        parts = self.sequences if self.gathered else ()
        return sum(len(work.q) * len(work.heads) + 2 * work.keys * len(work.kv) for work in parts)

    @property
    def keys(self) -> int:
        """The number of key rows of one repetition."""
        return sum(map(len, self.k))

    @property
    def rows(self) -> range:
        """The local rows from the first query row to the last, over all repetitions."""
        return range(self.q[0], self.q[-1] + 1 + (self.repeat - 1) * self.q_shift)

    def narrow(self, q: tuple[int, int], k: tuple[int, int]) -> Work:
        """The part of the work in its rows number q[0] .. q[1]-1 and its keys number k[0] .. k[1]-1."""
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
        """The part of the work in its rows number first .. last-1, with the keys that these rows see."""
        start = 0 if self.hi is None else max(0, first - self.hi)
        stop = self.keys if self.lo is None else min(self.keys, last - self.lo)
        return self.narrow((first, last), (start, stop))

    def singles(self) -> Iterator[Work]:
        """The repetitions of the work, one by one."""
        for turn in range(self.repeat):
            yield self.part(turn, 1)

    def batches(self, most: int) -> Iterator[Work]:
        """The repetitions of the work, at most `most` at a time."""
        for first in range(0, self.repeat, max(most, 1)):
            yield self.part(first, min(max(most, 1), self.repeat - first))

    def part(self, first: int, repeat: int) -> Work:
        """`repeat` repetitions of the work, from number `first` on."""
        if repeat == self.repeat:
            return self
        q = shift_range(self.q, first * self.q_shift)
        k = tuple(shift_range(run, first * self.k_shift) for run in self.k)
        if repeat == 1:
            return replace(self, q=q, k=k, repeat=1, q_shift=0, k_shift=0)
        return replace(self, q=q, k=k, repeat=repeat)


def _is_short(work: Work) -> bool:
    return len(work.q) <= GATHER_ROWS and work.keys <= GATHER_KEYS * len(work.q)


def join_keys(works: Iterable[Work], joins: Callable[[Work], bool] = _is_short) -> list[Work]:
    """The works, where works of the same few query rows become one work whose keys are the runs of all of them.

    One kernel call on keys copied together is faster than a call and a merge for each short run. At most one of the
    joined works has a band; its keys come last. Works that `joins` refuses stay as they are.
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
    """The works, where works of one shape at equal distances become one work that is repeated."""
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
    """Whether `work` follows the last work of the chain at the distance of the others, with query rows of its own."""
    q_shift, k_shift = _shift(chain[-1], work)
    if q_shift < len(chain[-1].rows) or k_shift < 0:
        return False
    return len(chain) == 1 or (q_shift, k_shift) == _shift(chain[0], chain[1])


def _join_chain(chain: list[Work]) -> Work:
    if len(chain) == 1:
        return chain[0]
    q_shift, k_shift = _shift(chain[0], chain[1])
    return replace(chain[0], repeat=len(chain), q_shift=q_shift, k_shift=k_shift)
