"""Solvers against an event simulation that shares no code with them; machines that are faster never take longer."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from event_oracle import EventOracle
from hypothesis import given
from hypothesis import strategies as st

from ringattn import (
    Causal,
    Documents,
    Full,
    Machine,
    Plan,
    Stall,
    Strided,
    Unsupported,
    Window,
    make_plan,
    predict,
    simulate,
)
from ringattn.simulator.timing.rates import Faults
from ringattn.simulator.timing.solvers import delay, event_loop
from ringattn.simulator.timing.solvers.event_loop import share_evenly
from ringattn.simulator.timing.solvers.recurrence import NeighborMessages, Phase, Ring
from ringattn.simulator.timing.window import window

CLOSE = 1e-9


@dataclass(frozen=True)
class Drawn:
    plan: Plan
    machine: Machine
    backward: bool
    faults: dict[str, Any]


def count_steps(plan: Plan, backward: bool) -> int:
    """Steps of the pass: those in which any rank does something."""
    planned = [plan.for_rank(rank) for rank in range(plan.ranks)]
    return len({step.clock for rank in planned for step in (rank.backward if backward else rank.forward)})


def draw(count: int) -> Iterator[Drawn]:
    """Random plans, machines and faults by seed."""
    for seed in range(count):
        pick = random.Random(seed)
        ranks, rows = pick.choice([2, 3, 4, 6]), pick.choice([1, 2, 4, 6])
        tokens = 2 * ranks * rows
        lengths = [tokens // 2 - 1, tokens - tokens // 2 + 1]
        pattern = pick.choice(
            [
                Full(),
                Full(),
                Causal(),
                Window(rows, 2 * rows),
                Causal() & Window(3 * rows),
                Documents(lengths),
                Strided(3),
            ]
        )
        inner = pick.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
        schedule = pick.choice(["ring", "ring", "ring", "ring", "direct", "allgather", f"double_ring({inner})"])
        plan = make_plan(
            pattern, tokens=tokens, ranks=ranks, layout=pick.choice(["contiguous", "zigzag", "striped"]), heads=2,
            kv_heads=pick.choice([1, 2]), head_dim=4, dtype=pick.choice(["float32", "bfloat16"]), schedule=schedule,
            rotate=pick.choice(["keys", "queries"]),
        )  # fmt: skip
        machine = Machine(
            flops=pick.choice([1e6, 1e7]), latency=pick.choice([0.0, 1e-4]), bandwidth=pick.choice([1e5, 1e6, 1e7]),
            ranks_per_node=pick.choice([1, 2, 3, 4]), node_bandwidth=pick.choice([None, 1e7]),
            node_latency=pick.choice([None, 1e-5]), shared_nic=pick.random() < 0.5,
            merge=pick.choice([None, 1e7]), gamma=pick.choice([None, 0.2]), cores={0: 1, 3: 2}.get(seed % 8),
        )  # fmt: skip
        backward = pick.random() < 0.5
        steps = count_steps(plan, backward)
        faults: dict[str, Any] = {
            "slow": {pick.randrange(ranks): pick.choice([0.5, 3.0])} if pick.random() < 0.2 else None,
            "slow_links": {pick.randrange(ranks): pick.choice([0.5, 3.0])} if pick.random() < 0.2 else None,
            "stalls": [
                Stall(pick.randrange(ranks), pick.randrange(steps), pick.choice([1e-4, 1e-2]))
                for _ in range(pick.choice([0, 0, 1, 2]))
            ],
        }
        yield Drawn(plan, machine, backward, faults)


def check(one: Drawn, solver: str = "auto") -> str:
    """When every rank begins its steps and finishes, and what the pass waits for, against the oracle; the solver."""
    oracle = EventOracle(one.plan, one.machine, one.backward, **one.faults)
    wanted, busiest = oracle.run(), oracle.busiest()
    shown = window(
        one.plan,
        one.machine,
        ranks=range(one.plan.ranks),
        steps=range(oracle.count),
        backward=one.backward,
        **one.faults,
    )
    for found, expected in ((shown.begun, oracle.begun), (shown.busy, np.array(oracle.busy).T)):
        assert found == pytest.approx(expected, rel=CLOSE), one
    peers = max(oracle.run(instant=True)) - busiest
    timeline = simulate(one.plan, one.machine, backward=one.backward, solver=solver, **one.faults)
    assert timeline.finish == pytest.approx(wanted, rel=CLOSE), (solver, one)
    waits = {"wait for peers": peers, "wait for messages": max(wanted) - busiest - peers}
    assert {cause: timeline.exposed[cause] for cause in waits} == pytest.approx(waits, abs=CLOSE * max(wanted))
    return timeline.solver


def with_slots(one: Drawn) -> Drawn:
    return replace(one, machine=replace(one.machine, buffers=2 + one.plan.ranks % 2))


def check_all(count: int) -> Counter[str]:
    """Check random passes by the quickest solver, and where it is not events, by events and with several slots."""
    solvers: Counter[str] = Counter()
    for one in draw(count):
        solver = check(one)
        solvers[solver] += 1
        if solver == "events":
            continue
        solvers[check(one, "events")] += 1
        if solver == "periodic":
            check(one, "stencil")
        with suppress(Unsupported):  # messages between ranks that are not neighbours have one slot
            check(with_slots(one))
            solvers["slots"] += 1
    return solvers


def test_solvers_agree_with_an_event_simulation() -> None:
    solvers = check_all(300)
    assert min(solvers[name] for name in ("periodic", "slots", "stencil")) >= 8, solvers


def test_rectangles_agree_with_an_event_simulation() -> None:
    """Queries at other positions than the keys, in either form of either pass."""
    for seed, one in enumerate(draw(80)):
        pick, whole = random.Random(seed), one.plan
        rows = pick.randint(1, whole.tokens)
        first, name = pick.randint(0, whole.tokens - rows), pick.choice(["contiguous", "zigzag", "striped"])
        plan = make_plan(
            whole.pattern, tokens=whole.tokens, ranks=whole.ranks, layout=whole.layout,
            q_layout=f"shifted({name}, {first})", q_tokens=rows, schedule=whole.schedule,
            **{**whole.sizes, "rotate": pick.choice(["keys", "queries", "queries, keys"])},
        )  # fmt: skip
        assert check(replace(one, plan=plan, faults={**one.faults, "stalls": []})) == "events"
        square = replace(whole, rotate="queries, keys")
        assert check(replace(one, plan=square, faults={**one.faults, "stalls": []})) == "events"


def test_auto_compares_both_forms_of_a_rectangle() -> None:
    """Few queries travel to many keys, and keys to many queries; a plan of a chosen form is one where it is named."""
    slow = Machine(flops=1e9, latency=1e-6, bandwidth=1e6)
    for rows, wanted in ((16, "queries"), (1024, "keys")):
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
    assert compared[:2] == [("ring", "keys"), ("ring", "queries")] and len(compared) > 4
    assert {rotate for _, rotate in compared[2:]} == {fastest.rotate}
    hidden = make_plan(Full(), machine=Machine(flops=1e3, latency=0.0, bandwidth=1e12), **sizes)
    assert hidden.choice is not None and hidden.schedule == "ring"
    assert [c.left_out for c in hidden.choice.candidates if "less than its visits" in c.left_out]


find_arrivals = delay.DelayState._find_arrivals


def mutated_share(first: np.ndarray, last: np.ndarray, gap: np.ndarray) -> np.ndarray:
    return gap


def mutated_cores(seconds: Sequence[float], cores: int) -> list[float]:
    return [max(1.0, len(seconds) / cores) * each for each in seconds]


def mutated_stalls(faults: Faults, steps: int) -> dict[tuple[int, int], float]:
    return {(stall.rank, max(stall.step - 1, 0)): stall.seconds for stall in faults.stalls}


def mutated_busy(ring: Ring, phase: Phase) -> Any:
    return phase.compute + phase.merge


def mutated_arrivals(state: delay.DelayState, sent: NeighborMessages, slot_free: np.ndarray | None) -> np.ndarray:
    return find_arrivals(state, replace(sent, gap=0.0), slot_free)


@pytest.mark.parametrize(
    ("owner", "name", "mutated"),
    [
        (event_loop, "share_evenly", mutated_share),
        (event_loop, "share_cores", mutated_cores),
        (event_loop, "_stalls_by_step", mutated_stalls),
        (Ring, "busy", mutated_busy),
        (delay.DelayState, "_find_arrivals", mutated_arrivals),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_solvers_are_noticed(owner: Any, name: str, mutated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that is not shared, cores that ended visits keep, a clock one step off, visits that messages do not slow,
    links that carry any number of messages at once."""
    monkeypatch.setattr(owner, name, mutated)
    with pytest.raises(AssertionError):
        check_all(40)


def test_faster_machines_never_take_longer() -> None:
    """Shares of a card by order of arrival broke this."""
    for number, one in enumerate(draw(60)):
        machine = replace(one.machine, shared_nic=True, ranks_per_node=2)
        slower = simulate(one.plan, machine, backward=one.backward, **one.faults).seconds
        name, factor = [("bandwidth", 1.3), ("flops", 1.3), ("latency", 0.7), ("node_bandwidth", 2.0)][number % 4]
        value = machine.bandwidth if getattr(machine, name) is None else getattr(machine, name)
        faster = replace(machine, **{name: factor * value})
        found = simulate(one.plan, faster, backward=one.backward, **one.faults).seconds
        assert found <= slower * (1 + CLOSE), (name, one)


def test_more_cores_never_take_longer_and_enough_cores_change_nothing() -> None:
    for one in draw(40):
        ranks = one.plan.ranks
        machine = replace(one.machine, ranks_per_node=ranks)
        by_cores = {
            cores: simulate(one.plan, replace(machine, cores=cores), backward=one.backward, **one.faults).seconds
            for cores in (*range(1, ranks + 2), None)
        }
        assert by_cores[ranks] == by_cores[ranks + 1] == by_cores[None]
        assert all(by_cores[n] >= by_cores[n + 1] * (1 - CLOSE) for n in range(1, ranks)), one
        copying = replace(machine, cores=None, gamma=1.0 if machine.gamma else None)  # no core is left for messages
        alone = simulate(one.plan, copying, backward=one.backward, **one.faults).seconds
        assert by_cores[1] <= ranks * alone * (1 + CLOSE), "one core takes turns"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.floats(0, 9)), min_size=1, max_size=6))
def test_an_even_share_is_the_sum_of_what_others_were_served(drawn: list[tuple[int, int, float]]) -> None:
    uses = [(first, first + length, gap) for first, length, gap in drawn]
    wanted = [
        sum(min(gap, other) for begin, end, other in uses if first <= end and begin <= last)
        for first, last, gap in uses
    ]
    assert share_evenly(*map(np.array, zip(*uses, strict=True))) == pytest.approx(wanted)
