"""Tables for people: every number says whether it was measured or counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True)
class Number:
    """A figure and where it comes from: measured, counted, modelled or extrapolated."""

    name: str
    value: str
    kind: str = ""


def size(count: float) -> str:
    """Bytes for people: 1,536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


def show(title: str, numbers: Iterable[Number]) -> None:
    """Print names and values, each with its kind."""
    table = Table(title=escape(title) or None, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", no_wrap=True)
    for number in numbers:
        kind = f"[{number.kind}]" if number.kind else ""
        table.add_row(*(escape(text) for text in (number.name, number.value, kind)))
    console().print(table)


def grid(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with a header."""
    table = Table(title=escape(title) or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(header):
        table.add_column(escape(name), justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    console().print(table)


def console() -> Console:
    """Standard output; wide enough for a table where it is not a terminal."""
    found = Console()
    return found if found.is_terminal else Console(width=120)
