"""ringattn bench: run a suite, print its tables, store the record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config.schema import BenchConfig
from ..errors import InvalidInput
from ..experiments.bench import get_cases
from ..experiments.bench.records import MIXED, conclusion_lines, write_record
from ..experiments.bench.runner import run_suite
from ..files import OUTPUTS, make_folder
from ..reporting.console import console, grid
from ..text import size


def main(config: BenchConfig) -> None:
    """Measure `suite`, or its named `cases`, in `repeat` alternating rounds."""
    if config.repeat < 1:
        raise InvalidInput(f"repeat={config.repeat}: at least one round is needed")
    folder = Path(config.output.path or f"{OUTPUTS}/bench")
    get_cases(config.suite, config.cases)  # what can be wrong is said before minutes are spent on measuring
    make_folder(folder)
    lines = console()
    record = run_suite(config.suite, config.cases, config.repeat, lambda text: lines.print(f"measuring {text}"))
    show(record)
    if "summary" in record:
        lines.print("\n" + "\n".join(conclusion_lines(record)), highlight=False, markup=False, soft_wrap=True)
    if record["mixed"]:
        lines.print(f"\n{MIXED.strip('*')}", style="bold red", soft_wrap=True)
    data, text = write_record(record, folder)
    lines.print(f"\nwritten {data} and {text}", soft_wrap=True)


def show(record: dict[str, Any]) -> None:
    """Print the times, ratios and peaks of a record."""
    timed = [case for case in record["cases"] if "columns" in case]
    times = [
        (case["case"], name, str(column["threads"]), *_numbers(column, 4), f"{column['spread']:.1%}")
        for case in timed
        for name, column in case["columns"].items()
    ]
    ratios = [
        (case["case"], ratio["ratio"], *_numbers(ratio, 3), _target(">=", ratio["target"]), _met(ratio["met"]))
        for case in timed
        for ratio in case["ratios"]
    ]
    errors = [(case["case"], name, f"{error:.1e}") for case in timed for name, error in case["errors"].items()]
    peaks = [
        (
            case["case"], size(max(map(max, found["peak_bytes"]))), size(max(found["formula_bytes"])),
            f"{found['ratio']:.3f}", _target("<=", found["limit"]), _met(found["met"]),
        )
        for case in record["cases"] if (found := case.get("memory"))
    ]  # fmt: skip
    for title, header, rows in (
        ("seconds [measured]", ("case", "column", "threads", "median", "min", "max", "spread"), times),
        ("ratios of times, round by round [measured]", ("case", "ratio", "median", "min", "max", "target", "met"), ratios),
        ("largest error relative to the single call [measured]", ("case", "column", "error"), errors),
        ("peak memory per rank [measured] and its formula [counted]", ("case", "peak", "formula", "ratio", "limit", "met"), peaks),
    ):  # fmt: skip
        if rows:
            console().print()
            grid(title, header, rows)


def _numbers(values: dict[str, float], digits: int) -> tuple[str, str, str]:
    median, least, most = (f"{values[name]:.{digits}f}" for name in ("median", "min", "max"))
    return median, least, most


def _target(sign: str, value: float | None) -> str:
    return "" if value is None else f"{sign} {value}"


def _met(met: bool | None) -> str:
    return "" if met is None else "yes" if met else "NO"
