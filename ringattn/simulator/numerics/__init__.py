"""The numerics simulator: a plan's own messages, kernels and merges over virtual ranks, with inputs made on demand."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import InvalidInput
from ...plan.plan import Plan
from ...text import did_you_mean
from ..timing.solvers.jitter import check_seed
from .faults import Fault
from .oracle import count_mask_errors
from .result import NumericsReport
from .sampled import chosen_rows, sample
from .source import PERIOD, make_source
from .whole import TOGETHER, whole

MODES = ("sample", "all")


def numerics(
    plan: Plan,
    *,
    mode: str = "sample",
    rows: int | Sequence[int] = 16,
    spread: int | None = None,
    ranks: Sequence[int] | None = None,
    backward: bool = False,
    together: int = TOGETHER,
    period: int | None = PERIOD,
    seed: int = 0,
    fault: Fault | None = None,
) -> NumericsReport:
    """The report of executing a plan on virtual ranks with inputs made on demand, checked by oracles and a ledger.

    mode="sample" executes, in fp64, every message of the ranks that hold `rows`: query positions, or how many
    positions to choose on at most `spread` ranks. Memory grows neither with tokens nor with ranks. mode="all" executes
    all rows of `ranks` (default: all ranks) from end to end, about `together` ranks at a time, in fp64 or
    fp32. `backward` adds their gradients; the ranks must then see only each other, as in a forward in which queries
    travel. Queries and keys are those of the plan's two layouts.

    `period` is the period of K and V, a prime; with None they do not repeat, and the oracle reads every key of a
    compared row. The tiles of one row are compared with the pattern's independent `visible`. `seed` fixes all inputs.
    `fault` harms one visit. Raises InvalidInput or Unsupported before anything is executed.
    """
    if mode not in MODES:
        raise InvalidInput(f"mode={mode!r}: {did_you_mean(mode, MODES)}expected {' or '.join(MODES)}")
    check_seed(seed)
    source = make_source(plan, seed=seed, period=period)
    if mode == "all":
        report = whole(plan, source, ranks=ranks, grads=backward, together=together, fault=fault)
        layout = plan.layout_of("q")
        places = layout.positions(max(ranks or range(plan.ranks), key=layout.rows)).tolist()  # the longest shard
    elif ranks is not None:
        raise InvalidInput("mode='sample' executes query rows; ranks= is of mode='all'")
    elif backward:
        raise InvalidInput(
            "sampled rows follow the forward alone; for backward=True try mode='all' (numerics.mode=all)"
        )
    else:
        places = chosen_rows(plan, rows, spread, seed) if isinstance(rows, int) else list(rows)
        report = sample(plan, source, rows=places, fault=fault)
    if not places:
        return report
    # Neither end of the sequence where there is another row: a mask that is off by one may be right there.
    row = sorted(places)[len(places) // 2]
    report.mask_keys, report.wrong_mask_keys = count_mask_errors(plan.pattern, source, row, seed)
    return report
