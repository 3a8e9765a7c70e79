"""Whole passes of the ring, measured on real ranks, and the modelled times of the same plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from ...functional import ring_attention
from ...machine.machine import Machine
from ...pattern import parse_pattern
from ...plan.plan import Plan
from ...planner import make_plan
from ..timing.simulation import simulate
from .measuring_ranks import MeasuringRanks, Settings

#: (seconds of a run by the clock, factor that corrects them for the pace of the machine), run by run.
Runs = tuple[tuple[float, float], ...]
#: (pattern, layout) of the passes whose ratios a calibration keeps: ranks equally busy, equally busy with half the
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

    def __str__(self) -> str:
        return f"{self.pattern} {self.layout} {self.tokens} {'backward' if self.backward else 'forward'}"

    def plan(self, ranks: int, settings: Settings) -> Plan:
        """The plan of the pass on so many ranks."""
        return make_plan(
            parse_pattern(self.pattern),
            tokens=self.tokens,
            ranks=ranks,
            layout=self.layout,
            schedule="ring",
            heads=settings.heads,
            head_dim=settings.head_dim,
            dtype=settings.dtype,
        )


@dataclass(frozen=True)
class Pass:
    """A measured case: the seconds of each run, corrected for the pace of the machine, and the modelled seconds.

    `raw` are the seconds of each run as the clock told them; () where they are the same.
    """

    case: PassCase
    seconds: tuple[float, ...]
    modelled: float
    raw: tuple[float, ...] = ()

    @property
    def ratios(self) -> tuple[float, ...]:
        """Measured over modelled seconds of each run."""
        return tuple(t / self.modelled for t in self.seconds)

    @property
    def record(self) -> dict[str, Any]:
        """The pass as plain data."""
        seconds = {"seconds": list(self.seconds), "raw": list(self.raw or self.seconds)}
        return {**asdict(self.case), **seconds, "modelled": self.modelled}


def list_cases(grid: Sequence[tuple[str, str]], rows: Sequence[int], ranks: int) -> list[PassCase]:
    """Every (pattern, layout) of the grid with every number of rows per rank, forward and backward."""
    return [
        PassCase(pattern, layout, n * ranks, backward)
        for n in rows
        for pattern, layout in grid
        for backward in (False, True)
    ]


def sizes_between(rows: Sequence[int]) -> list[int]:
    """Rounded geometric means of neighbouring sizes, except of the two smallest, where a call is all overhead.

    Passes of these sizes have the error of interpolating between kernel times in their ratios.
    """
    means = [round((a * b) ** 0.5) for a, b in pairwise(rows)]
    return means[1:] or means


def time_passes(ranks: MeasuringRanks, cases: Sequence[PassCase], settings: Settings, *, warm_up: bool) -> Runs:
    """One run of each case, after another one of the same case with `warm_up`. Collective.

    Each run has tensors of its own: where the allocator puts them affects a short pass strongly.
    """
    return tuple(_time_pass(ranks, case, settings, warm_up) for case in cases)


def model_passes(
    cases: Sequence[PassCase], runs_of_cases: Sequence[Runs], ranks: int, machine: Machine, settings: Settings
) -> list[Pass]:
    """The measured cases, with their modelled seconds on `machine`, which is the node they ran on."""
    passes = []
    for case, runs in zip(cases, runs_of_cases, strict=True):
        raw, factors = zip(*runs, strict=True)
        corrected = tuple(seconds * factor for seconds, factor in runs)
        modelled = simulate(case.plan(ranks, settings), machine, backward=case.backward)
        passes.append(Pass(case, corrected, modelled.seconds, raw if set(factors) != {1.0} else ()))
    return passes


def _time_pass(ranks: MeasuringRanks, case: PassCase, settings: Settings, warm_up: bool) -> tuple[float, float]:
    """Seconds of a pass, of the slowest rank by its own clock; all ranks begin after a barrier.

    Also the factor on these seconds that corrects them for the pace of the machine.
    """
    plan = case.plan(ranks.size, settings)
    shape = (1, settings.heads, plan.layout.rows(ranks.rank), settings.head_dim)
    q, k, v, grad = (torch.randn(shape, device=ranks.device).to(settings.torch_dtype) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(case.backward)

    def attend() -> torch.Tensor:
        kernel, transport = settings.kernel, ranks.transport
        return ring_attention(
            q, k, v, plan.pattern, layout=plan.layout, schedule="ring", kernel=kernel, transport=transport
        )

    def time_once() -> tuple[float, float]:
        out = attend() if case.backward else None

        def run() -> None:
            if out is None:
                attend()
            else:
                torch.autograd.grad(out, (q, k, v), grad)

        return ranks.correction(lambda: ranks.time_call(run))

    if warm_up:
        time_once()
    seconds, factor = time_once()
    return max(ranks.gather(seconds)), factor
