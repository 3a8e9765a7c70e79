"""What the timing model leaves unexplained: ratios of measured over modelled times of whole passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median

from ...machine.machine import Machine
from .measuring_ranks import MeasuringRanks, Settings
from .passes import Pass, list_cases, measure_passes

#: (pattern, layout) of the passes whose ratios a calibration keeps: ranks equally busy, equally busy with half the
#: work, busy at different times, and with bands. The model errs differently for each, and intervals must hold for all.
GRID = (
    ("Full()", "contiguous"),
    ("Causal()", "zigzag"),
    ("Causal()", "contiguous"),
    ("Causal() & Window(255)", "contiguous"),
)
#: Least repetitions of the passes with little work.
SHORT_REPETITIONS = 10


def sizes_between(rows: Sequence[int]) -> list[int]:
    """Rounded geometric means of neighbouring sizes, except of the two smallest, where a call is all overhead.

    Passes of these sizes have the error of interpolating between kernel times in their ratios.
    """
    means = [round((a * b) ** 0.5) for a, b in pairwise(rows)]
    return means[1:] or means


def measure_short_passes(
    ranks: MeasuringRanks, machine: Machine, rows: Sequence[int], settings: Settings
) -> list[Pass]:
    """Passes of the two smallest blocks, for the time of a call beside its work.

    Passes without any work would take less: where ranks compute, their threads for messages wait for a core.
    """
    often = replace(settings, repeat=max(settings.repeat, SHORT_REPETITIONS))
    return measure_passes(ranks, list_cases(GRID, rows[:2], ranks.size), machine, often)


def fit_call_overhead(passes: Sequence[Pass]) -> float:
    """Seconds of a call beside its modelled time: the mean over passes of (median measured - modelled), at least 0."""
    return max(0.0, mean(median(each.seconds) - each.modelled for each in passes))


def measure_residuals(ranks: MeasuringRanks, machine: Machine, rows: Sequence[int], settings: Settings) -> list[Pass]:
    """Passes at sizes between those of the kernel times, modelled on the machine that has just been measured."""
    return measure_passes(ranks, list_cases(GRID, sizes_between(rows), ranks.size), machine, settings)
