"""What the model leaves unexplained: ratios of measured over modelled times of whole passes, kept one by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ..timing import Machine
from .passes import Pass, Settings, cases, measure, modelled
from .team import Team

#: Patterns and layouts of the passes whose ratios a calibration keeps.
GRID = (("Full()", "contiguous"), ("Causal()", "zigzag"))


def between(rows: Sequence[int]) -> list[int]:
    """Sizes between those of the kernel times, so that the ratios hold the error of interpolation, too: the rounded
    geometric means of neighbours, without those of the smallest sizes, where a call is all overhead."""
    means = [round((a * b) ** 0.5) for a, b in pairwise(rows)]
    return means[1:] or means


def residuals(team: Team, machine: Machine, rows: Sequence[int], settings: Settings) -> list[Pass]:
    """Passes at sizes between those of the kernel times, with the machine that has just been measured."""
    found = []
    for case in cases(GRID, between(rows), team.size):
        seconds = measure(team, case, settings)
        found.append(Pass(case, tuple(seconds), modelled(case, machine, team.size, settings)))
    return found
