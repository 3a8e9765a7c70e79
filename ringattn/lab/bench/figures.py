"""The plots of a suite's results: lines over tokens, or bars by case. They need matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from itertools import cycle
from typing import Any

from ...text import duration, size
from ..pages.figures import COLOURS, draw_lines, drawing, to_svg, use_log_y
from ..pages.pages import Plot
from .case import BenchSuite, CaseRecord, get_summary

#: The middle of a bar, and the ends of its whisker.
Bar = tuple[float, float, float]
Show = Callable[[float], str]
Rows = Mapping[str, Mapping[str, Bar]]


def draw(cases: list[CaseRecord], suite: BenchSuite | None) -> list[Plot]:
    """The plots; none without matplotlib or if there is nothing to compare."""
    if find_spec("matplotlib") is None:
        return []
    drawn = []
    for title, value, unit in (("median time", median, duration), ("peak of tensors", peak_of_tensors, size)):
        series: dict[str, list[tuple[int, float]]] = {}
        for case in cases:
            if "system" in case["settings"] and (number := value(case)) is not None:
                series.setdefault(line_name(case), []).append((case["settings"]["tokens"], number))
        if series := {name: sorted(points) for name, points in series.items() if len(points) > 2}:
            drawn.append(_draw_lines(title, series, unit))
    if drawn:
        return drawn
    title, rows, show, reference = _choose([case for case in cases if "failed" not in case], suite)
    return [_draw_bars(title, rows, show, reference)] if sum(map(len, rows.values())) > 1 else []


def median(case: CaseRecord) -> float | None:
    """The median time of a case's first column in seconds; None if the case failed."""
    return next((column["median"] for column in case["columns"].values()), None)


def peak_of_tensors(case: CaseRecord) -> float | None:
    """Peak bytes of tensors in the first column of a case that recorded them; None if none did."""
    return next((column["peaks"]["tensors"] for column in case["columns"].values() if "peaks" in column), None)


def line_name(case: CaseRecord) -> str:
    """The name of a system, with the number of real ranks it ran on."""
    return str(case["settings"]["system"]) + (f", {case['ranks']} ranks" if case["ranks"] > 1 else "")


def _draw_lines(title: str, series: dict[str, list[tuple[int, float]]], show: Show) -> Plot:
    with drawing(3.2 + 0.16 * len(series)) as figure:
        axes = draw_lines(figure, series, "tokens", f"{title}, measured", log=True)
        use_log_y(axes, show, 2 if show is size else 10)
        axes.xaxis.set_major_formatter(lambda count, place: size(count).rstrip("iB").replace(".0 ", ""))
        axes.grid(alpha=0.25)
        return Plot(title, to_svg(figure, title))


def _choose(cases: list[CaseRecord], suite: BenchSuite | None) -> tuple[str, Rows, Show, float | None]:
    """(title, bars, formatter of values, value marked by a line): the suite's own bars, ratios, or times."""
    if suite is not None and suite.bars is not None:
        title, names = suite.bars
        rows: dict[str, dict[str, Bar]] = {}
        for case in cases:
            values = {legend: [row[name] for row in get_summary(case)] for legend, name in names.items()}
            rows[_label(case)] = {legend: (statistics.median(x), min(x), max(x)) for legend, x in values.items()}
        return title, rows, lambda value: f"{value:g}", None
    ratios: dict[str, dict[str, Bar]] = {}
    for case in cases:
        for ratio in case.get("ratios", ()):
            name = ratio["ratio"].partition(" x ")[0]
            ratios.setdefault(_label(case), {})[name] = ratio["median"], ratio["min"], ratio["max"]
    if ratios:
        return "ratio of times", ratios, lambda value: f"{value:g}", 1.0
    times: dict[str, dict[str, Bar]] = {}
    for case in cases:
        settings = case["settings"]
        for name, column in case.get("columns", {}).items():
            label, series = _label(case), name
            if "system" in settings:
                label, series = settings["system"], f"{settings['tokens']:,} tokens"
                series += f", {case['ranks']} ranks" if case["ranks"] > 1 else ""
            times.setdefault(label, {})[series] = column["median"], column["min"], column["max"]
    return "median time", times, duration, None


def _label(case: CaseRecord) -> str:
    """The name of a case, with the unit of its link's rate."""
    name, rate = str(case["case"]), case["settings"].get("rate")
    return name.removesuffix(f"_{rate}").replace("_", " ") + (f", {rate:,} Mbit/s" if rate else "")


def _draw_bars(title: str, rows: Rows, show: Show, reference: float | None) -> Plot:
    """Groups of horizontal bars that end in a dot, with whiskers from minimum to maximum."""
    series: dict[str, list[tuple[float, Bar]]] = {name: [] for bars in rows.values() for name in bars}
    places, at = [], 0.0
    for bars in rows.values():
        places.append(at + (len(bars) - 1) / 2)
        for i, name in enumerate(name for name in series if name in bars):
            series[name].append((at + i, bars[name]))
        at += len(bars) + 0.8
    values = [bar[0] for bars in rows.values() for bar in bars.values()]
    log = (reference is not None or show is duration) and max(values) > 8 * min(values) > 0
    start = reference if log and reference is not None else 0.0
    with drawing(1.2 + 0.15 * at + 0.17 * len(series)) as figure:
        axes: Any = figure.subplots()
        for color, (name, mine) in zip(cycle(COLOURS), series.items(), strict=False):
            spread = [[mid - low for _, (mid, low, _) in mine], [high - mid for _, (mid, _, high) in mine]]
            axes.barh(
                [y for y, _ in mine],
                [bar[0] - start for _, bar in mine],
                left=start,
                xerr=spread if any(map(any, spread)) else None,
                height=0.85,
                color=color,
                error_kw={"elinewidth": 0.7, "ecolor": "#808080"},
                label=name,
            )
            # Also where a bar from 1 has no length.
            axes.plot([bar[0] for _, bar in mine], [y for y, _ in mine], "o", markersize=3, color=color)
        if log:
            axes.set_xscale("log")
        if reference is not None:
            axes.axvline(reference, color="#808080", linewidth=0.8, linestyle="--")
        axes.set_yticks(places, list(rows))
        axes.invert_yaxis()
        axes.xaxis.set_major_formatter(lambda value, place: show(value))
        axes.xaxis.set_minor_formatter(lambda value, place: "")
        meaning = "" if reference is None else "\nabove 1: the second is faster"
        axes.set_xlabel(f"{title}, {'log scale' if log else 'from 0'}{meaning}")
        axes.grid(alpha=0.25, axis="x")
        return Plot(title, to_svg(figure, title))
