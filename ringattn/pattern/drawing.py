"""Draw a pattern as text, from exact pair counts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise


def draw(count: Callable[[range, range], int], tokens: int, *, cells: int, ascii: bool) -> str:
    """One character per cell of a `cells` x `cells` grid over the tokens x tokens square (rows are queries).

    Characters by the exact share of pairs that attend: none, under a half, less than all, all or more.
    """
    cells = min(cells, tokens)
    marks = ".-+#" if ascii else "·░▓█"
    edges = [tokens * i // cells for i in range(cells + 1)] if cells else [0]
    blocks = [range(a, b) for a, b in pairwise(edges)]
    lines = []
    for q in blocks:
        line = ""
        for k in blocks:
            pairs, all_pairs = count(q, k), len(q) * len(k)
            line += marks[0 if pairs == 0 else 3 if pairs >= all_pairs else 2 if 2 * pairs >= all_pairs else 1]
        lines.append(line)
    return "\n".join(lines)
