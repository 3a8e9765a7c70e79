"""What the timing model leaves unexplained: ratios of measured over modelled times of whole passes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

#: (pattern, layout) of the passes whose ratios a calibration keeps: ranks equally busy, equally busy with half the
#: work, busy at different times, and with bands. The model errs differently for each, and intervals must hold for all.
GRID = (
    ("Full()", "contiguous"),
    ("Causal()", "zigzag"),
    ("Causal()", "contiguous"),
    ("Causal() & Window(255)", "contiguous"),
)


def sizes_between(rows: Sequence[int]) -> list[int]:
    """Rounded geometric means of neighbouring sizes, except of the two smallest, where a call is all overhead.

    Passes of these sizes have the error of interpolating between kernel times in their ratios.
    """
    means = [round((a * b) ** 0.5) for a, b in pairwise(rows)]
    return means[1:] or means
