"""What the model leaves unexplained: ratios of measured over modelled times of whole passes, kept one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median

from ...machine.machine import Machine
from .passes import Pass, Settings, cases, measured
from .team import Team

#: Patterns and layouts of the passes whose ratios a calibration keeps: ranks busy alike, with half the work, at different
#: times, and with bands. What they leave unexplained differs, and an interval is to hold for all of them.
GRID = (
    ("Full()", "contiguous"),
    ("Causal()", "zigzag"),
    ("Causal()", "contiguous"),
    ("Causal() & Window(255)", "contiguous"),
)


#: The least number of calls of little work.
CALLS = 20


def between(rows: Sequence[int]) -> list[int]:
    """Sizes between those of the kernel times, so that the ratios hold the error of interpolation, too: the rounded
    geometric means of neighbours, without those of the smallest sizes, where a call is all overhead."""
    means = [round((a * b) ** 0.5) for a, b in pairwise(rows)]
    return means[1:] or means


def calls(team: Team, machine: Machine, rows: Sequence[int], settings: Settings) -> list[Pass]:
    """Passes of the two smallest blocks, for what a call takes beside its work. Without work it would take less: where
    ranks compute, their threads for messages wait for a core.
    """
    often = replace(settings, repeat=max(settings.repeat, CALLS))
    return measured(team, cases(GRID[:1], rows[:2], team.size), machine, often)


def beside(passes: Sequence[Pass]) -> float:
    """Seconds that a call takes beside what is modelled of it: the mean, over passes, of the difference of medians."""
    return max(0.0, mean(median(one.seconds) - one.modelled for one in passes))


def residuals(team: Team, machine: Machine, rows: Sequence[int], settings: Settings) -> list[Pass]:
    """Passes at sizes between those of the kernel times, with the machine that has just been measured."""
    return measured(team, cases(GRID, between(rows), team.size), machine, settings)
