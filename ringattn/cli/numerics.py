"""ringattn simulate mode=numerics: a plan's virtual ranks executed, compared with oracles and a ledger."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from ..config.build import asked_plan
from ..config.checks import check_needs
from ..config.groups import NumericsGroup
from ..config.schema import SimulateConfig, parse_size
from ..errors import InvalidInput, NumericsFailure, did_you_mean, plural
from ..files import STDOUT, check_json, write_json
from ..numerics import GRADIENT_FAULTS, MODES, Fault, NumericsReport, chosen_rows, numerics
from ..plan.plan import Plan
from ..progress import listening
from ..reporting.console import Number, console, head, show
from ..reporting.peak_memory import peak
from ..text import size
from .effort import EACH, NIGHT, SAMPLED, check_effort
from .progress import progress
from .ranks import check_threads

#: Ranks that a route is walked along, at most: more take hours, however few of them have rows.
RANKS = 1 << 24
#: What each way leaves without a meaning.
OTHERS = {"sample": ("first", "count", "together"), "all": ("rows", "spread")}


def main(config: SimulateConfig) -> NumericsReport:
    """Simulate and print, and write JSON where asked.

    Raises NumericsFailure where a plan fails, or where a fault that was asked for passes.
    """
    options = config.numerics
    check_needs("numerics", config)
    _check(options)
    check_json(config.output.path)
    torch.set_num_threads(options.threads)
    plan = _plan(config)
    rows, ranks = _rows(plan, config), _ranks(plan, options)
    _check_effort(plan, rows, ranks)
    fault = _fault(plan, options, rows, ranks)
    with progress(console()) as tell, listening(tell):
        report = numerics(
            plan, mode=options.way, rows=rows, ranks=ranks, backward=config.backward, together=options.together,
            period=options.period, seed=config.seed, fault=fault,
        )  # fmt: skip
    numbers = [*report.numbers(), Number("peak memory", size(peak()), "measured")]
    if fault is not None:
        text = f"{fault.kind} at rank {fault.rank}, block of {fault.owner}: {_caught(report)}"
        numbers.append(Number("fault", text, "measured"))
    if config.output.path != STDOUT:
        show(head(plan, "virtual rank"), numbers)
    if config.output.path:
        write_json(config.output.path, _written(report, numbers, fault))
    if fault is None and not report.passed:
        raise NumericsFailure(f"the numerics of this plan are wrong: {_caught(report)}; the lines above say where")
    if fault is not None and report.passed:
        raise NumericsFailure(f"the fault {fault} was not noticed by the ledger nor by the numbers")
    return report


def _plan(config: SimulateConfig) -> Plan:
    """The plan that is asked for. schedule=auto takes the fastest schedule without teams: only such a schedule is executed."""
    plan = asked_plan(config)
    if plan.ulysses_size == 1 or config.schedule.spec != "auto":
        return plan
    assert plan.choice is not None, "the schedule was chosen"
    best = plan.choice.fastest_without_ulysses()
    return asked_plan(config, layout=best.layout, schedule=best.schedule)


def _check(options: NumericsGroup) -> None:
    if options.way not in MODES:
        raise InvalidInput(
            f"numerics.way={options.way}: {did_you_mean(options.way, MODES)}expected {' or '.join(MODES)}"
        )
    plain = NumericsGroup()
    meaningless = list(OTHERS[options.way])
    if options.fault is None:
        meaningless += ["fault_rank", "fault_owner"]
    for name in meaningless:
        if getattr(options, name) != getattr(plain, name):
            beside = f"with numerics.way={options.way}" if name in OTHERS[options.way] else "without numerics.fault"
            raise InvalidInput(f"numerics.{name}={getattr(options, name)} has no meaning {beside}; leave it out")
    check_threads("numerics.threads", options.threads)
    if options.spread is not None and options.spread < 1:
        raise InvalidInput(
            f"numerics.spread={options.spread}: sampled rows are on at least 1 rank; leave it out for any number"
        )


def _rows(plan: Plan, config: SimulateConfig) -> list[int]:
    """The sampled query rows; none where whole ranks are executed."""
    options = config.numerics
    if options.way != "sample":
        return []
    if isinstance(options.rows, list):
        return [parse_size(row, "numerics.rows") for row in options.rows]
    number = parse_size(options.rows, "numerics.rows")
    if number < 1:
        raise InvalidInput(f"numerics.rows={options.rows}: at least one row is needed, or a list of positions")
    found = chosen_rows(plan, number, options.spread, config.seed)
    if len(found) < number and options.rows != NumericsGroup().rows:
        ranks = f" on at most {plural(options.spread, 'rank')}" if options.spread is not None else ""
        raise InvalidInput(
            f"numerics.rows={options.rows}: a sequence of {plural(plan.tokens, 'token')} has {plural(len(found), 'query row')}{ranks}; "
            f"try numerics.rows={len(found)}"
        )
    return found


def _ranks(plan: Plan, options: NumericsGroup) -> range | None:
    """The executed ranks; None: all."""
    stop = plan.ranks if options.count is None else options.first + options.count
    if not 0 <= options.first < stop <= plan.ranks:
        raise InvalidInput(
            f"numerics.first={options.first}, numerics.count={options.count}: no ranks among 0 .. {plan.ranks - 1}"
        )
    return None if (options.first, stop) == (0, plan.ranks) else range(options.first, stop)


def _check_effort(plan: Plan, rows: Sequence[int], ranks: range | None) -> None:
    if plan.ranks > RANKS:
        raise InvalidInput(
            f"ranks={plan.ranks:,}: mode=numerics walks along all ranks, at most {RANKS:,} of them; try fewer ranks"
        )
    if rows:
        homes = {plan.layout.owner(row) for row in rows}
        check_effort(plan, homes, len(homes), SAMPLED, NIGHT, "try fewer ranks, or numerics.spread=1")
    elif plan.tokens:
        some = range(plan.ranks) if ranks is None else ranks
        advice = "try fewer ranks, numerics.count=, or numerics.way=sample"
        check_effort(plan, {some[0], some[len(some) // 2]}, len(some), EACH, NIGHT, advice)


def _fault(plan: Plan, options: NumericsGroup, rows: Sequence[int], ranks: range | None) -> Fault | None:
    if options.fault is None:
        return None
    executed = {plan.layout.owner(row) for row in rows} if rows else set(ranks or range(plan.ranks))
    ordered = sorted(executed)
    rank = options.fault_rank
    if rank is None:
        # Gradients come home from later rows to earlier ones, keys the other way round.
        rank = (
            plan.layout.owner(rows[0 if options.fault in GRADIENT_FAULTS else -1])
            if rows
            else ordered[len(ordered) // 2]
        )
    if rank not in executed:
        some = ", ".join(map(str, ordered[:8]))
        raise InvalidInput(f"numerics.fault_rank={rank} is not executed, so that its fault shows nowhere; try {some}")
    owner = options.fault_owner
    if owner is None:
        owner = rank if options.fault in GRADIENT_FAULTS else (rank - 1) % plan.ranks
    return Fault(options.fault, rank, owner)


def _caught(report: NumericsReport) -> str:
    by = [name for name, fine in (("the ledger", report.complete), ("the numbers", report.accurate)) if not fine]
    return f"caught by {' and '.join(by)}" if by else "not caught"


def _written(report: NumericsReport, numbers: list[Number], fault: Fault | None) -> dict[str, Any]:
    """The report as plain data, with the words as printed."""
    values = {name: value for name, value in vars(report).items() if name != "plan"}
    return {
        "plan": json.loads(report.plan.to_json()),
        **values,
        "peak_bytes": peak(),
        "complete": report.complete,
        "accurate": report.accurate,
        "fault": None if fault is None else {**vars(fault), "caught": _caught(report)},
        "words": {number.name: number.kind for number in numbers if number.kind},
    }
