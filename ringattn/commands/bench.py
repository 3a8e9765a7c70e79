"""ringattn bench: run a suite, print its table, store the record."""

from __future__ import annotations

from pathlib import Path

from ..bench.runner import rows, run_suite, write
from ..config import BenchConfig
from ..errors import InvalidInput
from ..report import console


def main(config: BenchConfig) -> None:
    """Measure `suite`, or its named `cases`, in `repeat` alternating rounds."""
    if config.repeat < 1:
        raise InvalidInput(f"repeat={config.repeat}: at least one round is needed")
    lines = console()
    record = run_suite(config.suite, config.cases, config.repeat, lambda text: lines.print(f"measuring {text}"))
    for row in rows(record):
        case, columns, *rest = row
        if columns:
            lines.print(f"\n{case}: {columns}  \\[measured]", soft_wrap=True, highlight=False)
        lines.print(f"    {'  '.join(x for x in rest if x)}", soft_wrap=True, highlight=False)
    data, text = write(record, Path(config.output.path or "benchmarks"))
    lines.print(f"\nwritten {data} and {text}", soft_wrap=True)
