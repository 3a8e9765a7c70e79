"""Text drawings of patterns from exact pair counts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise


def draw(count: Callable[[range, range], int], tokens: int, *, cells: int, ascii: bool) -> str:
    """A drawing of the tokens x tokens square (lines are queries), at most `cells` x `cells` characters.

    `count(q, k)` returns the number of pairs in a cell. A character shows its share of all pairs of the cell: none,
    under half, half or more, all (or more than all, if branches count pairs twice).
    """
    cells = min(cells, tokens)
    marks = ".-+#" if ascii else "·░▓█"
    bounds = [tokens * i // cells for i in range(cells + 1)] if cells else [0]
    blocks = [range(start, stop) for start, stop in pairwise(bounds)]
    lines = []
    for q in blocks:
        line = ""
        for k in blocks:
            pairs, all_pairs = count(q, k), len(q) * len(k)
            line += marks[0 if pairs == 0 else 3 if pairs >= all_pairs else 2 if 2 * pairs >= all_pairs else 1]
        lines.append(line)
    return "\n".join(lines)
