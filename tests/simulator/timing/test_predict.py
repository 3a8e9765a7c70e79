"""The timing model on cases done by hand, what `auto` picks by it, and what that costs; no time is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from counted import CALLS, Counted
from hypothesis import given
from hypothesis import strategies as st
from strategies import problems

import ringattn as ra
from ringattn import Causal, Documents, Full, InvalidInput, Machine, Pattern, Plan, Window, make_plan, predict
from ringattn.machine.presets import MACHINES, get_machine
from ringattn.simulator.timing.auto import EQUAL
from ringattn.simulator.timing.kernel_seconds import timed_ranks

#: Numbers that are easy to multiply: 1 flop takes 1 s, a message 10 s, a byte 1/16 s.
SLOW = Machine(flops=1.0, latency=10.0, bandwidth=16.0)


def tiny(schedule: str, ranks: int = 2, **more: object) -> Plan:
    return make_plan(Full(), tokens=2 * ranks, ranks=ranks, head_dim=1, value_dim=3, schedule=schedule, **more)  # type: ignore[arg-type]


def test_two_ranks_by_hand() -> None:
    """A visit is 2 x 2 pairs x 2 (1 + 3) flops = 32 s; a block 2 rows x 4 numbers x 4 bytes = 32 bytes, 2 s, and 10
    s."""
    for schedule in ("ring", "direct", "allgather"):
        found = predict(tiny(schedule), SLOW)
        assert (found.seconds, found.compute, found.exposed) == (64.0, 64.0, 0.0)
        assert (found.bytes, found.messages) == (32, 1)
    # Ten times the latency: 100 + 2 s of messages, of which the first visit hides 32.
    assert predict(tiny("ring"), replace(SLOW, latency=100.0)).exposed == 70.0


def test_four_ranks_by_hand() -> None:
    """The ring exposes each of its 3 messages, all-gather their sum, less the visits under them."""
    machine = replace(SLOW, latency=98.0)  # 100 s a message, 32 s a visit
    assert predict(tiny("ring", 4), machine).seconds == 3 * 100 + 32
    assert predict(tiny("allgather", 4), machine).seconds == 300 + 3 * 32
    # Two nodes of two with links of 1 s inside: the outer message has both steps of the inner cycle.
    nodes = replace(machine, ranks_per_node=2, node_latency=0.0, node_bandwidth=32.0)
    assert predict(tiny("double_ring(2)", 4), nodes).seconds == pytest.approx(100 + 64)
    assert predict(tiny("ring", 4), nodes).seconds == 3 * 100 + 32


def test_a_rectangle_by_hand() -> None:
    """A visit is 1 x 2 pairs x 8 flops = 16 s. A block of keys takes 12 s; a query of 4 bytes 10.25 s, and its (out,
    lse) of 16 bytes, which go home after the last visit, 11 s."""
    sizes: dict[str, Any] = {"tokens": 4, "q_tokens": 2, "ranks": 2, "head_dim": 1, "value_dim": 3, "schedule": "ring"}
    for rotate, seconds, sent, messages in (("kv", 32.0, 32, 1), ("q", 43.0, 20, 2)):
        found = predict(make_plan(Full(), q_layout="contiguous", rotate=rotate, **sizes), SLOW)
        assert (found.seconds, found.compute, found.bytes, found.messages) == (seconds, 32.0, sent, messages)


def test_pairs_of_ulysses_groups_are_those_of_the_plan() -> None:
    machine = Machine(flops=1.0, latency=0.0, bandwidth=1e30)
    plan = make_plan(Causal(), tokens=64, ranks=4, heads=4, head_dim=1, value_dim=1, schedule="ulysses(2)")
    assert predict(plan, machine).compute == 4 * max(map(plan.pairs, range(4)))


def test_a_shared_way_out_by_hand() -> None:
    """Nodes of two: of a ring only one rank of a node sends out in a step, of an all-gather both, to two ranks each."""
    # 100 s a message
    machine = replace(SLOW, latency=98.0, ranks_per_node=2, node_latency=0.0, node_bandwidth=1e9)
    shared = replace(machine, shared_nic=True)
    assert [predict(tiny("ring", 4), m).seconds for m in (machine, shared)] == pytest.approx([332, 332])
    assert [predict(tiny("allgather", 4), m).seconds for m in (machine, shared)] == pytest.approx([296, 300])


@given(problems(), st.sampled_from(["ring", "direct", "allgather"]))
def test_better_machines_are_not_slower(case: tuple[Pattern, int, int, str], schedule: str) -> None:
    pattern, tokens, ranks, layout = case
    plan = make_plan(pattern, tokens=tokens, ranks=ranks, layout=layout, schedule=schedule)
    machine = Machine(flops=1e6, latency=1e-4, bandwidth=1e6)
    slow = predict(plan, machine)
    for better in ({"flops": 1e7}, {"bandwidth": 1e7}, {"latency": 1e-5}):
        fast = predict(plan, replace(machine, **better))
        assert fast.seconds <= slow.seconds * EQUAL and fast.bytes == slow.bytes
    assert slow.seconds == pytest.approx(slow.compute + slow.exposed) and slow.exposed >= -1e-9 * slow.seconds


def picked(pattern: Pattern, machine: Machine | str = "cpu", **options: object) -> tuple[str, str]:
    options = {"tokens": 1 << 14, "ranks": 8, "heads": 4, "layout": "auto", **options}
    plan = make_plan(pattern, machine=machine, **options)  # type: ignore[arg-type]
    assert plan.choice is not None
    assert (plan.choice.picked.layout, plan.choice.picked.schedule) == (plan.layout.name, plan.schedule)
    assert str(plan.choice.picked) in plan.choice.reason
    times = [c.prediction.seconds for c in plan.choice.candidates if c.prediction]
    assert plan.choice.picked.prediction is not None
    assert plan.choice.picked.prediction.seconds <= min(times) * EQUAL
    return plan.layout.name, plan.schedule


def test_what_auto_picks() -> None:
    assert picked(Full()) == ("contiguous", "ring")  # all are equal: the first
    assert picked(Causal()) == ("zigzag", "ring")
    assert picked(Window(200, 200))[0] == "contiguous"
    lengths = [9000, *[300] * 24, 184]
    assert picked(Causal() & Documents(lengths))[0].startswith(("balanced", "striped", "zigzag"))
    slow = Machine(flops=1e13, latency=1e-5, bandwidth=1e9)
    assert picked(ra.dilated_blocks(128, offsets=(48,)), slow, layout="contiguous")[1] == "direct"
    nodes = Machine(flops=1e13, latency=1e-6, bandwidth=1e9, ranks_per_node=4, node_latency=1e-6, node_bandwidth=1e10)
    assert picked(Full(), nodes, layout="contiguous") == ("contiguous", "double_ring(4)")
    # Named layouts and schedules stay; only what is left to auto is compared.
    assert picked(Causal(), schedule="direct") == ("zigzag", "direct")
    assert picked(Causal(), layout="striped(512)")[0] == "striped(512)"
    assert make_plan(Causal(), tokens=64, ranks=2, schedule="ring").choice is None


def test_nothing_is_compared_where_nothing_moves() -> None:
    for options, words in (({"ranks": 1}, "one rank"), ({"tokens": 0}, "empty"), ({"batch": 0}, "empty")):
        plan = make_plan(Causal(), **{"tokens": 64, "ranks": 2, "layout": "auto", **options})  # type: ignore[arg-type]
        assert plan.choice is not None and words in plan.choice.reason and not plan.choice.candidates
        assert (plan.layout.name, plan.schedule) == ("contiguous", "ring")


@given(problems())
def test_the_plan_of_auto_is_that_of_its_names(case: tuple[Pattern, int, int, str]) -> None:
    pattern, tokens, ranks, _ = case
    plan = make_plan(pattern, tokens=tokens, ranks=ranks, layout="auto", heads=2)
    named = make_plan(pattern, tokens=tokens, ranks=ranks, layout=plan.layout, schedule=plan.schedule, heads=2)
    assert plan == named and plan.hash == named.hash
    assert [plan.for_rank(r) for r in range(ranks)] == [named.for_rank(r) for r in range(ranks)]
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.choice is None
    assert make_plan(pattern, tokens=tokens, ranks=ranks, layout="auto", heads=2) is plan or pattern.transient


def test_fresh_processes_choose_alike() -> None:
    code = (
        "import ringattn as ra\n"
        "for p in (ra.Causal(), ra.local_window(64, blocks=1), ra.Documents([700, 100, 224])):\n"
        "    plan = ra.make_plan(p, tokens=1024, ranks=4, layout='auto', heads=2)\n"
        "    print(plan.hash, plan.choice.reason, plan.choice.candidates)\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1 and "predicted" in outputs.pop()


LOCAL = (Causal() & Window(4095), ra.Dilated((2048, 4096), (1, 2)), ra.dilated_blocks(128, offsets=(1, 2, 4)))


def test_no_exposed_time_is_negative() -> None:
    """Two ranks whose messages all hide: a time and the computation within it are sums that round differently."""
    for tokens in (1 << 20, 1 << 19, 3 << 18):
        plan = ra.make_plan(ra.Causal(), tokens=tokens, ranks=2, layout="zigzag", heads=1, head_dim=64)
        assert plan.choice is not None
        assert min(one.prediction.exposed for one in plan.choice.candidates if one.prediction) >= 0.0


@pytest.mark.parametrize("pattern", [*LOCAL, Full()], ids=["window", "dilated", "blocks", "dense"])
def test_a_choice_for_many_ranks_looks_at_few_tiles(pattern: Pattern) -> None:
    """Not at O(P), for a dense pattern either: steps of few ranks stand for all."""
    CALLS.clear()
    plan = make_plan(Counted(pattern, Full()), tokens=1 << 30, ranks=1 << 18)
    assert len(CALLS) < 12_000 and plan.choice is not None
    if pattern == Full():
        assert plan.schedule == "ring" and plan.choice.picked.prediction is not None
        assert "of 262,144 steps" in plan.choice.picked.basis
    else:
        assert len(plan.for_rank(1 << 17).forward) <= 8


def test_sampled_ranks() -> None:
    assert timed_ranks(1) == [0] and timed_ranks(4) == [0, 1, 2, 3] and len(timed_ranks(16)) == 8
    assert timed_ranks(1 << 18) == [0, (1 << 17) - 1, (1 << 18) - 1]


def test_wrong_machines() -> None:
    for options, words in (
        ({"flops": 0}, "flops=0 must be a number from 1e-30 to 1e\\+30; flops is the useful .* try flops=5e"),
        ({"latency": -1.0}, "latency=-1.0 must be a number from 0 to 1e\\+30; latency is the seconds"),
        ({"bandwidth": float("nan")}, "bandwidth=nan"),
        ({"ranks_per_node": 0}, "ranks_per_node=0 must be a whole number >= 1; .* the number of ranks"),
        ({"node_bandwidth": 0.0}, "node_bandwidth=0.0"),
        ({"shared_nic": 1}, "shared_nic=1 must be True or False"),
    ):
        with pytest.raises(InvalidInput, match=words):
            Machine(**{"flops": 1.0, "latency": 0.0, "bandwidth": 1.0, **options})  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="unknown machine 'cudo'; did you mean 'cuda'"):
        make_plan(Causal(), tokens=64, ranks=2, machine="cudo")
    assert get_machine(None, "cuda") == MACHINES["cuda"] and get_machine(None, "mps") == MACHINES["cpu"]


def test_wrong_names_and_layouts_without_a_plan() -> None:
    for options, words in (({"schedule": "autos"}, "did you mean 'auto'"), ({"layout": "atuo"}, "did you mean 'auto'")):
        with pytest.raises(InvalidInput, match=words):
            make_plan(Causal(), tokens=64, ranks=2, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"make_plan\(pattern, .*layout='auto'\)\.layout"):
        ra.make_layout("auto", tokens=64, ranks=2)


def test_virtual_attention_chooses() -> None:
    q = torch.randn(1, 2, 50, 8)
    wanted = ra.attention(q, q, q, Causal())
    found = ra.virtual_attention(q, q, q, Causal(), ranks=3, layout="auto", machine=SLOW)
    assert torch.allclose(found, wanted, atol=1e-6)
    with pytest.raises(InvalidInput, match=r"machine=3: expected Machine \| str \| None"):
        ra.virtual_attention(q, q, q, Causal(), ranks=3, machine=3)  # type: ignore[arg-type]


def _disagree(rank: int, what: str) -> str:
    torch.distributed.barrier()
    q = torch.randn(1, 1, 4, 8)
    options: dict[str, Any] = {"layout": "auto"}
    if what == "machine":
        options = {"layout": "zigzag", "machine": replace(SLOW, latency=1.0 + rank)}
    with pytest.raises(ra.RingAttentionError) as caught:
        ra.ring_attention(q, q, q, Causal(), **options)
    return str(caught.value)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("what", "words"), [("machine", "disagree about machine"), ("layout", "layout='auto').layout")]
)
def test_ranks_hear_of_it(run_ranks, what: str, words: str) -> None:  # type: ignore[no-untyped-def]
    assert all(words in text for text in run_ranks(_disagree, 2, what))
