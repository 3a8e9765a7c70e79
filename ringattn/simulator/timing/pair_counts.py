"""The pairs of every rank in closed form, where a pattern is made of bands and of documents: `auto` bounds by them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...layout.regular import Layout
from ...pattern import Pattern
from ...pattern.base import And, BandPattern
from ...pattern.documents import Documents

#: Products of two positions below this fit into 64-bit integers.
MOST_TOKENS = 1 << 30


def count_pairs(pattern: Pattern, layout: Layout) -> list[int] | None:
    """The (query, key) pairs of one head of each rank; None for other patterns, and where ranges have steps."""
    operands = list(_list_operands(pattern))
    bands = [operand.bounds for operand in operands if isinstance(operand, BandPattern)]
    packings = [operand for operand in operands if isinstance(operand, Documents) and operand.rows is None]
    ranges = [(rank, part) for rank in range(layout.ranks) for part in layout.shard(rank)]
    tokens = layout.tokens
    if len(bands) + len(packings) < len(operands) or len(packings) > 1 or not 0 < tokens <= MOST_TOKENS:
        return None
    if any(part.step != 1 for _, part in ranges):
        return None
    low = max((lo for lo, _ in bands if lo is not None), default=-tokens)
    high = min((hi for _, hi in bands if hi is not None), default=tokens)
    borders = np.array(packings[0].starts if packings else (0, tokens))
    rank, start, stop = np.array([(rank, part.start, part.stop) for rank, part in ranges]).T
    # Between two cuts the queries belong to one rank, and see the keys of one document.
    cuts = np.sort(np.concatenate((borders, start, stop)))
    cuts = cuts[np.append(True, cuts[1:] > cuts[:-1])]  # np.unique would load numpy.ma in the first plan of a process
    document = np.searchsorted(borders, cuts[:-1], side="right") - 1
    queries, keys = (cuts[:-1], cuts[1:] - 1), (borders[document], borders[document + 1] - 1)
    pairs = _count_at_most(queries, keys, max(high, low - 1)) - _count_at_most(queries, keys, low - 1)
    before = np.concatenate(([0], np.cumsum(pairs)))
    totals = np.zeros(layout.ranks, dtype=np.int64)
    np.add.at(totals, rank, before[np.searchsorted(cuts, stop)] - before[np.searchsorted(cuts, start)])
    return [int(total) for total in totals]


def _list_operands(pattern: Pattern) -> Iterator[Pattern]:
    """The patterns whose common pairs are those of `pattern`."""
    if isinstance(pattern, And):
        for operand in pattern.operands:
            yield from _list_operands(operand)
    else:
        yield pattern


def _count_at_most(
    queries: tuple[np.ndarray, np.ndarray], keys: tuple[np.ndarray, np.ndarray], distance: int
) -> np.ndarray:
    """How many pairs of each run of queries (first, last) and run of keys have a distance q - k of at most `distance`.

    A pair is u rows after the first query and v rows before the last key: count u + v <= n, without u or v too large.
    """
    n = distance - queries[0] + keys[1]
    rows, columns = (run[1] - run[0] + 1 for run in (queries, keys))

    def triangle(n: np.ndarray) -> np.ndarray:
        side = np.maximum(n + 1, 0)
        return side * (side + 1) // 2

    return triangle(n) - triangle(n - rows) - triangle(n - columns) + triangle(n - rows - columns)
