"""Runs a study: every point once, recorded as it finishes, then the tables, plots and reports of all points."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from ... import __version__
from ...errors import InvalidInput, NumericsFailure, RingAttentionError
from ...files import OUTPUTS, check_writable, make_folder, write_text
from ...plan.plan import Plan
from ...simulator.progress import Listener
from ...simulator.reporting.figures import FORMATS
from ...simulator.reporting.journal import Journal, read_journal
from ...simulator.reporting.provenance import git, source
from ...simulator.timing.window import StepWindow, window
from ..config.build import machine_from_config, plan_from_config, simulate_options
from ..config.groups import WindowGroup
from ..config.schema import SimulateConfig
from . import plots, trace
from .checks import check_study, extrapolated_tokens
from .execution import ExecutionTask, execute, execution_inputs, make_executed_plan, plan_execution, skip_task
from .extrapolation import Extrapolation, extrapolate
from .machines import describe_machines, machines_of
from .point import SimulationCache, evaluate
from .rendering import render_html, render_markdown
from .report import StudyReport, list_points
from .space import Point, digest, group_by_plan
from .tables import Row, Table, make_table, to_csv, to_json

FORMAT = "ringattn study 2"
JOURNAL = "points.jsonl"
#: The journal of a share by its number, and all journals of a folder.
SHARE, JOURNALS = "points.{}.jsonl", "points*.jsonl"
#: Where studies without an output.path have their folders.
STUDIES = Path(OUTPUTS) / "simulate"
#: Name of the heat map of a window.
WINDOW = "straggler_heat"
#: The files that every study ends with, beside its journal and its plots.
FILES = (
    "sweep.csv",
    "summary.json",
    "report.md",
    "report.html",
    "trace.json",
    "config.yaml",
    "overrides.yaml",
    "provenance.json",
)
#: Records of points, or of executions, by the number of the point.
Records = dict[int, dict[str, Any]]
#: Records of points that shares have computed, by the key of the point.
SharedRecords = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Study:
    """A study and the folder of its files. `yaml`, the configuration, and `overrides` are stored beside the results."""

    name: str
    config: SimulateConfig
    points: Sequence[Point]
    folder: Path
    yaml: str = ""
    overrides: Sequence[str] = field(default=())

    @property
    def head(self) -> dict[str, Any]:
        """The first record of the journal. A study continues only from a journal with an equal head."""
        return {
            "format": FORMAT,
            "study": self.name,
            "version": __version__,
            "source": source(),
            "points": digest([[point.key, point.labels] for point in self.points]),
            "execute": asdict(self.config.study.execute),
        }


def run_share(study: Study, tell: Listener = lambda done, count, what: None) -> None:
    """Write the journal of one of `study.spread` shares; `run` collects the journals of all shares.

    A share has the points that the study's own journal lacks. Points with equal plans are in one share. Raises
    InvalidInput.
    """
    options = study.config.study
    assert options.share is not None
    spread = options.spread or 1
    if not 0 <= options.share < spread:
        raise InvalidInput(f"study.share={options.share}: expected one of the {spread} shares 0 .. {spread - 1}")
    _prepare(study)
    turns = {key: turn for turn, key in enumerate(dict.fromkeys(p.plan_key for p in study.points))}
    _, known = read_journal(study.folder / JOURNAL)
    mine = [p for p in study.points if turns[p.plan_key] % spread == options.share and p.key not in known]
    with Journal(study.folder / SHARE.format(options.share), study.head) as journal:
        _evaluate_points(mine, journal, tell, {})


def _read_shares(study: Study) -> SharedRecords:
    """The records of the points that shares have computed. Raises InvalidInput where a share is still at work."""
    found: SharedRecords = {}
    for path in study.folder.glob(SHARE.format("*")):
        with Journal(path, study.head) as share:
            found |= share.records
    return found


def _remove_shares(study: Study) -> None:
    """Remove the journals of shares, whose points the journal of the study has now."""
    for path in study.folder.glob(SHARE.format("*")):
        path.unlink()
        path.with_name(f"{path.name}.lock").unlink(missing_ok=True)


def _prepare(study: Study) -> None:
    """Check a study, and make its folder. Raises InvalidInput and Unsupported."""
    check_study(study.config.study, study.points)
    for folder in (*((STUDIES.parent, STUDIES) if study.folder.parent == STUDIES else ()), study.folder):
        make_folder(folder)
    _check_folder(study.folder)


def run(study: Study, tell: Listener = lambda done, count, what: None) -> Table:
    """Compute the points that are missing in the folder's journal, and write all files; returns the table.

    `tell` receives the progress. Raises InvalidInput and Unsupported, and, after all files are written, NumericsFailure
    where an execution found wrong numbers.
    """
    _prepare(study)
    head = study.head
    with Journal(study.folder / JOURNAL, head) as journal:
        shares = _read_shares(study)
        _remove_temporary_files(study.folder)
        for name in _output_names(study):
            check_writable(study.folder / name)
        records = _evaluate_points(study.points, journal, tell, shares)
        journal.sync()
        _remove_shares(study)
        executed = _execute_plans(study, journal, tell)
        tell(1, 1, "tables, plots and reports")
        table = make_table(study.points, records, executed)
        _check_any_done(table)
        _write_files(study, head, table, records)
    wrong = [row["point"] for row in table.rows if _is_wrong(row)]
    if wrong:
        raise NumericsFailure(
            f"{list_points(wrong)}: the executed numerics are wrong; {study.folder / 'report.md'} says where"
        )
    return table


def _is_wrong(row: Row) -> bool:
    if "executed error" not in row:
        return False
    errors = row["executed error"], row["executed error of lse"]
    within = all(error <= row["executed most allowed"] for error in errors)  # NaN is not within
    return row["executed ledger"] != "complete" or not within


def _evaluate_points(points: Sequence[Point], journal: Journal, tell: Listener, shares: SharedRecords) -> Records:
    """The records of points: from the journal, else from `shares`, else computed now; the journal then has all."""
    records = {}
    cache: SimulationCache = {}
    for done, point in enumerate(group_by_plan(points)):
        if point.key not in journal.records:
            tell(done, len(points), "points")
            journal.add(point.key, shares.get(point.key) or evaluate(point.config, cache))
        records[point.number] = journal.records[point.key]
    return records


def _execute_plans(study: Study, journal: Journal, tell: Listener) -> Records:
    """What was executed of the points' plans, as far as the budget goes.

    The turns: whole ranks first, from the shortest sequence on, then sampled rows, from the longest sequence on.
    """
    options = study.config.study.execute
    if options.budget is None:
        return {}
    sharing: dict[str, list[Point]] = {}
    for point in study.points:
        sharing.setdefault(digest(execution_inputs(point)), []).append(point)
    values: dict[str, dict[str, Any]] = {}
    tasks: list[tuple[str, Plan, ExecutionTask]] = []
    for key, points in sharing.items():
        try:
            plan = make_executed_plan(points[0].config)
        except RingAttentionError as error:
            values[key] = {"why not": str(error)}
            continue
        tasks.append((key, plan, plan_execution(plan, options)))
    tasks.sort(key=lambda entry: (True, -entry[1].tokens) if entry[2].how == "rows" else (False, entry[1].tokens))
    left = options.budget
    for turn, (key, plan, task) in enumerate(tasks, 1):
        tell(turn - 1, len(tasks), f"executing, {plan.tokens:,} tokens")
        if key not in journal.records:
            affordable = task if task.seconds <= left else skip_task(task, options, left)
            journal.add(key, {"values": execute(plan, affordable, options)})
            journal.sync()
        values[key] = {"turn": turn, **journal.records[key]["values"]}
        left -= task.seconds if "how" in values[key] else 0.0
    return {point.number: values[key] for key, points in sharing.items() for point in points}


def _check_any_done(table: Table) -> None:
    if all(row["status"] == "refused" for row in table.rows) and table.rows:
        raise InvalidInput(f"every point of the study is refused, the first because: {table.rows[0]['why']}")


def _check_folder(folder: Path) -> None:
    """Refuse a folder with files of something else, which the study might replace."""
    if any(folder.iterdir()) and not any(path.is_file() for path in folder.glob(JOURNALS)):
        raise InvalidInput(f"{folder}: holds files, and none of a study; give an output.path that is new or empty")


def _output_names(study: Study) -> list[str]:
    """The files that this study ends with, beside its journal."""
    names = [*study.config.study.plots, *([WINDOW] if study.config.study.window.point is not None else [])]
    return [*FILES, *(f"{name}.{kind}" for name in names for kind in FORMATS)]


def _remove_temporary_files(folder: Path) -> None:
    """Remove the files that a killed process did not come to rename."""
    for name in [*FILES, *(f"{name}.{kind}" for name in (*plots.PLOTS, WINDOW) for kind in FORMATS)]:
        for path in folder.glob(f".{name}.*"):
            if path.is_file():
                path.unlink()


def _write_files(study: Study, head: dict[str, Any], table: Table, records: Records) -> None:
    options, folder = study.config.study, study.folder
    not_modelled = sorted({note for record in records.values() for note in record.get("not modelled", ())})
    files, remarks = _draw_plots(study, table)
    machines = machines_of(study.points)
    extrapolations: list[Extrapolation] = []
    if options.extrapolate is not None:
        tokens = extrapolated_tokens(options, study.points)
        extrapolations = extrapolate(table, machines, tokens)
        if not extrapolations:
            remarks.append(
                f"Nothing is extrapolated to {tokens:,} tokens: this needs a series whose last two points have "
                "numbers, as many tokens on each rank, and different numbers of ranks."
            )
    lines = describe_machines(study.points, machines)
    provenance = {**head, "commit": git("rev-parse", "--short", "HEAD")}
    write_text(folder / "config.yaml", study.yaml)
    write_text(folder / "overrides.yaml", "".join(f"- {json.dumps(override)}\n" for override in study.overrides))
    write_text(folder / "provenance.json", json.dumps(provenance, indent=1) + "\n")
    write_text(folder / "sweep.csv", to_csv(table))
    more = {"extrapolated": [asdict(line) for line in extrapolations], "machines": lines}
    write_text(folder / "summary.json", to_json(table, provenance, not_modelled, more))
    report = StudyReport(
        study.name,
        options.execute,
        table,
        plots=[path for path in files if path.suffix == ".svg"],
        not_modelled=not_modelled,
        command=" ".join(["ringattn simulate", *map(quote, study.overrides)]),
        provenance=provenance,
        machines=lines,
        extrapolations=extrapolations,
        remarks=remarks,
    )
    write_text(folder / "report.md", render_markdown(report))
    write_text(folder / "report.html", render_html(report))


def _draw_plots(study: Study, table: Table) -> tuple[list[Path], list[str]]:
    """The files of the plots and of the window's heat map, and remarks on what could not be drawn; writes the trace."""
    options = study.config.study
    files: list[Path] = []
    remarks: list[str] = []
    if options.plots:
        x, y = plots.choose_axes(table, options.x, options.y)
        for name in options.plots:
            files += plots.draw(study.folder, name, table, x, y)
    if options.window.point is not None:
        try:
            steps = _simulate_window(study.points[options.window.point].config, options.window)
        except RingAttentionError as error:
            remarks.append(f"The study has no heat map and no trace: {error}")
        else:
            record = {
                "traceEvents": trace.make_events(steps, "forward"),
                "displayTimeUnit": "ms",
                "otherData": {"kind": "modelled"},
            }
            write_text(study.folder / "trace.json", json.dumps(record) + "\n")
            files += plots.draw_delays(study.folder, WINDOW, steps)
    return files, remarks


def _simulate_window(config: SimulateConfig, options: WindowGroup) -> StepWindow:
    machine = machine_from_config(config)
    plan, settings = plan_from_config(config, machine), simulate_options(config)
    return window(
        plan,
        machine,
        ranks=range(options.first_rank, min(options.first_rank + options.ranks, plan.ranks)),
        steps=range(options.first_step, options.first_step + options.steps),
        **{name: settings[name] for name in ("slow", "slow_links", "stalls")},
    )
