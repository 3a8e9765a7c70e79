"""Bands whose numbers change from step to step: what is counted anew, against counts of every rank at every step; and
the times, loads and traffic that follow, against plain Python."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ring_oracle import truth

from ringattn import Causal, Machine, Pattern, Stall, Window, make_plan, simulate
from ringattn.plan.schedules.relay import Way
from ringattn.simulator.timing.band.band import find_band
from ringattn.simulator.timing.band.counts import BandCounts
from ringattn.simulator.timing.rates import Faults, Rates
from ringattn.simulator.timing.resources import survey
from ringattn.simulator.timing.solvers import delay as delays
from ringattn.simulator.timing.solvers import incremental as sweeps

CLOSE = 1e-12
EVEN = Machine(flops=1e8, latency=1e-4, bandwidth=2e7, merge=1e8, gamma=0.1)
MACHINES = (
    EVEN,
    replace(EVEN, gamma=None, flops=3e8),
    replace(EVEN, ranks_per_node=2, node_bandwidth=1e9),
    replace(EVEN, ranks_per_node=3),
)


@st.composite
def counted(draw: st.DrawFn) -> BandCounts:
    """Bands on up to 20 ranks, with ways that need not be those that a plan would choose, and faults."""
    ranks, chunk = draw(st.integers(1, 20)), draw(st.integers(1, 5))
    tokens = 2 * ranks * chunk
    ends = st.integers(0, 2 * tokens)
    window = st.builds(Window, ends, ends)
    pattern: Pattern = draw(window | st.builds(lambda left: Causal() & Window(left), ends) | st.just(Causal()))
    layout = draw(st.sampled_from(["contiguous", "zigzag"]))
    plan = make_plan(pattern, tokens=tokens, ranks=ranks, layout=layout, schedule="ring", heads=2, head_dim=8)
    band = find_band(plan)
    assert band is not None
    ways = (Way(+1, ranks - 1),), (Way(-1, ranks - 1),), (Way(+1, ranks // 2), Way(-1, (ranks - 1) // 2))
    factors = st.none() | st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=ranks, max_size=ranks).map(np.array)
    taken = tuple(way for way in draw(st.sampled_from(ways)) if way.limit)
    one = BandCounts(
        Rates(plan, draw(st.sampled_from(MACHINES)), False), Faults(draw(factors), draw(factors)), band, taken
    )
    stalls = st.builds(Stall, st.integers(0, ranks - 1), st.integers(0, one.reach), st.sampled_from([0.01, 1.0]))
    return replace(one, faults=replace(one.faults, stalls=tuple(draw(st.lists(stalls, max_size=2)))))


def every(one: BandCounts) -> list[np.ndarray]:
    """Pairs and rows of all ranks, step by step, until nothing is sent."""
    found = []
    while not found or found[-1][2:].any():
        found.append(one.count(one.ranks, np.asarray(len(found))))
    return found


@given(counted())
def test_pairs_and_rows_of_every_clock_are_those_of_the_plan(one: BandCounts) -> None:
    demand = one.rates.plan.demand
    for step, counts in enumerate(every(one)):
        for rank in range(one.band.ranks):
            owners = {(rank - way.sign * step) % one.band.ranks for way in one.ways if step <= way.limit}
            owners = owners if step else {rank}
            assert counts[0, rank] * one.band.heads == sum(demand.pairs(rank, owner) for owner in owners)
            for index, way in enumerate(one.ways):
                owner = (rank - way.sign * step) % one.band.ranks
                there = [(owner + way.sign * d) % one.band.ranks for d in range(step + 1, way.limit + 1)]
                rows = demand.count_needed(tuple(range(r, r + 1) for r in there), owner) // demand.block_heads
                assert counts[2 + index, rank] == rows * one.traffic.moving[0].row_bytes


@given(counted())
def test_what_changes_is_found_at_few_places(one: BandCounts) -> None:
    counts = every(one)
    assert one.reach + 1 == len(counts)
    found = sweeps.find_changed_runs(one, np.arange(len(counts)))
    marks = np.zeros((len(counts), one.band.ranks), dtype=bool)
    for row, start, stop in zip(found.row, found.start, found.stop, strict=True):
        marks[row, start:stop] = True
    for step in range(1, len(counts)):
        assert (marks[step] == (counts[step] != counts[step - 1]).any(axis=0)).all()


@given(counted(), st.sampled_from([1, 3, 16384]), st.sampled_from([1, 4, 128]), st.sampled_from([0, 4, 4096]))
def test_a_sweep_is_the_recurrence(one: BandCounts, block: int, depth: int, many: int) -> None:
    """Finish times against plain Python, loads and traffic against sums over all steps, for any sizes of blocks."""
    ring = one.make_ring()
    assert callable(ring.phases)
    whole = replace(ring, phases=tuple(ring.phases()))
    known = delays.BLOCK, delays.DEPTH, sweeps.DEPTH, sweeps.MANY
    delays.BLOCK, delays.DEPTH, sweeps.DEPTH, sweeps.MANY = block, depth, depth, many
    try:
        solved = sweeps.solve_incremental(one)
    finally:
        delays.BLOCK, delays.DEPTH, sweeps.DEPTH, sweeps.MANY = known
    assert solved.finish == pytest.approx(truth(whole), rel=CLOSE, abs=CLOSE)
    wanted, bytes_sent = survey(whole)
    assert solved.traffic == bytes_sent
    for name in ("compute", "merge", "interference", "stalls"):
        assert getattr(solved.loads, name) == pytest.approx(
            getattr(wanted, name) * np.ones(ring.ranks), rel=1e-9, abs=1e-12
        )


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_blocks_that_repeat_are_gone_through_once(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 ranks in nodes of 8, in blocks of 64: bitwise what they are where nothing is taken to repeat."""
    plan = make_plan(Causal(), tokens=256 * 64, ranks=256, layout=layout, schedule="ring", heads=4, dtype="bfloat16")
    machine = Machine(5e10, 1e-5, 2e9, ranks_per_node=8, node_bandwidth=2e10, gamma=0.05, merge=1e11)
    monkeypatch.setattr(delays, "BLOCK", 64)
    monkeypatch.setattr(delays, "DEPTH", 16)
    short, gone = 0, delays._advance_block

    def counting(around: np.ndarray, *rest: object) -> np.ndarray:
        nonlocal short
        short += len(around) <= 8 + 2 * 16
        return gone(around, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(delays, "_advance_block", counting)
    found = simulate(plan, machine, solver="stencil")
    monkeypatch.setattr(delays, "_repeats", lambda rows, period: False)
    whole = simulate(plan, machine, solver="stencil")
    assert short and (found.finish == whole.finish).all()


def test_many_ranks_are_swept() -> None:
    """1,024 causal zigzag ranks; a rank that is slower delays them all."""
    plan = make_plan(Causal(), tokens=1024 * 64, ranks=1024, layout="zigzag", schedule="ring", heads=8, kv_heads=2)
    machine = Machine(1e11, 1e-5, 5e10)
    found = simulate(plan, machine)
    slow = simulate(plan, machine, slow={5: 1.5})
    assert slow.seconds == pytest.approx(1.5 * found.seconds, rel=1e-3) and slow.traffic == found.traffic
