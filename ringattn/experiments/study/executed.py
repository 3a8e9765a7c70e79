"""What of a study is executed: whole ranks where that is little, sampled rows over the whole sequence where it is not.

The seconds that the budget counts are pairs and rows over assumed rates, not a step: which points are executed, and
how, must not depend on the machine nor on whether the study was interrupted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from ...config.build import machine_from_config, plan_from_config
from ...config.groups import ExecuteGroup
from ...config.schema import SimulateConfig
from ...errors import InvalidInput, Unsupported, plural
from ...plan.plan import Plan
from ...text import duration
from .space import Point

#: Assumed of one core, in fp64: elements of K and V per second that sampled rows visit, those of whole ranks that are made,
#: visited and compared, and multiplications per second.
ELEMENTS, WHOLE, PRODUCTS = 1.0e8, 1.0e7, 5.0e9
#: Whole ranks are executed where they take at most this part of the budget, or so many seconds of it: all of them, or a
#: power of two, at least so many.
SHARE, LEAST, FEWEST = 0.02, 1.0, 16


@dataclass(frozen=True)
class Order:
    """What is to be executed of a plan: "whole" (all ranks), "some" (ranks first ..), "rows", or nothing, and why."""

    how: str
    first: int = 0
    count: int = 0
    seconds: float = 0.0
    why: str = ""


def executed_plan(config: SimulateConfig) -> Plan:
    """The plan of a point as it is executed: its layout and schedule in fp64, with the heads of study.execute. Raises
    InvalidInput."""
    options, machine = config.study.execute, machine_from_config(config)
    chosen = {}
    if _chosen(config):  # for the sizes of the point, not for those that are executed
        plan = plan_from_config(config, machine)
        chosen = {"layout": plan.layout.name, "schedule": plan.schedule}
    return plan_from_config(
        config, machine, heads=options.heads, kv_heads=options.heads, head_dim=options.head_dim, dtype="float64", batch=1,
        comm_dtype=None, **chosen,
    )  # fmt: skip


def _chosen(config: SimulateConfig) -> bool:
    return "auto" in (config.layout.spec, config.schedule.spec)


def wanted(plan: Plan, options: ExecuteGroup) -> Order:
    """What is to be executed of a plan by a budget that is spent on it alone, and its seconds at the assumed rates."""
    assert options.budget is not None
    tokens, width = plan.tokens / plan.ranks, 2 * options.heads * options.head_dim
    rank = plan.pairs() / plan.ranks * 2 * options.head_dim / PRODUCTS + tokens * width / WHOLE
    count = min(plan.ranks, int(max(SHARE * options.budget, min(LEAST, options.budget)) / rank))
    if count == plan.ranks:
        return Order("whole", 0, count, rank * count)
    if count >= FEWEST:
        count = 1 << count.bit_length() - 1
        return Order("some", (plan.ranks - count) // 2, count, rank * count)
    # Blocks are made whole, and once for all rows that see them.
    keys = min(plan.tokens, options.rows * (plan.pairs() / (plan.tokens * plan.heads) + 2 * tokens))
    return Order("rows", 0, options.rows, keys * width * (1 / ELEMENTS + options.rows / PRODUCTS))


def left_out(order: Order, options: ExecuteGroup, left: float) -> Order:
    """The order of nothing, where `left` seconds of the budget are too few."""
    what = plural(order.count, "row" if order.how == "rows" else "whole rank")
    why = (
        f"not executed: {what} would take {duration(order.seconds)} at the assumed rates, and {duration(left)} of the budget of "
        f"{duration(float(options.budget or 0))} were left at its turn"
    )
    return Order("nothing", why=why)


def execute(plan: Plan, order: Order, options: ExecuteGroup) -> dict[str, Any]:
    """Run the order; what is recorded of it, without times."""
    if order.how == "nothing":
        return {"why not": order.why}
    numerics = import_module("...numerics", __package__).numerics  # which needs torch
    some = range(order.first, order.first + order.count)  # of whole ranks
    settings: dict[str, Any] = {"mode": "sample", "rows": options.rows}
    if order.how != "rows":
        settings = {"mode": "all", "ranks": None if order.how == "whole" else some}
    torch = import_module("torch")
    threads = torch.get_num_threads()
    # As mode=numerics has: equal numbers whatever the cores, and short calls are no faster on more.
    torch.set_num_threads(1)
    try:
        found = numerics(plan, seed=options.seed, **settings)
    except (InvalidInput, Unsupported) as error:
        return {"why not": str(error)}
    finally:
        torch.set_num_threads(threads)
    words = {
        "whole": "all ranks, whole",
        "some": f"ranks {order.first:,} .. {order.first + order.count - 1:,}, whole",
        "rows": f"{plural(found.rows, 'row')}, with all keys that they see",
    }
    rows = found.rows if order.how == "rows" else sum(map(plan.layout.rows, some))
    return {
        "how": words[order.how], "ranks": found.ranks, "rows": rows, "rows compared": found.rows, "visits": found.visits,
        "visits expected": found.visits_expected, "pairs": found.pairs, "part of all pairs": found.pairs / max(plan.pairs(), 1),
        "ledger": "complete" if found.complete else "NOT COMPLETE", "error": found.error, "error of lse": found.lse_error,
        "most allowed": found.tolerance,
    }  # fmt: skip


def name_of(point: Point) -> dict[str, Any]:
    """All that an execution depends on: equal for points that share it."""
    config = point.config
    return {
        "execute": asdict(config.study.execute), "pattern": config.pattern.spec, "layout": config.layout.spec,
        "schedule": config.schedule.spec, "tokens": config.length(), "ranks": config.ranks,
        "chosen for": point.inputs if _chosen(config) else None,
    }  # fmt: skip
