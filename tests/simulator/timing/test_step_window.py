"""The window of a pass that heat maps and traces show, against a plain recurrence."""

from __future__ import annotations

import numpy as np
import pytest
from ring_oracle import Step, starts

import ringattn as ra
from ringattn import InvalidInput, Machine, Unsupported
from ringattn.cli.study import trace
from ringattn.simulator.timing.window import window

MACHINE = Machine(flops=1e8, latency=1e-4, bandwidth=2e7, merge=1e8, gamma=0.1)


@pytest.mark.parametrize(("slow", "solver"), [({2: 3.0}, "stencil"), ({2: 3.0}, "events")])
def test_windows_and_traces_are_the_plain_recurrence(slow: dict[int, float], solver: str) -> None:
    """Five ranks, all pairs: the seconds of every event, from formulas written out here."""
    ranks, rows, heads, dim = 5, 16, 2, 8
    schedule = "ring" if solver == "stencil" else "double_ring(1)"
    plan = ra.make_plan(ra.Full(), tokens=ranks * rows, ranks=ranks, heads=heads, head_dim=dim, schedule=schedule)
    found = window(plan, MACHINE, ranks=range(1, 5), steps=range(1, 4), slow=slow)
    assert found.solver == solver
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
    plain, _ = times({})
    assert found.begun == pytest.approx(np.array([row[1:] for row in expected[1:5]]), rel=1e-12)
    assert found.late == pytest.approx(
        np.array([row[1:] for row in expected[1:5]]) - [r[1:] for r in plain[1:5]], abs=1e-12
    )
    made = trace.make_events(found, "forward")
    done = [event for event in made if event["ph"] == "X"]
    assert all(event.keys() >= {"ph", "ts", "dur", "pid", "tid", "name"} for event in made)
    for k in range(1, 4):
        for rank in range(1, 5):
            (busy,) = [e for e in done if (e["name"], e["tid"], e["pid"], e["args"]["step"]) == ("busy", rank, 0, k)]
            assert (busy["ts"], busy["dur"]) == pytest.approx((1e6 * expected[k][rank], 1e6 * steps[k].busy[rank]))
            end = expected[k][rank] + steps[k].busy[rank]
            begun = max(expected[k][(rank + d) % ranks] for d in (-1, 0, 1)) if k < 4 else 0.0
            for name, gap in (
                ("wait for peers", max(begun - end, 0.0)),
                ("wait for messages", expected[k + 1][rank] - max(begun, end)),
            ):
                waits = [e for e in done if (e["name"], e["tid"], e["args"]["step"]) == (name, rank, k)]
                assert sum(e["dur"] for e in waits) == pytest.approx(1e6 * gap, abs=1e-6)
            if solver == "stencil" and k < 4:
                (sent,) = [e for e in done if e["pid"] == 1 and (e["tid"], e["args"]["step"]) == (rank, k)]
                target = (rank + 1) % ranks
                assert sent["name"] == f"to rank {target}"
                assert sent["ts"] == pytest.approx(1e6 * max(expected[k][rank], expected[k][target]))
                assert sent["dur"] == pytest.approx(1e6 * message)


def test_windows_that_nobody_knows_are_refused() -> None:
    plan = ra.make_plan(ra.Full(), tokens=64, ranks=4, schedule="ring")
    for ranks, steps in ((range(0, 5), range(2)), (range(2), range(7, 9)), (range(0), range(2))):
        with pytest.raises(InvalidInput, match="the pass has"):
            window(plan, MACHINE, ranks=ranks, steps=steps)
    many = ra.make_plan(ra.Causal(), tokens=1 << 30, ranks=1 << 18, heads=8, layout="zigzag", schedule="ring")
    with pytest.raises(Unsupported):
        window(many, Machine(1e12, 1e-6, 1e12), ranks=range(4), steps=range(1 << 14, (1 << 14) + 4))
