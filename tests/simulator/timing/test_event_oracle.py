"""Solvers against an event simulation that shares no code with them; machines that are faster never take longer."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from event_oracle import EventOracle
from hypothesis import given
from hypothesis import strategies as st
from shares import share_of

import ringattn as ra
from ringattn import Causal, Full, Machine, Plan, Stall, Window, make_plan, predict, simulate
from ringattn.machine.kernel_times import SHAPES, KernelRates, KernelTimes, TimeGrid
from ringattn.plan.steps import PlanSizes
from ringattn.simulator.timing import simulation
from ringattn.simulator.timing.rates import Rates
from ringattn.simulator.timing.solvers import event_loop
from ringattn.simulator.timing.solvers.event_loop import share_evenly
from ringattn.simulator.timing.solvers.recurrence import Ring
from ringattn.simulator.timing.window import window

CLOSE = 1e-9
#: Random plans that are compared.
COUNT = share_of(300)
#: Modelled and measured kernels, whose rates grow with the size of a call.
RATES = KernelRates("any", forward=2e7, backward=1e7, softmax=4.0, slots=4, memory=1e7, launch=1e-4, visit=2e-4)
GRIDS = [
    TimeGrid(shape, backward, (2, 16), (2, 16), ((2e6, 8e6), (4e6, 1e7)))
    for shape in SHAPES
    for backward in (False, True)
]
KERNELS: list[dict[str, Any]] = [
    {"kernel_rates": RATES},
    {"kernel": KernelTimes(4, "float32", (1e-4, 2e-4), tuple(GRIDS), extrapolate=True)},
]


@dataclass(frozen=True)
class Drawn:
    plan: Plan
    machine: Machine
    backward: bool
    faults: dict[str, Any]

    def simulate(self, **changes: Any) -> float:
        """Seconds of the pass on the machine with other numbers."""
        machine = replace(self.machine, **changes)
        return simulate(self.plan, machine, backward=self.backward, **self.faults).seconds


def count_steps(plan: Plan, backward: bool) -> int:
    """Steps of the pass: those in which any rank does something."""
    planned = [plan.for_rank(rank) for rank in range(plan.ranks)]
    return len({step.clock for rank in planned for step in (rank.backward if backward else rank.forward)})


def draw_plan(pick: random.Random, even: bool) -> Plan:
    """A plan of any schedule, layout and mask; `even`: a ring of equal shards, which has solvers of its own."""
    ranks = pick.choice([1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, pick.randint(9, 16)])
    heads, kv_heads = pick.choice([(2, 1), (2, 2), (4, 2)])
    inner = pick.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
    group = pick.choice(
        [n for n in (1, 2, 4) if ranks % n == heads % n == 0 and (kv_heads % n == 0 or n == 2 * kv_heads)]
    )
    schedules = ["ring", "ring", "direct", "allgather", f"double_ring({inner})"]
    schedules += [f"ulysses({group}, {name})" for name in ("ring", "direct", "allgather") if group > 1]
    rows = pick.choice([1, 2, 3])
    tokens = 2 * ranks * rows
    layout = pick.choice(["contiguous", "zigzag"] if even else ["contiguous", "zigzag", "striped", "rows"])
    if layout == "rows":
        cuts = sorted(pick.randint(0, tokens) for _ in range(ranks - 1))
        layout = f"rows({', '.join(str(b - a) for a, b in pairwise([0, *cuts, tokens]))})"
    elif not even and pick.random() < 0.2:
        tokens -= pick.randrange(ranks)
    bands = [Full(), Full(), Causal(), Window(2 * rows, 4 * rows), Causal() & Window(6 * rows)]
    others = [
        ra.Documents([tokens // 2, tokens - tokens // 2]),
        ra.Strided(3),
        ra.Dilated((rows, 2 * rows), (1, 2), causal=True),
    ]
    pattern: ra.Pattern = pick.choice(bands if even else bands + others)
    sizes: dict[str, Any] = {}
    if not even and pick.random() < 0.3 and not isinstance(pattern, ra.Dilated):
        queries, name = pick.randint(1, tokens), pick.choice(["contiguous", "zigzag", "striped"])
        sizes = {"q_layout": f"shifted({name}, {pick.randint(0, tokens - queries)})", "q_tokens": queries}
    plan = make_plan(
        pattern, tokens=tokens, ranks=ranks, layout=layout, heads=heads, kv_heads=kv_heads, head_dim=4,
        value_dim=pick.choice([4, 6]), batch=pick.choice([1, 2]), dtype=pick.choice(["float32", "bfloat16", "float64"]),
        comm_dtype=pick.choice([None, None, None, "bfloat16"]), schedule="ring" if even else pick.choice(schedules),
        rotate=pick.choice(["kv", "q"] if even else ["kv", "q", "q, kv"]), **sizes,
    )  # fmt: skip
    return replace(plan)  # which shares no answers with plans of other tests


def draw_machine(pick: random.Random, even: bool) -> Machine:
    """A machine with any numbers; `even`: without what rings of equal shards need events for."""

    def maybe(*values: Any) -> Any:
        return pick.choice([None, None, *values])

    call = maybe(1e-3)
    return Machine(
        flops=pick.choice([1e6, 1e7]), latency=pick.choice([0.0, 1e-4]), bandwidth=pick.choice([1e5, 1e6, 1e7]),
        ranks_per_node=pick.choice([1, 2, 3, 4, 5, 8]), node_bandwidth=pick.choice([None, 1e7]),
        node_latency=pick.choice([None, 1e-5]), shared_nic=not even and pick.random() < 0.5, switch=maybe(1, 2, 3),
        merge=pick.choice([None, 1e7]), gamma=pick.choice([None, 0.2]), one_gather=pick.random() < 0.5,
        cores=None if even else pick.choice([None] * 5 + [1, 2]), deferred=maybe(True, False), call=call,
        call_backward=None if call is None else maybe(2e-3), sweep=maybe(1e7), sweep_backward=maybe(1e6),
        host=maybe(1e-5, 1e-3), host_call=maybe(1e-4), **({} if even else pick.choice([{}] * 6 + KERNELS)),
    )  # fmt: skip


def draw(count: int) -> Iterator[Drawn]:
    """Random plans, machines and faults by seed."""
    for seed in range(count):
        pick, even = random.Random(seed), seed % 3 == 0
        plan, machine, backward = draw_plan(pick, even), draw_machine(pick, even), pick.random() < 0.5
        ranks, steps = plan.ranks, count_steps(plan, backward)
        faults: dict[str, Any] = {
            "slow": {pick.randrange(ranks): pick.choice([0.5, 3.0])} if pick.random() < 0.2 else None,
            "slow_links": {pick.randrange(ranks): pick.choice([0.5, 3.0])} if pick.random() < 0.2 else None,
            "stalls": [
                Stall(pick.randrange(ranks), pick.randrange(steps), pick.choice([1e-4, 1e-2]))
                for _ in range(pick.choice([0, 0, 1, 2]) if steps else 0)
            ],
        }
        yield Drawn(plan, machine, backward, faults)


def check(one: Drawn) -> str:
    """When every rank begins its steps and finishes, what the pass waits for, and its seconds; the quickest solver.

    Where there is a quicker solver than events, slower ones have to agree, too.
    """
    oracle = EventOracle(one.plan, one.machine, one.backward, **one.faults)
    wanted, busiest = oracle.run(), oracle.busiest()
    every = {"ranks": one.plan.ranks, "steps": oracle.count}
    shown = window(one.plan, one.machine, backward=one.backward, **every, **one.faults)
    for found, expected in ((shown.begun, oracle.begun), (shown.busy, np.array(oracle.busy).T)):
        assert found == pytest.approx(expected, rel=CLOSE), one
    peers = max(oracle.run(instant=True)) - busiest
    waits = {"wait for peers": peers, "wait for messages": max(wanted) - busiest - peers}
    timelines = [simulate(one.plan, one.machine, backward=one.backward, **one.faults)]
    slower = {"periodic": ["stencil", "events"], "stencil": ["events"]}.get(timelines[0].solver, [])
    for solver in slower:
        timelines.append(simulate(one.plan, one.machine, backward=one.backward, solver=solver, **one.faults))
    for timeline in timelines:
        assert timeline.finish == pytest.approx([*map(oracle.seconds, wanted)], rel=CLOSE), (timeline.solver, one)
        assert timeline.seconds == pytest.approx(oracle.seconds(max(wanted)), rel=CLOSE), (timeline.solver, one)
        told = {cause: timeline.exposed[cause] for cause in waits}
        assert told == pytest.approx(waits, abs=CLOSE * max(wanted)), (timeline.solver, one)
    return timelines[0].solver


def check_all(count: int) -> Counter[str]:
    """Check random passes."""
    return Counter(map(check, draw(count)))


def test_solvers_agree_with_an_event_simulation() -> None:
    solvers = check_all(COUNT)
    assert min(solvers[name] for name in ("periodic", "stencil")) >= COUNT / 40, solvers


def test_smaller_nodes_and_every_host_are_looked_at() -> None:
    """Three of seven ranks on a node of their own; of sixteen ranks, two without tokens, the fourteenth visits most."""
    sizes: dict[str, Any] = {"heads": 2, "head_dim": 4, "schedule": "allgather"}
    seven = make_plan(Full(), tokens=14, ranks=7, layout="contiguous", **sizes)
    machine = Machine(flops=1e9, latency=1e-9, bandwidth=1e9, ranks_per_node=4, node_bandwidth=1e5, switch=2, host=0.0)
    check(Drawn(seven, machine, False, {"stalls": []}))
    check(Drawn(seven, replace(machine, bandwidth=1e5, node_bandwidth=1e9, one_gather=True), False, {"stalls": []}))
    late = make_plan(Causal(), tokens=14, ranks=16, layout=f"rows({'1, ' * 14}0, 0)", **sizes)
    check(Drawn(late, replace(machine, host=1.0), False, {"stalls": []}))


def test_auto_compares_both_forms_of_a_rectangle() -> None:
    """Few queries travel to many keys, and keys to many queries; a plan of a chosen form is one where it is named."""
    slow = Machine(flops=1e9, latency=1e-6, bandwidth=1e6)
    for rows, wanted in ((16, "q"), (1024, "kv")):
        sizes: dict[str, Any] = {"tokens": 1024, "q_tokens": rows, "ranks": 4, "heads": 2, "kv_heads": 1}
        plan = make_plan(Full(), q_layout="zigzag", machine=slow, schedule="ring", **sizes)
        choice = plan.choice
        assert choice is not None and plan.forward_rotates == wanted == choice.picked.rotate
        compared = {c.rotate: c.seconds for c in choice.candidates}
        assert min(compared, key=lambda name: compared[name]) == wanted
        for name, seconds in compared.items():
            named = make_plan(Full(), q_layout="zigzag", schedule="ring", rotate=name, **sizes)
            assert simulate(named, slow).seconds == predict(named, slow).seconds == seconds
        assert Plan.from_json(plan.to_json()).forward_rotates == wanted
        many = make_plan(Full(), q_layout="zigzag", machine=slow, **{**sizes, "ranks": 64})
        assert (many.schedule, many.forward_rotates) == ("ring", wanted), "by bytes, as no step is simulated"


def test_auto_compares_the_schedules_of_a_rectangle() -> None:
    """The ring in both forms, then other schedules in the faster one, unless messages hide under the visits."""
    sizes: dict[str, Any] = {"tokens": 512, "q_tokens": 64, "ranks": 4, "heads": 2, "q_layout": "shifted(zigzag, 448)"}
    bound = make_plan(Causal(), machine=Machine(flops=1e9, latency=1e-3, bandwidth=1e6), **sizes)
    assert bound.choice is not None
    compared = [(c.schedule, c.rotate) for c in bound.choice.candidates if c.prediction]
    fastest = min(bound.choice.candidates[:2], key=lambda c: c.seconds)
    assert compared[:2] == [("ring", "kv"), ("ring", "q")] and len(compared) > 4
    assert {rotate for _, rotate in compared[2:]} == {fastest.rotate}
    hidden = make_plan(Full(), machine=Machine(flops=1e3, latency=0.0, bandwidth=1e12), **sizes)
    assert hidden.choice is not None and hidden.schedule == "ring"
    assert [c.left_out for c in hidden.choice.candidates if "visits alone take" in c.left_out]


def test_a_square_in_which_queries_travel_is_compared_by_every_step() -> None:
    choice = make_plan(Causal(), tokens=512, ranks=4, heads=2, rotate="q, kv").choice
    assert choice is not None and {c.basis for c in choice.candidates if c.prediction} == {"every step of every rank"}


def mutated_bytes(**kinds: str) -> Callable[..., int]:
    """Bytes of messages in which parts of some kinds have the size of others."""
    return lambda plan, kind, rows, **as_sent: block_bytes(plan, kinds.get(kind, kind), rows, **as_sent)


rates_of, block_bytes = Machine.rates, PlanSizes.block_bytes
#: What is wrong, where, and the wrong function or property: that the comparison can fail.
MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "a card is not shared": (event_loop, "share_evenly", lambda first, last, gap: gap),
    "messages do not slow visits of rings": (Ring, "busy", lambda ring, phase: phase.compute + phase.merge),
    "nodes have the links of others": (Machine, "rates", lambda machine, near: rates_of(machine, not near)),
    "the own block is merged, too": (Rates, "merges", lambda rates, own: np.ones(np.shape(own), dtype=bool)),
    "the host starts a pass at once": (
        simulation,
        "host_seconds",
        lambda ranks, machine, calls: machine.host_call or 0.0,
    ),
    "every rank has cores of its own": (Rates, "cores", property(lambda rates: None)),
    "gradients travel in the dtype of blocks": (PlanSizes, "block_bytes", mutated_bytes(grad="kv", dq="query")),
    "every rank has a link of its own": (Rates, "crowd", lambda rates, *rest: 1),
}


@pytest.mark.parametrize("wrong", MUTATIONS)
def test_wrong_rules_are_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[wrong])
    with pytest.raises(AssertionError, match="Drawn"):
        check_all(COUNT)


#: Numbers that make a machine faster, and which way they do.
BETTER = {
    **dict.fromkeys(("flops", "bandwidth", "node_bandwidth", "merge", "sweep"), 1),
    **dict.fromkeys(("latency", "node_latency", "gamma", "call", "host", "host_call"), -1),
}


def make_better(one: Drawn, pick: random.Random) -> tuple[str, Drawn]:
    """The name of a random change for the better, and the pass with this change."""
    machine, plan = one.machine, one.plan
    changes: dict[str, Any] = {
        name: getattr(machine, name) * pick.uniform(1, 8) ** way
        for name, way in BETTER.items()
        if getattr(machine, name) is not None
    }
    changes |= {name: None for name in ("cores", "switch") if getattr(machine, name) is not None}
    changes |= {"shared_nic": False} if machine.shared_nic else {}
    if machine.kernel_rates is not None:
        changes["kernel_rates"] = replace(RATES, forward=3 * RATES.forward, backward=3 * RATES.backward)
    fewer = ["tokens"] * (plan.is_plain and plan.pattern in (Full(), Causal()) and "rows" not in plan.layout.name)
    name = pick.choice([*changes, *fewer])
    if name == "tokens":
        sizes = {**plan.sizes, "tokens": plan.tokens // 2, "ranks": plan.ranks, "schedule": plan.schedule}
        return name, replace(one, plan=make_plan(plan.pattern, layout=plan.layout.name, **sizes))
    return name, replace(one, machine=replace(machine, **{name: changes[name]}))


def test_240_changes_for_the_better_never_slow_down_a_pass() -> None:
    """Shares of a card by order of arrival broke this.

    Where a mask is so many tokens wide, fewer tokens may take longer: the mask reaches more of the shorter shards, by
    more messages.
    """
    changed: Counter[str] = Counter()
    for number, one in enumerate(draw(60)):
        pick, one = random.Random(number), replace(one, faults={**one.faults, "stalls": []})
        before = one.simulate()
        for name, better in (make_better(one, pick) for _ in range(4)):
            changed[name] += 1
            assert better.simulate() <= before * (1 + CLOSE), (name, better, one)
    assert changed.total() == 240 and len(changed) == 16, changed


def test_predict_is_simulate_where_few_ranks_have_cards_of_their_own() -> None:
    """Without interference and merging, whose estimate is rougher, and where each visited block is one message."""
    compared = 0
    for one in draw(100):
        plan = one.plan
        alike = plan.is_plain and len({plan.layout.rows(rank) for rank in range(plan.ranks)}) == 1 and plan.ranks <= 8
        if not alike or "double" in plan.schedule or "ulysses" in plan.schedule:
            continue
        numbers = {"ranks_per_node": 1, "shared_nic": True, "gamma": None, "merge": None, "host": None}
        machine = replace(one.machine, kernel=None, kernel_rates=None, **numbers)
        assert predict(plan, machine).seconds == pytest.approx(simulate(plan, machine).seconds, rel=CLOSE), one
        compared += 1
    assert compared >= 25, compared


def test_more_cores_never_take_longer_and_enough_cores_change_nothing() -> None:
    for one in draw(20):
        ranks = one.plan.ranks
        one = replace(one, machine=replace(one.machine, ranks_per_node=ranks))
        counts = sorted({1, 2, ranks // 2, ranks - 1, ranks, ranks + 1} - {0})
        by_cores = [one.simulate(cores=cores) for cores in (*counts, None)]
        assert len(set(by_cores[counts.index(ranks) :])) == 1, one
        assert all(fewer >= more * (1 - CLOSE) for fewer, more in pairwise(by_cores)), one
        # No core is left for messages.
        alone = one.simulate(cores=None, gamma=1.0 if one.machine.gamma else None)
        assert by_cores[0] <= ranks * alone * (1 + CLOSE), "one core takes turns"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.floats(0, 9)), min_size=1, max_size=6))
def test_an_even_share_is_the_sum_of_what_others_were_served(drawn: list[tuple[int, int, float]]) -> None:
    uses = [(first, first + length, gap) for first, length, gap in drawn]
    wanted = [
        sum(min(gap, other) for begin, end, other in uses if first <= end and begin <= last)
        for first, last, gap in uses
    ]
    assert share_evenly(*map(np.array, zip(*uses, strict=True))) == pytest.approx(wanted)
