"""Which rows two pieces of a block share, and where they are in the tensors of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .row_sets import Rows, RowSet, decode, places

#: A copy of rows is written as slices up to this many, as an index list above.
MAX_SLICES = 16


@dataclass(frozen=True)
class RowCopy:
    """Rows of a tensor of one cut that are rows of another's: heads and rows in either."""

    to_heads: range
    to_rows: range | np.ndarray
    from_heads: range
    from_rows: range | np.ndarray


def moves(target: RowSet | None, source: RowSet | None, kv_heads: int, rows: int) -> tuple[RowCopy, ...]:
    """Where the rows that two cuts of a block of `rows` rows share are in the tensors of both."""
    whole = RowSet(tuple(range(kv_heads)), ((range(rows),),))
    to, of = target or whole, source or whole
    heads = [head for head in to.heads if head in of.index]
    found: list[RowCopy] = []
    if len(to.rows) == len(of.rows) == 1 and heads:
        pairs = [(to.index[head], of.index[head]) for head in heads]
        if _even([a for a, _ in pairs]) and _even([b for _, b in pairs]):
            spans = [_span([a for a, _ in pairs]), _span([b for _, b in pairs])]
            return tuple(RowCopy(spans[0], a, spans[1], b) for a, b in _shared(to.rows[0], of.rows[0]))
    for head in heads:
        a, b = to.index[head], of.index[head]
        found += [RowCopy(range(a, a + 1), x, range(b, b + 1), y) for x, y in _shared(to.of(head), of.of(head))]
    return tuple(found)


def _even(numbers: list[int]) -> bool:
    return len(set(np.diff(numbers).tolist())) <= 1 and (len(numbers) < 2 or numbers[1] > numbers[0])


def _span(numbers: list[int]) -> range:
    return range(numbers[0], numbers[-1] + 1, numbers[1] - numbers[0] if len(numbers) > 1 else 1)


def _shared(to: Rows, of: Rows) -> Iterator[tuple[range | np.ndarray, range | np.ndarray]]:
    """Indices of the members that two ascending lists share, in either."""
    if to == of:
        yield range(sum(map(len, to))), range(sum(map(len, of)))
        return
    if _whole(of, to):
        yield from _in_place(to)
        return
    if _whole(to, of):
        yield from ((b, a) for a, b in _in_place(of))
        return
    _, a, b = np.intersect1d(places(to), places(of), assume_unique=True, return_indices=True)
    x, y = decode(a), decode(b)
    if max(len(x), len(y)) > MAX_SLICES:
        yield a, b
        return
    # Cut both at the ends of either, so that each slice of one is a slice of the other.
    ends = sorted({0, *np.cumsum([len(r) for r in x]).tolist(), *np.cumsum([len(r) for r in y]).tolist()})
    for start, stop in pairwise(ends):
        yield decode(a[start:stop])[0], decode(b[start:stop])[0]


def _whole(rows: Rows, others: Rows) -> bool:
    """Whether rows are 0, 1, 2 ... to the last of the others at least, so that each of these is its own index."""
    return len(rows) == 1 and (rows[0].start, rows[0].step) == (0, 1) and others[-1][-1] < len(rows[0])


def _in_place(rows: Rows) -> Iterator[tuple[range | np.ndarray, range | np.ndarray]]:
    """The indices of rows among themselves, and the rows."""
    if len(rows) > MAX_SLICES:
        yield np.arange(sum(map(len, rows))), places(rows)
        return
    first = 0
    for run in rows:
        yield range(first, first + len(run)), run
        first += len(run)
