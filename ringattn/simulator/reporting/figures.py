"""Plots of pages as <svg> elements in the colours of the page, dark or light. Needs matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, util
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ...errors import Unsupported
from ...files import writing

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd")
#: The colour that stands for the colour of the page's text.
TEXT = "#010203"
_SETTINGS = {
    "svg.hashsalt": "ringattn",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), TEXT),
}


#: The kinds of a plot that is written to files.
FORMATS = ("svg", "png")


def save_figure(figure: Any, folder: Path, name: str) -> list[Path]:
    """The files NAME.svg and NAME.png of a figure, with the same bytes in every run."""
    settings = {"svg.hashsalt": "ringattn", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 9.0}
    # Dates and versions would make equal plots differ.
    metadata: dict[str, dict[str, Any]] = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
    paths = [folder / f"{name}.{kind}" for kind in FORMATS]
    for kind, path in zip(FORMATS, paths, strict=True):
        with import_module("matplotlib").rc_context(settings), writing(path) as temporary:
            figure.savefig(temporary, format=kind, metadata=metadata[kind], dpi=110)
    return paths


def has_matplotlib() -> bool:
    """Whether plots can be drawn."""
    return util.find_spec("matplotlib") is not None


def check_matplotlib(instead: str) -> None:
    """Raise Unsupported where matplotlib is missing; `instead` says how to do without plots."""
    if not has_matplotlib():
        raise Unsupported(f"plots need matplotlib: pip install 'ringattn[plot]', or {instead}")


@contextmanager
def drawing(height: float = 3.2) -> Iterator[Any]:
    """A figure of matplotlib that fits a phone, 4.8 inches wide; draw it, and read its `to_svg`, within the block."""
    with import_module("matplotlib").rc_context(_SETTINGS):
        yield import_module("matplotlib.figure").Figure(figsize=(4.8, height), layout="constrained")


def to_svg(figure: Any, name: str) -> Markup:
    """The <svg> element of a figure. The name is put before its ids, as several plots share a page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(TEXT, "currentColor").replace("#000000", "currentColor")
    prefix = re.sub(r"\W+", "-", name)
    return Markup(re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{prefix}-", svg))
