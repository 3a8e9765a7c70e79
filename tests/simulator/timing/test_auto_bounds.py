"""What `auto` leaves out by a bound is no faster: bounds against estimates, picks against picks without bounds."""

from __future__ import annotations

import random
from typing import Any

import pytest

import ringattn as ra
from ringattn import Causal, Documents, Pattern, Window, make_plan
from ringattn.call import planner
from ringattn.machine.presets import MACHINES
from ringattn.simulator.timing import auto

TOKENS = 1 << 13


def draw_pattern(source: random.Random, tokens: int) -> Pattern:
    """A pattern of bands, documents, both, or neither."""
    borders = [0, *sorted(source.choices(range(tokens + 1), k=source.randrange(12))), tokens]
    documents, width = Documents(cu_seqlens=borders), source.randrange(tokens)
    options = (
        Causal() & documents,
        Causal() & Window(width) & documents,
        Window(width, width // 2) & documents,
        Window(width, 3),
        Causal(),
        Causal() | Window(3, 3),
        ra.mix(Causal(), Window(width)),
    )
    return source.choice(options)


@pytest.mark.parametrize("seed", range(7))
def test_what_a_bound_leaves_out_is_no_faster(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(seed)
    pattern, machine = draw_pattern(source, TOKENS), source.choice(("cpu", "cuda", "h100_nvlink_ib", "a100_pcie"))
    options: dict[str, Any] = {
        "tokens": TOKENS, "ranks": source.choice((16, 32)), "layout": source.choice(("contiguous", "zigzag")),
        "heads": 16, "kv_heads": source.choice((2, 16)), "dtype": "bfloat16",
        "machine": MACHINES[machine],
    }  # fmt: skip
    bounds: dict[str, float] = {}
    bound = auto._Comparison._bound

    def note(self: auto._Comparison, plan: ra.Plan) -> float:
        bounds[plan.schedule] = bound(self, plan)
        return bounds[plan.schedule]

    with monkeypatch.context() as patch:
        patch.setattr(auto._Comparison, "_bound", note)
        chosen = make_plan(pattern, **options).choice
    with monkeypatch.context() as patch:
        patch.setattr(auto._Comparison, "_bound", lambda *_: 0.0)
        planner._plans.clear()
        every = make_plan(pattern, **options).choice
    assert chosen is not None and every is not None and len(bounds) > 3
    seconds = {c.schedule: c.seconds for c in every.candidates if c.prediction}
    for name in bounds.keys() & seconds:
        assert bounds[name] <= seconds[name] * (1 + 1e-9), (pattern, options, name)
    assert [c.schedule for c in chosen.candidates] == [c.schedule for c in every.candidates]
    assert all(c.prediction or c.left_out for c in chosen.candidates)
    assert seconds[chosen.picked.schedule] <= every.picked.seconds * auto.EQUAL
