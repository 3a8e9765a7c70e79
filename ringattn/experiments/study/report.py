"""What a study's report says: every number with its word, what was refused, what is not modelled, how to do it again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...config.groups import ExecuteGroup
from ...errors import plural
from ...text import duration, rate, size
from .extend import Extended
from .paper import Code, Heading, Items, Part, Plot, TableItem, Text
from .tables import Row, Table, column_of

#: Rows of the table in a report; all of them are in sweep.csv.
ROWS = 200
#: What a point is: columns where it differs from point to point, else said once.
WHAT = (
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
#: What a report shows of every pass, and of what was executed.
SHOWN = ("time", "rate", "solver", "efficiency", "wait", "imbalance", "bytes", "memory", "fits")
EXECUTED = (
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
WORDS = (
    "Every number has a word. counted: exact integers of the plan. modelled: by the timing model on the machine that is named, not run. measured: it "
    "ran on the machine that made this report. extrapolated: a formula carried beyond what was modelled or run. Columns without a "
    "word say what a point is, or are labels that the study was given."
)


def report(
    name: str, execute: ExecuteGroup, table: Table, plots: Sequence[Path], notes: Iterable[str], command: str, head: dict[str, Any],
    machines: Sequence[str], extended: Sequence[Extended], remarks: Sequence[str],
) -> list[Part]:  # fmt: skip
    """The parts of a report."""
    refused = [row for row in table.rows if row["status"] == "refused"]
    done = len(table.rows) - len(refused)
    commit = f", commit {head['commit']}" if head.get("commit") else ""
    parts: list[Part] = [
        Heading(f"Study {name}", 1),
        Text(
            f"{done:,} of {plural(len(table.rows), 'point')} {'has' if done == 1 else 'have'} numbers, {len(refused):,} "
            f"{'was' if len(refused) == 1 else 'were'} refused. {WORDS}"
        ),
        *[Text(remark) for remark in remarks],
        Heading("Points"),
        *_points(table),
    ]
    if any("executed how" in row or "executed why not" in row for row in table.rows):
        parts += [Heading("Executed"), *_executed(table, execute)]
    if extended:
        parts += [Heading("Extrapolated"), *_extended(extended)]
    if plots:
        parts += [Heading("Plots"), *(Plot(path) for path in plots if path.suffix == ".svg")]
    if refused:
        reasons: dict[str, list[int]] = {}
        for row in refused:
            reasons.setdefault(row["why"], []).append(row["point"])
        parts += [Heading("Refused"), Items([f"{listed(numbers)}: {why}" for why, numbers in reasons.items()])]
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


def listed(numbers: Sequence[int]) -> str:
    """Points by their numbers, the first of many."""
    shown = ", ".join(map(str, numbers[:8]))
    return (
        f"point{'' if len(numbers) == 1 else 's'} {shown}{f' and {len(numbers) - 8} more' if len(numbers) > 8 else ''}"
    )


def _points(table: Table) -> list[Part]:
    labels = [one.name for one in table.columns if not one.unit and one.name not in table.axes and not one.word]
    known = {"point", "status", "why", *WHAT}
    plain = [name for name in labels if " " not in name and name not in known]
    there = [one.name for one in table.columns]
    values = {name: {str(row.get(name)) for row in table.rows} for name in WHAT if name in there}
    same = [name for name, some in values.items() if len(some) == 1 and name not in table.axes]
    varied = [name for name in values if name not in (*same, *table.axes)]
    names = [*table.axes, *varied, *plain, "pairs"]
    for one in ("forward", "backward"):
        names += [f"{one} {name}" for name in SHOWN]
    found = _grid(table, [name for name in names if name in there and any(name in row for row in table.rows)])
    if same:
        found.append(
            Text("The same of all points: " + ", ".join(f"{name}={values[name].pop()}" for name in same) + ".")
        )
    return found


def _executed(table: Table, options: ExecuteGroup) -> list[Part]:
    there = {one.name for one in table.columns}
    first = [name for name in ("tokens", "ranks", "pattern", "layout", "schedule") if name in there]
    turns: dict[Any, Row] = {}
    for row in table.rows:  # points that differ in the machine alone share it
        if any(name.startswith("executed ") for name in row):
            turns.setdefault(row.get("executed turn", str([row.get(name) for name in first])), row)
    rows = tuple(sorted(turns.values(), key=lambda row: row.get("executed turn", 0)))
    names = [*first, *(f"executed {name}" for name in EXECUTED)]
    heads = plural(options.heads, "head")
    text = (
        f"Plans of these patterns, tokens and ranks, executed in fp64 with {heads} of {options.head_dim} elements and a batch of 1, "
        "on inputs that are made on demand; points that differ in the machine alone share one. Of every executed row a ledger is "
        "kept, of the pairs that were computed beside those that the pattern asks for. The rows that were compared were so with "
        "softmaxes over all of their keys, in fp64 or wider; the error is the largest of their outputs, over the largest entry of "
        "the truth, or over 1."
    )
    turned = (
        f"In the order of the turns: whole ranks, the shortest sequences first, then sampled rows, the longest first. Each takes "
        f"its seconds, at assumed rates and not by a step, from study.execute.budget={options.budget:g}; where more is needed than is "
        "left at its turn, nothing is executed, and the next has its turn."
    )
    return [
        Text(text),
        *_grid(Table(table.columns, rows, table.axes), [name for name in names if name in there]),
        Text(turned),
    ]


def _grid(table: Table, names: Sequence[str]) -> list[Part]:
    header = ["point", *(_header(table, name) for name in names)]
    rows = [[str(row["point"]), *(shown(table, name, row) for name in names)] for row in table.rows[:ROWS]]
    found: list[Part] = [TableItem(header, rows)]
    if len(table.rows) > ROWS:
        found.append(Text(f"The first {ROWS} of {len(table.rows):,} points; all are in sweep.csv."))
    return found


def _header(table: Table, name: str) -> str:
    found = column_of(table.columns, name)
    if name.startswith("machine."):
        return found.title
    return f"{name}, {found.word}" if found.word and found.word != "kind" else name


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
    if name.startswith("machine."):  # in the unit of the header
        return f"{value:.4g}"
    if found.unit == "s":
        text = duration(value)
    elif found.unit in ("bytes", "bytes per rank"):
        text = size(value)
    elif found.unit == "tokens/s":
        text = rate(value, found.unit)
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
            "not modelled" if one.watts is None else f"{rate(one.watts, 'W')} [extrapolated]",
            f"{size(one.memory)} [extrapolated]", f"{one.points[0]} and {one.points[1]}",
        )
        for one in extended
    ]  # fmt: skip
    assumed = [
        "The time is a straight line through the last two points of a series, in the number of ranks at as many tokens on each.",
        "A step takes as long, and links are as fast, among all of these ranks as among those of the points.",
        "No rank fails. Where the table says how often one does, and that is less than the time of a pass, no pass ends.",
        "Nothing of this size was executed, counted or modelled: it says what the model's formula gives, no more.",
    ]
    return [TableItem(header, rows), Items(assumed)]
