"""A report as Markdown and as one HTML file that needs no other: headings, sentences, tables, plots."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto;margin:1em 0}"
    "td,th{border:1px solid #ccc;padding:.25em .6em;text-align:right}td:first-child,th:first-child{text-align:left}"
    "th{background:#f3f3f3}code,pre{background:#f5f5f5}pre{padding:.7em;overflow-x:auto}svg{max-width:100%;height:auto}"
)


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Items:
    items: Sequence[str]


@dataclass(frozen=True)
class TableItem:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Plot:
    """An SVG file beside the report."""

    path: Path


Part = Heading | Text | Code | Items | TableItem | Plot


def as_markdown(parts: Sequence[Part]) -> str:
    """The report as Markdown; plots are links to their files."""
    return "\n\n".join(map(_markdown, parts)) + "\n"


def _markdown(part: Part) -> str:
    if isinstance(part, Heading):
        return f"{'#' * part.level} {part.text}"
    if isinstance(part, Code):
        return f"```bash\n{part.text}\n```"
    if isinstance(part, Items):
        return "\n".join(f"- {item}" for item in part.items)
    if isinstance(part, TableItem):
        lines = [part.header, ["---"] * len(part.header), *part.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    if isinstance(part, Plot):
        return f"![{part.path.stem}]({part.path.name})"
    return part.text


def as_html(title: str, parts: Sequence[Part]) -> str:
    """The report as one HTML file, plots inside it."""
    body = "\n".join(_html(part) for part in parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _html(part: Part) -> str:
    if isinstance(part, Heading):
        return f"<h{part.level}>{html.escape(part.text)}</h{part.level}>"
    if isinstance(part, Code):
        return f"<pre>{html.escape(part.text)}</pre>"
    if isinstance(part, Items):
        return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in part.items) + "</ul>"
    if isinstance(part, TableItem):
        lines = [_cells("th", part.header), *(_cells("td", row) for row in part.rows)]
        return "<table>\n" + "\n".join(lines) + "\n</table>"
    if isinstance(part, Plot):
        return "<figure>" + _inline(part.path) + "</figure>"
    return f"<p>{html.escape(part.text)}</p>"


def _cells(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _inline(path: Path) -> str:
    """The <svg> element of a file; its ids are made its own, as several plots share a page."""
    text = path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    return re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{path.stem}-", text)
