"""The report of a suite's results: tables and sentences for the console and the HTML page.

All numbers come from the stored results; nothing is measured here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...cli.config.overrides import quote
from ...errors import InvalidInput
from ...files import load, make_folder, write_text
from ...text import duration, plural, shorten, size
from ..pages.pages import Cell, Plot, ReportTable, render_page
from . import SUITES, figures
from .case import BenchSuite, CaseRecord, get_summary
from .records import read_results

#: Settings shown in a column if they differ between cases, otherwise in the sentence below the table.
SETTINGS = (
    *("system", "tokens", "pattern", "backward", "ring_size", "segment_lengths", "dilation_rates", "block", "density"),
    *("k", "batch", "heads", "head_dim", "dtype", "layout"),
)
#: The warning if cases measured different versions of the code.
MIXED = "The code changed during this run: its cases measured different versions. Run it again."
#: A machine is busy if other processes use more than this share of its cores beside a case.
BUSY = 0.1
#: The beginning of the index of a folder of results.
INDEX = (
    "# Results\n\n"
    "The newest run of each suite on each machine, and of each study. `ringattn report` writes this page.\n\n"
)
MET = {None: "", True: "yes", False: "NO"}
#: Maximum characters of a setting and of a remark in a table.
MOST_SETTING, MOST_REMARK = 40, 160


@dataclass(frozen=True)
class BenchReport:
    """The results of a suite, in the form in which the report page shows them."""

    record: dict[str, Any]

    @property
    def suite(self) -> BenchSuite | None:
        """The suite; None if the package that defines it is not installed."""
        return SUITES.get(self.record["suite"])

    @property
    def warnings(self) -> list[str]:
        """Warnings for the reader: `MIXED`, the machine was busy, targets were lowered, cases are missing."""
        warnings = [MIXED] if self.record["mixed"] else []
        if max(self._others.values(), default=0.0) > BUSY * self.record["machine"]["cores"]:
            warnings.append(f"The machine was busy. {self.load}")
        judged = (one for case in self.record["cases"] for one in (*case.get("ratios", ()), *get_summary(case)))
        if eased := sum(bool(one.get("met")) and "was" in one for one in judged):
            warnings.append(f"{eased} reached it only since the target was lowered, after this run.")
        if (done := len(self.record["cases"])) < self.record["planned"]:
            warnings.append(f"Incomplete: {done} of {self.record['planned']} cases; measure the others: {self.command}")
        return warnings

    @property
    def load(self) -> str:
        """How much other processes worked beside the cases, as a sentence."""
        if not self._others:
            return "How busy the machine was is not recorded."
        case, cores = max(self._others, key=lambda case: self._others[case]), self.record["machine"]["cores"]
        return f"Other processes used at most {self._others[case]:.2f} of {plural(cores, 'core')}, beside {case}."

    @property
    def _others(self) -> dict[str, float]:
        """Cores that other processes used beside each case."""
        return {case["case"]: case["others"] for case in self.record["cases"] if "others" in case}

    @property
    def conclusion(self) -> str | None:
        """What the cases show, as a sentence; None if no case was measured."""
        suite, cases = self.suite, self.record["cases"]
        if suite is None or not cases:
            return None
        text, met = (suite.conclude or _judge)(cases)
        target = "" if met is None else "; target met" if met else "; target missed"
        return f"{text[:1].upper()}{text[1:]}{target}."

    @property
    def tables(self) -> list[ReportTable]:
        """The tables that have rows: by length, ratios, memory against a formula, summaries of cases, all columns."""
        cases = self.record["cases"]
        tables = [
            _by_tokens("median time by tokens [measured]", cases, figures.median, duration),
            _by_tokens("peak of tensors per token [measured]", cases, figures.peak_of_tensors, size, per_token=True),
            _ratios("ratios of times, round by round [measured]", cases),
            _formulas("peak memory per rank [measured] and its formula [counted]", cases),
            _summaries("what the cases conclude", cases),
            _columns("every column [measured]", cases),
        ]
        return [table for table in tables if table.rows]

    @property
    def shared(self) -> str:
        """The settings that all cases share, as name=value."""
        equal = _settings(self.record["cases"])[1]
        return ", ".join(f"{name}={value}" for name, value in equal.items() if value)

    @property
    def notes(self) -> list[str]:
        """Notes on how the numbers were measured, and the pattern that each system computes."""
        cases = self.record["cases"]
        patterns = [
            f"{settings['system']}: {settings['pattern']}"
            for settings in (case["settings"] for case in cases)
            if {"system", "pattern"} <= settings.keys()
        ]
        return list(dict.fromkeys([*(note for case in cases for note in case["notes"]), *patterns]))

    @cached_property
    def plots(self) -> list[Plot]:
        """The plots; none without matplotlib."""
        return figures.draw(self.record["cases"], self.suite)

    @property
    def command(self) -> str:
        """The command that produces results like these again."""
        record = self.record
        parts = [str(record["suite"]), f"repeat={record['repeat']}"]
        if record["memory"]:
            parts.append(f"memory={record['memory']}")
        if isinstance(asked := record["asked"], list):
            names = (name if re.fullmatch(r"[\w.-]+", name) else quote(name) for name in asked)
            parts.append(f"cases=[{','.join(names)}]")
        return f"ringattn report {shlex.join(parts)}"


def _judge(cases: list[CaseRecord]) -> tuple[str, None]:
    """How many ratios reach their targets, and which ratio is lowest relative to its target."""
    ratios = [(ratio, case["case"]) for case in cases for ratio in case.get("ratios", ()) if ratio["target"]]
    if not ratios:
        return f"{plural(len(cases), 'case')} measured, none with a target", None
    met = sum(ratio["met"] for ratio, _ in ratios)
    worst, name = min(ratios, key=lambda pair: pair[0]["median"] / pair[0]["target"])
    least = f"{worst['ratio']} of {name} is {worst['median']:.2f}, target {worst['target']:.3g}"
    return f"{met} of {plural(len(ratios), 'ratio')} reached the target; the least, {least}", None


def narrow(table: ReportTable) -> ReportTable:
    """A version of `table` that fits on a console.

    Tables of cases lose the columns for settings and details; long remarks are shortened.
    """
    is_of_cases = {"IQR", "remark"} & set(table.header)
    left_out = (*SETTINGS, "threads", "min", "max", "tokens/s") if is_of_cases else ()
    kept = [i for i, name in enumerate(table.header) if name not in left_out]
    rows = [[shorten(row[i], MOST_SETTING) for i in kept] for row in table.rows]
    return ReportTable([table.header[i] for i in kept], rows, table.title)


def _columns(title: str, cases: list[CaseRecord]) -> ReportTable:
    """A row for each column of each case, and for each failed case. Empty table columns are left out."""
    varied = _settings(cases)[0]
    if "system" in varied:  # the case's name and the notes show both
        varied = [name for name in varied if name not in ("system", "pattern")]
    header = ["case", *varied, "ranks", "column", "threads", "median", "IQR", "min", "max", "tokens/s"]
    header += ["peak of tensors", "peak of the process", "error", "remark"]
    rows = []
    for case in cases:
        start = [case["case"], *(_setting(case, name) for name in varied), _count(case["ranks"])]
        blank = [""] * (len(header) - len(start) - 1)
        if "failed" in case:
            last_line = case["failed"]["message"].splitlines()[-1].strip()
            rows.append([*start, *blank, shorten(f"{case['failed']['class']}: {last_line}", MOST_REMARK)])
        for name, column in case.get("columns", {}).items():
            rows.append([*start, *_column_cells(case, name, column), ""])
        for name, reason in case.get("details", {}).get("missing", {}).items():
            rows.append([*start, name, *blank[1:], reason])
    return _without_empty(title, header, rows)


def _column_cells(case: CaseRecord, name: str, column: dict[str, Any]) -> list[str]:
    """The cells of a column, from its name to its error."""
    tokens, peaks = case["settings"].get("tokens"), column.get("peaks", {})
    rate = tokens / column["median"] if tokens and "system" in case["settings"] else None
    return [
        name,
        _count(column["threads"]),
        *(Cell(duration(column[x]), column[x]) for x in ("median", "iqr", "min", "max")),
        "" if rate is None else Cell(f"{rate:,.0f}", rate),
        *(Cell(size(peaks[x]), peaks[x]) if x in peaks else "" for x in ("tensors", "process")),
        Cell(f"{case['errors'][name]:.1e}", case["errors"][name]) if name in case["errors"] else "",
    ]


def _ratios(title: str, cases: list[CaseRecord]) -> ReportTable:
    rows = [
        [
            case["case"],
            ratio["ratio"],
            *(Cell(f"{ratio[x]:.3f}", ratio[x]) for x in ("median", "min", "max")),
            "" if ratio["target"] is None else f">= {ratio['target']:.3g}",
            f">= {ratio['was']:.3g}" if ratio.get("was") else "",
            MET[ratio["met"]],
        ]
        for case in cases
        for ratio in case.get("ratios", ())
    ]
    return _without_empty(title, ["case", "ratio", "median", "min", "max", "target", "target of the run", "met"], rows)


def _formulas(title: str, cases: list[CaseRecord]) -> ReportTable:
    rows = []
    for case in cases:
        if memory := case.get("memory"):
            peak, formula = max(map(max, memory["peak_bytes"])), max(memory["formula_bytes"])
            limit = "" if memory["limit"] is None else f"<= {memory['limit']}"
            ratio = Cell(f"{memory['ratio']:.3f}", memory["ratio"])
            cells = [Cell(size(peak), peak), Cell(size(formula), formula), ratio, limit, MET[memory["met"]]]
            rows.append([case["case"], *cells])
    return _without_empty(title, ["case", "peak", "formula", "ratio", "limit", "met"], rows)


def _summaries(title: str, cases: list[CaseRecord]) -> ReportTable:
    """The conclusions of cases, with equal keys in all cases."""
    summaries = [(case["case"], row) for case in cases for row in get_summary(case)]
    header = list(summaries[0][1]) if summaries else []
    rows = [[name, *(_value(row.get(key, "")) for key in header)] for name, row in summaries]
    return _without_empty(title, ["case", *header], rows)


def _value(value: Any) -> str:
    return Cell(f"{value:.3f}", value) if isinstance(value, float) else shorten(str(value), MOST_SETTING)


def _by_tokens(
    title: str,
    cases: list[CaseRecord],
    value: Callable[[CaseRecord], float | None],
    show: Callable[[float], str],
    per_token: bool = False,
) -> ReportTable:
    """A row for each system and number of ranks, a column for each length; failures appear as their class."""
    cases = [case for case in cases if "system" in case["settings"]]
    lengths = sorted({case["settings"]["tokens"] for case in cases})
    rows: dict[str, dict[int, str]] = {}
    for case in cases:
        if (number := value(case)) is not None and per_token:
            number /= case["settings"]["tokens"]
        text = case["failed"]["class"] if "failed" in case else "" if number is None else Cell(show(number), number)
        rows.setdefault(figures.line_name(case), {})[case["settings"]["tokens"]] = text
    cells = [[name, *(by_length.get(length, "") for length in lengths)] for name, by_length in rows.items()]
    return ReportTable(["system", *(f"{length:,}" for length in lengths)], cells if len(lengths) > 1 else [], title)


def compare(old: dict[str, Any], new: dict[str, Any], noise: float) -> ReportTable:
    """A table that compares two results of a suite, column by column.

    A column is slower if new / old exceeds 1 + noise, and faster if it is below 1 / (1 + noise).
    """
    before, after = (_columns_by_name(record) for record in (old, new))
    rows = []
    for key in dict.fromkeys((*before, *after)):
        a, b = before.get(key), after.get(key)
        if isinstance(a, float) and isinstance(b, float):
            ratio = b / a
            mark = "SLOWER" if ratio > 1 + noise else "faster" if ratio < 1 / (1 + noise) else ""
            cells = [Cell(duration(a), a), Cell(duration(b), b), Cell(f"{ratio:.3f}", ratio), mark]
        else:
            texts = ["missing" if x is None else duration(x) if isinstance(x, float) else x for x in (a, b)]
            cells = [*texts, "", "FAILS" if isinstance(a, float) and b is not None else ""]
        rows.append([*key, *cells])
    title = f"ratio of medians, new over old; noise band {noise:.0%} either way"
    return ReportTable(["case", "column", "old", "new", "ratio", "mark"], rows, title)


def _columns_by_name(record: dict[str, Any]) -> dict[tuple[str, str], float | str]:
    """The median of each (case, column); a failed case has the class of its failure as column "forward"."""
    found: dict[tuple[str, str], float | str] = {}
    for case in record["cases"]:
        for name, column in case.get("columns", {}).items():
            found[case["case"], name] = column["median"]
        if "failed" in case:
            found[case["case"], "forward"] = case["failed"]["class"]
    return found


def _settings(cases: Iterable[CaseRecord]) -> tuple[list[str], dict[str, str]]:
    """(names of the settings that differ between cases, the other settings with their values)."""
    values = {
        name: {_setting(case, name) for case in cases if name in case["settings"]}
        for name in SETTINGS
        if any(name in case["settings"] for case in cases)
    }
    return [name for name in values if len(values[name]) > 1], {n: min(x) for n, x in values.items() if len(x) == 1}


def _setting(case: CaseRecord, name: str) -> str:
    value = case["settings"].get(name)
    if value is None:
        return ""
    return _count(value) if type(value) is int else shorten(str(value), MOST_SETTING)


def _count(value: int) -> Cell:
    return Cell(f"{value:,}", value)


def _without_empty(title: str, header: Sequence[str], rows: list[list[str]]) -> ReportTable:
    """A table without the columns that are empty in all rows."""
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return ReportTable([header[i] for i in kept], [[row[i] for i in kept] for row in rows], title)


def read_report(results: Path) -> BenchReport:
    """The report of stored results, which are judged by today's targets. Raises InvalidInput.

    What missed the target of its run, which has changed since, has it as "was".
    """
    record = read_results(results)
    suite, cases = SUITES.get(record["suite"]), record["cases"]
    has_targets = any(ratio["target"] for case in cases for ratio in case.get("ratios", ()))
    if suite is None or not (has_targets or any("target" in case["settings"] for case in cases)):
        return BenchReport(record)
    today = {case.name: case for case in suite.cases()}
    for case in (case for case in cases if case["case"] in today):
        now = today[case["case"]]
        targets = {ratio.label: ratio.target for ratio in now.ratios}
        for ratio in case.get("ratios", ()):
            was, target = ratio["target"], targets.get(ratio["ratio"], ratio["target"])
            if was != target and target is not None:
                ratio |= {"target": target, "met": ratio["median"] >= target, **({} if ratio["met"] else {"was": was})}
        if "target" in case["settings"] and "summary" in case and now.summarise is not None:
            (was,), target = get_summary({"summary": now.summarise(case)}), now.settings["target"]
            case["settings"]["target"] = target
            case["summary"] = now.summarise(case)
            if not was["met"] and was["target"] != target:
                case["summary"]["was"] = was["target"]
    return BenchReport(record)


def write_page(results: Path, target: Path) -> BenchReport:
    """Write the page of stored results; returns their report. Raises InvalidInput."""
    report = read_report(results)
    write_text(target, render_page(__package__ or "", "bench.j2", {"report": report}))
    return report


def write_index(folder: Path) -> list[Path]:
    """Write the README.md of a folder: a table of the newest run of each suite per machine, and of each study.

    Returns [path of README.md], or [] if there is a README.md that this function did not write, which stays unchanged.
    """
    target = folder / "README.md"
    if target.exists() and not target.read_text(errors="replace").startswith(INDEX):
        return []
    rows = ["| suite | machine | date | conclusion | results |", "|---|---|---|---|---|"]
    rows += [f"| {suite} | {machine} | {date} | {said} | [{path.name}]({path.relative_to(folder)}) |"
             for suite, machine, date, said, path in _newest(folder)]  # fmt: skip
    write_text(target, INDEX + "\n".join(rows) + "\n")
    return [target]


def write_site(results: Path, target: Path) -> None:
    """Write the pages of all stored results in the folder `results`, and index.html, to the folder `target`."""
    make_folder(target)
    pages = []
    for suite, machine, date, said, path in _newest(results):
        link = ""  # a study has no page here: its points are all that is stored
        if path.suffix == ".jsonl":
            link = f"{path.stem}.html"
            write_page(path, target / link)
        pages.append((suite, machine, date, said, link))
    write_text(target / "index.html", render_page(__package__ or "", "index.j2", {"pages": pages}))


@dataclass(frozen=True)
class _Counts:
    ok: int
    refused: int


@dataclass(frozen=True)
class _Summary:
    """What the index takes from a study's summary.json."""

    study: str = ""
    date: str | None = None
    counts: _Counts | None = None


def _newest(folder: Path) -> Iterator[tuple[str, str, str, str, Path]]:
    """(suite, machine, date, conclusion, file) of the newest run of each suite per machine, and of each study."""
    newest: dict[tuple[str, str], tuple[str, str, Path]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        try:
            report = read_report(path)
        except InvalidInput as error:  # perhaps written by another version
            newest[path.name, ""] = "", str(error), path
            continue
        machine = report.record["machine"]
        key = report.record["suite"], f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores"
        run = machine["date"], " ".join([report.conclusion or "", *report.warnings]).strip(), path
        newest[key] = max(run, newest.get(key, run))
    for path in sorted(folder.glob("*/summary.json")):
        try:
            study = load(path, _Summary, "results")
        except InvalidInput as error:
            newest[path.parent.name, "any"] = "", str(error), path
            continue
        if study.counts is not None:  # it is None in those of ringattn score
            said = f"{plural(study.counts.ok, 'point')} with numbers, {study.counts.refused} refused"
            run = study.date or "", said, path
            newest[study.study, "any"] = max(run, newest.get((study.study, "any"), run))
    for (suite, machine), (date, said, path) in newest.items():
        yield suite, machine, date[:10], said, path
