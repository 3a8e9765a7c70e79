"""Both passes of bands that hide something: what is counted of all ranks at once, against the plan's own steps and
dense masks; the times that follow, against plain Python and step by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn import Causal, Machine, Pattern, Plan, Stall, Unsupported, Window, make_plan, simulate
from ringattn.simulator.timing.band.counts import BandCounts
from ringattn.simulator.timing.problem import RingProblem, make_ring_problem
from ringattn.simulator.timing.rates import Faults, Rates
from ringattn.simulator.timing.resources import Traffic
from ringattn.simulator.timing.solvers import delay as delays
from ringattn.simulator.timing.solvers import incremental as sweeps
from ringattn.simulator.timing.solvers.changes import CoefficientChanges
from ringattn.simulator.timing.solvers.event_loop import rank_steps
from ringattn.simulator.timing.solvers.recurrence import NEVER, DirectMessages
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
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    return make_plan(
        pattern,
        tokens=tokens,
        ranks=ranks,
        layout=draw(st.sampled_from(["contiguous", "zigzag"])),
        schedule="ring",
        heads=4,
        kv_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=8,
        value_dim=draw(st.sampled_from([4, 8])),
        dtype=dtype,
        comm_dtype=draw(st.none() | st.just("bfloat16")),
        rotate=draw(st.sampled_from(["keys", "queries"])),
    )


def counted(plan: Plan, backward: bool) -> BandCounts | None:
    """What counts a pass; None where all see all."""
    found = make_ring_problem(Rates(plan, EVEN, backward), Faults())
    assert isinstance(found, RingProblem)
    return found.counts


@dataclass
class Pass:
    """A pass of a plan step by step: by step, the pairs of each rank's visits (one entry for each that there
    is), the (query row, head) of all of them that see a key, and the bytes of each message by its ends."""

    ranks: int
    steps: int
    pairs: list[list[list[int]]]
    rows: list[list[int]]
    messages: list[dict[tuple[int, int], int]]


def whole_pass(plan: Plan, one: BandCounts) -> Pass:
    """Messages from the steps of all ranks, whose tags say at which step; pairs from the dense mask. `one` says only
    along which ways, and how far, blocks go."""
    heads = plan.pattern.mask(plan.tokens, plan.heads)
    mask = heads.sum(0)
    where = [[p for run in plan.layout.shard(rank) for p in run] for rank in range(plan.ranks)]
    seen = [[int(mask[np.ix_(q, k)].sum()) for k in where] for q in where]
    seeing = [[int(heads[:, q][:, :, k].any(-1).sum()) for k in where] for q in where]
    backward = one.rates.backward
    keys = not backward or plan.rotates == "keys"
    sent: defaultdict[int, dict[tuple[int, int], int]] = defaultdict(dict)
    for rank in range(plan.ranks):
        for hop in (hop for step in rank_steps(plan, rank, backward) for hop in step.sends):
            assert hop.tag % 2 == 0 and (rank, hop.peer) not in sent[hop.tag // 2]
            sent[hop.tag // 2][rank, hop.peer] = sum(map(plan.part_bytes, hop.parts))
    last = max(one.reach, *sent) if sent else 0
    pairs: list[list[list[int]]] = []
    rows: list[list[int]] = []
    for step in range(last + 1):
        pairs.append([])
        rows.append([])
        for rank in range(plan.ranks):
            owners = [(rank - way.sign * step) % plan.ranks for way in one.ways if step <= way.limit]
            found = [seen[rank][o] if keys else seen[o][rank] for o in (owners if step else [rank])]
            pairs[-1].append([count for count in found if count])
            rows[-1].append(sum(seeing[rank][o] if keys else seeing[o][rank] for o in (owners if step else [rank])))
    messages = [sent[step] for step in range(last + 1)]
    if not backward:
        rows[0] = [0] * plan.ranks  # the first result of a rank is not merged
    elif keys:
        pairs, rows, messages = pairs[::-1], rows[::-1], messages[::-1]
    return Pass(plan.ranks, last + 1, pairs, rows, messages)


def starts(
    rates: Rates, done: Pass, slow: dict[int, float], links: dict[int, float], stalls: list[Stall]
) -> tuple[list[list[float]], list[dict[tuple[int, int], float]]]:
    """S[k][r], when rank r begins step k, the last when it has finished; and the seconds of messages by step."""
    plan, machine = rates.plan, rates.machine
    begun, taken = [[0.0] * plan.ranks], []
    for k in range(done.steps):
        totals: defaultdict[tuple[int, bool, bool], float] = defaultdict(float)
        for (source, target), size in done.messages[k].items():
            near, latency, bandwidth = machine.link(source, target)
            alone = links.get(source, 1.0) * (latency + size / bandwidth)
            totals[source, True, near] += alone
            totals[target, False, near] += alone
        seconds = {}
        for source, target in done.messages[k]:
            near = machine.link(source, target)[0]
            seconds[source, target] = max(totals[source, True, near], totals[target, False, near])
        now, then = begun[-1], []
        for rank in range(plan.ranks):
            visit = slow.get(rank, 1.0) * rates.pair * sum(done.pairs[k][rank])
            leaving = max((value for (source, _), value in seconds.items() if source == rank), default=0.0)
            coming = max((value for (_, target), value in seconds.items() if target == rank), default=0.0)
            late = sum(s.seconds for s in stalls if (s.rank, s.step) == (rank, k))
            merged = slow.get(rank, 1.0) * rates.merge(done.rows[k][rank])
            busy = visit + (machine.gamma or 0.0) * min(visit, (leaving + coming) / 2) + merged + late
            ended = [max(now[a], now[b]) + value for (a, b), value in seconds.items() if rank in (a, b)]
            then.append(max([now[rank] + busy, *ended]))
        begun.append(then)
        taken.append(seconds)
    return begun, taken


@contextmanager
def sizes(block: int, depth: int, many: int) -> Iterator[None]:
    known = delays.BLOCK, delays.DEPTH, sweeps.DEPTH, sweeps.MANY
    delays.BLOCK, delays.DEPTH, sweeps.DEPTH, sweeps.MANY = block, depth, depth, many
    try:
        yield
    finally:
        delays.BLOCK, delays.DEPTH, sweeps.DEPTH, sweeps.MANY = known


@settings(max_examples=60)
@given(plans(), st.booleans())
def test_pairs_and_messages_of_every_clock_are_those_of_the_plan(plan: Plan, backward: bool) -> None:
    one = counted(plan, backward)
    if one is None:
        return
    done = whole_pass(plan, one)
    assert one.steps == done.steps
    for step in range(one.steps):
        counts = one.count(one.ranks, np.asarray(step))
        assert (counts[0] * plan.heads).tolist() == [sum(found) for found in done.pairs[step]]
        assert (counts[1] * plan.heads).tolist() == done.rows[step]
        sent = {
            (rank, (rank + sign) % plan.ranks): size
            for sign, row in zip(one.signs, counts[2:].tolist(), strict=True)
            for rank, size in enumerate(row)
            if size
        }
        across = one.direct_bytes.between(step, step + 1)
        far = dict(
            zip(zip(across.source.tolist(), across.target.tolist(), strict=True), across.bytes.tolist(), strict=True)
        )
        assert not set(sent) & set(far) and {**sent, **far} == done.messages[step]


@settings(max_examples=50)
@given(plans(), st.booleans())
def test_what_changes_is_found_at_few_places(plan: Plan, backward: bool) -> None:
    one = counted(plan, backward)
    if one is None:
        return
    counts = [one.count(one.ranks, np.asarray(step)) for step in range(one.steps)]
    found = sweeps.find_changed_runs(one, np.arange(one.steps))
    marks = np.zeros((one.steps, plan.ranks), dtype=bool)
    for row, start, stop in zip(found.row, found.start, found.stop, strict=True):
        marks[row, start:stop] = True
    for step in range(1, one.steps):
        assert (marks[step] == (counts[step] != counts[step - 1]).any(axis=0)).all()


@settings(max_examples=80)
@given(
    plans(12),
    st.sampled_from(MACHINES),
    st.sampled_from([1, 3, 16384]),
    st.sampled_from([1, 2, 4, 128]),
    st.sampled_from([0, 4, 4096]),
    st.booleans(),
    st.data(),
)
def test_a_sweep_is_the_recurrence(
    plan: Plan, machine: Machine, block: int, depth: int, many: int, backward: bool, data: st.DataObject
) -> None:
    """Finish times against plain Python on the plan's own messages, with slow ranks, slow links and stalls, for any
    sizes of blocks; the same of the ring's phases, step by step, and of the window that shows them."""
    one = counted(plan, backward)
    if one is None:
        return
    slow, links = data.draw(factors(plan.ranks)), data.draw(factors(plan.ranks))
    one_stall = st.builds(
        Stall, st.integers(0, plan.ranks - 1), st.integers(0, one.steps - 1), st.sampled_from([0.01, 1.0])
    )
    stalls = data.draw(st.lists(one_stall, max_size=2))
    done = whole_pass(plan, one)
    begun, seconds = starts(Rates(plan, machine, backward), done, slow, links, stalls)
    with sizes(block, depth, many):
        found = simulate(plan, machine, backward=backward, solver="stencil", slow=slow, slow_links=links, stalls=stalls)
    assert found.finish == pytest.approx(np.array(begun[-1]), rel=CLOSE, abs=CLOSE)
    seen = window(
        plan,
        machine,
        backward=backward,
        ranks=range(plan.ranks),
        steps=range(one.steps),
        slow=slow,
        slow_links=links,
        stalls=stalls,
    )
    assert seen.begun == pytest.approx(np.array(begun), rel=CLOSE, abs=CLOSE) and seen.messages is not None
    shown = {(m.step, m.source, m.target): (m.begun, m.seconds) for m in seen.messages}
    assert len(shown) == len(seen.messages) == sum(map(len, seconds))
    for k, row in enumerate(seconds):
        for (a, b), value in row.items():
            assert shown[k, a, b] == pytest.approx((max(begun[k][a], begun[k][b]), value), rel=CLOSE)


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
    assert (found.traffic.total, found.traffic.messages) == (
        plan.bytes_sent(backward=backward),
        plan.messages(backward=backward),
    )
    assert found.compute == pytest.approx(steps.compute, rel=1e-9)
    assert found.exposed == pytest.approx(steps.exposed, rel=1e-9, abs=1e-9 * steps.seconds)


@pytest.mark.parametrize("rotate", ["keys", "queries"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_48_ranks_step_by_step(layout: str, rotate: str) -> None:
    for pattern in (Causal(), Window(300, 150)):
        plan = make_plan(
            pattern, tokens=48 * 16, ranks=48, layout=layout, schedule="ring", heads=4, kv_heads=2, rotate=rotate
        )
        machine = Machine(2e9, 1e-5, 2e8, ranks_per_node=8, node_bandwidth=2e9, gamma=0.05, merge=1e10)
        options = {"slow": {3: 1.5, 40: 0.7}, "slow_links": {47: 2.0}, "backward": True}
        with sizes(16, 8, 4096):
            found = simulate(plan, machine, solver="stencil", **options)  # type: ignore[arg-type]
        steps = simulate(plan, machine, solver="events", **options)  # type: ignore[arg-type]
        assert found.finish == pytest.approx(steps.finish, rel=CLOSE) and found.traffic == steps.traffic


@given(st.integers(3, 12), st.integers(1, 9), st.sampled_from([1, 4, 16384]), st.sampled_from([1, 3, 128]), st.data())
def test_chords_reach_as_far_as_they_do(ranks: int, steps: int, block: int, depth: int, data: st.DataObject) -> None:
    """The stencil with any chords and changes, in blocks, against every rank at every step in plain Python."""
    number = st.floats(-4.0, 4.0)
    row = st.lists(number, min_size=ranks, max_size=ranks).map(np.array)
    now, *whole = (data.draw(row) for _ in range(4))
    whole[1][data.draw(st.integers(0, ranks - 1))] = NEVER
    place = st.integers(0, ranks - 1)
    chord = st.tuples(st.integers(0, steps - 1), place, place, number).filter(lambda x: x[1] != x[2])
    chords = sorted(data.draw(st.lists(chord, max_size=6)), key=lambda x: x[0])
    point = st.tuples(st.integers(0, steps - 1), place, number, number, number)
    points = sorted(data.draw(st.lists(point, max_size=4, unique_by=lambda x: x[:2])), key=lambda x: x[0])
    own, left, right = (value.tolist() for value in whole)
    expected = now.tolist()
    for k in range(steps):
        for at, rank, *values in points:
            if at == k:
                own[rank], left[rank], right[rank] = values
        old = expected
        expected = [max(old[r] + own[r], old[r - 1] + left[r], old[(r + 1) % ranks] + right[r]) for r in range(ranks)]
        for at, a, b, seconds in chords:
            if at == k:
                ended = max(old[a], old[b]) + seconds
                expected[a], expected[b] = max(expected[a], ended), max(expected[b], ended)
    at, source, target = (np.array([x[i] for x in chords], dtype=np.int64) for i in range(3))
    across = DirectMessages(at, source, target, 0 * at, np.array([x[3] for x in chords]))
    changes = CoefficientChanges(
        steps,
        None,
        *(np.array([x[i] for x in points], dtype=np.int64) for i in range(2)),
        np.array([x[2:] for x in points]).reshape(-1, 3).T,
        across,
    )
    with sizes(block, depth, 4096):
        found = delays.advance_blocks(now, steps, whole, 1, changes, across)
    assert found == pytest.approx(np.array(expected), rel=CLOSE, abs=CLOSE)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_chords_do_not_depend_on_blocks(layout: str) -> None:
    """512 ranks in nodes of 8, in blocks of 64 and in one of all."""
    plan = make_plan(
        Causal(), tokens=512 * 64, ranks=512, layout=layout, schedule="ring", heads=8, kv_heads=1, dtype="bfloat16"
    )
    machine = Machine(5e10, 1e-5, 2e9, ranks_per_node=8, node_bandwidth=2e10, gamma=0.05, merge=1e11)
    options = {"backward": True, "solver": "stencil", "slow": {100: 2.0}}
    whole = simulate(plan, machine, **options)  # type: ignore[arg-type]
    for block, depth in ((64, 16), (100, 7)):
        with sizes(block, depth, 4096):
            found = simulate(plan, machine, **options)  # type: ignore[arg-type]
        assert found.finish == pytest.approx(whole.finish, rel=CLOSE)


def test_many_ranks_by_hand() -> None:
    """2,048 causal ranks of one head. Where messages take no time, the last of contiguous ranks visits at every step.
    Where only their latency a does, keys go to its neighbour and come from one owner at every step t but the first
    and the last two, both beside each other where that owner, rank P - t, has a block to pass on: it does from P / 2
    on down.
    """
    ranks, rows = 2048, 64
    plan = make_plan(
        Causal(), tokens=ranks * rows, ranks=ranks, layout="contiguous", schedule="ring", rotate="keys", head_dim=64
    )
    fast = simulate(plan, Machine(1e9, 0.0, 1e15), backward=True)
    visit = 2.5 * 4 * 64 * rows**2 / 1e9
    own = 2.5 * 4 * 64 * rows * (rows + 1) / 2 / 1e9
    assert fast.solver == "stencil" and fast.seconds == pytest.approx(own + (ranks - 1) * visit, rel=1e-9)
    late = simulate(plan, Machine(1e30, 1e-3, 1e30), backward=True)
    assert late.seconds == pytest.approx(1e-3 * (ranks + ranks // 2 - 1), rel=1e-9)
    zigzag = make_plan(
        Causal(), tokens=ranks * rows, ranks=ranks, layout="zigzag", schedule="ring", rotate="queries", head_dim=64
    )
    even = simulate(zigzag, Machine(1e9, 0.0, 1e15), backward=True)
    assert even.solver == "stencil" and even.compute == pytest.approx(fast.compute, rel=1e-9)
    # All ranks have about as much to do at every step.
    assert even.seconds == pytest.approx(even.compute, rel=1e-3)


def test_sums_of_bytes_are_exact() -> None:
    """All ranks together may send more than 2^63 bytes."""
    found = Traffic.of(np.array([1 << 61, 0, 1 << 61, 5]), 7, np.array([1 << 62, 3]))
    assert found == Traffic((1 << 63) + 8, 1 << 62, 5, 9)


def test_what_is_not_modelled_is_told() -> None:
    sizes_of = {"tokens": 64 * 8, "ranks": 64, "schedule": "ring", "layout": "contiguous", "rotate": "keys"}
    plan = make_plan(Causal(), **sizes_of)  # type: ignore[arg-type]
    with pytest.raises(
        Unsupported, match=r"solver=stencil needs .*, but messages between ranks that are not neighbors"
    ):
        simulate(plan, replace(EVEN, buffers=2), backward=True, solver="stencil")
    with pytest.raises(Unsupported, match="buffers=2: plans that are simulated step by step"):
        simulate(plan, replace(EVEN, buffers=2), backward=True)
    shared = simulate(plan, replace(EVEN, ranks_per_node=4, shared_nic=True), backward=True)
    assert shared.solver == "events" and "share a node's NIC" in shared.why
    jitter = simulate(plan, replace(EVEN, jitter=0.2), backward=True)
    assert jitter.solver == "stencil + jitter" and jitter.exposed["jitter"] > 0


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
