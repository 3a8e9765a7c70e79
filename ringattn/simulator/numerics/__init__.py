"""The numerics simulator: executes a plan's messages, kernels and merges on virtual ranks, with generated inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import InvalidInput, Unsupported
from ...plan.plan import Plan
from ...text import did_you_mean
from .checkpoint import Checkpoint
from .oracle import count_mask_errors
from .result import MODES as MODES
from .result import NumericsReport
from .sampled import chosen_rows, sample
from .source import PERIOD, check_seed, make_source
from .whole import TOGETHER, whole


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
    state: Path | None = None,
) -> NumericsReport:
    """Execute a plan on virtual ranks with generated inputs, check the results, and return a report.

    An independent, exact computation (the oracle) checks the results, and a ledger checks which pairs were computed.

    mode="sample" executes, in fp64, every message of the ranks that hold the query positions `rows`; if `rows` is a
    number, that many positions are chosen on at most `spread` ranks. Memory grows neither with tokens nor with ranks.
    mode="all" executes all rows of `ranks` (default: all ranks), about `together` ranks at a time, in fp64 or fp32.
    `backward` also runs and checks the backward. With `backward`, or with pass-Q in the forward, no rank in `ranks` may
    exchange messages with a rank outside. Query and key positions come from the plan's two layouts.

    K and V repeat with `period`, a prime; with None they do not repeat, and the oracle reads every key of a compared
    row. For one row, the pattern's tiles are also compared with its `visible`, which is written independently. `seed`
    determines all inputs. Finished work is kept in the file `state`; an execution with the same arguments continues
    from it. Raises InvalidInput or Unsupported before executing anything.
    """
    if mode not in MODES:
        raise InvalidInput(f"mode={mode!r}: {did_you_mean(mode, MODES)}expected {' or '.join(MODES)}")
    check_seed(seed)
    if plan.reproducible is not None:
        raise Unsupported(f"reproducible={plan.reproducible}: the ledger counts works, not leaves; leave it out")
    source = make_source(plan, seed=seed, period=period)
    inputs = {"plan": plan.hash, "mode": mode, "seed": seed, "period": period}
    if mode == "all":
        inputs |= {"ranks": None if ranks is None else [*ranks], "backward": backward, "together": together}
        kept = Checkpoint(state, inputs)
        report = whole(plan, source, ranks=ranks, grads=backward, together=together, checkpoint=kept)
        layout = plan.layout_of("q")
        places = layout.positions(max(ranks or range(plan.ranks), key=layout.rows)).tolist()  # the longest shard
    elif ranks is not None:
        raise InvalidInput("ranks= needs mode='all'; mode='sample' takes rows=")
    elif backward:
        raise InvalidInput("mode='sample' executes only the forward; for backward=True try mode='all'")
    else:
        places = chosen_rows(plan, rows, spread, seed) if isinstance(rows, int) else list(rows)
        kept = Checkpoint(state, inputs | {"rows": places})
        report = sample(plan, source, rows=places, checkpoint=kept)
    if not places:
        return report
    # Check a row in the middle: at the ends of the sequence, a mask that is off by one may still be right.
    row = sorted(places)[len(places) // 2]
    report.mask_keys, report.wrong_mask_keys = count_mask_errors(plan.pattern, source, row, seed)
    return report
