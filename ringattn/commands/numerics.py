"""ringattn simulate mode=numerics: a plan's virtual ranks executed, compared with oracles and a ledger."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import Shape, parse_size
from ..errors import InvalidInput, NumericsFailure
from ..memory import peak
from ..pattern import parse_pattern
from ..plan import make_plan
from ..report import Number, show, size
from ..simulator import PERIOD, Mutation, NumericsReport, numerics
from ..simulator.whole import TOGETHER


@dataclass
class NumericsConfig(Shape):
    """`way` is "sample" or "all"; `first` and `count` name the executed ranks of "all" (default: all of them)."""

    way: str = "sample"
    heads: int = 1
    head_dim: int = 16
    dtype: str = "float64"
    rows: int = 16
    spread: int | None = None
    first: int = 0
    count: int | None = None
    backward: bool = False
    together: int = TOGETHER
    period: int | None = PERIOD
    seed: int = 0
    fault: str | None = None
    fault_rank: int = 1
    fault_owner: int = 0
    threads: int = 1


def main(config: NumericsConfig) -> NumericsReport:
    """Simulate and print. Raises NumericsFailure where a plan fails, or where a fault that was asked for passes."""
    torch.set_num_threads(config.threads)
    if config.batch != 1:
        raise InvalidInput(f"batch={config.batch}: simulated numerics are of one element; leave it out")
    ranks = parse_size(config.ranks, "ranks")
    plan = make_plan(
        parse_pattern(config.pattern.spec), tokens=config.size(), ranks=ranks,
        layout=config.layout.spec, schedule=config.schedule.spec, heads=config.heads, kv_heads=config.kv_heads,
        head_dim=config.head_dim, dtype=config.dtype, wire_dtype=config.wire_dtype, machine=config.machine.made(ranks=ranks),
        rotate=config.rotate,
    )  # fmt: skip
    fault = None if config.fault is None else Mutation(config.fault, config.fault_rank, config.fault_owner)
    stop = plan.ranks if config.count is None else config.first + config.count
    if not 0 <= config.first < stop <= plan.ranks:
        raise InvalidInput(f"first={config.first}, count={config.count}: no ranks among 0 .. {plan.ranks - 1}")
    some = None if (config.first, stop) == (0, plan.ranks) else range(config.first, stop)
    report = numerics(
        plan, mode=config.way, rows=config.rows, spread=config.spread, ranks=some, backward=config.backward,
        together=config.together, period=config.period, seed=config.seed, mutation=fault,
    )  # fmt: skip
    title = (
        f"{plan.pattern!r}, {plan.tokens:,} tokens, {plan.layout.name} on {plan.ranks:,} virtual ranks, {plan.schedule}"
    )
    caught = [] if fault is None else [Number("fault", f"{fault.fault}: {_caught(report)}", "measured")]
    show(title, [*report.numbers(), Number("peak memory", size(peak()), "measured"), *caught])
    if fault is None and not report.passed:
        raise NumericsFailure(f"the numerics of this plan are wrong: {_caught(report)}; the lines above say where")
    if fault is not None and report.passed:
        raise NumericsFailure(f"the fault {fault} was not noticed by the ledger nor by the numbers")
    return report


def _caught(report: NumericsReport) -> str:
    by = [name for name, fine in (("the ledger", report.complete), ("the numbers", report.accurate)) if not fine]
    return f"caught by {' and '.join(by)}" if by else "not caught"
