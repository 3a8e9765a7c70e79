"""Errors of a study that are visible before its first point is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...errors import InvalidInput
from ...simulator.reporting.figures import check_matplotlib
from ..config.groups import ExecuteGroup, StudyGroup, WindowGroup
from ..config.schema import parse_size
from . import plots
from .space import Point
from .tables import make_table


def check_study(options: StudyGroup, points: Sequence[Point]) -> None:
    """Raise InvalidInput where settings of a study cannot be honoured over its points.

    Raises Unsupported where the study needs matplotlib, and matplotlib is missing.
    """
    if options.plots or options.window.point is not None:
        check_matplotlib("leave plots out with study.plots=[]")
    _check_plots(options, points)
    _check_window(options.window, points)
    _check_execute(options.execute)
    if options.extrapolate is not None:
        extrapolated_tokens(options, points)


def extrapolated_tokens(options: StudyGroup, points: Sequence[Point]) -> int:
    """The tokens of study.extrapolate. Raises InvalidInput where a point has as many tokens or more."""
    tokens = parse_size(options.extrapolate, "study.extrapolate")
    longest = max(point.config.length() for point in points)
    if tokens <= longest:
        raise InvalidInput(
            f"study.extrapolate={options.extrapolate}: the study itself has {longest:,} tokens; take more"
        )
    return tokens


def _check_plots(options: StudyGroup, points: Sequence[Point]) -> None:
    plots.check_names(options.plots)
    if not options.plots:
        return
    planned = make_table(points, {point.number: {"status": "planned"} for point in points}, {})
    _, y = plots.choose_axes(planned, options.x, options.y)
    if "crossover" in options.plots and y is None:
        raise InvalidInput(
            "study.plots: a crossover map needs a second axis with several numbers, study.y; add an axis, or leave the "
            "map out of study.plots"
        )


def _check_window(window: WindowGroup, points: Sequence[Point]) -> None:
    if window.point is None:
        return
    if not 0 <= window.point < len(points):
        raise InvalidInput(f"study.window.point={window.point}: the study has the points 0 .. {len(points) - 1}")
    ranks = points[window.point].config.ranks
    if not 0 <= window.first_rank < ranks:
        raise InvalidInput(f"study.window.first_rank={window.first_rank}: the point has the ranks 0 .. {ranks - 1}")
    for name, least in (("ranks", 1), ("steps", 1), ("first_step", 0)):
        if getattr(window, name) < least:
            raise InvalidInput(f"study.window.{name}={getattr(window, name)}: must be at least {least}")


def _check_execute(execute: ExecuteGroup) -> None:
    if execute.budget is None:
        return
    if not 0 <= execute.budget < math.inf:
        raise InvalidInput(f"study.execute.budget={execute.budget}: expected seconds >= 0")
    for name in ("rows", "heads", "head_dim"):
        if getattr(execute, name) < 1:
            raise InvalidInput(f"study.execute.{name}={getattr(execute, name)}: must be at least 1")
