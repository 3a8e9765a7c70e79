"""Both passes of bands that hide something: what is counted of all ranks at once, and the times that follow, against
the event oracle and step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from event_oracle import EventOracle
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn import Causal, Machine, Pattern, Plan, Stall, Window, make_plan, simulate
from ringattn.simulator.timing.band.counts import BandCounts
from ringattn.simulator.timing.problem import RingProblem, make_ring_problem
from ringattn.simulator.timing.rates import Faults, Rates
from ringattn.simulator.timing.solvers import stencil
from ringattn.simulator.timing.solvers.base import Traffic
from ringattn.simulator.timing.window import window

CLOSE = 1e-12
EVEN = Machine(flops=1e8, latency=1e-4, bandwidth=2e7, merge=1e8, gamma=0.1)
MACHINES = (
    EVEN,
    replace(EVEN, gamma=None, flops=3e8),
    replace(EVEN, ranks_per_node=2, node_bandwidth=1e9),
    replace(EVEN, ranks_per_node=3, node_latency=2e-5, flops=1e9),
    replace(EVEN, latency=0.0, bandwidth=1e6),
)


def factors(ranks: int) -> st.SearchStrategy[dict[int, float]]:
    return st.dictionaries(st.integers(0, ranks - 1), st.sampled_from([0.5, 1.0, 3.0]), max_size=2)


@st.composite
def plans(draw: st.DrawFn, most: int = 20) -> Plan:
    """Bands of all kinds; both rotations, whatever sends fewer bytes."""
    ranks, chunk = draw(st.integers(2, most)), draw(st.integers(1, 5))
    tokens = 2 * ranks * chunk
    ends = st.integers(0, tokens) | st.integers(0, 4 * chunk)
    pattern: Pattern = draw(
        st.just(Causal()) | st.builds(lambda left: Causal() & Window(left), ends) | st.builds(Window, ends, ends)
    )
    choices: dict[str, list[Any]] = {
        **{"layout": ["contiguous", "zigzag"], "kv_heads": [1, 2, 4], "value_dim": [4, 8]},
        **{"dtype": ["float32", "bfloat16"], "rotate": ["kv", "q"]},
    }
    options: dict[str, Any] = {name: draw(st.sampled_from(each)) for name, each in choices.items()}
    return make_plan(pattern, tokens=tokens, ranks=ranks, schedule="ring", heads=4, head_dim=8, **options)


def counted(plan: Plan, backward: bool) -> BandCounts | None:
    """What counts a pass; None where all see all."""
    found = make_ring_problem(Rates(plan, EVEN, backward), Faults())
    assert isinstance(found, RingProblem)
    return found.counts


@settings(max_examples=50)
@given(plans() | plans(160), st.booleans())
def test_what_changes_is_found_at_few_places(plan: Plan, backward: bool) -> None:
    one = counted(plan, backward)
    if one is None:
        return
    counts = [one.count(one.ranks, np.asarray(step)) for step in range(one.steps)]
    marks = np.zeros((one.steps, plan.ranks), dtype=bool)
    for row, start, stop in zip(*stencil.find_changed_runs(one, np.arange(one.steps)), strict=True):
        marks[row, start:stop] = True
    for step in range(1, one.steps):
        assert (marks[step] == (counts[step] != counts[step - 1]).any(axis=0)).all()


@settings(max_examples=80)
@given(
    plans(12),
    st.sampled_from(MACHINES),
    st.sampled_from([1, 2, 4, 128]),
    st.sampled_from([0, 4, 4096]),
    st.booleans(),
    st.data(),
)
def test_a_sweep_is_the_recurrence(
    plan: Plan, machine: Machine, depth: int, many: int, backward: bool, data: st.DataObject
) -> None:
    """Finish times against the event oracle, with slow ranks, slow links and stalls, for parts of any length; the same
    of the ring's phases, step by step, and of the window that shows them."""
    if counted(plan, backward) is None:
        return
    options = {"slow": data.draw(factors(plan.ranks)), "slow_links": data.draw(factors(plan.ranks))}
    steps = EventOracle(plan, machine, backward).count
    one_stall = st.builds(
        Stall, st.integers(0, plan.ranks - 1), st.integers(0, steps - 1), st.sampled_from([0.01, 1.0])
    )
    stalls = data.draw(st.lists(one_stall, max_size=2))
    oracle = EventOracle(plan, machine, backward, stalls=stalls, **options)
    finish = oracle.run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stencil, "DEPTH", depth)
        patch.setattr(stencil, "MANY", many)
        found = simulate(plan, machine, backward=backward, solver="stencil", stalls=stalls, **options)  # type: ignore[arg-type]
    assert found.finish == pytest.approx(finish, rel=CLOSE, abs=CLOSE)
    every = {"ranks": plan.ranks, "steps": steps}
    seen = window(plan, machine, backward=backward, stalls=stalls, **every, **options)  # type: ignore[arg-type]
    assert seen.begun == pytest.approx(oracle.begun, rel=CLOSE, abs=CLOSE) and seen.messages is not None
    shown = {(m.step, m.source, m.target): (m.begun, m.seconds) for m in seen.messages}
    assert len(shown) == len(seen.messages) == len(oracle.messages)
    for sent in oracle.messages:
        begun = max(oracle.begun[sent.post, [sent.source, sent.target]])
        assert shown[sent.post, sent.source, sent.target] == pytest.approx((begun, sent.seconds), rel=CLOSE)


@settings(max_examples=40)
@given(plans(24), st.sampled_from(MACHINES), st.booleans(), st.data())
def test_all_that_is_told_is_what_the_steps_tell(
    plan: Plan, machine: Machine, backward: bool, data: st.DataObject
) -> None:
    """Seconds, causes and links against solver events, on the plan's own steps; bytes and messages against the plan."""
    options = {"slow": data.draw(factors(plan.ranks)), "slow_links": data.draw(factors(plan.ranks))}
    found = simulate(plan, machine, backward=backward, **options)  # type: ignore[arg-type]
    steps = simulate(plan, machine, backward=backward, solver="events", **options)  # type: ignore[arg-type]
    assert found.finish == pytest.approx(steps.finish, rel=CLOSE)
    assert found.traffic == steps.traffic
    assert found.traffic.total == plan.bytes_sent(backward=backward)
    assert found.traffic.messages == plan.messages(backward=backward)
    assert found.compute == pytest.approx(steps.compute, rel=1e-9)
    assert found.exposed == pytest.approx(steps.exposed, rel=1e-9, abs=1e-9 * steps.seconds)


def test_many_ranks_by_hand() -> None:
    """2,048 causal ranks of one head. Where messages take no time, the last of contiguous ranks visits at every step.
    Where only their latency a does, keys go to its neighbour and come from one owner at every step t but the first
    and the last two, both beside each other where that owner, rank P - t, has a block to pass on: it does from P / 2
    on down.
    """
    ranks, rows = 2048, 64
    plan = make_plan(
        Causal(), tokens=ranks * rows, ranks=ranks, layout="contiguous", schedule="ring", rotate="kv", head_dim=64
    )
    fast = simulate(plan, Machine(1e9, 0.0, 1e15), backward=True)
    visit = 2.5 * 4 * 64 * rows**2 / 1e9
    own = 2.5 * 4 * 64 * rows * (rows + 1) / 2 / 1e9
    assert fast.solver == "stencil" and fast.seconds == pytest.approx(own + (ranks - 1) * visit, rel=1e-9)
    late = simulate(plan, Machine(1e30, 1e-3, 1e30), backward=True)
    assert late.seconds == pytest.approx(1e-3 * (ranks + ranks // 2 - 1), rel=1e-9)
    zigzag = make_plan(
        Causal(), tokens=ranks * rows, ranks=ranks, layout="zigzag", schedule="ring", rotate="q", head_dim=64
    )
    even = simulate(zigzag, Machine(1e9, 0.0, 1e15), backward=True)
    assert even.solver == "stencil" and even.compute == pytest.approx(fast.compute, rel=1e-9)
    # All ranks have about as much to do at every step.
    assert even.seconds == pytest.approx(even.compute, rel=1e-3)


def test_sums_of_bytes_are_exact() -> None:
    """All ranks together may send more than 2^63 bytes."""
    found = Traffic.of(np.array([1 << 61, 0, 1 << 61, 5, 1 << 62, 3]), 9)
    assert found == Traffic((1 << 63) + 8, 1 << 62, 5, 9)


def test_what_is_not_modelled_is_told() -> None:
    sizes_of = {"tokens": 64 * 8, "ranks": 64, "schedule": "ring", "layout": "contiguous", "rotate": "kv"}
    plan = make_plan(Causal(), **sizes_of)  # type: ignore[arg-type]
    shared = simulate(plan, replace(EVEN, ranks_per_node=4, shared_nic=True), backward=True)
    assert shared.solver == "events" and "share a node's NIC" in shared.why
