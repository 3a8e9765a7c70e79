"""What a study's report says: every number with its word, what was refused, what is not modelled, how to do it again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..choice import duration
from ..report import size
from .extend import Extended
from .paper import Code, Grid, Heading, Items, Part, Plot, Text
from .tables import Row, Table, column_of

#: Rows of the table in a report; all of them are in sweep.csv.
ROWS = 200
#: What a report shows of every pass, and of what was executed.
SHOWN = ("time", "tier", "efficiency", "wait", "imbalance", "bytes", "memory", "fits")
EXECUTED = ("how", "ranks", "rows", "ledger", "error", "most allowed", "part of all pairs", "why not")
WORDS = (
    "counted: exact integers of the plan. modelled: by the timing model on the machine that is named, not run. measured: it "
    "ran on the machine that made this report. extrapolated: a formula carried beyond what was modelled or run."
)


def report(
    name: str, table: Table, plots: Sequence[Path], notes: Iterable[str], command: str, head: dict[str, Any],
    machines: Sequence[str], extended: Sequence[Extended], remarks: Sequence[str],
) -> list[Part]:  # fmt: skip
    """The parts of a report."""
    refused = [row for row in table.rows if row["status"] == "refused"]
    done = len(table.rows) - len(refused)
    commit = f", commit {head['commit']}" if head.get("commit") else ""
    parts: list[Part] = [
        Heading(f"Study {name}", 1),
        Text(f"{done:,} of {len(table.rows):,} points have numbers, {len(refused):,} were refused. {WORDS}"),
        *[Text(remark) for remark in remarks],
        Heading("Points"),
        *_points(table),
    ]
    if any("executed how" in row or "executed why not" in row for row in table.rows):
        parts += [Heading("Executed"), *_executed(table)]
    if extended:
        parts += [Heading("Extrapolated"), *_extended(extended)]
    if plots:
        parts += [Heading("Plots"), *(Plot(path) for path in plots if path.suffix == ".svg")]
    if refused:
        reasons: dict[str, list[int]] = {}
        for row in refused:
            reasons.setdefault(row["why"], []).append(row["point"])
        parts += [Heading("Refused"), Items([f"{_some(numbers)}: {why}" for why, numbers in reasons.items()])]
    parts += [
        Heading("Not modelled"),
        Items(sorted(notes) or ["no point has numbers"]),
        Heading("Machines"),
        Items(machines),
        Heading("How to do it again"),
        Code(command),
        Text(
            f"ringattn {head['version']}{commit}, source {head['source']}. The same command in the same folder goes on where "
            "it was interrupted, and ends with the same bytes. points.jsonl holds every point as it was done, config.yaml and "
            "overrides.yaml the configuration."
        ),
    ]
    return parts


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"points {shown}{f' and {len(numbers) - 8} more' if len(numbers) > 8 else ''}"


def _points(table: Table) -> list[Part]:
    labels = [one.name for one in table.columns if not one.unit and one.name not in table.axes and not one.word]
    known = {
        "point",
        "status",
        "why",
        "pattern",
        "layout",
        "schedule",
        "heads",
        "dtype",
        "machine",
        "kv_heads",
        "batch",
    }
    plain = [name for name in labels if " " not in name and name not in known]
    varied = [*table.axes, *(n for n in ("tokens", "ranks", "machine") if n not in table.axes), *plain, "pairs"]
    names = [*varied]
    for one in ("forward", "backward"):
        names += [f"{one} {name}" for name in SHOWN]
    there = {one.name for one in table.columns}
    return _grid(table, [name for name in names if name in there and any(name in row for row in table.rows)])


def _executed(table: Table) -> list[Part]:
    there = {one.name for one in table.columns}
    first = [name for name in ("tokens", "ranks", "pattern", "layout") if name in there]
    seen: dict[str, Row] = {}
    for row in table.rows:  # points that differ in the machine alone share it
        seen.setdefault(str([row.get(name) for name in (*first, "schedule")]), row)
    rows = tuple(row for row in seen.values() if any(name.startswith("executed ") for name in row))
    names = [*first, *(f"executed {name}" for name in EXECUTED)]
    return _grid(Table(table.columns, rows, table.axes), [name for name in names if name in there])


def _grid(table: Table, names: Sequence[str]) -> list[Part]:
    header = ["point", *(_header(table, name) for name in names)]
    rows = [[str(row["point"]), *(shown(table, name, row) for name in names)] for row in table.rows[:ROWS]]
    found: list[Part] = [Grid(header, rows)]
    if len(table.rows) > ROWS:
        found.append(Text(f"The first {ROWS} of {len(table.rows):,} points; all are in sweep.csv."))
    return found


def _header(table: Table, name: str) -> str:
    word = column_of(table.columns, name).word
    return f"{name}, {word}" if word and word != "kind" else name


def shown(table: Table, name: str, row: Row) -> str:
    """A number for people; where rows differ in the word, with the word."""
    value = row.get(name)
    found = column_of(table.columns, name)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if found.unit == "s":
        text = duration(value)
    elif found.unit.startswith("bytes"):
        text = size(value)
    elif isinstance(value, float):
        text = f"{value:.4g}"
    else:
        text = f"{value:,}" if isinstance(value, int) else str(value)
    return f"{text} [{table.word(name, row)}]" if found.word == "kind" else text


def _extended(extended: Sequence[Extended]) -> list[Part]:
    header = (
        "series", "tokens", "ranks", "time of a pass", "ranks fail every, all together", "power", "memory of all ranks",
        "from points",
    )  # fmt: skip
    rows = [
        (
            one.series, f"{one.tokens:,}", f"{one.ranks:,}", f"{duration(one.seconds)} [extrapolated]",
            "not modelled" if one.failure is None else f"{duration(one.failure)} [extrapolated]",
            "not modelled" if one.watts is None else f"{one.watts / 1e6:,.1f} MW [extrapolated]",
            f"{one.memory / 1e15:,.3f} PB [extrapolated]", f"{one.points[0]} and {one.points[1]}",
        )
        for one in extended
    ]  # fmt: skip
    assumed = [
        "The time is a straight line through the last two points of a series, in the number of ranks at as many tokens on each.",
        "A clock takes as long, and links are as fast, among all of these ranks as among those of the points.",
        "No rank fails. Where the table says how often one does, and that is less than the time of a pass, no pass ends.",
        "Nothing of this size was executed, counted or modelled: it says what the model's formula gives, no more.",
    ]
    return [Grid(header, rows), Items(assumed)]
