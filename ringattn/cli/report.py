"""ringattn report: a suite as a page, the page of stored results, or two results compared."""

from __future__ import annotations

from pathlib import Path

from ..bench.records import read_results
from ..bench.report import compare
from ..errors import InvalidInput
from ..simulator.reporting.console import print_grid, print_paragraph
from ..text import plural
from . import bench
from .config.schema import ReportConfig


def main(config: ReportConfig) -> None:
    """Measure a suite; or read `results`, or `compare` two results."""
    config.check()
    if config.compare is not None:
        _compare(config)
    elif config.results is not None:
        bench.show_results(Path(config.results))
    else:
        bench.main(config)


def _compare(config: ReportConfig) -> None:
    """Print ratios of medians, with a mark on what is slower or faster by more than the noise."""
    if config.compare is None or len(config.compare) != 2:
        raise InvalidInput("compare: expected two results, such as 'compare=[old.jsonl,new.jsonl]'")
    if not config.noise >= 0:
        raise InvalidInput(f"noise={config.noise:g}: must be at least 0; 0.1 allows medians to differ by 10 %")
    old, new = (read_results(Path(path), "compare") for path in config.compare)
    table = compare(old, new, config.noise)
    print_grid(table.title, table.header, table.rows)
    for name in ("suite", "repeat", "memory"):
        if old[name] != new[name]:
            print_paragraph(f"The results differ in {name}: {old[name]} and {new[name]}.")
    if any(old["machine"][name] != new["machine"][name] for name in ("cpu", "cores", "gpu", "torch")):
        print_paragraph(
            "The results are from different machines or versions of torch: ratios say little about the code."
        )
    marks = [row[-1] for row in table.rows]
    print_paragraph(
        f"{plural(marks.count('SLOWER') + marks.count('FAILS'), 'regression')}, {marks.count('faster')} faster"
    )
