"""Reports as Markdown and as HTML pages that need no other file: the parts of a page are in the templates beside."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...text import plural

AnyText = TypeVar("AnyText", str, Markup)


class Cell(str):
    """The text of a table's cell with the number by which a page sorts it."""

    value: float

    def __new__(cls, text: str, value: float) -> Cell:
        cell = super().__new__(cls, text)
        cell.value = value
        return cell


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
        "cell": _markdown_cell,
        "plain": _plain,
        "svg": _inline_svg,
    }
    return environment.get_template(template).render(**values, format=f"{kind}.j2").strip() + "\n"


def _one_line(text: AnyText) -> AnyText:
    """The words of a paragraph on one line, whatever the line breaks of its template; markup stays markup."""
    return type(text)(" ").join(text.split())


def _plain(text: str) -> str:
    """Markdown without HTML: a name must not be markup."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)


def _markdown_cell(text: str) -> str:
    return _plain(text).replace("|", "\\|").replace("\n", " ")


def _inline_svg(path: Path) -> Markup:
    """The <svg> element of a file. The file's stem is put before its ids, as several plots share a page."""
    text = path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    return Markup(re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{path.stem}-", text))
