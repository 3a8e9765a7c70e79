"""ringattn verify: execute a plan on virtual ranks and compare with oracles and a ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..errors import InvalidInput, NumericsFailure
from ..files import STDOUT, check_json, write_json
from ..plan.plan import Plan
from ..runtime.peak_memory import peak
from ..simulator.numerics import numerics
from ..simulator.numerics.result import NumericsReport
from ..simulator.numerics.sampled import chosen_rows
from ..simulator.progress import listening
from ..simulator.reporting.console import Number, describe_plan, get_console, print_numbers, show_progress
from ..text import plural, size
from ..transport.launcher import refuse_windows
from .config.build import plan_from_config
from .config.groups import check_least, default_of
from .config.schema import VerifyConfig, parse_size
from .ranks import check_threads

#: The most ranks of a plan: the simulator follows each block through all ranks, even if few have sampled rows.
MAX_RANKS = 1 << 24


def main(config: VerifyConfig) -> dict[str, Any]:
    """Execute the plan, print a report, write it as JSON if a path is given, and return it.

    Raises NumericsFailure if numbers are wrong, or if a query-key pair was not computed exactly once.
    """
    refuse_windows("ringattn verify")
    config.check()
    check_threads("threads", config.threads)
    if config.spread is not None:
        check_least(config, spread=1)
    check_json(config.output.path)
    torch.set_num_threads(config.threads or 1)
    if config.ranks > MAX_RANKS:
        raise InvalidInput(f"ranks={config.ranks:,}: every rank is visited, at most {MAX_RANKS:,}; try fewer ranks")
    plan = plan_from_config(config)
    if plan.ulysses_size > 1 and config.schedule.spec == "auto":  # the simulator does not execute Ulysses groups
        assert plan.choice is not None, "schedule=auto makes a choice"
        candidate = plan.choice.fastest_without_ulysses()
        plan = plan_from_config(config, layout=candidate.layout, schedule=candidate.schedule)
    if plan.forward_rotates == "q" and not config.whole and config.rotate.startswith("auto"):
        plan = plan_from_config(config, rotate="kv")  # sampled rows need pass-KV
    rows, ranks = _sample_rows(plan, config), _executed_ranks(plan, config)
    with show_progress(get_console()) as tell, listening(tell):
        report = numerics(
            plan,
            mode="all" if config.whole else "sample",
            rows=rows,
            ranks=ranks,
            backward=config.backward,
            together=config.together,
            period=config.period,
            seed=config.seed,
            state=None if config.state is None else Path(config.state),
        )
    numbers = [*report.numbers(), Number("peak memory", size(peak()), "measured")]
    if config.output.path != STDOUT:
        print_numbers(describe_plan(plan, "virtual rank"), numbers)
    record = _record(report, numbers)
    if config.output.path is not None:
        write_json(config.output.path, record)
    if not report.passed:
        raise NumericsFailure(f"the numerics of this plan are wrong: {_describe_catch(report)}; see the lines above")
    return record


def _sample_rows(plan: Plan, config: VerifyConfig) -> list[int]:
    """The positions of the sampled query rows; [] with whole=true. Raises InvalidInput."""
    if config.whole:
        return []
    if isinstance(config.rows, list):
        return [parse_size(row, "rows") for row in config.rows]
    count = parse_size(config.rows, "rows")
    if count < 1:
        raise InvalidInput(f"rows={config.rows}: give at least one row, or a list of positions")
    rows = chosen_rows(plan, count, config.spread, config.seed)
    if len(rows) < count and config.rows != default_of(config, "rows"):
        where = f" on at most {plural(config.spread, 'rank')}" if config.spread is not None else ""
        raise InvalidInput(
            f"rows={config.rows}: a sequence of {plural(plan.q_tokens, 'token')} has only "
            f"{plural(len(rows), 'query row')}{where}; try rows={len(rows)}"
        )
    return rows


def _executed_ranks(plan: Plan, config: VerifyConfig) -> range | None:
    """The ranks to execute; None: all. Raises InvalidInput."""
    stop = plan.ranks if config.count is None else config.first + config.count
    if not 0 <= config.first < stop <= plan.ranks:
        raise InvalidInput(f"first={config.first}, count={config.count}: expected ranks among 0 .. {plan.ranks - 1}")
    return None if (config.first, stop) == (0, plan.ranks) else range(config.first, stop)


def _describe_catch(report: NumericsReport) -> str:
    """Which checks noticed an error."""
    checks = [name for name, fine in (("the ledger", report.complete), ("the numbers", report.accurate)) if not fine]
    return f"caught by {' and '.join(checks)}" if checks else "not caught"


def _record(report: NumericsReport, numbers: list[Number]) -> dict[str, Any]:
    """The report as plain data, with the kind of each printed number."""
    return {
        "plan": json.loads(report.plan.to_json()),
        **report.counts(),
        "peak_bytes": peak(),
        "complete": report.complete,
        "accurate": report.accurate,
        "words": {number.name: number.kind for number in numbers if number.kind},
    }
