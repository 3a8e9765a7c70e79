"""The contents of a study's report: tables with every number's word, what was refused and what is not modelled.

`rendering` turns a report into Markdown and HTML; the sentences around these contents are in its templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...simulator.reporting.pages import Cell
from ...text import duration, plural, rate, size
from ..config.groups import ExecuteGroup
from .extrapolation import Extrapolation
from .plots import list_passes, total
from .point import DIRECTIONS, WAITS
from .tables import Row, Table, find_column

#: Most rows and columns of a table in a report; sweep.csv has all rows, and wider tables become several.
MOST_ROWS, MOST_COLUMNS = 200, 6
#: Columns that describe a point. A column whose value is equal for all points is written once, below the table.
DESCRIPTION = (
    "tokens",
    "ranks",
    "pattern",
    "layout",
    "schedule",
    "heads",
    "kv_heads",
    "head_dim",
    "dtype",
    "batch",
    "machine",
)
#: Columns of every pass in the table of points.
PASS_COLUMNS = ("time", "rate", "solver", "efficiency", *WAITS, "imbalance", "bytes", "memory", "fits")
#: Columns that describe a plan, and columns of its execution, in the table of executions.
PLAN_COLUMNS = ("tokens", "ranks", "pattern", "layout", "schedule")
EXECUTED_COLUMNS = (
    "turn",
    "how",
    "ranks",
    "rows",
    "ledger",
    "rows compared",
    "error",
    "most allowed",
    "part of all pairs",
    "why not",
)


@dataclass(frozen=True)
class ReportTable:
    """Cells as text. `total` is the number of rows before the table was cut to MOST_ROWS."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    total: int


@dataclass(frozen=True)
class StudyReport:
    """All that the templates say of a study.

    `provenance` has the version, the source hash and the commit of the code, `plots` are SVG files beside the report.
    """

    name: str
    execute: ExecuteGroup
    table: Table
    plots: Sequence[Path]
    not_modelled: Sequence[str]
    command: str
    provenance: Mapping[str, Any]
    machines: Sequence[str]
    extrapolations: Sequence[Extrapolation]
    remarks: Sequence[str]

    @property
    def count(self) -> int:
        """The number of points."""
        return len(self.table.rows)

    @property
    def refused(self) -> int:
        """The number of points without numbers."""
        return sum(row["status"] == "refused" for row in self.table.rows)

    @property
    def refusals(self) -> list[str]:
        """One line for each reason, with the points that were refused for it."""
        numbers: dict[str, list[int]] = {}
        for row in self.table.rows:
            if row["status"] == "refused":
                numbers.setdefault(row["why"], []).append(row["point"])
        return [f"{list_points(points)}: {reason}" for reason, points in numbers.items()]

    @property
    def shared(self) -> dict[str, str]:
        """The values that are equal for all points, by name."""
        return {
            name: different.copy().pop()
            for name, different in self._described.items()
            if len(different) == 1 and name not in self.table.axes
        }

    @property
    def _described(self) -> dict[str, set[str]]:
        """The different values of the columns that describe a point."""
        return {name: {str(row.get(name)) for row in self.table.rows} for name in DESCRIPTION if name in self._names}

    @property
    def _names(self) -> list[str]:
        return [column.name for column in self.table.columns]

    @property
    def verdict(self) -> str:
        """The fastest point, the most and the least efficient point, and how many do not fit, in one sentence."""
        rows = [row for row in self.table.rows if total(row, "time")]
        if not rows:
            return "No point takes any time."

        def efficiency(row: Row) -> float:
            return total(row, "compute") / total(row, "time")

        fastest = min(rows, key=lambda row: total(row, "time"))
        worst, best = min(rows, key=efficiency), max(rows, key=efficiency)
        words = f"Point {self._label(fastest)} takes the least time, {duration(total(fastest, 'time'))} [modelled]"
        words += f"; ranks compute {efficiency(worst):.0%} of the time at point {self._label(worst)}"
        words += f", and {efficiency(best):.0%} at point {self._label(best)}" if best is not worst else ""
        tight = sum(any(row.get(f"{direction} fits") is False for direction in list_passes(row)) for row in rows)
        return words + (f"; {plural(tight, 'point')} do not fit into memory." if tight else ".")

    def _label(self, row: Row) -> str:
        """The number of a point with its values of the axes."""
        values = [f"{name}={show_value(self.table, name, row)}" for name in self.table.axes]
        return f"{row['point']}: {', '.join(values)}" if values else str(row["point"])

    @property
    def points(self) -> list[ReportTable]:
        """The tables of all points."""
        table = self.table
        described = {"point", "status", "why", *DESCRIPTION, *table.axes}
        labels = [
            column.name
            for column in table.columns
            if not column.unit and not column.word and " " not in column.name and column.name not in described
        ]
        varied = [name for name in self._described if name not in self.shared and name not in table.axes]
        passes = ([f"{direction} {name}" for name in PASS_COLUMNS] for direction in DIRECTIONS)
        groups = (*passes, ["pairs", *varied, *labels])
        found = [[name for name in names if any(name in row for row in table.rows)] for names in groups]
        return [part for names in found if names for part in self._tabulate(table.rows, names)]

    @property
    def executed(self) -> list[ReportTable]:
        """Tables with a row for each executed plan in the order of the turns; none where the study executes nothing."""
        if not any("executed how" in row or "executed why not" in row for row in self.table.rows):
            return []
        plan_columns = [name for name in PLAN_COLUMNS if name in self._names]
        by_turn: dict[Any, Row] = {}
        for row in self.table.rows:  # points that differ only in the machine share one execution, and its turn
            if any(name.startswith("executed ") for name in row):
                plan_key = str([row.get(name) for name in plan_columns])
                by_turn.setdefault(row.get("executed turn", plan_key), row)
        rows = sorted(by_turn.values(), key=lambda row: row.get("executed turn", 0))
        names = [f"executed {name}" for name in EXECUTED_COLUMNS]
        return self._tabulate(rows, [name for name in names if name in self._names])

    def _tabulate(self, rows: Sequence[Row], names: Sequence[str]) -> list[ReportTable]:
        """Tables of the columns `names`, the point before them."""
        header = ["point", *(_header(self.table, name) for name in names)]
        cells = [
            [Cell(self._label(row), row["point"]), *(show_value(self.table, name, row) for name in names)]
            for row in rows[:MOST_ROWS]
        ]
        return _split(header, cells, len(rows))

    @property
    def extrapolated(self) -> list[ReportTable]:
        """Tables with a row for each series that is carried on to more tokens; none without such a series."""
        header = (
            *("series", "tokens", "ranks", "time of a pass", "ranks fail every, all together", "power"),
            *("memory of all ranks", "from points"),
        )
        rows = [
            (
                line.series,
                f"{line.tokens:,}",
                f"{line.ranks:,}",
                f"{duration(line.seconds)} [extrapolated]",
                "not modelled" if line.failure is None else f"{duration(line.failure)} [extrapolated]",
                "not modelled" if line.watts is None else f"{rate(line.watts, 'W')} [extrapolated]",
                f"{size(line.memory)} [extrapolated]",
                f"{line.points[0]} and {line.points[1]}",
            )
            for line in self.extrapolations
        ]
        return _split(header, rows, len(rows)) if rows else []


def _split(header: Sequence[str], rows: Sequence[Sequence[str]], total: int) -> list[ReportTable]:
    """Tables of at most MOST_COLUMNS columns, each with the first column of the whole."""
    width = MOST_COLUMNS - 1
    return [
        ReportTable([header[0], *header[i : i + width]], [[row[0], *row[i : i + width]] for row in rows], total)
        for i in range(1, len(header), width)
    ]


def list_points(numbers: Sequence[int]) -> str:
    """Points by number, such as "points 0, 3, 4"; of more than 8 points the first 8."""
    first = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"point{'' if len(numbers) == 1 else 's'} {first}{more}"


def _header(table: Table, name: str) -> str:
    column = find_column(table.columns, name)
    if name.startswith("machine."):
        return column.title
    return f"{name}, {column.word}" if column.word and column.word != "kind" else name


def show_value(table: Table, name: str, row: Row) -> str:
    """A row's value for people; with its word where the rows of the column differ in the word."""
    value = row.get(name)
    column = find_column(table.columns, name)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if name.startswith("machine."):  # the header has the unit
        return f"{value:.4g}"
    if column.unit == "s":
        text = duration(value)
    elif column.unit in ("bytes", "bytes per rank"):
        text = size(value)
    elif column.unit == "tokens/s":
        text = rate(value, column.unit)
    elif isinstance(value, float):
        text = f"{value:.4g}"
    else:
        text = f"{value:,}" if isinstance(value, int) else str(value)
    return f"{text} [{table.word_of(name, row)}]" if column.word == "kind" else text
