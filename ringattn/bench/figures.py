"""Plots of a suite's report as <svg> elements in the colours of the page, dark or light. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from ..simulator.reporting.figures import COLOURS, drawing, has_matplotlib, to_svg
from ..simulator.timing.window import StepWindow

MARKERS = "osD^vP*X"


def draw_lines(series: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str) -> Markup | None:
    """Lines of points (x, y) on logarithmic axes, by name; None without points, or without matplotlib."""
    if not series or not has_matplotlib():
        return None
    with drawing(3.2 + 0.16 * len(series)) as figure:
        axes = figure.subplots()
        for i, (name, points) in enumerate(series.items()):
            style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i // 2 % len(MARKERS)], "markersize": 4}
            axes.plot(*zip(*sorted(points), strict=True), label=name, alpha=0.85, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel=x, ylabel=y)
        axes.xaxis.set_major_formatter(lambda value, place: _short(value))
        axes.grid(alpha=0.25)
        figure.legend(loc="outside lower center", fontsize=7, framealpha=0.0, ncols=2)
        return to_svg(figure, y)


def draw_timeline(window: StepWindow) -> Markup | None:
    """When each rank computes (bars, their colour by step) and waits (gaps); None without matplotlib."""
    if not has_matplotlib():
        return None
    with drawing(1.2 + 0.25 * len(window.ranks)) as figure:
        axes = figure.subplots()
        for step, (begun, busy) in enumerate(zip(window.begun * 1e3, window.busy * 1e3, strict=False)):
            axes.barh(window.ranks, busy, left=begun, color=COLOURS[step % len(COLOURS)], height=0.7)
        axes.invert_yaxis()
        axes.set(
            xlabel="milliseconds, modelled on preset cpu; gaps wait for messages",
            ylabel="rank",
            yticks=list(window.ranks),
        )
        return to_svg(figure, "timeline")


def _short(count: float) -> str:
    """Tokens in powers of 1024: 2K, 1M."""
    power = 2 if count >= 1 << 20 else 1 if count >= 1 << 10 else 0
    return f"{count / 1024**power:g}{('', 'K', 'M')[power]}"
