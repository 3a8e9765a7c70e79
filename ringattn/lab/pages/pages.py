"""Reports as Markdown files and as self-contained HTML pages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...files import write_text
from ...text import plural
from .figures import on_paper

AnyText = TypeVar("AnyText", str, Markup)


class Cell(str):
    """The text of a table cell, with the number that a page sorts by."""

    value: float

    def __new__(cls, text: str, value: float) -> Cell:
        cell = super().__new__(cls, text)
        cell.value = value
        return cell


@dataclass(frozen=True)
class ReportTable:
    """A table of text cells, `Cell` for numbers. `total`: the number of rows before the table was cut."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    total: int = 0


class Plot(NamedTuple):
    """A plot of a report: its title, its <svg> element, and the name of its file beside the Markdown."""

    title: str
    svg: Markup
    file: str = ""


def render_page(package: str, template: str, kind: str, values: Mapping[str, object]) -> str:
    """The text of a report, from a template in `package`'s folder `templates`; `kind` is "html" or "markdown"."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name, "templates") for name in (package, __package__ or "")]),
        autoescape=kind == "html",  # in Markdown, `plain` and `cell` escape the text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "plural": plural,
        "one_line": _one_line,
        "cell": lambda text: _plain(text).replace("|", "\\|").replace("\n", " "),
        "plain": _plain,
    }
    return environment.get_template(template).render(**values, format=f"{kind}.j2").strip() + "\n"


def _one_line(text: AnyText) -> AnyText:
    """The text of a paragraph joined into one line; markup stays markup."""
    return type(text)(" ").join(text.split())


def _plain(text: str) -> str:
    """The text escaped for Markdown, so that a name is not read as HTML."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)


def write_report(
    folder: Path, stem: str, package: str, template: str, report: object, plots: Sequence[Plot]
) -> list[Path]:
    """Write a report as STEM.md and STEM.html, with the plots as files that STEM.md shows; returns both paths."""
    for plot in plots:
        write_text(folder / plot.file, on_paper(plot.svg))
    written = {"markdown": folder / f"{stem}.md", "html": folder / f"{stem}.html"}
    for kind, path in written.items():
        write_text(path, render_page(package, template, kind, {"report": report}))
    return [*written.values()]
