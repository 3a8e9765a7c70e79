"""Plans of the numerics simulator, and their inputs and results as whole tensors."""

from __future__ import annotations

import oracle

import ringattn as ra
from ringattn.pattern import Pattern
from ringattn.plan.plan import Plan
from ringattn.simulator.numerics.source import make_source

PATTERNS = (
    ra.Full(),
    ra.Causal(),
    ra.Window(37, 5),
    ra.Dilated((32, 64, 128), (1, 2, 4), causal=True),
    ra.Dilated((32, 64), (1, 2), mix="group"),
    ra.Causal() & ra.Documents([30, 100, 126]),
    ra.Strided(3),
)
LAYOUTS = ("contiguous", "zigzag", "striped", "striped(4)")
PERIOD = 37


def make(pattern: Pattern, tokens: int = 256, ranks: int = 8, **options: object) -> Plan:
    chosen = {"schedule": "ring", "dtype": "float64", "head_dim": 8, "heads": 4, "kv_heads": 2, "rotate": "kv"}
    return ra.make_plan(pattern, tokens=tokens, ranks=ranks, **{**chosen, **options})  # type: ignore[arg-type]


def case_of(plan: Plan, period: int | None) -> oracle.Case:
    """The inputs of a simulation as whole tensors."""
    source, every = make_source(plan, period=period), range(plan.tokens)
    return oracle.Case(*(source.rows(name, every) for name in ("q", "k", "v", "grad")))  # type: ignore[arg-type]


def truth_of(plan: Plan, period: int | None) -> oracle.Result:
    return oracle.truth_of(case_of(plan, period), plan.pattern)
