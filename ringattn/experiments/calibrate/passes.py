"""Whole passes of the ring, measured on real ranks, and what the timing model says of the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...functional import ring_attention
from ...machine.machine import Machine
from ...pattern import parse_pattern
from ...plan.plan import Plan
from ...planner import make_plan
from ...timing.simulation import simulate
from .team import Team


@dataclass(frozen=True)
class Settings:
    """What all measurements of a calibration share. `kernel` is the name that was asked for; repeats are the least."""

    heads: int
    head_dim: int
    dtype: str
    kernel: str
    repeat: int

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclass(frozen=True)
class PassCase:
    """One pass to measure: forward, or backward alone, of the ring schedule."""

    pattern: str
    layout: str
    tokens: int
    backward: bool

    def __str__(self) -> str:
        return f"{self.pattern} {self.layout} {self.tokens} {'backward' if self.backward else 'forward'}"

    def plan(self, ranks: int, settings: Settings) -> Plan:
        return make_plan(
            parse_pattern(self.pattern), tokens=self.tokens, ranks=ranks, layout=self.layout, schedule="ring",
            heads=settings.heads, head_dim=settings.head_dim, dtype=settings.dtype,
        )  # fmt: skip


@dataclass(frozen=True)
class Pass:
    """A measured case: its seconds, run by run, and the modelled seconds."""

    case: PassCase
    seconds: tuple[float, ...]
    modelled: float

    @property
    def ratios(self) -> tuple[float, ...]:
        """Measured over modelled, run by run."""
        return tuple(t / self.modelled for t in self.seconds)


def cases(grid: Sequence[tuple[str, str]], rows: Sequence[int], ranks: int) -> list[PassCase]:
    """Every (pattern, layout) with every number of rows per rank, forward and backward."""
    return [
        PassCase(pattern, layout, n * ranks, backward)
        for n in rows
        for pattern, layout in grid
        for backward in (False, True)
    ]


def measured(
    team: Team, chosen: Sequence[PassCase], machine: Machine, settings: Settings, slow: float = 1.0
) -> list[Pass]:
    """Some cases, measured in rounds over all of them and modelled; `slow` is a factor on modelled visits. Collective.

    Each run is one round, on tensors of its own: where the allocator puts them decides much of a short pass.
    """
    rounds = [[_seconds(team, case, settings) for case in chosen] for _ in range(settings.repeat)]
    return [
        Pass(case, same, modelled(case, machine, team.size, settings, slow))
        for case, same in zip(chosen, zip(*rounds, strict=True), strict=True)
    ]


def _seconds(team: Team, case: PassCase, settings: Settings) -> float:
    """Seconds of a pass after one that does not count, from a barrier to a barrier, so that the slowest rank counts.
    Rank 0's step."""
    plan = case.plan(team.size, settings)
    rows = plan.layout.rows(team.rank)
    shape = (1, settings.heads, rows, settings.head_dim)
    q, k, v, grad = (torch.randn(shape, device=team.device).to(settings.torch_dtype) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(case.backward)

    def attend() -> torch.Tensor:
        found: torch.Tensor = ring_attention(
            q, k, v, plan.pattern, layout=plan.layout, schedule="ring", kernel=settings.kernel, transport=team.transport
        )
        return found

    def timed() -> float:
        out = attend() if case.backward else None
        team.barrier()

        def run() -> None:
            if out is None:
                attend()
            else:
                torch.autograd.grad(out, (q, k, v), grad)
            team.synchronize()
            team.barrier()

        return team.timed(run)

    timed()
    found: float = team.everyone(timed())[0]
    return found


def modelled(case: PassCase, machine: Machine, ranks: int, settings: Settings, slow: float = 1.0) -> float:
    """Seconds that the timing model gives a case; `slow` is a factor on the visits of all ranks."""
    plan = case.plan(ranks, settings)
    return simulate(plan, machine, backward=case.backward, slow=[slow] * ranks).seconds
