"""ringattn report: measure a suite, render the report of stored results again, or compare two results."""

from __future__ import annotations

from pathlib import Path

from ...cli.config.groups import check_least
from ...cli.config.schema import parse_size
from ...errors import BenchFailure, InvalidInput
from ...files import make_folder
from ...simulator.reporting.console import announce, get_console, print_grid, print_paragraph
from ...text import plural
from ..bench import get_cases, get_suite
from ..bench.records import read_results
from ..bench.report import compare, narrow, write_index, write_page
from ..bench.runner import run_suite
from .settings import ReportConfig


def main(config: ReportConfig) -> None:
    """Measure a suite, show stored `results`, or `compare` two results."""
    config.check()
    if config.compare is not None:
        _compare(config.compare, config.noise)
    elif config.results is not None:
        _show_results(Path(config.results))
    else:
        _measure(config)


def _measure(config: ReportConfig) -> None:
    """Measure `suite`, or its named `cases`, in `repeat` alternating rounds."""
    check_least(config, repeat=1)
    if config.output.path is None:
        raise InvalidInput("output.path=null: the results need a folder; leave output.path out for outputs/bench")
    folder = Path(config.output.path)
    memory = None if config.memory is None else parse_size(config.memory, "memory")
    get_cases(config.suite, config.cases)  # raises before minutes are spent on measuring
    suite = get_suite(config.suite)
    if suite.check is not None:
        suite.check()
    make_folder(folder)
    path = run_suite(config.suite, config.cases, config.repeat, folder, memory, announce)
    _show_results(path)


def _show_results(path: Path) -> None:
    """Print the tables of results and write their report. Raises BenchFailure if cases have failed."""
    page = path.with_suffix(".html")
    report = write_page(path, page)
    for table in map(narrow, report.tables):
        get_console().print()
        print_grid(table.title, table.header, table.rows)
    get_console().print()
    for text in (report.conclusion, *report.warnings):
        if text:
            print_paragraph(text)
    written = ", ".join(map(str, [page, *write_index(path.parent)]))
    get_console().print(f"written {path}, {written}", soft_wrap=True)
    failed = [case["case"] for case in report.record["cases"] if "failed" in case and not case["may_fail"]]
    if failed:
        raise BenchFailure(f"{plural(len(failed), 'case')} failed: {', '.join(failed)}; their errors are in {path}")


def _compare(paths: list[str], noise: float) -> None:
    """Print ratios of medians, marking those that are slower or faster by more than `noise`."""
    if len(paths) != 2:
        raise InvalidInput("compare: expected two results, such as 'compare=[old.jsonl,new.jsonl]'")
    if not noise >= 0:
        raise InvalidInput(f"noise={noise:g}: must be at least 0; 0.1 allows medians to differ by 10 %")
    old, new = (read_results(Path(path), "compare") for path in paths)
    table = compare(old, new, noise)
    print_grid(table.title, table.header, table.rows)
    for name in ("suite", "repeat", "memory"):
        if old[name] != new[name]:
            print_paragraph(f"The results differ in {name}: {old[name]} and {new[name]}.")
    if any(old["machine"][name] != new["machine"][name] for name in ("cpu", "cores", "gpu", "torch")):
        print_paragraph("Machines or versions of torch differ between the results: ratios say little about the code.")
    marks = [row[-1] for row in table.rows]
    print_paragraph(
        f"{plural(marks.count('SLOWER') + marks.count('FAILS'), 'regression')}, {marks.count('faster')} faster"
    )
