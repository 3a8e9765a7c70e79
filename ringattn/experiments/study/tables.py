"""The tables of a study: one row per point in the order of the axes, every column with its unit and its word."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .point import Column, column
from .space import Point

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows by column name; a row has no entry where its point was refused or nothing was executed."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    #: Names of the columns that are axes or vary together, in their order.
    axes: tuple[str, ...]
    #: Those of them that vary together.
    together: tuple[str, ...] = ()

    def word(self, name: str, row: Row) -> str:
        """The word that belongs to a number of a row."""
        found = column_of(self.columns, name).word
        return str(row.get(f"{name.split()[0]} kind", "modelled")) if found == "kind" else found


def column_of(columns: Sequence[Column], name: str) -> Column:
    """The column of a name."""
    return next(one for one in columns if one.name == name)


def table(points: Sequence[Point], records: Mapping[int, Row], executed: Mapping[int, Row]) -> Table:
    """The table of the points' records, and of what was executed of them, both by the points' numbers."""
    rows = []
    axes: dict[str, None] = {}
    together: dict[str, None] = {}
    for point in points:
        record = records[point.number]
        axes |= dict.fromkeys(point.settings)
        together |= dict.fromkeys(point.together)
        row = {
            "point": point.number, **point.settings, **_inputs(point), **point.labels, "status": record["status"],
            "why": record.get("why"), **record.get("values", {}),
            **{f"executed {name}": value for name, value in executed.get(point.number, {}).items()},
        }  # fmt: skip
        rows.append({name: value for name, value in row.items() if value is not None})
    labels = dict.fromkeys(name for point in points for name in point.labels)
    names = dict.fromkeys(["point", *axes, *labels, *(name for row in rows for name in row)])
    plain = {name: Column(name) for name in ("point", "status", "why", *labels)}
    return Table(tuple(plain.get(name) or column(name) for name in names), tuple(rows), tuple(axes), tuple(together))


def _inputs(point: Point) -> Row:
    """What a point is, refused or not; what was made of `auto` replaces it."""
    config = point.config
    tokens, ranks = config.length(), config.ranks
    return {
        "tokens": tokens, "ranks": ranks, "shard": -(-tokens // ranks) if ranks > 0 else None,
        "pattern": config.pattern.spec, "layout": config.layout.spec, "schedule": config.schedule.spec,
        "heads": config.heads, "kv_heads": config.heads if config.kv_heads is None else config.kv_heads, "dtype": config.dtype, "machine": config.machine.spec,
    }  # fmt: skip


def as_csv(found: Table) -> str:
    """The table as CSV: numbers as Python reads them back exactly, empty where there is none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([one.title for one in found.columns])
    for row in found.rows:
        writer.writerow([_cell(row.get(one.name)) for one in found.columns])
    return text.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value)
    return value if isinstance(value, str) else json.dumps(value)


def as_summary(found: Table, head: Mapping[str, Any], notes: Sequence[str], more: Mapping[str, Any]) -> str:
    """All numbers as JSON, each column with its unit and word; `kind`: as the row's own column says."""
    counts = {status: sum(row["status"] == status for row in found.rows) for status in ("ok", "refused")}
    return json.dumps({
        **head, "counts": counts, "axes": list(found.axes),
        "columns": [{"name": one.name, "unit": one.unit, "word": one.word} for one in found.columns],
        "not modelled": list(notes), **more, "rows": list(found.rows),
    }, indent=1) + "\n"  # fmt: skip
