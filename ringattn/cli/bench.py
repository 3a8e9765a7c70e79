"""ringattn bench: run a suite, print its tables, store the record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config.schema import BenchConfig
from ..errors import BenchFailure, InvalidInput
from ..experiments.bench import get_cases, get_suite
from ..experiments.bench.records import MIXED, conclusion_lines, verdict, write_record
from ..experiments.bench.runner import run_suite
from ..files import OUTPUTS, make_folder
from ..reporting.console import get_console, print_grid, print_plain
from ..text import plural, size


def main(config: BenchConfig) -> None:
    """Measure `suite`, or its named `cases`, in `repeat` alternating rounds."""
    if config.repeat < 1:
        raise InvalidInput(f"repeat={config.repeat}: at least one round is needed")
    folder = Path(f"{OUTPUTS}/bench" if config.output.path is None else config.output.path)
    get_cases(config.suite, config.cases)  # raises its errors before minutes are spent on measuring
    suite = get_suite(config.suite)
    if suite.check is not None:
        suite.check(folder)
    make_folder(folder)
    console = get_console()
    record = run_suite(config.suite, config.cases, config.repeat, lambda text: console.print(f"measuring {text}"))
    print_record(record)
    if "summary" in record:
        print_plain("\n" + "\n".join(conclusion_lines(record)), console)
    if record["mixed"]:
        console.print(f"\n{MIXED.strip('*')}", style="bold red", soft_wrap=True)
    data, text = write_record(record, folder)
    console.print(f"\nwritten {data} and {text}", soft_wrap=True)
    failed = [case["case"] for case in record["cases"] if "failed" in case.get("details", {})]
    if failed:
        raise BenchFailure(f"{plural(len(failed), 'case')} failed: {', '.join(failed)}; their errors are in {data}")


def print_record(record: dict[str, Any]) -> None:
    """Print the times, ratios, errors and peaks of a suite's record."""
    timed = [case for case in record["cases"] if "columns" in case]
    times = [
        (case["case"], name, str(column["threads"]), *_format_spread(column, 4), f"{column['spread']:.1%}")
        for case in timed
        for name, column in case["columns"].items()
    ]
    ratios = [
        (case["case"], ratio["ratio"], median, least, *verdict(most, ">=", ratio["target"], ratio["met"]))
        for case in timed
        for ratio in case["ratios"]
        for median, least, most in [_format_spread(ratio, 3)]
    ]
    errors = [(case["case"], name, f"{error:.1e}") for case in timed for name, error in case["errors"].items()]
    peaks = [
        (
            case["case"],
            size(max(map(max, memory["peak_bytes"]))),
            size(max(memory["formula_bytes"])),
            *verdict(f"{memory['ratio']:.3f}", "<=", memory["limit"], memory["met"]),
        )
        for case in record["cases"]
        if (memory := case.get("memory"))
    ]
    for title, header, rows in (
        ("seconds [measured]", ("case", "column", "threads", "median", "min", "max", "spread"), times),
        (
            "ratios of times, round by round [measured]",
            ("case", "ratio", "median", "min", "max", "target", "met"),
            ratios,
        ),
        ("largest error relative to the single call [measured]", ("case", "column", "error"), errors),
        (
            "peak memory per rank [measured] and its formula [counted]",
            ("case", "peak", "formula", "ratio", "limit", "met"),
            peaks,
        ),
    ):
        if rows:
            get_console().print()
            print_grid(title, header, rows)


def _format_spread(values: dict[str, float], digits: int) -> tuple[str, str, str]:
    """The median, minimum and maximum of repeated measurements."""
    median, least, most = (f"{values[name]:.{digits}f}" for name in ("median", "min", "max"))
    return median, least, most
