"""Reports as Markdown and as HTML pages that need no other file, and their plots, which need matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...errors import Unsupported
from ...files import writing
from ...text import plural

AnyText = TypeVar("AnyText", str, Markup)
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd")
#: Markers and dashes of lines: with COLOURS they tell 320 lines apart.
MARKERS, DASHES = "osD^vP*X", ("-", "--", ":", "-.")
#: The colour that stands for the colour of the page's text.
TEXT = "#010203"
#: The kinds of a plot that is written to files.
FORMATS = ("svg", "png")
_SETTINGS = {
    "svg.hashsalt": "ringattn",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), TEXT),
}


class Cell(str):
    """The text of a table's cell with the number by which a page sorts it."""

    value: float

    def __new__(cls, text: str, value: float) -> Cell:
        cell = super().__new__(cls, text)
        cell.value = value
        return cell


@dataclass(frozen=True)
class ReportTable:
    """Cells as text, `Cell` where a number is behind the text. `total`: the rows before the table was cut."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    total: int = 0


def render_page(package: str, template: str, kind: str, values: Mapping[str, object]) -> str:
    """A report, by a template in the folder `templates` of `package`; `kind` is "html" or "markdown"."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name, "templates") for name in (package, __package__ or "")]),
        autoescape=kind == "html",  # in Markdown `plain` and `cell` escape what they must
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "plural": plural,
        "one_line": _one_line,
        "cell": lambda text: _plain(text).replace("|", "\\|").replace("\n", " "),
        "plain": _plain,
        "svg": lambda path: _svg_element(path.read_text(encoding="utf-8"), path.stem),
    }
    return environment.get_template(template).render(**values, format=f"{kind}.j2").strip() + "\n"


def _one_line(text: AnyText) -> AnyText:
    """The words of a paragraph on one line, whatever the line breaks of its template; markup stays markup."""
    return type(text)(" ").join(text.split())


def _plain(text: str) -> str:
    """Markdown without HTML: a name must not be markup."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)


def _svg_element(text: str, name: str) -> Markup:
    """The <svg> element of a file. The name is put before its ids, as several plots share a page."""
    prefix = re.sub(r"\W+", "-", name)
    return Markup(re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{prefix}-", text[text.index("<svg") :]))


def check_matplotlib(instead: str) -> None:
    """Raise Unsupported where matplotlib is missing; `instead` says how to do without plots."""
    if not util.find_spec("matplotlib"):
        raise Unsupported(f"plots need matplotlib: pip install 'ringattn[plot]', or {instead}")


@contextmanager
def drawing(height: float = 3.2) -> Iterator[Any]:
    """A figure of matplotlib that fits a phone, 4.8 inches wide; draw it, and read its `to_svg`, within the block."""
    with import_module("matplotlib").rc_context(_SETTINGS):
        yield import_module("matplotlib.figure").Figure(figsize=(4.8, height), layout="constrained")


def to_svg(figure: Any, name: str) -> Markup:
    """The <svg> element of a figure in the colours of the page, dark or light."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _svg_element(text.getvalue().replace(TEXT, "currentColor").replace("#000000", "currentColor"), name)


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


def draw_lines(
    figure: Any, series: Mapping[str, Sequence[tuple[float, float]]], xlabel: str, ylabel: str, *, log: bool
) -> Any:
    """Lines of points (x, y) by name, x on a logarithmic axis where `log`; returns the axes."""
    axes = figure.subplots()
    for i, (name, points) in enumerate(series.items()):
        style = {"color": COLOURS[i % 10], "marker": MARKERS[i // 10 % 8], "linestyle": DASHES[i // 80 % 4]}
        axes.plot(*zip(*points, strict=True), label=name or None, markersize=3, **style)
    if log:
        axes.set_xscale("log", base=2)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if any(series):
        figure.legend(loc="outside lower center", fontsize=7, framealpha=0.0, ncols=2)
    return axes
