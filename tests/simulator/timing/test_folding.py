"""Folded plans: periods of masks against dense masks, and the times of many ranks by few against those of all of
them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import ringattn as ra
from ringattn import Causal, Dilated, Full, Machine, Pattern, Plan, Strided, Unsupported, Window, make_plan, simulate
from ringattn.simulator.timing.rates import Faults, Rates
from ringattn.simulator.timing.solvers import events
from ringattn.simulator.timing.solvers.base import Solved
from ringattn.simulator.timing.solvers.event_loop import list_events

CLOSE = 1e-12
EVEN = Machine(flops=1e8, latency=1e-4, bandwidth=2e7, merge=1e8, gamma=0.1)
MACHINES = (
    EVEN,
    replace(EVEN, flops=1e6),
    replace(EVEN, ranks_per_node=2, node_bandwidth=1e9),
    replace(EVEN, ranks_per_node=4, node_latency=0),
)
SHARED = tuple(replace(EVEN, ranks_per_node=n, shared_nic=True, node_bandwidth=1e9) for n in (2, 4))
LOCAL: tuple[Pattern, ...] = (
    Causal() & Window(9),
    Window(5, 7),
    Dilated((8, 16), (1, 2)),
    Dilated((8, 12), (1, 3), causal=True, mix="group"),
    Dilated((8,), (2,), mix="union") | Window(3),
    ra.mix(Dilated((12,), (2,)), Causal() & Window(6)),
    ra.local_window(4, blocks=1),
    ra.dilated_blocks(4, offsets=(1, 3)),
    ra.hierarchical(2, levels=((1, 1), (2, 2))),
    Strided(3) & Window(10, 4),
)
FAR = (Full(), Causal(), Strided(3), ra.strided_blocks(4, stride=3), ra.hierarchical(2, levels=((1, 1), (6, -1))))


@pytest.mark.parametrize("pattern", LOCAL + FAR, ids=repr)
def test_periods_are_those_of_dense_masks(pattern: Pattern) -> None:
    """Moved along the diagonal by the period it is the same mask, and a shorter sequence has a part of it."""
    repeats = pattern.period
    assert repeats is not None
    for tokens in (2 * repeats + 5, 60):
        mask = pattern.mask(tokens, heads=4)
        assert (mask[:, repeats:, repeats:] == mask[:, :-repeats, :-repeats]).all()
        longer = pattern.mask(tokens + 7, heads=4)
        assert (longer[:, :tokens, :tokens] == mask).all()


ALONE = (
    *(ra.Documents([5, 7]), ra.Sinks(2), Causal() & ra.Sinks(2), ra.mix(Causal(), ra.Sinks(2))),
    *(ra.BlockSparse(4, np.eye(3, dtype=bool)), ra.global_local(4, globals=1, blocks=1)),
    *(ra.local_window(4, density=0.5), ra.dilated_blocks(4, density=0.5)),
)


@pytest.mark.parametrize("pattern", ALONE, ids=repr)
def test_masks_that_do_not_repeat_have_no_period(pattern: Pattern) -> None:
    assert pattern.period is None
    if not isinstance(pattern, ra.BlockSparse):
        return
    plan = make_plan(pattern, tokens=12, ranks=12, layout="contiguous", schedule="ring")
    assert events.find_fold(Rates(plan, EVEN, False)) == "the mask does not repeat at all lengths"


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ranks, rows = draw(st.integers(40, 80)), draw(st.sampled_from([1, 2, 4, 5, 8]))
    return make_plan(
        draw(st.sampled_from(LOCAL)), tokens=rows * ranks, ranks=ranks, layout="contiguous", head_dim=8, kv_heads=2,
        schedule=draw(st.sampled_from(["ring", "direct"])), heads=draw(st.sampled_from([2, 4])),
        rotate=draw(st.sampled_from(["auto", "kv", "q"])),
    )  # fmt: skip


@settings(max_examples=12)
@given(plans(), st.sampled_from((*MACHINES, *SHARED)), st.booleans())
def test_few_ranks_have_the_times_of_many(plan: Plan, machine: Machine, backward: bool) -> None:
    rates = Rates(plan, machine, backward)
    found = events.simulate_folded(rates, "")
    assume(isinstance(found, Solved))
    assert isinstance(found, Solved)
    whole = list_events(rates, Faults()).solve()
    assert found.finish == pytest.approx(whole.finish, rel=CLOSE)
    assert found.seconds == pytest.approx(whole.seconds, rel=CLOSE)
    assert found.traffic == whole.traffic and found.peers == pytest.approx(whole.peers, rel=CLOSE)
    for name in ("compute", "merge", "interference", "stalls"):
        assert getattr(found.loads, name) == pytest.approx(getattr(whole.loads, name), rel=1e-9, abs=1e-15)


def test_too_few_ranks_around_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where delays from the ends reach farther than is taken, the two periods between them differ."""
    plan = make_plan(Window(9, 2), tokens=240, ranks=120, layout="contiguous", schedule="ring", heads=2, head_dim=8)
    rates = Rates(plan, MACHINES[0], False)
    assert isinstance(events.simulate_folded(rates, ""), Solved)
    monkeypatch.setattr(events, "_find_dependence", lambda rates, size: 2)
    with pytest.raises(AssertionError):
        events.simulate_folded(rates, "")


SIZES = {"layout": "contiguous", "schedule": "ring", "heads": 8, "kv_heads": 2, "dtype": "bfloat16"}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("pattern", [Causal() & Window(9000), Dilated(), ra.local_window(128, blocks=8)], ids=repr)
def test_a_billion_tokens_by_few(pattern: Pattern, backward: bool) -> None:
    """As long as on 32 ranks, where all steps are simulated."""
    machine = Machine(5e14, 1e-5, 5e10, ranks_per_node=4, node_bandwidth=4e11, gamma=0.1, merge=1e12)
    many, few = (make_plan(pattern, tokens=n << 12, ranks=n, **SIZES) for n in (1 << 18, 32))  # type: ignore[arg-type]
    found = simulate(many, machine, backward=backward)
    whole = simulate(few, machine, backward=backward, solver="events")
    assert found.solver == ("stencil" if isinstance(pattern, type(Causal() & Full())) else "events, folded")
    assert found.seconds == pytest.approx(whole.seconds, rel=CLOSE)
    assert len(found.finish) == 1 << 18
    ends = [*range(8), *range(-8, 0)]
    assert found.finish[ends] == pytest.approx(whole.finish[ends], rel=CLOSE)


def test_what_is_not_folded() -> None:
    plan = make_plan(ra.local_window(128, blocks=8), tokens=1 << 25, ranks=1 << 13, **SIZES)  # type: ignore[arg-type]
    assert simulate(plan, EVEN).solver == "events, folded"
    for machine, options, words in (
        (EVEN, {"slow": {1: 2.0}}, "slow ranks and stalls rule out"),
        (replace(EVEN, ranks_per_node=1 << 9), {}, "the mask and the nodes repeat every 512 ranks, and at most 32"),
    ):
        with pytest.raises(Unsupported, match=f"8,192 ranks are more than the 4,096 .*{words}"):
            simulate(plan, machine, **options)  # type: ignore[arg-type]
    striped = make_plan(plan.pattern, tokens=plan.tokens, ranks=plan.ranks, **{**SIZES, "layout": "striped(64)"})  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="the layout is not contiguous"):
        simulate(striped, EVEN)
