"""What a study computes for each point: the numbers of `simulate`, and executions of the point's plan.

An execution runs whole ranks if that is little work, otherwise sampled rows of the whole sequence. Its cost in seconds
is computed from counted pairs and rows at assumed rates, never timed: which points are executed, and how, depends
neither on the machine nor on whether the study was interrupted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ...cli.config.build import plan_from_config, simulate_options
from ...cli.config.schema import SimulateConfig
from ...errors import InvalidInput, Unsupported
from ...plan.plan import Plan
from ...simulator.timing.simulation import simulate_passes
from ...simulator.timing.timeline import CAUSES, Timeline
from ...text import duration, plural
from ..verbs.estimate import NOT_MODELLED, describe_errors, estimate_model
from ..verbs.settings import EstimateConfig, ExecuteGroup
from .space import Point, PointConfig

#: Assumed fp64 rates of one core per second: elements of K and V that sampled rows visit; elements of whole ranks that
#: are generated, visited and compared; multiplications.
VISITED_RATE, WHOLE_RATE, PRODUCT_RATE = 1.0e8, 1.0e7, 5.0e9
#: Whole ranks are executed if they take at most this share of the budget, or at most these seconds if that is more: all
#: ranks of a plan, or a power of two of them, but at least FEWEST_RANKS.
WHOLE_SHARE, WHOLE_SECONDS, FEWEST_RANKS = 0.02, 1.0, 16


def evaluate(config: PointConfig) -> dict[str, Any]:
    """Simulate one point of a study; returns its record.

    {"status": "ok", "values": by column name, "not modelled": texts}, or {"status": "refused", "why": text}, then with
    the counted values if a plan could be made.
    """
    if isinstance(config, EstimateConfig):
        return _evaluate_model(config)
    values: dict[str, Any] = {}
    try:
        machine = config.machine.made(ranks=config.ranks)
        plan = plan_from_config(config, machine)
        values = {  # beside those that the point itself tells
            "pattern": repr(plan.pattern),
            "layout": plan.layout.name,
            **{name: getattr(plan, name) for name in ("schedule", "head_dim", "dtype", "batch")},
            "pairs": plan.cache.answer("study.pairs", plan.pairs),
        }
        timelines = simulate_passes(plan, machine, config.backward, simulate_options(config))
    except (InvalidInput, Unsupported) as error:
        return {"status": "refused", "why": str(error), **({"values": values} if values else {})}
    for timeline in timelines:
        values |= {f"{timeline.direction} {name}": value for name, value in _pass_values(timeline, plan).items()}
    return {"status": "ok", "values": values, "not modelled": [*timelines[0].unmodelled, *timelines[0].notes]}


def _evaluate_model(config: EstimateConfig) -> dict[str, Any]:
    """The record of a point that simulates a phase of a model."""
    try:
        _, estimate = estimate_model(config)
    except (InvalidInput, Unsupported) as error:
        return {"status": "refused", "why": str(error)}
    values = {
        "time": estimate.seconds,
        "rate": estimate.tokens / estimate.seconds,
        "memory": estimate.bytes,
        "fits": estimate.fits,
        **{f"memory: {name}": value for name, value in estimate.memory.items()},
        **{f"time: {name}": value for name, value in estimate.parts.items()},
    }
    named = {f"{config.phase} {name}": value for name, value in values.items()}
    notes = [NOT_MODELLED, describe_errors(config.phase, estimate)]
    return {"status": "ok", "values": named, "not modelled": notes}


def _pass_values(timeline: Timeline, plan: Plan) -> dict[str, Any]:
    """The numbers of a pass by name; None for those that are not modelled."""
    traffic, machine = timeline.traffic, timeline.machine
    unmodelled = {cause for cause, number in CAUSES.items() if getattr(machine, number) is None}
    return {
        "time": timeline.seconds,
        "rate": plan.batch * plan.tokens / timeline.seconds if timeline.seconds else None,
        "solver": timeline.solver,
        "compute": timeline.compute,
        **{cause: None if cause in unmodelled else value for cause, value in timeline.exposed.items()},
        "efficiency": timeline.compute / timeline.seconds if timeline.seconds else None,
        "bytes": traffic.total,
        "busiest link": traffic.busiest,
        "messages": traffic.messages,
        "memory": sum(timeline.memory.values()),
        "fits": timeline.fits,
        **{f"memory: {name}": value for name, value in timeline.memory.items()},
        "total": timeline.total,
        "failure every": None if machine.mtbf is None else machine.mtbf / timeline.ranks,
        "energy": timeline.joules,
        "cost": timeline.price,
    }


@dataclass(frozen=True)
class ExecutionTask:
    """What to execute of a plan: the whole ranks `ranks`, or sampled rows if it is None.

    `seconds` is how long this takes on one core.
    """

    ranks: range | None
    seconds: float


def make_executed_plan(point: Point, options: ExecuteGroup) -> Plan:
    """Make the plan that is executed for a point, with its layout and schedule.

    It computes in fp64, with the heads of `options`.

    Raises InvalidInput if the plan cannot be made.
    """
    config = point.config
    assert isinstance(config, SimulateConfig), "only its points have plans"
    machine = config.machine.made(ranks=config.ranks)
    resolved = {}
    if point.has_auto:  # let auto choose for the point's sizes, not for the executed sizes
        plan = plan_from_config(config, machine)
        resolved = {"layout": plan.layout.name, "schedule": plan.schedule}
    sizes: dict[str, Any] = {
        "heads": options.heads,
        "kv_heads": options.heads,
        "head_dim": options.head_dim,
        "batch": 1,
    }
    sizes |= {"value_dim": None, "block": None}
    return plan_from_config(config, machine, **sizes, dtype="float64", comm_dtype=None, **resolved)


def plan_execution(plan: Plan, options: ExecuteGroup) -> ExecutionTask:
    """Decide how much of a plan to execute, if the plan may use the whole time budget."""
    assert options.budget is not None
    rank_tokens, row_elements = plan.tokens / plan.ranks, 2 * options.heads * options.head_dim
    products = plan.pairs() / plan.ranks * 2 * options.head_dim
    rank_seconds = products / PRODUCT_RATE + rank_tokens * row_elements / WHOLE_RATE
    whole_seconds = max(WHOLE_SHARE * options.budget, min(WHOLE_SECONDS, options.budget))
    ranks = min(plan.ranks, int(whole_seconds / rank_seconds))
    if ranks >= min(FEWEST_RANKS, plan.ranks):
        if ranks < plan.ranks:
            ranks = 1 << ranks.bit_length() - 1
        first = (plan.ranks - ranks) // 2
        return ExecutionTask(range(first, first + ranks), rank_seconds * ranks)
    # A block is generated as a whole, once for all rows that see it.
    keys = min(plan.tokens, options.rows * (plan.pairs() / (plan.tokens * plan.heads) + 2 * rank_tokens))
    seconds = keys * row_elements * (1 / VISITED_RATE + options.rows / PRODUCT_RATE)
    return ExecutionTask(None, seconds)


def execute(plan: Plan, task: ExecutionTask, options: ExecuteGroup, left: float, state: Path) -> dict[str, Any]:
    """Execute a task if it should take at most `left` seconds; returns its record.

    Records contain no times, so that repeated runs are equal. The file `state` exists only while the task runs; an
    interrupted task continues from it.
    """
    ranks = task.ranks
    if task.seconds > left:
        assert options.budget is not None
        work = plural(options.rows, "row") if ranks is None else plural(len(ranks), "whole rank")
        return {
            "why not": f"not executed: {work} would take {duration(task.seconds)} at the assumed rates, and "
            f"{duration(left)} of the budget of {duration(options.budget)} were left at its turn"
        }
    numerics = import_module("...simulator.numerics", __package__).numerics  # needs torch
    is_whole = ranks == range(plan.ranks)
    settings: dict[str, Any] = {"mode": "sample", "rows": options.rows}
    if ranks is not None:
        settings = {"mode": "all", "ranks": None if is_whole else ranks}
    torch = import_module("torch")
    threads = torch.get_num_threads()
    # One thread, as in ringattn verify: the numbers do not depend on the cores, and short calls gain nothing from more.
    torch.set_num_threads(1)
    try:
        report = numerics(plan, seed=options.seed, state=state, **settings)
    except (InvalidInput, Unsupported) as error:
        return {"why not": str(error)}
    finally:
        torch.set_num_threads(threads)
    state.unlink(missing_ok=True)
    how = f"{plural(report.rows, 'row')}, with all keys that they see"
    if ranks is not None:
        how = "all ranks, whole" if is_whole else f"ranks {ranks[0]:,} .. {ranks[-1]:,}, whole"
    return {
        "how": how,
        "ranks": report.ranks,
        "rows": report.rows if ranks is None else sum(map(plan.layout_of("q").rows, ranks)),
        "rows compared": report.rows,
        "visits": report.visits,
        "visits expected": report.visits_expected,
        "pairs": report.pairs,
        "part of all pairs": report.pairs / max(plan.pairs(), 1),
        "ledger": "complete" if report.complete else "NOT COMPLETE",
        "error": report.error,
        "error of lse": report.lse_error,
        "most allowed": report.tolerance,
    }


def execution_inputs(point: Point, options: ExecuteGroup) -> dict[str, Any]:
    """Everything a point's execution depends on: points with equal inputs share one execution."""
    config = point.config
    assert isinstance(config, SimulateConfig), "only its points have plans"
    return {
        "execute": asdict(options),
        **{name: getattr(config, name).spec for name in ("pattern", "layout", "schedule")},
        "tokens": config.length(),
        "ranks": config.ranks,
        "chosen for": point.inputs if point.has_auto else None,
    }
