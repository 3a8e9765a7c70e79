"""The stencil computes only ranks whose gains change: the times are those of computing every rank at every step."""

from __future__ import annotations

import numpy as np
import pytest

import ringattn as ra
from ringattn.pattern import Pattern
from ringattn.simulator.timing.solvers import delay, stencil

MACHINES = ("h100_nvlink_ib", "h100_ethernet", "cpu")


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("pattern", [ra.Causal(), ra.Causal() & ra.Window(5000), ra.Window(3000, 7000)], ids=repr)
def test_windows_have_the_times_of_all_ranks(pattern: Pattern, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": "bfloat16", "schedule": "ring"}
    plan = ra.make_plan(pattern, tokens=200 * 256, ranks=200, layout=layout, **sizes)  # type: ignore[arg-type]
    windows = [0]
    run = delay.DelayState._run

    def counted(self: delay.DelayState, changes: object, ranks: np.ndarray, steps: range, gains: np.ndarray) -> None:
        windows[0] += len(ranks) < plan.ranks
        run(self, changes, ranks, steps, gains)  # type: ignore[arg-type]

    monkeypatch.setattr(delay.DelayState, "_run", counted)
    for module in (delay, stencil):
        monkeypatch.setattr(module, "DEPTH", 4)
    compared = 0
    for machine, backward in ((machine, backward) for machine in MACHINES for backward in (False, True)):
        found = []
        for fewest in (2, 10**9):
            monkeypatch.setattr(delay, "FEWEST", fewest)
            try:
                found.append(ra.simulate(plan, machine, backward=backward, solver="stencil"))
            except ra.Unsupported:  # a shared card
                break
        if len(found) == 2:
            compared += 1
            some, every = found
            assert np.abs(some.finish - every.finish).max() <= 1e-13 * every.seconds
            assert some.exposed == pytest.approx(every.exposed, rel=1e-12, abs=1e-12 * every.seconds)
    assert compared >= 4 and windows[0] > 0
