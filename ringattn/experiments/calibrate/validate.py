"""Validation: modelled against measured times of passes whose sizes and numbers of ranks were held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

from ...machine.machine import Machine
from .noise import GRID
from .passes import Pass, PassCase, cases

#: The level of intervals.
LEVEL = 0.9


@dataclass(frozen=True)
class Errors:
    """How far modelled times lie from the medians of measured ones, relative to these: signed, absolute, and the share
    of single runs within their interval (None: the machine has no residuals). Lower `bias` is too short a prediction."""

    passes: int
    runs: int
    bias: float
    median: float
    p90: float
    worst: float
    coverage: float | None


def held_out(rows: Sequence[int]) -> list[int]:
    """Rows per rank between those of the kernel times and those of the calibration's passes: at 1/4 and 3/4 of the way
    from one size to the next, in logarithms; not below the second size, as there a call is all overhead."""
    pairs = list(pairwise(rows))
    found = [round(a ** (1 - x) * b**x) for a, b in (pairs[1:] or pairs) for x in (0.25, 0.75)]
    return sorted(set(found) - set(rows))


def errors(passes: Sequence[Pass], machine: Machine) -> Errors:
    """The errors of some passes."""
    signed = [one.modelled / median(one.seconds) - 1 for one in passes]
    absolute = sorted(map(abs, signed))
    hits = [
        low <= seconds <= high
        for one in passes
        if (inside := machine.interval(one.modelled, LEVEL)) is not None
        for low, high in [inside]
        for seconds in one.seconds
    ]
    return Errors(
        passes=len(passes),
        runs=sum(len(one.seconds) for one in passes),
        bias=mean(signed),
        median=median(absolute),
        p90=quantile(absolute, 0.9),
        worst=absolute[-1],
        coverage=sum(hits) / len(hits) if hits else None,
    )


def quantile(ascending: Sequence[float], share: float) -> float:
    """A quantile of sorted numbers, linear between them."""
    place = share * (len(ascending) - 1)
    low = int(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (place - low) * (ascending[high] - ascending[low])


def chosen(rows: Sequence[int], ranks: int) -> list[PassCase]:
    """The cases of a validation on so many ranks."""
    return cases(GRID, rows, ranks)


def oversubscribed(ranks: int, threads: int, cores: int, calibrated: tuple[int, int]) -> float:
    """By how much visits of `ranks` x `threads` on `cores` take longer than in a calibration of (ranks, threads)."""
    return max(1.0, ranks * threads / cores) / max(1.0, calibrated[0] * calibrated[1] / cores)
