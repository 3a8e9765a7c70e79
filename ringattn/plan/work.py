"""The work of one visit, lowered to local rows: what one call of a kernel computes, or many of the same shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ..cache import Value

#: Dense works of at most this many query rows are joined into one whose keys are gathered.
GATHER_ROWS = 1024
#: Runs of keys longer than this multiple of the query rows are not gathered: merging costs less than the copy.
GATHER_KEYS = 4


@dataclass(frozen=True)
class Work(Value):
    """A tile, or several, lowered to the local rows of a shard and of a held block.

    Query row q[i] attends key j iff lo <= i - j <= hi (None is unbounded), where j counts through the runs of `k`
    one after another. Query heads `heads` share the key/value heads `kv`. Every row of `q` sees a key. The whole is
    repeated `repeat` times, with query rows q_shift and key rows k_shift further each time; the query rows of
    different repetitions are disjoint, their keys may overlap.
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

    @cached_property
    def _hash(self) -> int:
        return hash((self.heads, self.kv, self.q, self.k, self.lo, self.hi, self.repeat, self.q_shift, self.k_shift))

    def __hash__(self) -> int:  # works are keys of many tables
        return self._hash

    @property
    def dense(self) -> bool:
        """True where every query row sees every key row."""
        return self.lo is None and self.hi is None

    @property
    def keys(self) -> int:
        """Key rows of one repetition."""
        return sum(map(len, self.k))

    @property
    def rows(self) -> range:
        """The local rows from the first query row to the last."""
        return range(self.q[0], self.q[-1] + 1 + (self.repeat - 1) * self.q_shift)

    def narrow(self, q: tuple[int, int], k: tuple[int, int]) -> Work:
        """The part in rows q[0] .. q[1]-1 and keys k[0] .. k[1]-1, indices into its own rows and keys."""
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

    def singles(self) -> Iterator[Work]:
        """Its repetitions, one by one."""
        for turn in range(self.repeat):
            yield self.part(turn, 1)

    def batches(self, most: int) -> Iterator[Work]:
        """Its repetitions, at most `most` at a time."""
        for first in range(0, self.repeat, max(most, 1)):
            yield self.part(first, min(max(most, 1), self.repeat - first))

    def part(self, first: int, repeat: int) -> Work:
        """`repeat` of its repetitions, from number `first`."""
        if repeat == self.repeat:
            return self
        q, k = moved(self.q, first * self.q_shift), tuple(moved(run, first * self.k_shift) for run in self.k)
        if repeat == 1:
            return replace(self, q=q, k=k, repeat=1, q_shift=0, k_shift=0)
        return replace(self, q=q, k=k, repeat=repeat)


def moved(r: range, by: int) -> range:
    """The range `by` further."""
    return range(r.start + by, r.stop + by, r.step)


def gathered(works: Iterable[Work]) -> list[Work]:
    """Works of the same few query rows as one, whose keys are the runs of all.

    One call on keys copied together is faster than a call and a merge for each short run. At most one of them may
    have a band; its keys come last.
    """
    groups: dict[tuple[range, range], list[Work]] = {}
    for work in works:
        groups.setdefault((work.heads, work.q), []).append(work)
    found: list[Work] = []
    for (_, q), group in groups.items():
        short = [w for w in group if len(q) <= GATHER_ROWS and w.keys <= GATHER_KEYS * len(q) and w.hi is None]
        banded = [w for w in short if not w.dense][:1]
        joined = [w for w in short if w.dense] + banded
        if len(joined) < 2:
            found += group
            continue
        before = sum(w.keys for w in joined if w.dense)
        lo = None if not banded else banded[0].lo - before  # type: ignore[operator]
        found.append(replace(joined[0], k=tuple(run for w in joined for run in w.k), lo=lo))
        found += [w for w in group if not any(w is other for other in joined)]
    return found


def repeated(works: Iterable[Work]) -> list[Work]:
    """Works of one shape at equal distances as one work that is repeated."""
    groups: dict[object, list[Work]] = {}
    for work in works:
        runs = tuple((run.start - work.k[0].start, len(run), run.step) for run in work.k)
        shape = (work.heads, work.kv, len(work.q), work.q.step, runs, work.lo, work.hi)
        groups.setdefault(shape, []).append(work)
    found: list[Work] = []
    for group in groups.values():
        group.sort(key=lambda w: (w.q.start, w.k[0].start))
        chain = [group[0]]
        for work in group[1:]:
            if not _continues(chain, work):
                found.append(_chained(chain))
                chain = []
            chain.append(work)
        found.append(_chained(chain))
    return found


def _shift(a: Work, b: Work) -> tuple[int, int]:
    return b.q.start - a.q.start, b.k[0].start - a.k[0].start


def _continues(chain: list[Work], work: Work) -> bool:
    q_shift, k_shift = _shift(chain[-1], work)
    if q_shift < len(chain[-1].rows) or k_shift < 0:
        return False
    return len(chain) == 1 or (q_shift, k_shift) == _shift(chain[0], chain[1])


def _chained(chain: list[Work]) -> Work:
    if len(chain) == 1:
        return chain[0]
    q_shift, k_shift = _shift(chain[0], chain[1])
    return replace(chain[0], repeat=len(chain), q_shift=q_shift, k_shift=k_shift)
