"""The solvers of the ring recurrence against plain Python, against each other where they overlap, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringattn.simulator.timing.solvers.periodic import solve_periodic
from ringattn.simulator.timing.solvers.recurrence import NEVER, NeighborMessages, Phase, Ring, Stall
from ringattn.simulator.timing.solvers.stencil import solve_stencil

times = st.floats(0.0, 4.0) | st.sampled_from([0.0, 1.0, 1.5])
CLOSE = 1e-12


def truth(ring: Ring) -> list[float]:
    """When each rank has finished, in plain Python, rank by rank and step by step."""

    def at(value: float | np.ndarray, rank: int) -> float:
        return float(value[rank % ring.ranks]) if isinstance(value, np.ndarray) else float(value)

    now, number = [0.0] * ring.ranks, 0
    for phase in ring.phases:
        for _ in range(phase.steps):
            then = []
            for rank in range(ring.ranks):
                # By direction: the messages that leave the rank and those that arrive, with the rank at the other end.
                leaving = [(at(lane.seconds, rank), rank + lane.sign) for lane in phase.messages]
                arriving = [(at(lane.seconds, rank - lane.sign), rank - lane.sign) for lane in phase.messages]
                longest = [max([0.0, *(seconds for seconds, _ in one)]) for one in (leaving, arriving)]
                visit = at(phase.compute, rank)
                busy = visit + ring.gamma * min(visit, sum(longest) / 2) + at(phase.merge, rank)
                busy += sum(stall.seconds for stall in ring.stalls if (stall.rank, stall.step) == (rank, number))
                ends = [max(now[rank], now[peer % ring.ranks]) + seconds for seconds, peer in leaving + arriving]
                then.append(max([now[rank] + busy, *ends]))
            now, number = then, number + 1
    return now


def values(ranks: int, least: float = 0.0) -> st.SearchStrategy[float | np.ndarray]:
    several = st.lists(times, min_size=ranks, max_size=ranks).map(lambda row: np.array(row) + least)
    return several | times.map(lambda x: x + least)


@st.composite
def lanes(draw: st.DrawFn, ranks: int) -> tuple[NeighborMessages, ...]:
    found = []
    for sign in draw(st.sampled_from([(1,), (-1,), (1, -1), ()])):
        seconds = draw(values(ranks))
        if isinstance(seconds, np.ndarray) and draw(st.booleans()):
            seconds[draw(st.integers(0, ranks - 1))] = NEVER
        found.append(NeighborMessages(sign, seconds))
    return tuple(found)


@st.composite
def rings(draw: st.DrawFn) -> Ring:
    ranks = draw(st.integers(1, 7))
    phases = tuple(
        Phase(draw(st.integers(0, 6)), draw(values(ranks)), draw(times), draw(lanes(ranks)))
        for _ in range(draw(st.integers(1, 3)))
    )
    steps = sum(phase.steps for phase in phases)
    stalls = st.builds(Stall, st.integers(0, ranks - 1), st.integers(0, steps - 1), times)
    return Ring(
        ranks, phases, draw(st.sampled_from([0.0, 0.25])),
        tuple(draw(st.lists(stalls, max_size=2))) if steps else (),
    )  # fmt: skip


@given(rings())
def test_the_stencil_is_the_recurrence(ring: Ring) -> None:
    found = solve_stencil(ring)
    assert found.finish == pytest.approx(truth(ring), rel=CLOSE, abs=CLOSE)


@given(times, times, times, st.integers(1, 6), st.integers(1, 9), st.sampled_from([1, -1]))
def test_alike_ranks_take_the_longest_of_visit_and_message_at_each_step(
    compute: float, merge: float, message: float, ranks: int, steps: int, sign: int
) -> None:
    """Homogeneous: T = (P - 1) max(c + mu, l) + c + mu, exposed (P - 1) (l - c - mu)."""
    lane = NeighborMessages(sign, message)
    ring = Ring(ranks, (Phase(steps - 1, compute, merge, (lane,)), Phase(1, compute, merge)))
    busy = compute + merge
    wanted = (steps - 1) * max(busy, message) + busy
    assert truth(ring) == pytest.approx([wanted] * ranks, rel=CLOSE, abs=CLOSE)
    for found in (solve_periodic(ring), solve_stencil(ring)):
        assert found is not None and found.finish.max() == pytest.approx(wanted, rel=CLOSE, abs=CLOSE)
    exposed = wanted - steps * busy
    assert exposed == pytest.approx((steps - 1) * max(message - busy, 0.0), abs=1e-9)


@st.composite
def periodic(draw: st.DrawFn) -> Ring:
    """Rings of several copies of a few ranks, for long enough that states repeat."""
    size, copies = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    ranks = size * copies

    def row() -> np.ndarray:
        return np.tile(np.array(draw(st.lists(times, min_size=size, max_size=size))), copies)

    lane = draw(st.sampled_from([(1,), (-1,), (1, -1)]))
    moving = []
    for sign in lane:
        moving.append(NeighborMessages(sign, row()))
    phases = (Phase(draw(st.integers(1, 60)), row(), 0.25, tuple(moving)), Phase(1, row(), 0.0))
    return Ring(ranks, phases)


@given(periodic())
def test_the_periodic_solver_is_the_ring(ring: Ring) -> None:
    found = solve_periodic(ring)
    assert found is not None
    assert found.finish == pytest.approx(truth(ring), rel=CLOSE, abs=CLOSE)
    assert found.finish == pytest.approx(solve_stencil(ring).finish, rel=CLOSE, abs=CLOSE)


def test_the_periodic_solver_jumps() -> None:
    """262,144 steps of nodes of eight are a few; the result is that of all of them."""
    ranks, steps = 64, 5000
    message = np.tile(np.array([0.1] * 7 + [0.9]), ranks // 8)
    ring = Ring(ranks, (Phase(steps - 1, 0.5, 0.0, (NeighborMessages(1, message),)), Phase(1, 0.5, 0.0)))
    found = solve_periodic(ring)
    assert found is not None and "steps are skipped" in found.why
    assert int(found.why.split(";")[1].split(" of ")[0].replace(",", "")) > 0.99 * steps
    assert found.finish == pytest.approx(solve_stencil(ring).finish, rel=CLOSE)
    assert solve_periodic(Ring(7, (Phase(3, np.arange(7.0), 0.0),))) is None


def test_one_slow_rank() -> None:
    """finish_d = max(P c, (P - d) c' + d l) for a rank at distance d, as ranks wait for their sends, too."""
    ranks, usual, slow, message = 12, 1.0, 1.75, 0.4
    compute = np.full(ranks, usual)
    compute[3] = slow
    found = solve_stencil(
        Ring(ranks, (Phase(ranks - 1, compute, 0.0, (NeighborMessages(1, message),)), Phase(1, compute)))
    )
    for downstream in range(ranks):
        d = min(downstream, ranks - downstream)
        late = (ranks - d) * slow + d * message if d else ranks * slow
        # The last step is the rank's own: a slow one is slow in it, the others are not.
        late -= 0 if d == 0 else slow - usual
        assert found.finish[(3 + downstream) % ranks] == pytest.approx(max(ranks * usual, late))
    assert found.finish.max() == pytest.approx(ranks * slow)


def test_one_stall() -> None:
    """delay_d = (D - d (c - l))+, one hop per step, both ways, as ranks wait for their sends, too."""
    ranks, message, stall = 20, 0.75, 1.0
    phases = (Phase(ranks - 1, 1.0, 0.0, (NeighborMessages(1, message),)), Phase(1, 1.0))
    found = solve_stencil(Ring(ranks, phases, stalls=(Stall(8, 2, stall),)))
    for rank in range(ranks):
        d = min((rank - 8) % ranks, (8 - rank) % ranks)
        assert found.finish[rank] - ranks == pytest.approx(max(stall - d * (1.0 - message), 0.0))


def test_long_runs_lose_nothing() -> None:
    """After 200,000 steps of 8 ms, plain Python with exact fractions agrees to 1e-12."""
    from fractions import Fraction

    ranks, steps = 3, 20_000
    compute, message = np.array([0.008, 0.0081, 0.0079]), np.array([0.002, 0.0083, 0.001])
    found = solve_stencil(Ring(ranks, (Phase(steps, compute, 0.0, (NeighborMessages(1, message),)),)))
    now = [Fraction(0)] * ranks
    busy, moved = [Fraction(x) for x in compute], [Fraction(x) for x in message]
    for _ in range(steps):
        ends = [max(now[r], now[(r + 1) % ranks]) + moved[r] for r in range(ranks)]
        now = [max(now[r] + busy[r], ends[r], ends[r - 1]) for r in range(ranks)]
    assert found.finish == pytest.approx([float(x) for x in now], rel=CLOSE)
