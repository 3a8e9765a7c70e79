"""Plots of a suite's report as <svg> elements in the colours of the page, dark or light. Needs matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, util
from typing import Any

from markupsafe import Markup

from ...timing.window import StepWindow
from ..study.plots import COLOURS

#: The colour that stands for the colour of the page's text.
TEXT = "#010203"
MARKERS = "osD^vP*X"
_SETTINGS = {
    "svg.hashsalt": "ringattn",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), TEXT),
}


def draw_lines(series: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str) -> Markup | None:
    """Lines of points (x, y) on logarithmic axes, by name; None without points, or without matplotlib."""
    if not series:
        return None

    def draw(figure: Any, axes: Any) -> None:
        for i, (name, points) in enumerate(series.items()):
            style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i // 2 % len(MARKERS)], "markersize": 4}
            axes.plot(*zip(*sorted(points), strict=True), label=name, alpha=0.85, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel=x, ylabel=y)
        axes.xaxis.set_major_formatter(lambda value, place: _short(value))
        axes.grid(alpha=0.25)
        figure.legend(loc="outside lower center", fontsize=7, framealpha=0.0, ncols=2)

    return _make_svg(draw, 3.2 + 0.16 * len(series), y)


def draw_timeline(window: StepWindow) -> Markup | None:
    """When each rank computes (bars, their colour by step) and waits (gaps); None without matplotlib."""

    def draw(figure: Any, axes: Any) -> None:
        for step, (begun, busy) in enumerate(zip(window.begun * 1e3, window.busy * 1e3, strict=False)):
            axes.barh(window.ranks, busy, left=begun, color=COLOURS[step % len(COLOURS)], height=0.7)
        axes.invert_yaxis()
        axes.set(
            xlabel="milliseconds, modelled on preset cpu; gaps wait for messages",
            ylabel="rank",
            yticks=list(window.ranks),
        )

    return _make_svg(draw, 1.2 + 0.25 * len(window.ranks), "timeline")


def _make_svg(draw: Callable[[Any, Any], None], height: float, name: str) -> Markup | None:
    """The <svg> element of what draw(figure, axes) draws, its ids after `name`; None without matplotlib."""
    if util.find_spec("matplotlib") is None:
        return None
    matplotlib = import_module("matplotlib")
    with matplotlib.rc_context(_SETTINGS):
        figure = import_module("matplotlib.figure").Figure(figsize=(4.8, height), layout="constrained")
        draw(figure, figure.subplots())
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(TEXT, "currentColor").replace("#000000", "currentColor")
    prefix = re.sub(r"\W+", "-", name)
    return Markup(re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{prefix}-", svg))


def _short(count: float) -> str:
    """Tokens in powers of 1024: 2K, 1M."""
    power = 2 if count >= 1 << 20 else 1 if count >= 1 << 10 else 0
    return f"{count / 1024**power:g}{('', 'K', 'M')[power]}"
