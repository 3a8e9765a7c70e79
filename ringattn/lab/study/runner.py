"""ringattn study: run every point once, record it, then write tables, plots and reports."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console

from ... import __version__
from ...cli.comparison import print_jobs
from ...cli.config.groups import check_least, refuse_stdout
from ...cli.config.schema import parse_size
from ...errors import InvalidInput, NumericsFailure, RingAttentionError
from ...files import OUTPUTS, TEMPORARY, check_writable, make_folder, write_text
from ...plan.plan import Plan
from ...simulator.progress import Listener, listening
from ...simulator.reporting.console import print_plain, show_progress
from ...text import duration, plural, size
from ..pages.figures import check_matplotlib
from ..pages.journal import Journal, git, source
from ..pages.pages import render_page
from ..verbs.settings import StudyConfig
from . import evaluation, plots
from .report import StudyReport, describe_machines, extrapolate, machines_of, name_points
from .space import Point, digest, list_points
from .tables import Row, Table, list_passes, make_table, to_csv, to_json, total

FORMAT = "ringattn study 2"
JOURNAL = "points.jsonl"
#: What a running execution has finished.
EXECUTION = "execution.json"
#: The parent folder of studies without an output.path.
STUDIES = Path(OUTPUTS) / "study"
#: Records of points, or of executions, by the number of the point.
Records = dict[int, dict[str, Any]]


def main(config: StudyConfig) -> None:
    """Run a study, or continue one, and print where its files are."""
    refuse_stdout(
        "output.path", config.output.path, "a study writes a folder, with --json too; try output.path=scaling"
    )
    hydra_config = import_module("hydra.core.hydra_config").HydraConfig
    overrides, search_path = [], []
    if hydra_config.initialized():  # it is not when called from Python
        given = hydra_config.get().overrides
        overrides = list(given.task)
        search_path = [each for each in given.hydra if each.startswith("hydra.searchpath=")]
    config.check()
    points = list_points(config, search_path)
    if config.output.path is None:  # a folder of this study alone, where the same command continues
        name = re.sub(r"[^A-Za-z0-9]+", "-", config.name)
        folder = STUDIES / f"{name}-{digest(make_head(config, points))[:8]}"
    else:
        folder = Path(config.output.path)
    study = Study(config, points, folder, overrides)
    try:
        with show_progress(Console(stderr=True), tenths=True) as tell:
            table = run(study, tell)
    except KeyboardInterrupt:
        if folder.exists():
            sys.stderr.write(f"ringattn: {folder} holds the finished points; the same command continues from there\n")
        raise
    print_jobs(_jobs(table), "points [modelled]", f" in {folder / 'sweep.csv'}")
    print_plain(f"{_summarize(table)}; {folder / 'report.html'}, sweep.csv, summary.json")


def _jobs(table: Table) -> list[tuple[dict[str, str], dict[str, str]]]:
    """For each point, its varied settings, and the time, exposed time and memory of its passes."""
    jobs = []
    for row in table.rows:
        settings = {name: str(row.get(name, "")) for name in (*table.axes, *table.labels)}
        if row["status"] != "ok":
            jobs.append((settings, {"time": str(row["status"])}))
            continue
        seconds = total(row, "time")
        numbers = {
            "time": duration(seconds),
            **({"exposed": duration(max(seconds - total(row, "compute"), 0.0))} if "model" not in row else {}),
            "memory of a rank": size(max(row[f"{name} memory"] for name in list_passes(row))),
        }
        jobs.append((settings, numbers))
    return jobs


def _summarize(table: Table) -> str:
    """A sentence: how many points have numbers, how many were refused, how many plans were executed."""
    rows, refused = table.rows, table.refused
    text = f"{plural(len(rows) - refused, 'point')} [modelled], {refused:,} refused"
    plans = {row["executed turn"]: "executed how" in row for row in rows if "executed turn" in row}
    return f"{text}; {sum(plans.values()):,} of {plural(len(plans), 'plan')} executed [counted]" if plans else text


def make_head(config: StudyConfig, points: Sequence[Point]) -> dict[str, Any]:
    """The first record of a study's journal. A study continues only from a journal with an equal head."""
    return {
        "format": FORMAT,
        "study": config.name,
        "version": __version__,
        "source": source(),
        "points": digest([[point.key, point.labels] for point in points]),
        "execute": asdict(config.execute),
    }


@dataclass(frozen=True)
class Study:
    """A study, its folder, and the command-line overrides that define it."""

    config: StudyConfig
    points: Sequence[Point]
    folder: Path
    overrides: Sequence[str] = ()


def run(study: Study, tell: Listener = lambda done, count, what: None) -> Table:
    """Simulate the points that are not yet in the journal of the folder, and write all files; returns the table.

    `tell` is a progress callback. Raises InvalidInput and Unsupported. Raises NumericsFailure, after all files are
    written, if an execution found wrong numbers.
    """
    check_study(study.config, study.points)
    folder, head = study.folder, make_head(study.config, study.points)
    make_folder(folder)
    if any(folder.iterdir()) and not (folder / JOURNAL).is_file():
        raise InvalidInput(f"{folder}: holds files, but no study; give an output.path that is new or empty")
    with Journal(folder / JOURNAL, head) as journal:
        for path in folder.iterdir():  # files of an earlier run are replaced at the end
            if TEMPORARY in path.name:  # left by a run that was killed while writing
                path.unlink()
            else:
                check_writable(path)
        records = {}
        for done, point in enumerate(sorted(study.points, key=lambda x: x.plan_key)):  # a cached plan serves its points
            if point.key not in journal.records:
                tell(done, len(study.points), "points")
                journal.add(point.key, evaluation.evaluate(point.config))
            records[point.number] = journal.records[point.key]
        executed = _execute_plans(study, journal, tell)
        tell(1, 1, "tables, plots and reports")
        table = make_table(study.config, study.points, records, executed)
        if table.rows and table.refused == len(table.rows):
            raise InvalidInput(f"every point of the study is refused, the first because: {table.rows[0]['why']}")
        _write_files(study, head, table, records)
    if wrong := [row["point"] for row in table.rows if "executed error" in row and not _is_right(row)]:
        raise NumericsFailure(
            f"{name_points(wrong)}: the executed numerics are wrong; {folder / 'report.html'} says where"
        )
    return table


def _is_right(row: Row) -> bool:
    errors = row["executed error"], row["executed error of lse"]
    return row["executed ledger"] == "complete" and all(error <= row["executed most allowed"] for error in errors)


def _execute_plans(study: Study, journal: Journal, tell: Listener) -> Records:
    """Execute the points' plans within the budget; returns the records of the executions.

    Turns: whole ranks first, from the shortest sequence on; then sampled rows, from the longest sequence on.
    """
    options = study.config.execute
    if options.budget is None:
        return {}
    sharing: dict[str, list[Point]] = {}
    for point in study.points:
        sharing.setdefault(digest(evaluation.execution_inputs(point, options)), []).append(point)
    values: dict[str, dict[str, Any]] = {}
    tasks: list[tuple[str, Plan, evaluation.ExecutionTask]] = []
    for key, points in sharing.items():
        try:
            plan = evaluation.make_executed_plan(points[0], options)
        except RingAttentionError as error:
            values[key] = {"why not": str(error)}
            continue
        tasks.append((key, plan, evaluation.plan_execution(plan, options)))
    tasks.sort(key=lambda entry: (True, -entry[1].tokens) if entry[2].ranks is None else (False, entry[1].tokens))
    left = options.budget
    for turn, (key, plan, task) in enumerate(tasks, 1):
        tell(turn - 1, len(tasks), f"executing, {plan.tokens:,} tokens")
        if key not in journal.records:
            with listening(partial(_tell_within, tell, f"of plan {turn} of {len(tasks)}")):
                found = evaluation.execute(plan, task, options, left, study.folder / EXECUTION)
            journal.add(key, {"values": found})
        values[key] = {"turn": turn, **journal.records[key]["values"]}
        left -= task.seconds if "how" in values[key] else 0.0
    return {point.number: values[key] for key, points in sharing.items() for point in points}


def _tell_within(tell: Listener, where: str, done: int, count: int, what: str) -> None:
    tell(done, count, f"{what} {where}")


def _write_files(study: Study, head: dict[str, Any], table: Table, records: Records) -> None:
    options, folder = study.config, study.folder
    not_modelled = sorted({note for record in records.values() for note in record.get("not modelled", ())})
    names = plots.choose_plots(options, table)
    x, y = plots.choose_axes(table, options.x, options.y) if names else ("", None)
    drawn = [plot for name in names for plot in plots.draw(name, table, x, y)]
    machines = machines_of(study.points)
    extrapolations = []
    if options.extrapolate is not None:
        extrapolations = extrapolate(table, machines, extrapolated_tokens(options, study.points))
    lines = describe_machines(study.points, machines)
    provenance = {**head, "commit": git("log", "-1", "--format=%h"), "date": git("log", "-1", "--format=%cs")}
    command = " ".join(["ringattn study", *map(quote, study.overrides)])
    report = StudyReport(options, table, drawn, not_modelled, command, provenance, lines, extrapolations)
    more = {"extrapolated": extrapolations, "machines": lines}
    for name, text in {
        "config.yaml": import_module("omegaconf").OmegaConf.to_yaml(asdict(study.config)),
        "sweep.csv": to_csv(table),
        "summary.json": to_json(table, provenance, not_modelled, more),
        "report.html": render_page(__package__ or "", "report.j2", {"report": report}),
    }.items():
        write_text(folder / name, text)


def check_study(options: StudyConfig, points: Sequence[Point]) -> None:
    """Raise InvalidInput if the settings of a study do not fit its points.

    Raises Unsupported if the study needs matplotlib, and matplotlib is missing.
    """
    execute = options.execute
    planned = make_table(options, points, {point.number: {"status": "planned"} for point in points}, {})
    if names := plots.choose_plots(options, planned):
        check_matplotlib("leave plots out with plots=[]")
        _, y = plots.choose_axes(planned, options.x, options.y)
        if "crossover" in names and y is None:
            raise InvalidInput(
                "plots: a crossover map needs a second axis with several numbers, y=; add an axis, or leave the map out"
            )
    if execute.budget is not None:
        if not 0 <= execute.budget < math.inf:
            raise InvalidInput(f"execute.budget={execute.budget}: expected seconds >= 0")
        check_least(execute, "execute.", rows=1, heads=1, head_dim=1)
    if options.extrapolate is not None:
        extrapolated_tokens(options, points)


def extrapolated_tokens(options: StudyConfig, points: Sequence[Point]) -> int:
    """The tokens of extrapolate=. Raises InvalidInput unless they exceed the tokens of every point."""
    tokens = parse_size(options.extrapolate, "extrapolate")
    longest = max(point.config.length() for point in points)
    if tokens <= longest:
        raise InvalidInput(f"extrapolate={options.extrapolate}: the study itself has {longest:,} tokens; give more")
    return tokens
