"""Reports as self-contained HTML pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...text import plural


class Cell(str):
    """The text of a table cell, with the number that a page sorts by."""

    value: float

    def __new__(cls, text: str, value: float) -> Cell:
        cell = super().__new__(cls, text)
        cell.value = value
        return cell


@dataclass(frozen=True)
class ReportTable:
    """A table whose cells are text; cells with numbers are of type `Cell`.

    `total` is the number of rows before the table was shortened.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    total: int = 0


class Plot(NamedTuple):
    """A plot of a report: its title and its <svg> element."""

    title: str
    svg: Markup


def render_page(package: str, template: str, values: Mapping[str, object]) -> str:
    """The HTML of a report, from a template in `package`'s folder `templates`."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name, "templates") for name in (package, __package__ or "")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plural"] = plural
    return environment.get_template(template).render(**values).strip() + "\n"
