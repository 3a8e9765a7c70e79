"""A study's report as Markdown and as one HTML page, from the templates beside this module."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...text import plural
from .report import StudyReport

AnyText = TypeVar("AnyText", str, Markup)


def render_markdown(report: StudyReport) -> str:
    """The report as Markdown; plots are links to the files beside the report."""
    return _render(report, "markdown.j2", autoescape=False)  # Markdown has no entities: `cell` escapes what it must


def render_html(report: StudyReport) -> str:
    """The report as one HTML page, with its plots inside the page."""
    return _render(report, "html.j2", autoescape=True)


def _render(report: StudyReport, parts: str, *, autoescape: bool) -> str:
    environment = Environment(
        loader=PackageLoader(__package__ or "", "templates"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plural": plural, "one_line": _one_line, "cell": _markdown_cell, "svg": _inline_svg}
    return environment.get_template("report.j2").render(report=report, format=parts).strip() + "\n"


def _one_line(text: AnyText) -> AnyText:
    """The words of a paragraph on one line, whatever the line breaks of its template; markup stays markup."""
    return type(text)(" ").join(text.split())


def _markdown_cell(text: str) -> str:
    return text.replace("|", "\\|")


def _inline_svg(path: Path) -> Markup:
    """The <svg> element of a file. The file's stem is put before its ids, as several plots share a page."""
    text = path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    return Markup(re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{path.stem}-", text))
