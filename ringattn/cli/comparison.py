"""The table printed after a `-m` sweep: one row per job, with the varied settings and the headline numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..simulator.reporting.console import print_grid, print_plain
from ..text import duration, size

#: The texts of a table row, by column.
Cells = dict[str, str]
TITLE = "jobs: times and errors [measured], other numbers [counted]"
#: The most rows of the table.
MAX_ROWS = 50


def headlines(record: dict[str, Any]) -> Cells:
    """The headline numbers of a report of `run`, `plan` or `verify`."""
    cells: Cells = {}
    for name, timed in record.get("passes", {}).items():
        moved = "sent" if "bytes_sent" in timed else "copied"
        cells |= {name: duration(timed["median"]), f"{name} {moved}": size(sum(timed[f"bytes_{moved}"]))}
    for i, mask in enumerate(record.get("masks", ()), 1):  # one per pattern, if there are several
        shown = {name: x for name, x in headlines(mask).items() if name.endswith(("imbalance", "sends"))}
        cells |= {f"{name} {i}": x for name, x in shown.items()}
    if "counted" in record:
        totals = record["counted"]["totals"]
        cells["pairs"] = f"{totals['pairs']:,}"
        if "imbalance" in totals:  # present only if the steps of all ranks were counted
            cells["imbalance"] = f"{totals['imbalance']:.4f}"
            for name in ("forward", "backward"):
                sent = totals[name]
                cells |= {f"{name} sends": size(sent["bytes"]), f"{name} messages": f"{sent['messages']:,}"}
    if "seconds" in record:
        cells["time"] = duration(record["seconds"])
    if record.get("error") is not None:
        cells["error"] = f"{record['error']:.2e}"
    return cells


def read_overrides(overrides: Sequence[str]) -> Cells:
    """A dict of the command-line settings `key=value` of a job.

    A key such as pattern.spec is shortened to the name of its group, pattern.
    """
    pairs = (override.lstrip("+").partition("=") for override in overrides)
    return {key.removesuffix(".spec"): value.strip("'") for key, _, value in pairs}


def print_jobs(jobs: Sequence[tuple[Cells, Cells]], title: str = TITLE, all_in: str = "") -> None:
    """Print a table that compares jobs, each a pair (settings, numbers).

    The table shows all numbers, and the settings that differ between jobs. For a single job nothing is printed. If
    there are too many rows, the last line counts the missing ones and ends in `all_in`, text that says where to find
    all rows.
    """
    if len(jobs) < 2:
        return
    keys = dict.fromkeys(key for settings, _ in jobs for key in settings)
    varied = [key for key in keys if len({settings.get(key) for settings, _ in jobs}) > 1]
    names = dict.fromkeys(name for _, numbers in jobs for name in numbers)
    rows = [
        [*(settings.get(key, "") for key in varied), *(numbers.get(name, "") for name in names)]
        for settings, numbers in jobs
    ]
    print_plain(f"\n{title}")
    print_grid("", (*varied, *names), rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        print_plain(f"and {len(rows) - MAX_ROWS:,} more{all_in}")
