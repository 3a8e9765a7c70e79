"""One entry to the numerics of a plan over virtual ranks: some rows exactly, or all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidInput, did_you_mean
from ..plan.plan import Plan
from ..timing.options import check_seed
from .mutate import Mutation
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
    kernel: str = "auto",
    scale: float | None = None,
    mutation: Mutation | None = None,
) -> NumericsReport:
    """Execute a plan's virtual ranks on inputs that are made on demand, and compare them with oracles and a ledger.

    mode="sample": `rows` query positions, or so many chosen ones, on at most `spread` ranks, over the whole sequence:
    every hop of their ranks is executed for these rows, in fp64. Memory does not grow with tokens or ranks. With
    `backward` once more for dQ of these rows and dK, dV of some keys, of a loss that depends on these rows only.
    mode="all": all rows of `ranks` (default: of all) from end to end, about `together` ranks at a time, and with
    `backward` their gradients, too; the ranks must then see each other only. fp64 or fp32.

    `period` is that of K and V (a prime; None: no repetition, whose oracle costs the keys of every compared row). `seed`
    fixes all inputs. `mutation` puts a fault in. Raises InvalidInput or Unsupported before anything is executed.
    """
    if mode not in MODES:
        raise InvalidInput(f"mode={mode!r}: {did_you_mean(mode, MODES)}expected {' or '.join(MODES)}")
    check_seed(seed)
    source = make_source(plan, seed=seed, period=period)
    if mode == "all":
        return whole(
            plan, source, ranks=ranks, grads=backward, kernel=kernel, scale=scale, together=together, mutation=mutation
        )
    if ranks is not None:
        raise InvalidInput("mode='sample' executes query rows; ranks= is of mode='all'")
    places = chosen_rows(plan, rows, spread, seed) if isinstance(rows, int) else list(rows)
    return sample(plan, source, rows=places, kernel=kernel, scale=scale, grads=backward, seed=seed, mutation=mutation)
