"""The files of a suite's record: JSON with every raw number, and Markdown with tables for people."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ...files import make_folder, write_text
from .case import CaseRecord

#: The warning of a record whose cases measured different versions of the code.
MIXED = "**The code changed during this run: its cases measured different versions. Run it again.**"


def write_record(record: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Store the record of `runner.run_suite` under a dated, numbered name; returns the JSON and the Markdown file."""
    make_folder(folder)
    hardware = f"{slug(str(record['machine']['cpu']))}_{record['machine']['cores']}cores"
    hardware = slug(record["cases"][0]["settings"].get("device", "")) or hardware
    stem = f"{record['suite']}_{hardware}_{record['machine']['date'][:10]}"
    number = 1
    while (folder / f"{stem}_{number}.json").exists():
        number += 1
    data, text = (folder / f"{stem}_{number}.{suffix}" for suffix in ("json", "md"))
    write_text(data, json.dumps(record, indent=1) + "\n")
    write_text(text, to_markdown(record))
    return data, text


def slug(name: str) -> str:
    """A name as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def to_markdown(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    host = record["machine"]
    lines = [
        f"# Suite {record['suite']}, {host['date'][:10]}",
        "",
        f"{host['cpu']}, {host['cores']} cores, {host['memory_bytes'] / 2**30:.1f} GiB; torch {host['torch']}, "
        f"python {host['python']}, ringattn {host['ringattn']} at commit {host['commit']}"
        f"{' with local changes' if host['dirty'] else ''}; {record['repeat']} alternating rounds (fewer of the "
        f"longest cases) after one warm-up. All numbers are {record['kind']}; ratios are medians of the rounds' own "
        "ratios, [min .. max].",
        *(["", MIXED] if record["mixed"] else []),
        "",
        *_table_lines(
            ("case", "columns: median seconds [min .. max]", "ratio", "target", "met", "error"), _rows(record)
        ),
    ]
    notes = dict.fromkeys(note for case in record["cases"] for note in case["notes"])
    lines += ["", *conclusion_lines(record)]
    lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join([*lines, "", "Settings and every raw number are in the JSON file of the same name.", ""])


def conclusion_lines(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown: the conclusion of the suite, and a table of the conclusions of its cases. May be empty."""
    cases = [case for case in record["cases"] if "summary" in case]
    if not cases:
        return []
    summaries = [
        (case["case"], row)
        for case in cases
        for row in (case["summary"] if isinstance(case["summary"], list) else [case["summary"]])
    ]
    header = ["case", *summaries[0][1]]
    rows = [[name, *(f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values())] for name, row in summaries]
    conclusion = record["summary"]
    return [
        f"**{conclusion['summary']}; target >= {conclusion['target']}: {_yes_or_no(conclusion['met'])}**",
        "",
        *_table_lines(header, rows),
    ]


def _table_lines(header: list[str] | tuple[str, ...], rows: list[list[str]]) -> list[str]:
    lines = [header, *rows]
    texts = ["| " + " | ".join(line) + " |" for line in lines]
    return [texts[0], "|---" * len(header) + "|", *texts[1:]]


def _rows(record: dict[str, Any]) -> list[list[str]]:
    """One row per ratio, or per memory case: case, columns, ratio, target, met, error."""
    return [row for case in record["cases"] for row in (_memory_rows(case) if "memory" in case else _time_rows(case))]


def _memory_rows(case: CaseRecord) -> list[list[str]]:
    memory = case["memory"]
    peak, formula = max(map(max, memory["peak_bytes"])), max(memory["formula_bytes"])
    text = f"peak {peak / 2**20:.1f} MiB, formula {formula / 2**20:.1f} MiB"
    return [
        [case["case"], text, *verdict(f"{memory['ratio']:.3f}", "<=", memory["limit"], memory["met"]), _errors(case)]
    ]


def _time_rows(case: CaseRecord) -> list[list[str]]:
    columns = ", ".join(
        f"{name} {_with_range(column, 4)} ({column['threads']} threads)" for name, column in case["columns"].items()
    )
    rows: list[list[str]] = []
    for ratio in case["ratios"]:
        # The columns and errors belong to the case, and are written in its first row only.
        of_case, errors = ("", "") if rows else (columns, _errors(case))
        text = f"{ratio['ratio']} = {_with_range(ratio, 3)}"
        rows.append([case["case"], of_case, *verdict(text, ">=", ratio["target"], ratio["met"]), errors])
    return rows


def _errors(case: CaseRecord) -> str:
    return "; ".join(f"{name} {value:.1e}" for name, value in case["errors"].items())


def _with_range(values: dict[str, float], digits: int) -> str:
    return f"{values['median']:.{digits}f} [{values['min']:.{digits}f} .. {values['max']:.{digits}f}]"


def verdict(ratio: str, sign: str, target: float | None, met: bool | None) -> tuple[str, str, str]:
    """The cells of a ratio, of its target, and of whether the target is met."""
    return ratio, "" if target is None else f"{sign} {target}", _yes_or_no(met)


def _yes_or_no(met: bool | None) -> str:
    return "" if met is None else "yes" if met else "NO"
