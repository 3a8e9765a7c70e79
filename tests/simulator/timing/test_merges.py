"""What the timing model takes to be merged, against what the executor merges."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringattn as ra
from ringattn import Causal, Dilated, Full, Machine, Pattern, Window, make_plan
from ringattn.kernels import sums as rows
from ringattn.simulator.timing.problem import RingProblem, make_ring_problem
from ringattn.simulator.timing.rates import Faults, Rates
from ringattn.simulator.timing.simulation import simulate
from ringattn.simulator.timing.solvers.event_loop import list_events

EVEN = Machine(flops=1e8, latency=1e-4, bandwidth=2e7, merge=1e8)
PATTERNS = (Full(), Causal(), Causal() & Window(63), Window(300, 200), Dilated((256,), (2,), causal=True))


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_rows_that_are_merged(pattern: Pattern, layout: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those of a rank's own block, of which there is no partial yet, in the rows that see a key."""
    tokens, heads = 256 * ranks, 2  # kernels cut no triangle of 256 rows, whose parts they would merge
    plan = make_plan(pattern, tokens=tokens, ranks=ranks, layout=layout, schedule="ring", heads=heads, head_dim=8)
    merged = 0
    inner = rows.merge_

    def counting(
        out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, **options: Any
    ) -> None:
        nonlocal merged
        merged += part_lse.numel()
        inner(out, lse, part, part_lse, **options)

    monkeypatch.setattr(rows, "merge_", counting)
    q, k, v = torch.randn(3, 1, heads, tokens, 8)
    ra.virtual_attention(q, k, v, pattern, ranks=ranks, layout=layout, schedule="ring")
    rates = Rates(plan, EVEN, backward=False)
    solved = list_events(rates, Faults()).solve()
    counted = solved.loads.merge.sum() / rates.merge(1)
    if layout == "zigzag" and pattern == PATTERNS[3] and ranks > 1:  # visits of several calls that share rows
        assert counted < merged < 1.2 * counted
    else:
        assert counted == pytest.approx(merged)
    if isinstance(make_ring_problem(rates, Faults()), RingProblem):
        assert simulate(plan, EVEN, solver="stencil").exposed["merge"] == pytest.approx(
            simulate(plan, EVEN, solver="events").exposed["merge"], abs=1e-15
        )
