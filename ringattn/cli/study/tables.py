"""The table of a study: one row per point in the order of the axes, every column with its unit and its word."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .point import Column, make_column
from .space import Point

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows by column name. A row lacks the columns of numbers that were refused or not executed.

    `axes` are the names of the columns that are axes or vary together, in their order; `together` are those of them
    that vary together.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    axes: tuple[str, ...]
    together: tuple[str, ...] = ()

    def word_of(self, name: str, row: Row) -> str:
        """The word of the row's number in column `name`: modelled, counted, measured or extrapolated."""
        word = find_column(self.columns, name).word
        return str(row.get(f"{name.split()[0]} kind", "modelled")) if word == "kind" else word


def find_column(columns: Sequence[Column], name: str) -> Column:
    """The column of this name."""
    return next(column for column in columns if column.name == name)


def make_table(points: Sequence[Point], records: Mapping[int, Row], executed: Mapping[int, Row]) -> Table:
    """The table of a study from the records of its points and of their executions, both by the number of the point."""
    rows = []
    axes: dict[str, None] = {}
    together: dict[str, None] = {}
    for point in points:
        record = records[point.number]
        axes |= dict.fromkeys(point.settings)
        together |= dict.fromkeys(point.together)
        row = {
            "point": point.number,
            **point.settings,
            **_describe(point),
            **point.labels,
            "status": record["status"],
            "why": record.get("why"),
            **record.get("values", {}),
            **{f"executed {name}": value for name, value in executed.get(point.number, {}).items()},
        }
        rows.append({name: value for name, value in row.items() if value is not None})
    labels = dict.fromkeys(name for point in points for name in point.labels)
    names = dict.fromkeys(["point", *axes, *labels, *(name for row in rows for name in row)])
    plain = {name: Column(name) for name in ("point", "status", "why", *labels)}
    columns = tuple(plain.get(name) or make_column(name) for name in names)
    return Table(columns, tuple(rows), tuple(axes), tuple(together))


def _describe(point: Point) -> Row:
    """The sizes and names of a point, refused or not. The plan's own values replace them, such as auto's choice."""
    config = point.config
    tokens, ranks = config.length(), config.ranks
    return {
        "tokens": tokens,
        "ranks": ranks,
        "shard": -(-tokens // ranks) if ranks > 0 else None,
        "pattern": config.pattern.spec,
        "layout": config.layout.spec,
        "schedule": config.schedule.spec,
        "heads": config.heads,
        "kv_heads": config.heads if config.kv_heads is None else config.kv_heads,
        "dtype": config.dtype,
        "machine": config.machine.spec,
    }


def to_csv(table: Table) -> str:
    """The table as CSV: numbers that Python reads back exactly, empty cells where a row has no number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.title for column in table.columns])
    for row in table.rows:
        writer.writerow([_csv_cell(row.get(column.name)) for column in table.columns])
    return text.getvalue()


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value)
    return value if isinstance(value, str) else json.dumps(value)


def to_json(table: Table, head: Mapping[str, Any], not_modelled: Sequence[str], more: Mapping[str, Any]) -> str:
    """All numbers as JSON, each column with its unit and word; the word "kind" refers to the row's column `kind`."""
    summary = {
        **head,
        "counts": {status: sum(row["status"] == status for row in table.rows) for status in ("ok", "refused")},
        "axes": list(table.axes),
        "columns": [{"name": column.name, "unit": column.unit, "word": column.word} for column in table.columns],
        "not modelled": list(not_modelled),
        **more,
        "rows": list(table.rows),
    }
    return json.dumps(summary, indent=1) + "\n"
