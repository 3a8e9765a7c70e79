"""SVG figures for pages, by matplotlib; every run gives the same bytes."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module, util
from typing import Any

import numpy as np
from markupsafe import Markup

from ...errors import Unsupported

COLOURS = (
    *("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd"),
    *("#1b5e20", "#b5179e"),
)
#: Markers and dashes of lines; with COLOURS, markers distinguish 96 lines.
MARKERS, DASHES = "osD^vP*X", ("--", ":", "-.")
#: The smallest font, in points: 8 pixels on a phone, for which a figure of 4.8 inches shrinks.
SMALL = 8.5
#: A placeholder, which `to_svg` replaces by the page's text colour.
TEXT = "#010203"
_SETTINGS = {
    "svg.hashsalt": "ringattn",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), SMALL),
    "legend.framealpha": 0.0,  # a page may be dark
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), TEXT),
}


def check_matplotlib(instead: str) -> None:
    """Raise Unsupported if matplotlib is missing; `instead` tells the user how to do without plots."""
    if not util.find_spec("matplotlib"):
        raise Unsupported(f"plots need matplotlib: pip install 'ringattn[plot]', or {instead}")


@contextmanager
def drawing(height: float = 3.2, width: float = 4.8) -> Iterator[Any]:
    """A context with a matplotlib figure, by default as wide as a phone; draw and call `to_svg` inside the block."""
    with import_module("matplotlib").rc_context(_SETTINGS):
        yield import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def to_svg(figure: Any, name: str) -> Markup:
    """The <svg> element of a figure in the page's colours, dark or light, with a legend if the first axes have labels.

    The name prefixes all ids, since several plots share a page."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles and not figure.legends:
        figure.legend(handles, labels, loc="outside lower center", ncols=2 if max(map(len, labels)) < 30 else 1)
    written = io.StringIO()
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = written.getvalue().replace(TEXT, "currentColor").replace("#000000", "currentColor")
    prefix = re.sub(r"\W+", "-", name)
    return Markup(re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{prefix}-", text[text.index("<svg") :]))


def use_log_y(axes: Any, show: Callable[[float], str], base: int = 10) -> None:
    """Give axes a log y axis, labelled by `show` at powers of the base, and also at 2 and 5 times few powers of 10."""
    axes.set_yscale("log", base=base)
    low, high = axes.get_ylim()
    subs = (1, 2, 5) if base == 10 and high < 1000 * low else (1,)
    axes.yaxis.set_major_locator(import_module("matplotlib.ticker").LogLocator(base, subs))
    axes.yaxis.set_major_formatter(lambda value, place: show(value))
    axes.yaxis.set_minor_formatter(lambda value, place: "")


def wrap(label: str, width: int = 60) -> str:
    """The label in lines of at most `width` characters: 60 fit into a legend, 30 above one of two panels."""
    return textwrap.fill(label, width)


def draw_lines(
    figure: Any,
    series: Mapping[str, Sequence[tuple[float, float]]],
    xlabel: str,
    ylabel: str,
    *,
    log: bool,
    joined: bool = True,
    axes: Any = None,
) -> Any:
    """Draw named series of points (x, y), joined by lines if `joined`, with a log x axis if `log`; returns the axes.

    Each line is thinner than those before it and has gaps, so that equal lines show.
    """
    axes = axes or figure.subplots()
    for i, (name, points) in enumerate(series.items()):
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i // len(COLOURS) % 8]}
        style["linestyle"] = "" if not joined else DASHES[i % 3] if i else "-"
        size = 1 - i / len(series)
        style |= {"linewidth": 1 + 2.5 * size, "markersize": 3 + 4 * size if joined else 3}
        if points:
            axes.plot(*zip(*points, strict=True), label=wrap(name) or None, **style)
    if log:
        axes.set_xscale("log", base=2)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return axes


def draw_stacks(
    axes: Any, bars: Sequence[Mapping[str, float]], names: Sequence[str], *, across: bool = False
) -> dict[str, Any]:
    """Draw one stacked bar for each mapping; `names` are its parts, from the axis on. Returns the bars by part.

    Bars go upwards, or to the right if `across`. A part has the same colour on all axes that are drawn with the same
    names. Missing parts are left out.
    """
    drawn: dict[str, Any] = {}
    ends = np.zeros(len(bars))
    for i, name in enumerate(names):
        parts = np.array([bar.get(name, 0.0) for bar in bars])
        if parts.any():
            style = {"label": name, "color": COLOURS[i % len(COLOURS)], "hatch": "//" * (i // len(COLOURS))}
            draw, begin = (axes.barh, {"left": ends}) if across else (axes.bar, {"bottom": ends})
            drawn[name] = draw(range(len(bars)), parts, **begin, **style)
            ends = ends + parts
    return drawn
