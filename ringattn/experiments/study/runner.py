"""Run a study: every point once, recorded as it is done, then the tables, plots and reports of all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from ... import __version__
from ...config.build import machine_from_config, plan_from_config
from ...config.groups import WindowGroup
from ...config.schema import SimulateConfig
from ...errors import InvalidInput, NumericsFailure, RingAttentionError
from ...files import OUTPUTS, check_writable, make_folder, write_text
from ...plan.plan import Plan
from ...progress import Tell
from ...reporting.provenance import git, source
from ...timing.window import StepWindow, window
from . import plots, trace
from .checks import check, extrapolated
from .executed import Order, execute, executed_plan, left_out, name_of, wanted
from .extend import extended
from .journal import Journal
from .machines import described, machines_of
from .paper import as_html, as_markdown
from .point import Timed, asked_options, evaluate
from .report import listed, report
from .space import Point, digest, in_order
from .tables import Table, as_csv, as_summary, table

FORMAT = "ringattn study 1"
JOURNAL = "points.jsonl"
#: Where studies without an output.path have their folders.
STUDIES = Path(OUTPUTS) / "simulate"
#: Names of the files that a study ends with, whose left-over halves are removed.
WINDOW = "straggler_heat"
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


@dataclass(frozen=True)
class Study:
    """A study and the folder that it has for itself; `config` as YAML and `overrides` are written beside the results."""

    name: str
    config: SimulateConfig
    points: Sequence[Point]
    folder: Path
    yaml: str = ""
    overrides: Sequence[str] = field(default=())

    @property
    def head(self) -> dict[str, Any]:
        """What a journal must agree with to be gone on with."""
        points = digest([[point.key, point.labels] for point in self.points])
        return {
            "format": FORMAT, "study": self.name, "version": __version__, "source": source(), "points": points,
            "execute": asdict(self.config.study.execute),
        }  # fmt: skip


def run(study: Study, tell: Tell = lambda done, count, what: None) -> Table:
    """Do what is not done yet, and write all files; returns the table. Raises InvalidInput, Unsupported, and, after all
    is written, NumericsFailure where an execution found wrong numbers."""
    check(study.config.study, study.points, dict(one.lstrip("+~").partition("=")[::2] for one in study.overrides))
    for folder in (*((STUDIES.parent, STUDIES) if study.folder.parent == STUDIES else ()), study.folder):
        make_folder(folder)
    _check_folder(study.folder)
    head = study.head
    with Journal(study.folder / JOURNAL, head) as journal:
        _clean(study.folder)
        for name in _names(study):
            check_writable(study.folder / name)
        records = _points(study, journal, tell)
        executed = _executions(study, journal, tell)
        tell(1, 1, "tables, plots and reports")
        found = table(study.points, records, executed)
        _check_done(study, found)
        _write(study, head, found, records)
    wrong = [row["point"] for row in found.rows if _wrong(row)]
    if wrong:
        raise NumericsFailure(
            f"{listed(wrong)}: the executed numerics are wrong; {study.folder / 'report.md'} says where"
        )
    return found


def _wrong(row: dict[str, Any]) -> bool:
    if "executed error" not in row:
        return False
    errors, most = (row["executed error"], row["executed error of lse"]), row["executed most allowed"]
    return row["executed ledger"] != "complete" or not all(error <= most for error in errors)  # NaN is wrong, too


def _points(study: Study, journal: Journal, tell: Tell) -> dict[int, dict[str, Any]]:
    """The records of all points, by number."""
    found: dict[int, dict[str, Any]] = {}
    timed: Timed = {}
    for done, point in enumerate(in_order(study.points)):
        key = point.key
        if key not in journal.known:
            tell(done, len(study.points), "points")
            journal.add(key, evaluate(point.config, timed))
        found[point.number] = journal.known[key]
    return found


def _executions(study: Study, journal: Journal, tell: Tell) -> dict[int, dict[str, Any]]:
    """What was executed of the points' plans, by point, as far as the budget goes: whole ranks first, then rows, of which
    the longest sequences come first."""
    options = study.config.study.execute
    if options.budget is None:
        return {}
    sharing: dict[str, list[Point]] = {}
    for point in study.points:
        sharing.setdefault(digest(name_of(point)), []).append(point)
    values: dict[str, dict[str, Any]] = {}
    orders: list[tuple[str, Plan, Order]] = []
    for key, points in sharing.items():
        try:
            plan = executed_plan(points[0].config)
        except RingAttentionError as error:
            values[key] = {"why not": str(error)}
            continue
        orders.append((key, plan, wanted(plan, options)))
    orders.sort(
        key=lambda entry: (entry[2].how == "rows", -entry[1].tokens if entry[2].how == "rows" else entry[1].tokens)
    )
    left = options.budget
    for turn, (key, plan, order) in enumerate(orders, 1):
        tell(turn - 1, len(orders), f"executing, {plan.tokens:,} tokens")
        done = order if order.seconds <= left else left_out(order, options, left)
        if key not in journal.known:
            journal.add(key, {"values": execute(plan, done, options)})
            journal.sync()
        values[key] = {"turn": turn, **journal.known[key]["values"]}
        left -= order.seconds if "how" in values[key] else 0.0
    return {point.number: values[key] for key, points in sharing.items() for point in points}


def _check_done(study: Study, found: Table) -> None:
    if all(row["status"] == "refused" for row in found.rows) and found.rows:
        raise InvalidInput(f"every point of the study is refused, the first because: {found.rows[0]['why']}")


def _check_folder(folder: Path) -> None:
    """Refuse a folder with files that are not a study's, which might be replaced."""
    if any(folder.iterdir()) and not (folder / JOURNAL).is_file():
        raise InvalidInput(f"{folder}: holds files, and none of a study; give an output.path that is new or empty")


def _names(study: Study) -> list[str]:
    """The files that a study ends with, beside its journal."""
    names = [*study.config.study.plots, *([WINDOW] if study.config.study.window.point is not None else [])]
    return [*FILES, *(f"{name}.{kind}" for name in names for kind in plots.FORMATS)]


def _clean(folder: Path) -> None:
    """Remove what a killed process was about to rename."""
    for name in [*FILES, *(f"{name}.{kind}" for name in (*plots.PLOTS, WINDOW) for kind in plots.FORMATS)]:
        for left in folder.glob(f".{name}.*"):
            if left.is_file():
                left.unlink()


def _write(study: Study, head: dict[str, Any], found: Table, records: dict[int, dict[str, Any]]) -> None:
    options, folder = study.config.study, study.folder
    notes = sorted({note for record in records.values() for note in record.get("not modelled", ())})
    drawn, remarks = _drawn(study, found)
    machines = machines_of(study.points)
    far = []
    if options.extrapolate is not None:
        tokens = extrapolated(options, study.points)
        far = extended(found, machines, tokens)
        if not far:
            remarks.append(
                f"Nothing is extrapolated to {tokens:,} tokens: it takes a series whose last two points have numbers, as many "
                "tokens on each rank, and different ranks."
            )
    lines = described(study.points, machines)
    whole = {**head, "commit": git("rev-parse", "--short", "HEAD")}
    command = " ".join(["ringattn simulate", *map(quote, study.overrides)])
    write_text(folder / "config.yaml", study.yaml)
    write_text(folder / "overrides.yaml", "".join(f"- {json.dumps(override)}\n" for override in study.overrides))
    write_text(folder / "provenance.json", json.dumps(whole, indent=1) + "\n")
    write_text(folder / "sweep.csv", as_csv(found))
    more = {"extrapolated": [asdict(one) for one in far], "machines": lines}
    write_text(folder / "summary.json", as_summary(found, whole, notes, more))
    parts = report(study.name, options.execute, found, drawn, notes, command, whole, lines, far, remarks)
    write_text(folder / "report.md", as_markdown(parts))
    write_text(folder / "report.html", as_html(f"Study {study.name}", parts))


def _drawn(study: Study, found: Table) -> tuple[list[Path], list[str]]:
    """Plots and the trace; what could not be drawn, and why."""
    options = study.config.study
    files: list[Path] = []
    remarks: list[str] = []
    if options.plots:
        x, y = plots.axes_of(found, options.x, options.y)
        for name in options.plots:
            files += plots.draw(study.folder, name, found, x, y)
    if options.window.point is not None:
        try:
            seen = _seen(study.points[options.window.point].config, options.window)
        except RingAttentionError as error:
            remarks.append(f"There is no heat map and no trace: {error}")
        else:
            record = {
                "traceEvents": trace.events(seen, "forward"), "displayTimeUnit": "ms", "otherData": {"kind": "modelled"}
            }  # fmt: skip
            write_text(study.folder / "trace.json", json.dumps(record) + "\n")
            files += plots.heat(study.folder, WINDOW, seen)
    return files, remarks


def _seen(config: SimulateConfig, options: WindowGroup) -> StepWindow:
    machine = machine_from_config(config)
    plan, asked = plan_from_config(config, machine), asked_options(config)
    return window(
        plan, machine, ranks=range(options.first_rank, min(options.first_rank + options.ranks, plan.ranks)),
        steps=range(options.first_step, options.first_step + options.steps),
        slow=asked["slow"], slow_links=asked["slow_links"], stalls=asked["stalls"],
    )  # fmt: skip
