"""simulate: solvers on real plans against each other and by hand, counts against the plan, budgets, errors, the
command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import Inside
from hypothesis import given
from hypothesis import strategies as st
from strategies import problems

import ringattn as ra
from ringattn import Causal, Full, InvalidInput, Machine, Pattern, Plan, Stall, Unsupported, Window, make_plan, simulate
from ringattn.machine.kernel_times import BACKWARD
from ringattn.simulator.timing.auto import predict
from ringattn.simulator.timing.costs import expected_seconds, failures, memory, young_daly

CLOSE = 1e-12
#: A machine on which visits and messages of these small plans take about as long.
EVEN = Machine(flops=1e8, latency=1e-4, bandwidth=2e7, merge=1e8, gamma=0.1)


@given(
    problems(most_tokens=24, most_ranks=6),
    st.sampled_from(["ring", "direct", "allgather", "double_ring(1)"]),
    st.booleans(),
)
def test_any_plan_has_a_time(case: tuple[Pattern, int, int, str], schedule: str, backward: bool) -> None:
    """Bounds that hold for every plan: the busiest rank's visits below, everything one after another above."""
    pattern, tokens, ranks, layout = case
    plan = make_plan(pattern, tokens=tokens, ranks=ranks, layout=layout, schedule=schedule, heads=2)
    machine = Machine(flops=1e6, latency=1e-3, bandwidth=1e6)
    found = simulate(plan, machine, backward=backward)
    each = [predict_compute(plan, machine, rank, backward) for rank in range(ranks)]
    latency = plan.messages(backward=backward) * machine.latency
    messages = latency + plan.bytes_sent(backward=backward) / machine.bandwidth
    if not (backward and plan.rotates == "q"):
        assert found.seconds >= max(each) * (1 - 1e-9)
    # A message ends with the others of its step at its sender or its receiver.
    assert found.seconds <= sum(each) + 2 * ranks * messages + 1e-9


def predict_compute(plan: Plan, machine: Machine, rank: int, backward: bool) -> float:
    flops = 2 * plan.pairs(rank) * (plan.head_dim + plan.value_dim) * (BACKWARD if backward else 1)
    return flops / machine.flops


def test_a_shared_way_out_is_split_evenly() -> None:
    """Two nodes of two, an all-gather: each rank sends two messages of 98 + 2 s out of its node. The card of
    the node is split evenly among four."""
    plan = make_plan(Full(), tokens=8, ranks=4, head_dim=1, value_dim=3, schedule="allgather")
    machine = Machine(flops=1.0, latency=98.0, bandwidth=16.0, ranks_per_node=2, node_latency=0.0, node_bandwidth=1e9)
    assert simulate(plan, machine).seconds == pytest.approx(200 + 3 * 32)
    assert simulate(plan, replace(machine, shared_nic=True)).seconds == pytest.approx(2 * 98 + 4 * 2 + 3 * 32)
    # A ring sends once out of each node in a step: nothing to share.
    ring = make_plan(Full(), tokens=8, ranks=4, head_dim=1, value_dim=3, schedule="ring")
    assert simulate(ring, machine).seconds == simulate(ring, replace(machine, shared_nic=True)).seconds


def test_ranks_that_share_a_link_wait_for_each_other() -> None:
    """A node of four, two on a switch: to the ranks 1, 2 and 3 places on go 1, 2 and 1 messages over a link at a time.

    A block takes 2 s alone. A ring's messages cross each link one by one, and so do those of one collective.
    """
    machine = Machine(flops=1e9, latency=0.0, bandwidth=16.0, ranks_per_node=4)
    shared = replace(machine, switch=2)

    def seconds(schedule: str, machine: Machine, **sizes: int) -> list[float]:
        plan = make_plan(Full(), tokens=8, ranks=4, head_dim=1, value_dim=3, schedule=schedule, **sizes)
        return [round(model(plan, machine).seconds, 4) for model in (simulate, predict)]

    assert seconds("allgather", machine) == [6.0, 6.0] and seconds("allgather", shared) == [8.0, 8.0]
    assert seconds("direct", machine) == [6.0, 6.0] and seconds("direct", shared) == [8.0, 8.0]
    assert seconds("ring", machine) == seconds("ring", shared) == [6.0, 6.0]
    assert seconds("direct", replace(machine, switch=4)) == seconds("direct", replace(machine, switch=9)) == [6.0, 6.0]
    one = replace(shared, one_gather=True)
    assert seconds("allgather", one) == seconds("allgather", replace(machine, one_gather=True))
    alone, crowded = (seconds("ulysses(4)", one, heads=4) for one in (machine, shared))
    assert crowded == pytest.approx([4 / 3 * each for each in alone], rel=1e-4)
    # Pairs exchange within a switch; then both of a pair send 4 tokens of 2 heads over its link, 8 s alone.
    alone, crowded = (seconds("ulysses(2, ring)", one, heads=4) for one in (machine, shared))
    assert crowded == [each + 8.0 for each in alone]


def test_the_host_starts_each_visit() -> None:
    """A ring of four has a visit at each step, an all-gather one and then three; one collective has one call."""
    machine = Machine(flops=1e30, latency=0.0, bandwidth=1e30, host=1.0, host_call=0.5)
    for schedule, one_gather, calls in (("ring", False, 4), ("allgather", False, 4), ("allgather", True, 2)):
        plan = make_plan(Full(), tokens=8, ranks=4, schedule=schedule)
        for model in (simulate, predict):
            assert model(plan, replace(machine, one_gather=one_gather)).seconds == pytest.approx(0.5 + calls)
    both = make_plan(Window(3, 3), tokens=16, ranks=8, schedule="ring")  # blocks from two ranks on either side
    assert [model(both, machine).seconds for model in (simulate, predict)] == pytest.approx([5.5, 5.5])


def test_double_ring_by_hand() -> None:
    """(P / w) max(w max(c, l_in), l_out) less the wait after the last cycle: the outer message has the inner cycle."""
    plan = make_plan(Full(), tokens=16, ranks=8, head_dim=1, value_dim=3, schedule="double_ring(4)")
    for latency, cycle in ((198.0, 200.0), (50.0, 4 * 32.0)):  # a visit is 32 s, a block 2 s on the outer link
        machine = Machine(
            flops=1.0, latency=latency, bandwidth=16.0, ranks_per_node=4, node_latency=0.0, node_bandwidth=32.0
        )
        assert simulate(plan, machine).seconds == pytest.approx(cycle + 4 * 32)


@pytest.mark.parametrize(("per_rank", "hidden"), [(190, False), (210, True)])
def test_when_messages_hide(per_rank: int, hidden: bool) -> None:
    """n >= (b / 2) (H_kv / H_q) F / bandwidth tokens per rank hide the messages of a dense ring (without latency)."""
    machine = Machine(flops=1e9, latency=0.0, bandwidth=1e7)
    least = 4 / 2 * 2 / 2 * machine.flops / machine.bandwidth  # fp32, as many key/value heads as query heads
    plan = make_plan(Full(), tokens=4 * per_rank, ranks=4, schedule="ring", heads=2, kv_heads=2)
    assert (per_rank >= least) is hidden
    assert (simulate(plan, machine).exposed["wait for messages"] < 1e-9) is hidden


def test_a_causal_ring_takes_as_long_as_its_busiest_rank() -> None:
    """The last rank of contiguous shards computes at every step; zigzag halves that. Messages are hidden."""
    sizes = {"tokens": 1 << 13, "ranks": 1 << 7, "heads": 8, "head_dim": 128, "schedule": "ring"}
    machine = Machine(flops=1e9, latency=0.0, bandwidth=1e14)
    visit = (1 << 6) ** 2 * 8 * 512 / machine.flops
    causal = simulate(make_plan(Causal(), layout="contiguous", **sizes), machine)  # type: ignore[arg-type]
    own = (1 << 6) * ((1 << 6) + 1) // 2 * 8 * 512 / machine.flops
    assert causal.solver == "stencil" and causal.seconds == pytest.approx(own + ((1 << 7) - 1) * visit, rel=CLOSE)
    zigzag = simulate(make_plan(Causal(), layout="zigzag", **sizes), machine)  # type: ignore[arg-type]
    assert zigzag.seconds == pytest.approx(causal.seconds / 2, rel=1e-2) and zigzag.exposed["wait for messages"] == 0


def test_262144_ranks_at_once() -> None:
    """Dense and local plans are seen to be regular from counts of all ranks; what is not is refused."""
    sizes = {"tokens": 1 << 30, "ranks": 1 << 18, "heads": 8, "head_dim": 128, "dtype": "bfloat16", "schedule": "ring"}
    machine = Machine(flops=5e14, latency=1e-5, bandwidth=5e10)
    pairs = (1 << 12) ** 2 * 8
    visit, block = pairs * 4 * 128 / machine.flops, 1e-5 + (1 << 12) * 8 * 256 * 2 / machine.bandwidth
    full = simulate(make_plan(Full(), **sizes), machine)  # type: ignore[arg-type]
    assert full.solver == "periodic"
    assert full.seconds == pytest.approx(((1 << 18) - 1) * max(visit, block) + visit, rel=CLOSE)
    nodes = simulate(make_plan(Full(), **sizes), "cuda")  # type: ignore[arg-type]
    assert nodes.solver == "periodic" and nodes.traffic == full.traffic
    local = simulate(make_plan(Causal() & Window(4095), layout="contiguous", **sizes), machine)  # type: ignore[arg-type]
    assert local.solver == "stencil" and local.traffic.messages == (1 << 18) - 1
    assert local.seconds == pytest.approx(block + (1 << 12) * ((1 << 12) - 1) // 2 * 8 * 512 / machine.flops, rel=1e-3)


def test_memory_by_hand() -> None:
    plan = make_plan(Full(), tokens=4096, ranks=4, schedule="ring", heads=8, kv_heads=2, head_dim=64, dtype="bfloat16")
    q, kv, lse = 1024 * 8 * 64 * 2, 1024 * 2 * 128 * 2, 1024 * 8 * 4
    assert memory(plan) == {
        "q, k, v": q + kv,
        "output": q,
        "lse": lse,
        "receive buffers": 2 * kv,
        "one visit's output": q + lse,
        "accumulator of the output": 2 * q,
    }
    back = memory(plan, backward=True)
    assert back["accumulators of dq, dk, dv"] == back["one visit's gradients, then dq, dk, dv"] == 2 * (q + kv)
    assert back["message buffers"] == 2 * (kv + 2 * kv) + 2 * kv + 2 * kv and back["saved block"] == kv
    whole = make_plan(Full(), tokens=4096, ranks=4, schedule="allgather", heads=8, kv_heads=2, dtype="bfloat16")
    assert memory(whole)["receive buffers"] == 4 * kv
    one = simulate(plan, replace(EVEN, memory=float(sum(memory(plan).values()))))
    assert one.fits is True and simulate(plan, replace(EVEN, memory=1e6)).fits is False
    assert simulate(plan, EVEN).fits is None and any("machine.memory" in words for words in one.unmodelled) is False


def test_failures_against_a_random_run() -> None:
    """The expected time, by drawing failures one by one; Young's interval from the figures of a ring of 262,144
    ranks."""
    assert young_daly(5.0, 696.0) == pytest.approx(83.4, abs=0.1)
    work, interval, write, restart, mean = 95.0, 10.0, 1.0, 2.0, 25.0
    source, total, runs = np.random.default_rng(0), 0.0, 1500

    def survives(span: float) -> float:
        """Seconds until `span` seconds passed without a failure or one came, negative in that case."""
        at = float(source.exponential(mean))
        return span if at >= span else -at

    for _ in range(runs):
        done = 0.0
        while done < work:
            found = survives(interval + write if done + interval < work else work - done)
            total += abs(found)
            if found > 0:
                done += min(interval, work - done)
                continue
            while (again := survives(restart)) < 0:
                total += -again
            total += again
    assert total / runs == pytest.approx(expected_seconds(work, interval, write, restart, mean), rel=0.03)


def test_energy_cost_and_failures_of_a_plan() -> None:
    plan = make_plan(Full(), tokens=4096, ranks=4, schedule="ring")
    machine = replace(EVEN, watts=500.0, price=2.0)
    found = simulate(plan, machine, passes=10)
    assert found.total == 10 * found.seconds
    assert found.joules == pytest.approx(500 * 4 * found.total) and found.price == pytest.approx(8 * found.total / 3600)
    risky = replace(machine, mtbf=400.0, checkpoint=1e9, restart=1.0)
    failing = simulate(plan, risky, passes=100)
    assert failing.failures is not None and failing.failures.mean == 100.0
    assert failing.failures.write == 1024 * 65 * 4 / 1e9 and failing.total > 100 * failing.seconds
    assert failing.joules == pytest.approx(500 * 4 * failing.total)
    with pytest.raises(InvalidInput, match="mtbf needs checkpoint"):
        simulate(plan, replace(EVEN, mtbf=1e6), passes=10)
    with pytest.raises(InvalidInput, match="the job never finishes"):
        failures(plan, replace(risky, mtbf=1e-3), 10.0)


def test_failures_and_checkpoints_belong_to_a_job() -> None:
    plan = make_plan(Full(), tokens=4096, ranks=4, schedule="ring")
    machine = replace(EVEN, watts=500.0, price=2.0, mtbf=1e9, checkpoint=1e3, restart=60.0)
    one = simulate(plan, machine)
    assert one.failures is None and one.total == one.seconds
    assert any("failures and checkpoints (define a job" in words for words in one.unmodelled)
    assert one.price == pytest.approx(2 * 4 * one.seconds / 3600) and one.joules == pytest.approx(500 * 4 * one.seconds)
    short = simulate(plan, machine, passes=10)  # no checkpoint takes longer than the job
    assert short.failures is not None and short.failures.checkpoints == 0 and short.failures.write > short.total
    assert short.total == pytest.approx(10 * one.seconds, rel=1e-6) and short.joules is not None
    most = young_daly(short.failures.write, short.failures.mean) / one.seconds
    parts = [simulate(plan, machine, passes=int(most * share)) for share in (0.5, 0.99, 1.01, 100.5)]
    counted = [part.failures.checkpoints for part in parts if part.failures is not None]
    assert counted == [0, 0, 1, 100]
    job = [int(most * share) * one.seconds for share in (0.5, 0.99, 1.01, 100.5)]
    times = [part.total / alone for part, alone in zip(parts, job, strict=True)]
    assert 1 < times[0] < times[1] < times[2] < times[3] < 1.1  # what failures and checkpoints add grows with the job


def test_wrong_requests() -> None:
    plan = make_plan(Full(), tokens=64, ranks=4, schedule="ring")
    direct = make_plan(Full(), tokens=64, ranks=4, schedule="direct")
    none = make_plan(Full(), tokens=64, ranks=4, schedule="ring", batch=0)
    many = make_plan(ra.Documents([64] * 8192), tokens=1 << 19, ranks=8192, schedule="ring", layout="contiguous")
    big = make_plan(Full(), tokens=1 << 14, ranks=2048, schedule="allgather")
    for call, kind, words in (
        (lambda: simulate(plan, EVEN, solver="X"), InvalidInput, "solver='X': expected one of auto, periodic"),
        (lambda: simulate(plan, EVEN, passes=0), InvalidInput, "passes=0: expected the number of passes"),
        (lambda: simulate(plan, EVEN, passes=10**300), InvalidInput, r"passes=a number of 997 bits: .* 1e\+15, or"),
        (lambda: simulate(none, EVEN), InvalidInput, "batch=0: there is nothing"),
        (lambda: simulate(plan, EVEN, slow={7: 2.0}), InvalidInput, r"slow: rank 7 is not one of 0 \.\. 3"),
        (lambda: simulate(plan, EVEN, slow=[1.0]), InvalidInput, "a factor for each of 4 ranks"),
        (lambda: simulate(plan, EVEN, slow={1: 0.0}), InvalidInput, "factors must be finite and > 0"),
        (lambda: simulate(plan, EVEN, slow=3), InvalidInput, "slow: expected a factor for each of 4 ranks"),  # type: ignore[arg-type]
        (lambda: simulate(plan, EVEN, slow={1: "x"}), InvalidInput, "a factor is not a number .*'x'"),  # type: ignore[dict-item]
        (lambda: simulate(plan, EVEN, stalls=[Stall(9, 0, 1.0)]), InvalidInput, r"expected a rank 0 \.\. 3"),
        (lambda: simulate(plan, EVEN, stalls=[(1, 0, 1.0)]), InvalidInput, "is not a Stall"),  # type: ignore[list-item]
        (lambda: simulate(plan, EVEN, stalls=[Stall(0, 4, 1.0)]), InvalidInput, r"has steps 0 \.\. 3"),
        (lambda: simulate(direct, EVEN, stalls=[Stall(0, 9, 1.0)]), InvalidInput, r"the pass has steps 0 \.\. 3"),
        (lambda: simulate(plan, EVEN, slow={1: 2.0}, solver="periodic"), Unsupported, "needs ranks that repeat with a"),
        (lambda: simulate(direct, EVEN, solver="stencil"), Unsupported, "the schedule direct is not a ring"),
        (lambda: simulate(many, EVEN), Unsupported, "8,192 ranks are more than the 4,096 .* this plan needs: the mask"),
        (lambda: simulate(big, EVEN), Unsupported, "steps and messages are more than"),
        (lambda: simulate(plan, 3), InvalidInput, "unknown machine 3; expected cpu"),  # type: ignore[arg-type]
        (lambda: simulate(plan, EVEN, backward="yes"), InvalidInput, "backward='yes': expected True or False"),  # type: ignore[arg-type]
        (lambda: simulate(plan, EVEN, solver=5), InvalidInput, "solver=5: expected one of auto"),  # type: ignore[arg-type]
        (lambda: simulate(plan, EVEN, slow=np.ones((2, 2))), InvalidInput, "slow: expected a factor for each of"),
        (lambda: simulate(plan, EVEN, slow_links={0: "x"}), InvalidInput, "slow_links: a factor is not a number"),  # type: ignore[dict-item]
        (lambda: simulate(plan, EVEN, stalls=[Stall(0, 0, -1.0)]), InvalidInput, "a step >= 0 and seconds >= 0"),
        (lambda: simulate(plan, "cpus"), InvalidInput, "did you mean 'cpu'"),
        (lambda: replace(EVEN, gamma=-1.0), InvalidInput, "gamma=-1.0 must be a number from 0 to 1e\\+30, or None"),
        (lambda: replace(EVEN, cores=0), InvalidInput, "cores=0 must be a whole number >= 1, or None; .* ranks of one"),
        (lambda: replace(EVEN, sources=(("flop", "cited"),)), InvalidInput, "did you mean 'flops'"),
        (lambda: replace(EVEN, sources=(("flops", "heard"),)), InvalidInput, "one of cited, fitted, assumed, measured"),
    ):
        with pytest.raises(kind, match=words):
            call()


def test_sources_follow_their_numbers() -> None:
    cpu = ra.MACHINES["cpu"]
    assert cpu.source("bandwidth") == "measured" and cpu.source("ranks_per_node") == "assumed"
    other = cpu.changed(bandwidth=1e9)
    assert other.source("bandwidth") == "assumed" and other.source("latency") == "measured"


def test_the_command(inside: Inside, tmp_path: Path) -> None:
    done = inside(
        "simulate ranks=4 tokens=4k heads=1 backward=true machine=cuda machine.memory=80e9 'slow={1: 1.5}' passes=3 "
        "'stalls=[[2, 1, 0.01]]' machine.price=2 output.path=t.json"
    )
    plan = make_plan(Causal(), tokens=4096, ranks=4, schedule="ring")
    machine = ra.MACHINES["cuda"].changed(memory=80e9, price=2.0)
    found = json.loads((tmp_path / "t.json").read_text())
    for backward, name in ((False, "forward"), (True, "backward")):
        one = simulate(plan, machine, backward=backward, slow={1: 1.5}, stalls=[Stall(2, 1, 0.01)], passes=3)
        assert found["passes"][name]["seconds"] == one.seconds and found["passes"][name]["solver"] == one.solver
        assert f"{one.solver}: {one.why[:20]}" in done.stdout
        kinds = found["passes"][name]["words"]
        assert (kinds["bytes"], kinds["cost of the job"]) == ("counted", "modelled")
    parts = "not modelled: merging", "fits", "interference        not modelled"
    for words in ("[assumed]", "[counted]", "[modelled]", *parts):
        assert words in done.stdout, words
    assert "measured]" not in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.json"]


@pytest.mark.parametrize("backward", [False, True])
def test_a_call_waits_for_records_unless_it_is_deferred(backward: bool) -> None:
    """ceil(log2 P) latencies with check="now"; none with "deferred", which is the default of devices."""
    plan = make_plan(Causal(), tokens=96, ranks=6, layout="zigzag")
    known = replace(EVEN, call=1e-3)

    def call(machine: Machine) -> float:
        return simulate(plan, machine, backward=backward).exposed["call"]

    assert call(known) == call(replace(known, deferred=False)) == pytest.approx(1e-3 + 3 * EVEN.latency)
    assert call(replace(known, deferred=True)) == call(replace(known, host=1e-6)) == 1e-3
    nodes = replace(known, ranks_per_node=8, node_latency=1e-6)
    assert call(nodes) == pytest.approx(1e-3 + 3e-6)
    assert call(EVEN) == call(replace(EVEN, host=1e-6)) == 0.0
    assert call(replace(EVEN, host=1e-6, deferred=False)) == pytest.approx(3 * EVEN.latency)
    for machine in (known, replace(known, deferred=True)):
        plain = predict(plan, replace(machine, call=None, deferred=True)).seconds
        assert predict(plan, machine).seconds - plain == pytest.approx(simulate(plan, machine).exposed["call"])
