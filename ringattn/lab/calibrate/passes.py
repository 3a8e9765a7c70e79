"""Whole passes of the ring measured on real ranks, and the modelled times of the same plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ...call.functional import ring_attention
from ...call.planner import make_plan
from ...pattern import parse_pattern
from ...plan.plan import Plan
from .measuring_ranks import MeasuringRanks, Settings

#: Seconds of each run, corrected for the pace of the machine.
Runs = tuple[float, ...]
#: (pattern, layout) of the passes whose ratios a calibration stores: ranks equally busy, equally busy with half the
#: work, busy at different times, and with bands. The model errs differently for each, and intervals must hold for all.
GRID = (
    ("Full()", "contiguous"),
    ("Causal()", "zigzag"),
    ("Causal()", "contiguous"),
    ("Causal() & Window(255)", "contiguous"),
)


@dataclass(frozen=True)
class PassCase:
    """One pass of the schedule "ring" to measure: the forward, or the backward alone."""

    pattern: str
    layout: str
    tokens: int
    backward: bool

    def plan(self, ranks: int, settings: Settings) -> Plan:
        """The plan of the pass on `ranks` ranks."""
        sizes: dict[str, Any] = {name: getattr(settings, name) for name in ("heads", "head_dim", "dtype")}
        pattern = parse_pattern(self.pattern)
        return make_plan(pattern, tokens=self.tokens, ranks=ranks, layout=self.layout, schedule="ring", **sizes)


@dataclass(frozen=True)
class Pass:
    """A measured case: the seconds of each run, and the modelled seconds."""

    case: PassCase
    seconds: Runs
    modelled: float

    @property
    def ratios(self) -> tuple[float, ...]:
        """Measured over modelled seconds of each run."""
        return tuple(t / self.modelled for t in self.seconds)

    @property
    def record(self) -> dict[str, Any]:
        """The pass as plain data."""
        return {**asdict(self.case), "seconds": list(self.seconds), "modelled": self.modelled}


def list_cases(rows: Sequence[int], ranks: int) -> list[PassCase]:
    """The passes to measure: every (pattern, layout) of GRID, forward and backward, at several sizes.

    The sizes are the two smallest of `rows`, and those of `sizes_between`.
    """
    return [
        PassCase(pattern, layout, n * ranks, backward)
        for n in (*rows[:2], *sizes_between(rows))
        for pattern, layout in GRID
        for backward in (False, True)
    ]


def sizes_between(rows: Sequence[int]) -> list[int]:
    """Sizes between the calibrated ones: rounded geometric means of neighbours, except of the two smallest sizes.

    At the smallest sizes, a call is only overhead. Passes of the returned sizes also test the interpolation between
    measured kernel times.
    """
    means = [round((a * b) ** 0.5) for a, b in pairwise(rows)]
    return means[1:] or means


def time_pass(ranks: MeasuringRanks, case: PassCase, settings: Settings, *, warm_up: bool) -> float:
    """Seconds of a pass on the slowest rank, scaled to the usual speed of the machine. Collective.

    Ranks begin at a barrier, and each uses its own clock. With `warm_up`, an untimed run on the same tensors comes
    first, because their place in memory strongly affects a short pass.
    """
    plan = case.plan(ranks.size, settings)
    shape = (1, settings.heads, plan.layout.rows(ranks.rank), settings.head_dim)
    q, k, v, grad = (torch.randn(shape, device=ranks.device).to(settings.torch_dtype) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(case.backward)

    def attend() -> torch.Tensor:
        how: Any = {"schedule": "ring", "kernel": settings.kernel, "transport": ranks.transport}
        return ring_attention(q, k, v, plan.pattern, layout=plan.layout, **how)

    def time_once() -> float:
        run: Callable[[], Any] = partial(torch.autograd.grad, attend(), (q, k, v), grad) if case.backward else attend
        seconds, factor = ranks.correction(lambda: ranks.time_call(run))
        return factor * max(ranks.gather(seconds))

    if warm_up:
        time_once()
    return time_once()
