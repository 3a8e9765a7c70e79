"""The window of a pass that timelines show, against a plain recurrence."""

from __future__ import annotations

import numpy as np
import pytest
from ring_oracle import Step, starts

import ringattn as ra
from ringattn import InvalidInput, Machine, Unsupported
from ringattn.simulator.timing.window import window

MACHINE = Machine(flops=1e8, latency=1e-4, bandwidth=2e7, merge=1e8, gamma=0.1)


@pytest.mark.parametrize(("slow", "solver"), [({2: 3.0}, "stencil"), ({2: 3.0}, "events")])
def test_windows_are_the_plain_recurrence(slow: dict[int, float], solver: str) -> None:
    """Five ranks, all pairs: the seconds of every event, from formulas written out here."""
    ranks, rows, heads, dim = 5, 16, 2, 8
    schedule = "ring" if solver == "stencil" else "double_ring(1)"
    plan = ra.make_plan(ra.Full(), tokens=ranks * rows, ranks=ranks, heads=heads, head_dim=dim, schedule=schedule)
    found = window(plan, MACHINE, ranks=range(1, 5), steps=range(1, 4), slow=slow)
    assert (found.messages is None) == (solver == "events")
    visit = rows * rows * heads * 4 * dim / MACHINE.flops
    merging = 3 * rows * heads * (dim + 1) * 4 / 1e8
    message = 1e-4 + 2 * rows * heads * dim * 4 / MACHINE.bandwidth

    def times(factors: dict[int, float]) -> tuple[list[list[float]], list[Step]]:
        steps = []
        for k in range(ranks):
            moving = k < ranks - 1
            busy = []
            for factor in (factors.get(r, 1.0) for r in range(ranks)):
                busy.append(factor * (visit + (k > 0) * merging) + 0.1 * moving * min(factor * visit, message))
            steps.append(Step(busy, {1: [(message, message - 1e-4)] * ranks} if moving else {}))
        return starts(ranks, steps), steps

    expected, steps = times(slow)
    assert found.begun == pytest.approx(np.array([row[1:] for row in expected[1:5]]), rel=1e-12)
    for k in range(1, 4):
        for rank in range(1, 5):
            assert found.busy[k - 1, rank - 1] == pytest.approx(steps[k].busy[rank])
            if solver == "stencil" and k < 4:
                assert found.messages is not None
                (sent,) = [one for one in found.messages if (one.source, one.step) == (rank, k)]
                assert sent.target == (rank + 1) % ranks and sent.seconds == pytest.approx(message)
                assert sent.begun == pytest.approx(max(expected[k][rank], expected[k][sent.target]))


def test_windows_that_nobody_knows_are_refused() -> None:
    plan = ra.make_plan(ra.Full(), tokens=64, ranks=4, schedule="ring")
    for ranks, steps in ((range(0, 5), range(2)), (range(2), range(7, 9)), (range(0), range(2))):
        with pytest.raises(InvalidInput, match="the pass has"):
            window(plan, MACHINE, ranks=ranks, steps=steps)
    many = ra.make_plan(ra.Causal(), tokens=1 << 30, ranks=1 << 18, heads=8, layout="zigzag", schedule="ring")
    with pytest.raises(Unsupported):
        window(many, Machine(1e12, 1e-6, 1e12), ranks=range(4), steps=range(1 << 14, (1 << 14) + 4))
