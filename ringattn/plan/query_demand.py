"""Which queries each rank needs where blocks of queries travel to the ranks that hold the keys that they see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..cache import cached
from ..layout.regular import Layout
from ..pattern.base import Pattern, Run, Runs
from .block_demand import BlockDemand
from .key_demand import KeyDemand
from .row_sets import ALL_ROWS, AllRows, Ranges, RowPlaces, RowSet, as_range
from .work import Work, join_keys, join_repetitions

#: (query head in the row set, key/value head)
HeadPairs = list[tuple[int, int]]


class QueryDemand(BlockDemand):
    """Which queries each rank needs for its keys: the demand `keys` the other way round. Row sets have query heads."""

    def __init__(self, keys: KeyDemand) -> None:
        super().__init__(keys.layout, keys.heads)
        self.keys = keys

    @property
    def pattern(self) -> Pattern:
        """The pattern that says which queries see which keys."""
        return self.keys.pattern

    def on_layout(self, layout: Layout) -> QueryDemand:
        """The demand of the same pattern and heads on another layout."""
        return QueryDemand(self.keys.on_layout(layout))

    def needs(self, ranks: range, owners: range) -> bool:
        """Whether some rank of `ranks` holds a key that a query of some rank of `owners` sees."""
        return self.keys.needs(owners, ranks)

    def visits(self, rank: int, owner: int) -> bool:
        """Whether `rank` holds a key that a query of `owner` sees."""
        return self.keys.visits(owner, rank)

    def needed_run(self, first: int, last: int) -> Run | None:
        """(first, last) query that sees a key of first .. last, where the pattern knows one run (`query_run`)."""
        return self.pattern.query_run(first, last)

    def needed_runs(self, first: np.ndarray, last: np.ndarray) -> Runs | None:
        return self.pattern.query_spans(first, last)

    def reader_runs(self, positions: np.ndarray) -> Runs | None:
        return self.pattern.key_spans(positions, positions)

    def sees_all(self, mine: range, block: range) -> bool:
        return self.keys.sees_all(block, mine)

    def _needed_pieces(self, mine: range, block: range) -> Iterator[tuple[range, range]]:
        return self.keys.queries(block, mine)

    @cached
    def batched(self, rank: int, owner: int, row_set: RowSet | AllRows = ALL_ROWS) -> tuple[Work, ...]:
        """What `rank` computes with its keys for query rows of `owner`, as few works.

        Works of a `RowSet` index its tensor by their query heads and rows.
        """
        works = self.keys.works(owner, rank, ALL_ROWS)
        if isinstance(row_set, RowSet):
            places = RowPlaces(row_set)
            works = tuple(piece for work in works for piece in restrict_queries(work, places))
        return tuple(join_repetitions(join_keys(works)))


def restrict_queries(work: Work, places: RowPlaces) -> Iterator[Work]:
    """A work on whole blocks as works on the tensor of a set of its query rows, whose places are `places`.

    Heads whose rows have different places in the tensor become works of their own, and so do runs of rows that are not
    adjacent in it.
    """
    group = len(work.heads) // len(work.kv)
    pairs_by_rows: dict[Ranges, HeadPairs] = {}
    for place, head in enumerate(work.heads):
        if head in places.index:
            pair = places.index[head], work.kv[place // group]
            pairs_by_rows.setdefault(places.locate(head, (work.q,)), []).append(pair)
    for rows, pairs in pairs_by_rows.items():
        parts = list(_split_rows(work, rows))
        for heads, kv in _join_heads(pairs):
            for part in parts:
                yield replace(part, heads=heads, kv=kv)


def _split_rows(work: Work, rows: Ranges) -> Iterator[Work]:
    """The work in parts whose query rows are one range of `rows` each, with the keys that these rows see."""
    first = 0
    for run in rows:
        last = first + len(run)
        part = work if len(run) == len(work.q) else work.narrow_rows(first, last)
        yield replace(part, q=run)
        first = last


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
