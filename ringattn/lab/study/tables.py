"""The table of a study: one row per point in the order of the axes, every column with its unit and its word."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...machine.machine import MACHINE_NUMBERS
from ...text import duration, rate, size
from ..verbs.settings import EstimateConfig, StudyConfig
from .space import Point

Row = dict[str, Any]
#: The passes of a plan, and the phases of a model.
DIRECTIONS = ("forward", "backward", "training", "prefill", "decode")
#: Columns of a pass: seconds of waiting, by cause.
WAITS = ("wait for peers", "wait for messages")
#: (unit, word) of columns by name.
_UNITS = {
    "tokens": ("tokens", ""),
    "shard": ("tokens per rank", ""),
    "head_dim": ("elements", ""),
    "pairs": ("(query, key, head) pairs", "counted"),
}
_UNITS_OF_PASS = {
    **dict.fromkeys(("compute", "imbalance", "merge", "interference", "stalls", *WAITS), ("s", "modelled")),
    **dict.fromkeys(("host", "call", "failure every", "time", "total"), ("s", "modelled")),
    "rate": ("tokens/s", "modelled"),
    "efficiency": ("compute / time", "modelled"),
    **dict.fromkeys(("bytes", "busiest link"), ("bytes", "counted")),
    "messages": ("messages", "counted"),
    "memory": ("bytes per rank", "modelled"),
    "energy": ("J", "modelled"),
    "cost": ("USD", "modelled"),
    "fits": ("", "modelled"),
    "solver": ("", ""),
}
_UNITS_OF_EXECUTION = {
    "ranks": ("ranks", "counted"),
    **dict.fromkeys(("rows", "rows compared"), ("query rows", "counted")),
    **dict.fromkeys(("visits", "visits expected"), ("visits", "counted")),
    "pairs": ("(query, key, head) pairs", "counted"),
    **dict.fromkeys(("part of all pairs", "ledger"), ("", "counted")),
    **dict.fromkeys(("error", "error of lse"), ("", "measured")),
}


@dataclass(frozen=True)
class Column:
    """A column of a study's tables: its name, its unit, and whether its numbers are measured, counted or modelled."""

    name: str
    unit: str = ""
    word: str = ""


def _make_column(name: str) -> Column:
    """The column of a recorded value, or of an axis."""
    first, _, rest = name.partition(" ")
    if first in DIRECTIONS and rest:  # `backward` alone is an axis
        return Column(name, *_UNITS_OF_PASS[rest.partition(": ")[0]])
    if first == "executed":
        return Column(name, *_UNITS_OF_EXECUTION.get(rest, ()))
    number = MACHINE_NUMBERS.get(name.removeprefix("machine.")) if name.startswith("machine.") else None
    return Column(name, *_UNITS.get(name, () if number is None else (number.unit,)))


@dataclass(frozen=True)
class Table:
    """The rows of a study's table, each a dict by column name; numbers that do not exist are missing in the dict.

    `axes` are the columns that vary, in order. `together` are those of them that vary jointly with another column, and
    `labels` those that only label the points.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    axes: tuple[str, ...]
    together: tuple[str, ...]
    labels: tuple[str, ...]

    @property
    def refused(self) -> int:
        """The number of points that could not be simulated."""
        return sum(row["status"] == "refused" for row in self.rows)

    def column(self, name: str) -> Column:
        """The column of this name."""
        return next(column for column in self.columns if column.name == name)

    def numbers(self, name: str) -> list[Any]:
        """The distinct numbers of a column, ascending."""
        return sorted({row[name] for row in self.rows if is_number(row.get(name))})

    def varied(self, x: str, without: tuple[str, ...] = ()) -> list[str]:
        """The axes that split the rows into lines over `x`, see `series`."""
        tied = self.together if x in self.together else ()
        others = [name for name in self.axes if name not in (x, *without, *tied)]
        return [name for name in others if len({str(row.get(name)) for row in self.rows}) > 1]

    def series(self, x: str, without: tuple[str, ...] = ()) -> dict[str, list[Row]]:
        """The lines of a plot, by label: each has the rows that differ only in `x`, sorted by `x`.

        Rows without numbers are left out. Axes in `without`, and axes that vary together with `x`, do not split rows
        into separate lines.
        """
        varied, series = self.varied(x, without), dict[str, list[Row]]()
        for row in self.rows:
            if row["status"] == "ok" and is_number(row.get(x)):
                series.setdefault(", ".join(name_value(name, row.get(name)) for name in varied), []).append(row)
        for rows in series.values():
            rows.sort(key=lambda row: row[x])
        return series


def is_number(value: Any) -> bool:
    """Whether a value is a number other than a bool."""
    return type(value) in (int, float)


def name_value(name: str, value: Any) -> str:
    """An axis value as text, with the axis name unless the value alone is clear: "zigzag", but "heads=8"."""
    text = show_number(name, value) if is_number(value) else "null" if value is None else str(value)
    return text if name in ("pattern", "layout", "schedule", "machine") else f"{name}={text}"


def show_number(name: str, value: Any) -> str:
    """A number in suitable units: 64k (as on the command line), 25 GB/s, 1.5 us, 0.5."""
    if name.startswith("machine.") and (number := MACHINE_NUMBERS.get(name.removeprefix("machine."))):
        return number.show(value)
    unit = _make_column(name).unit
    if unit == "s":
        return duration(value)
    if unit.endswith("/s"):
        return rate(value, unit.replace("bytes", "B"))
    if unit.startswith("bytes"):
        return size(value)
    power = 0
    while unit.startswith("tokens") and value and value % 1024 == 0 and power < 4:
        value, power = value // 1024, power + 1
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}{('', 'k', 'M', 'G', 'T')[power]}"


def list_passes(row: Row) -> tuple[str, ...]:
    """The passes (or phases) for which a row has numbers, such as "forward"."""
    return tuple(direction for direction in DIRECTIONS if f"{direction} time" in row)


def total(row: Row, name: str) -> float:
    """The sum of column `name` over all passes of a row."""
    return sum(row.get(f"{direction} {name}", 0.0) for direction in list_passes(row))


def efficiency(row: Row) -> float:
    """Computing time divided by the time of all passes; NaN if they take no time."""
    return total(row, "compute") / total(row, "time") if total(row, "time") else float("nan")


def make_table(
    options: StudyConfig, points: Sequence[Point], records: Mapping[int, Row], executed: Mapping[int, Row]
) -> Table:
    """Make the table of a study.

    `records` are the results of its points, and `executed` those of their executions, both by the number of the point.
    """
    rows = []
    for point in points:
        record = records[point.number]
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
    axes = tuple(dict.fromkeys(name for point in points for name in point.settings))
    labels = tuple(dict.fromkeys(name for point in points for name in point.labels))
    together = tuple(axis for axis in axes if axis not in options.axes)
    names = dict.fromkeys(["point", *axes, *labels, *(name for row in rows for name in row)])
    columns = tuple(Column(name) if name in labels else _make_column(name) for name in names)
    return Table(columns, tuple(rows), axes, together, labels)


def _describe(point: Point) -> Row:
    """The sizes and names of a point, refused or not; values of the plan, such as auto's choice, later replace them."""
    config = point.config
    tokens = config.length()
    if isinstance(config, EstimateConfig):
        spread = {name: getattr(config, name) for name in ("cp", "dp", "tp", "ep", "pp", "batch", "dtype")}
        return {"model": config.model, "tokens": tokens, **spread, "machine": config.machine.spec}
    ranks = config.ranks
    return {
        "tokens": tokens,
        "ranks": ranks,
        "shard": -(-tokens // ranks) if ranks > 0 else None,
        **{name: getattr(config, name).spec for name in ("pattern", "layout", "schedule")},
        "heads": config.heads,
        "kv_heads": config.heads if config.kv_heads is None else config.kv_heads,
        "dtype": config.dtype,
        "machine": config.machine.spec,
    }


def to_csv(table: Table) -> str:
    """The table as CSV; Python reads the numbers back exactly, and missing numbers are empty cells."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([f"{column.name} [{column.unit}]" if column.unit else column.name for column in table.columns])
    for row in table.rows:
        values = [row.get(column.name) for column in table.columns]
        writer.writerow(["" if x is None else x if isinstance(x, str) else json.dumps(x) for x in values])
    return text.getvalue()


def to_json(table: Table, head: Mapping[str, Any], not_modelled: Sequence[str], more: Mapping[str, Any]) -> str:
    """The table as JSON, with the unit of each column and whether its numbers are measured, counted or modelled."""
    summary = {
        **head,
        "counts": {"ok": len(table.rows) - table.refused, "refused": table.refused},
        "axes": list(table.axes),
        "columns": [{"name": column.name, "unit": column.unit, "word": column.word} for column in table.columns],
        "not modelled": list(not_modelled),
        **more,
        "rows": list(table.rows),
    }
    return json.dumps(summary, indent=1) + "\n"
