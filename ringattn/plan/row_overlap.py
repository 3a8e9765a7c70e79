"""Which rows two row sets of one block share, and where these rows are in the tensors of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .row_sets import AllRows, Ranges, RowSet, as_range, to_numbers, to_ranges

#: A copy of rows is written as slices up to this many, as an index list above.
MAX_SLICES = 16


@dataclass(frozen=True)
class RowCopy:
    """Rows that are in the tensors of two row sets: the indices of their heads and rows in either tensor."""

    to_heads: range
    to_rows: range | np.ndarray
    from_heads: range
    from_rows: range | np.ndarray


def find_copies(target: RowSet | AllRows, source: RowSet | AllRows, heads: int, rows: int) -> tuple[RowCopy, ...]:
    """The copies that bring all shared rows from the tensor of `source` to the tensor of `target`.

    Both are row sets of one block of `heads` heads and `rows` rows.
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
    """(indices in `to`, indices in `of`) of the members that both ascending lists of rows share."""
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
    # Split both at the ends of the ranges of either, so that each slice of `to` is one slice of `of`.
    ends = sorted({0, *np.cumsum([len(r) for r in x]).tolist(), *np.cumsum([len(r) for r in y]).tolist()})
    for start, stop in pairwise(ends):
        yield to_ranges(a[start:stop])[0], to_ranges(b[start:stop])[0]


def _indexes_itself(rows: Ranges, others: Ranges) -> bool:
    """Whether `rows` are 0, 1, 2 ... up to the last of `others` at least, so that each of `others` is its own index."""
    return len(rows) == 1 and (rows[0].start, rows[0].step) == (0, 1) and others[-1][-1] < len(rows[0])


def _index(rows: Ranges) -> Iterator[tuple[range | np.ndarray, range | np.ndarray]]:
    """(indices among `rows`, rows), in slices or as index lists."""
    if len(rows) > MAX_SLICES:
        yield np.arange(sum(map(len, rows))), to_numbers(rows)
        return
    first = 0
    for run in rows:
        yield range(first, first + len(run)), run
        first += len(run)
