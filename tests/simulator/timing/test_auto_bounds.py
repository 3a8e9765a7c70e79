"""What `auto` leaves out by a bound is no faster: bounds against estimates, picks against picks without bounds."""

from __future__ import annotations

import random
from typing import Any

import pytest

import ringattn as ra
from ringattn import Causal, Documents, Pattern, Window, make_plan, planner
from ringattn.layout.regular import make_layout
from ringattn.machine.presets import MACHINES
from ringattn.plan.schedules import split_ulysses
from ringattn.simulator.timing import auto
from ringattn.simulator.timing.pair_counts import count_pairs

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


def test_pairs_of_ranks_are_those_of_tiles() -> None:
    source, known = random.Random(3), 0
    for _ in range(60):
        tokens, ranks = source.choice((1, 7, 64, 200)), source.choice((1, 2, 3, 8, 16))
        pattern, name = draw_pattern(source, tokens), source.choice(("contiguous", "zigzag", "balanced(4)", "striped"))
        layout = make_layout(name, tokens=tokens, ranks=ranks, pattern=pattern)
        counted = count_pairs(pattern, layout)
        wanted = [sum(pattern.count(q, range(tokens)) for q in layout.shard(rank)) for rank in range(ranks)]
        assert counted in (None, wanted), (pattern, layout)
        known += counted is not None
    assert known > 20


@pytest.mark.parametrize("seed", range(7))
def test_what_a_bound_leaves_out_is_no_faster(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(seed)
    pattern, machine = draw_pattern(source, TOKENS), source.choice(("cpu", "cuda", "h100_nvlink_ib", "a100_pcie"))
    options: dict[str, Any] = {
        "tokens": TOKENS, "ranks": source.choice((16, 32)), "layout": source.choice(("contiguous", "zigzag")),
        "heads": 16, "kv_heads": source.choice((2, 16)), "dtype": "bfloat16",
        "machine": MACHINES[machine],
    }  # fmt: skip
    bounds: dict[int, float] = {}
    bound_groups = auto._Comparison._bound_groups

    def note(self: auto._Comparison, plan: ra.Plan, size: int) -> float:
        bounds[size] = bound_groups(self, plan, size)
        return bounds[size]

    with monkeypatch.context() as patch:
        patch.setattr(auto._Comparison, "_bound_groups", note)
        chosen = make_plan(pattern, **options).choice
    with monkeypatch.context() as patch:
        patch.setattr(auto._Comparison, "_bound", lambda *_: 0.0)
        planner._plans.clear()
        every = make_plan(pattern, **options).choice
    assert chosen is not None and every is not None
    seconds = {c.schedule: c.seconds for c in every.candidates if c.prediction}
    for name, found in seconds.items():
        assert bounds[split_ulysses(name)[0]] <= found * (1 + 1e-9), (pattern, options, name)
    assert [c.schedule for c in chosen.candidates] == [c.schedule for c in every.candidates]
    assert all(c.prediction or c.left_out for c in chosen.candidates)
    assert seconds[chosen.picked.schedule] <= every.picked.seconds * auto.EQUAL
