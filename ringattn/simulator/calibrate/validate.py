"""Validation: modelled against measured times of passes whose sizes, numbers of ranks and patterns were held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median

import numpy as np

from ...machine.machine import Machine
from ...text import duration, plural
from .passes import GRID, Pass, PassCase, list_cases

#: Probability that an interval is to have.
LEVEL = 0.9
#: (pattern, layout) of compared passes that no calibration measures.
HELD_OUT_GRID = (("Dilated((256, 1024), (1, 4), causal=True)", "contiguous"),)
#: Modelled seconds from which a pass counts as long: the noise of a machine's processes is small beside them.
LONG_PASS = 0.02


@dataclass(frozen=True)
class Errors:
    """Errors of modelled times relative to the medians of measured times, and how many runs lie in their intervals.

    `bias` is the mean signed error, below 0 where the model predicts too short times; `median`, `p90` and `worst` are
    of absolute errors. `coverage` is the share of single runs within their interval, None without residuals.
    """

    passes: int
    runs: int
    bias: float
    median: float
    p90: float
    worst: float
    coverage: float | None


def held_out(rows: Sequence[int]) -> list[int]:
    """Rows per rank that were measured neither for kernel times nor for the passes of a calibration, ascending.

    They lie at 1/4 and 3/4 of the way from one size to the next, in logarithms, and above the second size, as a call
    below it is all overhead.
    """
    pairs = list(pairwise(rows))
    sizes = [round(a ** (1 - x) * b**x) for a, b in (pairs[1:] or pairs) for x in (0.25, 0.75)]
    return sorted(set(sizes) - set(rows))


def summarise_errors(passes: Sequence[Pass], machine: Machine) -> Errors:
    """The errors of measured passes."""
    signed = [each.modelled / median(each.seconds) - 1 for each in passes]
    absolute = sorted(map(abs, signed))
    hits = [
        low <= seconds <= high
        for each in passes
        if (interval := machine.interval(each.modelled, LEVEL)) is not None
        for low, high in [interval]
        for seconds in each.seconds
    ]
    return Errors(
        passes=len(passes),
        runs=sum(len(each.seconds) for each in passes),
        bias=mean(signed),
        median=median(absolute),
        p90=float(np.quantile(absolute, 0.9)),
        worst=absolute[-1],
        coverage=sum(hits) / len(hits) if hits else None,
    )


def summarise_groups(passes: Sequence[Pass], machine: Machine, ranks: int) -> dict[str, Errors]:
    """The errors of all passes, of the long ones, of the passes of each size, and of the held-out patterns, by name."""
    held = {pattern for pattern, _ in HELD_OUT_GRID}
    groups = {"all": list(passes), f"over {duration(LONG_PASS)}": [p for p in passes if p.modelled >= LONG_PASS]}
    for rows in sorted({each.case.tokens // ranks for each in passes}):
        groups[f"{plural(rows, 'row')} per rank"] = [p for p in passes if p.case.tokens // ranks == rows]
    groups["pattern held out"] = [p for p in passes if p.case.pattern in held]
    groups["all, pace not corrected"] = [replace(p, seconds=p.raw) for p in passes if p.raw]
    return {name: summarise_errors(group, machine) for name, group in groups.items() if group}


def validation_cases(rows: Sequence[int], ranks: int) -> list[PassCase]:
    """The cases of a validation on so many ranks: the patterns of a calibration, and those held out."""
    return list_cases((*GRID, *HELD_OUT_GRID), rows, ranks)
