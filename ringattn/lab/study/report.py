"""The contents of a study's report: tables, machines, refusals and extrapolations; every number has its word.

The sentences around them are in templates/report.j2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...errors import RingAttentionError
from ...machine.machine import MACHINE_NUMBERS, Machine
from ...text import duration, rate, size
from ..pages.pages import Cell, Plot, ReportTable
from ..verbs.settings import StudyConfig
from .space import Point
from .tables import DIRECTIONS, WAITS, Row, Table, is_number, list_passes, show_number, total

#: Maximum rows of a table in a report; sweep.csv has all rows.
MOST_ROWS = 200
#: Columns that describe a point. A value that all points share is written once, above the plots.
DESCRIPTION = (
    *("model", "cp", "dp", "tp", "ep", "pp"),
    *("tokens", "ranks", "pattern", "layout", "schedule", "heads", "kv_heads", "head_dim", "dtype", "batch"),
    "machine",
)
#: Columns of every pass in the table of points.
PASS_COLUMNS = ("time", "rate", "solver", "efficiency", *WAITS, "imbalance", "bytes", "memory", "fits")
#: Columns that describe a plan, and columns of its execution, in the table of executions.
PLAN_COLUMNS = ("tokens", "ranks", "pattern", "layout", "schedule")
EXECUTED_COLUMNS = (
    *("turn", "how", "ranks", "rows", "ledger", "rows compared", "error", "most allowed", "part of all pairs"),
    "why not",
)


def extrapolate(table: Table, machines: dict[int, Machine], tokens: int) -> list[dict[str, Any]]:
    """Predict every series of the table for `tokens` tokens, more than any point has.

    `machines` are by point number. Each record has the `seconds` of all passes, the mean seconds between failures of
    any rank (`failure`), `watts` and `memory` (bytes) summed over all ranks, and the numbers of the two last `points`
    of the series, from which it is extrapolated. These two must have equal tokens per rank and different numbers of
    ranks; other series are left out.
    """
    lines = []
    for name, rows in table.series("tokens", without=("ranks", "shard", "tokens")).items():
        first, second = rows[-2:] if len(rows) > 1 else (rows[0], rows[0])
        if first["shard"] != second["shard"] or first["ranks"] == second["ranks"]:
            continue
        machine, ranks = machines[second["point"]], -(-tokens // second["shard"])
        slope = (total(second, "time") - total(first, "time")) / (second["ranks"] - first["ranks"])
        memory = max(second[f"{direction} memory"] for direction in list_passes(second))
        lines.append(
            {
                "series": name,
                "tokens": tokens,
                "ranks": ranks,
                "seconds": total(second, "time") + slope * (ranks - second["ranks"]),
                "failure": None if machine.mtbf is None else machine.mtbf / ranks,
                "watts": None if machine.watts is None else machine.watts * ranks,
                "memory": memory * ranks,
                "points": (first["point"], second["point"]),
            }
        )
    return lines


def machines_of(points: Sequence[Point]) -> dict[int, Machine]:
    """The machine of each point, by the point's number; points with an invalid machine are left out."""
    machines = {}
    for point in points:
        with suppress(RingAttentionError):  # the point's record has the message
            machines[point.number] = point.config.machine.made()
    return machines


def describe_machines(points: Sequence[Point], machines: Mapping[int, Machine]) -> list[str]:
    """One line for each machine: its numbers with units and sources. Numbers that differ between points are marked."""
    lines = []
    for name in dict.fromkeys(point.config.machine.spec for point in points if point.number in machines):
        named = [machines[x.number] for x in points if x.config.machine.spec == name and x.number in machines]
        variants, texts = list(dict.fromkeys(named)), []
        for key, number in MACHINE_NUMBERS.items():
            found = {machine: x for machine in variants if (x := getattr(machine, key)) not in (None, False)}
            if not found:
                continue
            values, sources = sorted(set(found.values())), sorted({machine.source(key) for machine in found})
            text = " .. ".join(map(number.show, dict.fromkeys((values[0], values[-1]))))
            differing = ", by point" if len(values) > 1 or len(found) < len(variants) else ""
            texts.append(f"{key}={text}{differing} [{', '.join(sources)}]")
        lines.append(f"{name}: {', '.join(texts)}")
    return lines


@dataclass(frozen=True)
class StudyReport:
    """The data of a study in the form in which the report templates use it.

    `provenance` has the version, the source hash and the commit of the code.
    """

    options: StudyConfig
    table: Table
    plots: Sequence[Plot]
    not_modelled: Sequence[str]
    command: str
    provenance: Mapping[str, Any]
    machines: Sequence[str]
    extrapolations: Sequence[Mapping[str, Any]]

    @property
    def refusals(self) -> list[str]:
        """One line for each reason for which points were refused, with the numbers of these points."""
        numbers: dict[str, list[int]] = {}
        for row in self.table.rows:
            if row["status"] == "refused":
                numbers.setdefault(row["why"], []).append(row["point"])
        return [f"{name_points(points)}: {reason}" for reason, points in numbers.items()]

    @property
    def shared(self) -> dict[str, str]:
        """The values that are equal for all points, by name."""
        return {
            name: min(different)
            for name, different in self._described.items()
            if len(different) == 1 and name not in self.table.axes
        }

    @property
    def _described(self) -> dict[str, set[str]]:
        """The distinct values of each column that describes a point."""
        return {name: {str(row.get(name)) for row in self.table.rows} for name in DESCRIPTION if name in self._names}

    @property
    def _names(self) -> list[str]:
        return [column.name for column in self.table.columns]

    def _label(self, row: Row) -> str:
        """The number of a point and its values on the axes."""
        values = [f"{name}={show_value(name, row)}" for name in self.table.axes]
        return f"{row['point']}: {', '.join(values)}" if values else str(row["point"])

    @property
    def points(self) -> ReportTable:
        """A table with a row for each point of the study."""
        table = self.table
        varied = [name for name in self._described if name not in self.shared and name not in table.axes]
        passes = (f"{direction} {name}" for direction in DIRECTIONS for name in PASS_COLUMNS)
        return self._tabulate(table.rows, (*passes, "pairs", *varied, *table.labels))

    @property
    def executed(self) -> ReportTable:
        """A table with a row for each executed plan, in order of execution; empty if the study executes nothing."""
        by_turn: dict[Any, Row] = {}
        for row in self.table.rows:  # points that differ only in the machine share one execution, and its turn
            if any(name.startswith("executed ") for name in row):
                plan_key = str([row.get(name) for name in PLAN_COLUMNS])
                by_turn.setdefault(row.get("executed turn", plan_key), row)
        rows = sorted(by_turn.values(), key=lambda row: row.get("executed turn", 0))
        return self._tabulate(rows, [f"executed {name}" for name in EXECUTED_COLUMNS])

    def _tabulate(self, rows: Sequence[Row], columns: Sequence[str]) -> ReportTable:
        """A table with the point as first column, then those of `columns` that the study has."""
        names = [name for name in columns if name in self._names]
        words = [self.table.column(name).word for name in names]
        titles = [f"{name}, {word}" if word else name for name, word in zip(names, words, strict=True)]
        cells = [
            [Cell(self._label(row), row["point"]), *(show_value(name, row) for name in names)]
            for row in rows[:MOST_ROWS]
        ]
        return ReportTable(["point", *titles], cells, total=len(rows))

    @property
    def extrapolated(self) -> ReportTable:
        """A table with a row for each series extrapolated to more tokens; empty if there is none."""
        shown: dict[str, tuple[str, Callable[[Any], str]]] = {
            "time of a pass": ("seconds", duration),
            "ranks fail every, all together": ("failure", duration),
            "power": ("watts", partial(rate, unit="W")),
            "memory of all ranks": ("memory", size),
        }
        rows = [
            [
                *(line["series"], f"{line['tokens']:,}", f"{line['ranks']:,}"),
                *(
                    "not modelled" if line[name] is None else f"{show(line[name])} [extrapolated]"
                    for name, show in shown.values()
                ),
                "{} and {}".format(*line["points"]),
            ]
            for line in self.extrapolations
        ]
        return ReportTable(["series", "tokens", "ranks", *shown, "from points"], rows, total=len(rows))


def name_points(numbers: Sequence[int]) -> str:
    """The points' numbers as text, such as "points 0, 3, 4"; only the first 8, and how many more there are."""
    first = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"point{'' if len(numbers) == 1 else 's'} {first}{more}"


def show_value(name: str, row: Row) -> str:
    """A row's value as text."""
    value = row.get(name)
    if isinstance(value, bool) or value is None:
        return {None: "", True: "yes", False: "no"}[value]
    return show_number(name, value) if is_number(value) else str(value)
