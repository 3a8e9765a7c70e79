"""The advice as one HTML page: the verdict and what would change it, plots, and narrow tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from ...errors import RingAttentionError
from ..reporting.figures import COLOURS, drawing, to_svg
from ..reporting.pages import render_page
from ..timing.window import StepWindow, window
from .advice import BANDWIDTHS, SLOWNESS, Advice, describe_counts, explain, tabulate
from .search import plan_attention

#: Ranks and steps of the timeline.
MOST_RANKS, MOST_STEPS = 16, 64
MARKERS = "osD^vP*X"


def render(advice: Advice) -> str:
    """The page. Raises Unsupported where matplotlib is missing."""
    best, timeline = advice.best[0], _window(advice)
    # Title, what draws it and from what, and what it shows; without data there is no plot.
    plots: list[tuple[str, Callable[[Any, Any], None], object, str]] = [
        ("Time and cost", _pareto, advice, "Each point is the fastest of a shape; the line joins the Pareto front."),
        ("Tokens that fit", _frontier, advice, f"Counted bytes, {best.offer.name}, one sequence on all GPUs."),
        ("Efficiency", _efficiency, advice, "The fastest candidate of each number of GPUs."),
        ("Memory of a GPU", _memory, advice,
         "The candidates of the table, in its order; the dashed lines are the GPUs' memory."),
        ("Attention of one layer", _timeline, None if isinstance(timeline, str) else timeline,
         f"Forward of {best.step.plan}."),
        ("Bandwidth between nodes", _bandwidth, advice if advice.bandwidths else None,
         "The candidates of the table with the plans that they have now."),
        ("One slow GPU", _stragglers, advice,
         f"{best.name}; the slow GPU takes as many times as long for all it computes."),
    ]  # fmt: skip
    values = {
        "advice": advice,
        "plots": [(title, _draw(draw, data), caption) for title, draw, data, caption in plots if data is not None],
        "best": dict(zip(("header", "rows"), tabulate(advice.best), strict=True)),
        "pareto": dict(zip(("header", "rows"), tabulate(advice.pareto), strict=True)),
        "reasons": [f"{one.name}: {one.step.plan}; {one.choices}; {explain(one)}" for one in advice.best],
        "counts": describe_counts(advice.counts),
        "no_timeline": timeline if isinstance(timeline, str) else "",
    }
    return render_page(__package__ or "", "advise.j2", "html", values)


def _draw(draw: Callable[[Any, Any], None], data: object, height: float = 3.4) -> Markup:
    with drawing(height) as figure:
        draw(figure, data)
        if figure.axes[0].get_legend_handles_labels()[0]:
            figure.legend(loc="outside lower center", fontsize=7, framealpha=0.0, ncols=2)
        return to_svg(figure, draw.__name__)


def _lines(
    figure: Any, series: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str, *, joined: bool = True
) -> Any:
    """Axes with points for each name, joined or not, over logarithmic x."""
    axes = figure.subplots()
    for i, (name, points) in enumerate(series.items()):
        style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "alpha": 0.8}
        line = "-" if joined else ""
        axes.plot(*zip(*sorted(points), strict=True), label=name, markersize=4, linestyle=line, **style)
    axes.set_xscale("log", base=2)
    axes.set(xlabel=x, ylabel=y)
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.grid(alpha=0.25)
    return axes


def _pareto(figure: Any, advice: Advice) -> None:
    series: dict[str, list[tuple[float, float]]] = {}
    for one in advice.all:
        series.setdefault(one.offer.name, []).append((one.seconds / 3600, one.cost))
    axes = _lines(figure, series, "hours of 1e9 tokens, modelled", f"cost of 1e9 tokens\n({advice.unit})", joined=False)
    front = [(one.seconds / 3600, one.cost) for one in advice.pareto]
    ring = {"markersize": 9, "markerfacecolor": "none"}  # a front of one point has no line
    axes.plot(*zip(*front, strict=True), "o--", color=COLOURS[3], label="Pareto front", **ring)
    # Below and to the left of a point of the front there is no other point.
    place = {"xytext": (-6, -6), "textcoords": "offset points", "ha": "right", "va": "top", "fontsize": 7}
    for candidate in {one.step.gpus: one for one in reversed(advice.pareto)}.values():
        axes.annotate(f"{candidate.step.gpus} GPUs", (candidate.seconds / 3600, candidate.cost), **place)
    axes.margins(0.3, 0.2)  # room for the words beside the first point


def _frontier(figure: Any, advice: Advice) -> None:
    series = {f"checkpointing={name}": points for name, points in advice.frontier.items() if points}
    axes = _lines(figure, series, "GPUs", "most tokens of a sequence, counted")
    axes.set_yscale("log", base=2)
    axes.axhline(advice.question.tokens, linestyle=":", color=COLOURS[3])
    axes.yaxis.set_major_formatter(
        lambda value, place: f"{value / 1024:g}k" if value < 2**20 else f"{value / 2**20:g}M"
    )


def _efficiency(figure: Any, advice: Advice) -> None:
    axes = _lines(figure, advice.efficiency, "GPUs", "TFLOP/s of the model per GPU, modelled")
    axes.set_ylim(0, 1.1 * max(rate for points in advice.efficiency.values() for _, rate in points))


def _memory(figure: Any, advice: Advice) -> None:
    axes = figure.subplots()
    places = np.arange(len(advice.best))
    names = list(dict.fromkeys(name for one in advice.best for name, count in one.step.memory.items() if count))
    left = np.zeros(len(places))
    for name, colour in zip(names, COLOURS, strict=False):
        counts = np.array([one.step.memory.get(name, 0) / 2**30 for one in advice.best])
        axes.barh(places, counts, left=left, label=name, color=colour)
        left += counts
    for has in {one.offer.machine.memory or 0.0 for one in advice.best} - {0.0}:
        axes.axvline(has / 2**30, linestyle="--", color=COLOURS[3])
    axes.set_yticks(places, [f"{place + 1}." for place in places])
    axes.invert_yaxis()
    axes.set(xlabel="GiB, counted and modelled")


def _window(advice: Advice) -> StepWindow | str:
    """When ranks begin steps of the forward of a layer; a text where the best candidate has none, or none is known."""
    best = advice.best[0]
    if best.parallel.cp == 1:
        return "One rank computes attention of a sequence in one step."
    plan, machine = plan_attention(advice.question, best)
    try:
        return window(plan, machine, ranks=range(min(plan.ranks, MOST_RANKS)), steps=range(MOST_STEPS))
    except RingAttentionError as error:
        return f"There is no timeline: {error}"


def _timeline(figure: Any, steps: StepWindow) -> None:
    axes = figure.subplots()
    for rank in range(len(steps.ranks)):
        begun, busy = steps.begun[:-1, rank], steps.busy[:, rank]
        known = np.isfinite(begun) & np.isfinite(busy) & (busy > 0)
        bars = list(zip(1e3 * begun[known], 1e3 * busy[known], strict=True))
        axes.broken_barh(bars, (rank - 0.4, 0.8), facecolors=[COLOURS[i % 2] for i in range(len(bars))])
    axes.set(xlabel="ms; bars compute, gaps wait, colours alternate by step", ylabel="rank")
    axes.invert_yaxis()


def _bandwidth(figure: Any, advice: Advice) -> None:
    series = {
        f"{place}. {one.name}": [
            (factor * one.offer.machine.bandwidth / 1e9, seconds / 3600)
            for factor, seconds in zip(BANDWIDTHS, line, strict=True)
        ]
        for place, (one, line) in enumerate(zip(advice.best, advice.bandwidths, strict=True), 1)
    }
    _lines(figure, series, "GB/s between nodes", "hours of 1e9 tokens, modelled")


def _stragglers(figure: Any, advice: Advice) -> None:
    axes = figure.subplots()
    axes.plot(SLOWNESS, advice.stragglers, "o-", color=COLOURS[0], markersize=4)
    axes.set(xlabel="times as slow", ylabel="times the step, modelled")
    axes.grid(alpha=0.25)
