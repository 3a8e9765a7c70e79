"""The demand seen from the other side: blocks of queries go to the ranks that hold the keys they see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from ..cache import Cache, Value
from ..layout.regular import Layout
from ..pattern.base import Run
from ..pattern.ranges import locate
from .block_demand import ANSWERS, remembered
from .key_demand import KeyDemand
from .row_sets import Rows, RowSet, RowSets, cover, covered, located
from .work import Work, gathered, repeated

#: (query head in the cut, key/value head)
Pairs = list[tuple[int, int]]


@dataclass(frozen=True)
class QueryDemand(Value):
    """A demand whose blocks are the query rows of the owners, needed by the ranks that hold keys. Cuts are of query
    heads."""

    demand: KeyDemand

    @property
    def layout(self) -> Layout:
        return self.demand.layout

    @property
    def block_heads(self) -> int:
        """Heads of a block of queries."""
        return self.demand.heads

    @cached_property
    def memory(self) -> Cache:
        """Answers of the functions that are `remembered`, which live as long as this object."""
        return Cache(ANSWERS)

    def needs(self, ranks: range, owners: range) -> bool:
        """Whether some rank of `ranks` holds a key that a query of some rank of `owners` sees."""
        return self.demand.needs(owners, ranks)

    def all_needed(self, rank: int, owners: range) -> bool:
        """Whether every one of `owners` is seen at once to have a query that sees a key of `rank`; False says nothing."""
        layout = self.layout
        return layout.regular and any(
            self._all_seeing(q, k) for q in layout.span(owners)[0] for k in layout.shard(rank)
        )

    def _all_seeing(self, q: range, k: range) -> bool:
        """Whether every query of `q` is seen at once to see some key of `k`; False says nothing."""
        run = self.run(k[0], k[-1]) if q.step == k.step == 1 else None
        return self.demand.dense((q,), (k,)) if run is None else run[0] <= q.start and q.stop - 1 <= run[1]

    def run(self, first: int, last: int) -> Run | None:
        """The first and the last query that see keys first .. last, where they are one run (`query_run`)."""
        return self.demand.pattern.query_run(first, last)

    def visits(self, rank: int, owner: int) -> bool:
        """Whether `rank` holds a key that a query of `owner` sees."""
        return self.demand.visits(owner, rank)

    def cuts(self, ranks: tuple[range, ...], owner: int) -> RowSets:
        """The query rows of `owner` that see a key of some rank of `ranks` (runs of ranks)."""
        return _cuts(self, ranks, owner)

    def size(self, ranks: tuple[range, ...], owner: int) -> int:
        """How many rows of all heads those are."""
        seen = (piece for run in ranks for piece in _seen(self, run, owner))
        return covered(seen, self.block_heads, self.layout.rows(owner))

    def batched(self, rank: int, owner: int, cut: RowSet | None = None) -> tuple[Work, ...]:
        """What `rank` computes with its keys for query rows of `owner`, as few works; those of a cut index its tensor
        by their query heads and rows."""
        return _batched(self, rank, owner, cut)


@remembered
def _cuts(wanted: QueryDemand, ranks: tuple[range, ...], owner: int) -> RowSets:
    seen = (piece for run in ranks for piece in _seen(wanted, run, owner))
    return cover(seen, wanted.block_heads, wanted.layout.rows(owner))


def _seen(wanted: QueryDemand, ranks: range, owner: int) -> Iterator[tuple[range, range]]:
    """(query heads, local query rows) of the block of `owner` that see a key of some rank of `ranks`."""
    if not wanted.needs(ranks, range(owner, owner + 1)):
        return
    k_rows, exact = wanted.layout.span(ranks)
    if not exact:
        half = len(ranks) // 2
        yield from _seen(wanted, ranks[:half], owner)
        yield from _seen(wanted, ranks[half:], owner)
        return
    first = 0
    for q_rows in wanted.layout.shard(owner):
        for k in k_rows:
            for heads, q in wanted.demand.queries(q_rows, k):
                local = locate(q, q_rows)
                yield heads, range(local.start + first, local.stop + first, local.step)
        first += len(q_rows)


@remembered
def _batched(wanted: QueryDemand, rank: int, owner: int, cut: RowSet | None) -> tuple[Work, ...]:
    works = wanted.demand.works(owner, rank)
    if cut is not None:
        known: dict[tuple[int, range], Rows] = {}
        works = tuple(piece for work in works for piece in _relocated(work, cut, known))
    return tuple(repeated(gathered(works)))


def _relocated(work: Work, cut: RowSet, known: dict[tuple[int, range], Rows]) -> Iterator[Work]:
    """A work on whole blocks as works on the tensor of a cut of its query rows.

    Heads whose rows are found in other places become works of their own, and so do runs of rows that the cut holds
    apart from each other. `known` remembers places from work to work.
    """
    group = len(work.heads) // len(work.kv)
    found: dict[Rows, Pairs] = {}
    for place, head in enumerate(work.heads):
        if head in cut.index:
            key = (0 if len(cut.rows) == 1 else head, work.q)
            if key not in known:
                known[key] = located(cut.of(head), (work.q,))
            found.setdefault(known[key], []).append((cut.index[head], work.kv[place // group]))
    for rows, pairs in found.items():
        parts = list(_runs(work, rows))
        for heads, kv in _together(pairs):
            for part in parts:
                yield replace(part, heads=heads, kv=kv)


def _runs(work: Work, rows: Rows) -> Iterator[Work]:
    """The work in parts whose query rows are one range of `rows` each, with the keys that they see."""
    first, keys = 0, work.keys
    for run in rows:
        last = first + len(run)
        start = 0 if work.hi is None else max(0, first - work.hi)
        stop = keys if work.lo is None else min(keys, last - work.lo)
        part = work if len(run) == len(work.q) else work.narrow((first, last), (start, stop))
        yield replace(part, q=run)
        first = last


def _together(pairs: Pairs) -> Iterator[tuple[range, range]]:
    """Query heads in the cut with the key/value heads they use, in parts that a kernel can take as they are."""
    heads, kv = [head for head, _ in pairs], sorted({kv for _, kv in pairs})
    group = len(heads) // len(kv)
    shared = [kv[place // group] for place in range(len(heads))] if group * len(kv) == len(heads) else []
    if _even(heads) and _even(kv) and shared == [kv for _, kv in pairs]:
        yield _range(heads), _range(kv)
        return
    for one in kv:
        mine = [head for head, other in pairs if other == one]
        if _even(mine):
            yield _range(mine), range(one, one + 1)
        else:
            yield from ((range(head, head + 1), range(one, one + 1)) for head in mine)


def _even(numbers: list[int]) -> bool:
    return len({b - a for a, b in pairwise(numbers)}) <= 1


def _range(numbers: list[int]) -> range:
    return range(numbers[0], numbers[-1] + 1, numbers[1] - numbers[0] if len(numbers) > 1 else 1)
