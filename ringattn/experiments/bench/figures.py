"""Plots of a suite's report as <svg> elements in the colours of the page, dark or light. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from ...reporting.figures import COLOURS, drawing, has_matplotlib, to_svg

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


def _short(count: float) -> str:
    """Tokens in powers of 1024: 2K, 1M."""
    power = 2 if count >= 1 << 20 else 1 if count >= 1 << 10 else 0
    return f"{count / 1024**power:g}{('', 'K', 'M')[power]}"
