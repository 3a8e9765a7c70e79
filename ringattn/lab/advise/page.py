"""The advice as one HTML page: the verdict and what would change it, plots, and narrow tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..pages.figures import COLOURS, SMALL, draw_lines, draw_stacks, drawing, to_svg
from ..pages.pages import Plot, ReportTable, render_page
from .advice import BANDWIDTHS, Advice, describe_numbers, explain, span, tabulate


def render(advice: Advice) -> str:
    """The page as HTML. Raises Unsupported where matplotlib is missing."""
    best, front = advice.best[0], "the line joins the Pareto front"
    if len(advice.pareto) == 1:
        front = "one is both the fastest and the cheapest"
    plots: list[tuple[str, Callable[[Any, Advice], None], str]] = [  # title, draw function, caption
        ("Time and cost", _pareto, f"Each point is the fastest of a shape; {front}."),
        ("Time by part", _time, "The candidates of the table, in its order."),
        ("Tokens that fit", _frontier, f"Counted bytes, {best.offer.name}, one sequence on all GPUs."),
        ("Memory of a GPU", _memory, "In the order of the table; the dashed lines are the GPUs' memory."),
    ]
    if advice.bandwidths:
        plots.append(("Bandwidth between nodes", _bandwidth, "The candidates of the table, with unchanged plans."))
    values = {
        "advice": advice,
        "plots": [(_draw(title, draw, advice), caption) for title, draw, caption in plots],
        "best": ReportTable(*tabulate(advice.best)),
        "pareto": ReportTable(*tabulate(advice.pareto)),
        "reasons": [f"{one.name}: {one.step.plan}; {one.choices}; {explain(one)}" for one in advice.best],
        "numbers": describe_numbers(advice),
    }
    return render_page(__package__ or "", "advise.j2", values)


def _draw(title: str, draw: Callable[[Any, Advice], None], advice: Advice) -> Plot:
    with drawing(3.4) as figure:
        draw(figure, advice)
        return Plot(title, to_svg(figure, draw.__name__))


def _lines(figure: Any, series: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str, **more: bool) -> Any:
    """Axes with points for each name, joined or not, over a logarithmic x axis."""
    ordered = {name: sorted(points) for name, points in series.items()}
    axes = draw_lines(figure, ordered, x, y, log=True, **more)
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.grid(alpha=0.25)
    return axes


def _pareto(figure: Any, advice: Advice) -> None:
    series: dict[str, list[tuple[float, float]]] = {}
    for one in advice.all:
        series.setdefault(one.offer.name, []).append((one.seconds / 3600, one.cost))
    axes = _lines(figure, series, "hours of 1e9 tokens, modelled", f"cost of 1e9 tokens\n({advice.unit})", joined=False)
    front = [(one.seconds / 3600, one.cost) for one in advice.pareto]
    ring = {"markersize": 9, "markerfacecolor": "none", "color": COLOURS[3]}
    style, label = ("o--", "Pareto front") if len(front) > 1 else ("o", "fastest and cheapest")
    axes.plot(*zip(*front, strict=True), style, label=label, **ring)
    # No other point lies below and to the left of a point of the front.
    place = {"xytext": (-6, -6), "textcoords": "offset points", "ha": "right", "va": "top", "fontsize": SMALL}
    for candidate in {one.step.gpus: one for one in reversed(advice.pareto)}.values():
        axes.annotate(f"{candidate.step.gpus} GPUs", (candidate.seconds / 3600, candidate.cost), **place)
    axes.margins(0.3, 0.2)  # room for the label of the first point


def _frontier(figure: Any, advice: Advice) -> None:
    series = {f"checkpointing={name}": points for name, points in advice.frontier.items() if points}
    axes = _lines(figure, series, "GPUs", "most tokens of a sequence, counted")
    axes.set_yscale("log", base=2)
    axes.axhline(advice.question.tokens, linestyle=":", color=COLOURS[3])
    axes.yaxis.set_major_formatter(
        lambda value, place: f"{value / 1024:g}k" if value < 2**20 else f"{value / 2**20:g}M"
    )


def _stack(figure: Any, bars: Sequence[Mapping[str, float]], label: str) -> Any:
    """Axes with one bar, stacked from named parts, for each candidate of the table."""
    axes = figure.subplots()
    draw_stacks(
        axes, bars, list(dict.fromkeys(name for bar in bars for name, part in bar.items() if part)), across=True
    )
    places = range(len(bars))
    axes.set_yticks(places, [f"{place + 1}." for place in places])
    axes.invert_yaxis()
    axes.set(xlabel=label)
    return axes


def _time(figure: Any, advice: Advice) -> None:
    scales = [one.seconds / one.step.seconds / 3600 for one in advice.best]
    bars = [
        {name: scale * part for name, part in one.step.parts.items()}
        for one, scale in zip(advice.best, scales, strict=True)
    ]
    axes = _stack(figure, bars, "hours of 1e9 tokens, modelled, and the band of published steps")
    hours = np.array([one.seconds / 3600 for one in advice.best])
    bands = np.array([span(one) for one in advice.best]).T / 3600
    axes.errorbar(hours, range(len(hours)), xerr=abs(bands - hours), fmt="none", ecolor=COLOURS[3], capsize=3)


def _memory(figure: Any, advice: Advice) -> None:
    bars = [{name: count / 2**30 for name, count in one.step.memory.items()} for one in advice.best]
    axes = _stack(figure, bars, "GiB, counted and modelled")
    for has in {one.offer.machine.memory or 0.0 for one in advice.best} - {0.0}:
        axes.axvline(has / 2**30, linestyle="--", color=COLOURS[3])


def _bandwidth(figure: Any, advice: Advice) -> None:
    series = {
        f"{place}. {one.name}": [
            (factor * one.offer.machine.bandwidth / 1e9, changed.seconds / 3600)
            for factor, changed in zip(BANDWIDTHS, line, strict=True)
        ]
        for place, (one, line) in enumerate(zip(advice.best, advice.bandwidths, strict=True), 1)
    }
    _lines(figure, series, "GB/s between nodes", "hours of 1e9 tokens, modelled")
