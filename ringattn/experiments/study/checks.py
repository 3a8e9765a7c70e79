"""What is wrong with a study and can be known before its first point is done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from ...config.groups import ExecuteGroup, StudyGroup, WindowGroup
from ...config.schema import parse_size
from ...errors import InvalidInput
from . import plots
from .space import Point
from .tables import table


def check(options: StudyGroup, points: Sequence[Point], given: Mapping[str, str]) -> None:
    """Raise InvalidInput where settings of a study cannot be honoured over its points, Unsupported where matplotlib is
    missing; `given` are the values of its command line by key."""
    _check_needed(options, given)
    if options.plots or options.window.point is not None:
        plots.check()
    _check_plots(options, points)
    _check_window(options.window, points)
    _check_execute(options.execute)
    if options.extrapolate is not None:
        extrapolated(options, points)


def check_unasked(options: StudyGroup) -> None:
    """Raise InvalidInput where settings of a study are given, and no axes, so that there is none."""
    for key, value in _differing("study", options, StudyGroup()):
        text = str(value).replace("'", "")  # as it is written on the command line
        raise InvalidInput(
            f"{key}={text} has no meaning without a study; give it axes, such as study.axes.ranks=[8,64], take one with "
            "study=NAME, or write several values with -m"
        )


def extrapolated(options: StudyGroup, points: Sequence[Point]) -> int:
    """The tokens of study.extrapolate. Raises InvalidInput where a point has as many."""
    tokens = parse_size(options.extrapolate, "study.extrapolate")
    most = max(point.config.length() for point in points)
    if tokens <= most:
        raise InvalidInput(f"study.extrapolate={options.extrapolate}: the study itself has {most:,} tokens; take more")
    return tokens


def _differing(name: str, given: Any, plain: Any) -> list[tuple[str, Any]]:
    """The fields that are not what they are by default, by their whole keys."""
    found: list[tuple[str, Any]] = []
    for field in fields(plain):
        value, usual, key = getattr(given, field.name), getattr(plain, field.name), f"{name}.{field.name}"
        if is_dataclass(usual):
            found += _differing(key, value, usual)
        elif value != usual:
            found.append((key, value))
    return found


def _check_needed(options: StudyGroup, given: Mapping[str, str]) -> None:
    """Refuse what is given of a part of the study that is not made. A preset's own settings may be left over."""
    for keys, there, need in (
        (("study.x", "study.y"), bool(options.plots), "study.plots=[...]"),
        (tuple(f"study.window.{f.name}" for f in fields(WindowGroup)), options.window.point is not None, "study.window.point=..."),
        (tuple(f"study.execute.{f.name}" for f in fields(ExecuteGroup)), options.execute.budget is not None, "study.execute.budget=..."),
    ):  # fmt: skip
        for key in keys:
            if not there and given.get(key, "null") != "null":
                raise InvalidInput(f"{key}={given[key]} has no meaning without {need}; give both, or neither")


def _check_plots(options: StudyGroup, points: Sequence[Point]) -> None:
    plots.check_names(options.plots)
    if not options.plots:
        return
    planned = table(points, {point.number: {"status": "planned"} for point in points}, {})
    _, y = plots.axes_of(planned, options.x, options.y)
    if "crossover" in options.plots and y is None:
        raise InvalidInput(
            "study.plots: a crossover map needs a second axis with several numbers, study.y; add one, or leave it out of plots"
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
