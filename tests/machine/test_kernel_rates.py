"""Modelled kernel rates: what makes a call slow, and that all solvers take the same seconds of kernels and hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

import ringattn as ra
from ringattn.machine.file import read_machine, write_machine
from ringattn.machine.kernel_times import BACKWARD, KernelRates
from ringattn.machine.presets import get_machine
from ringattn.pattern import parse_pattern
from ringattn.simulator.timing.kernel_seconds import modelled_seconds_per_pair

RATES = KernelRates("fa2", forward=1e12, backward=5e11, softmax=100.0, slots=64, memory=1e11, launch=1e-5, visit=1e-4)
MACHINE = ra.Machine(flops=1.0, latency=1e-5, bandwidth=1e9, merge=1e10, gamma=0.05, kernel_rates=RATES)


def plan(schedule: str = "ring", ranks: int = 4, **sizes: int) -> ra.Plan:
    """A causal zigzag plan in bf16."""
    given = {"tokens": 8192, "heads": 4, "kv_heads": 2, "head_dim": 64, **sizes}
    return ra.make_plan(ra.Causal(), ranks=ranks, layout="zigzag", schedule=schedule, dtype="bfloat16", **given)


def test_one_call_by_hand() -> None:
    """A rank alone, dense: pairs at the rate of a full GPU over its fill, the rows' traffic, and one launch."""
    alone = ra.make_plan(ra.Full(), tokens=2048, ranks=1, heads=4, head_dim=64, dtype="bfloat16", schedule="ring")
    blocks = 4 * 2048 / 128
    pairs = 4 * 2048**2 * (4 * 64 + 100) / (1e12 * blocks / (blocks + 16))
    assert ra.simulate(alone, MACHINE).compute == pytest.approx(pairs + 2 * 8192 * 64 * 2 / 1e11 + 1e-5)
    products = 4 * 2048**2 * (BACKWARD * 4 * 64 + 100) / (5e11 * blocks / (blocks + 16))
    backward = products + 9 * 8192 * 64 * 2 / 1e11 + 1e-5
    assert ra.simulate(alone, MACHINE, backward=True).compute == pytest.approx(backward)


@pytest.mark.parametrize(("pattern", "edges"), [(ra.Causal(), 1), (ra.Causal() & ra.Window(255), 2)])
def test_tiles_on_an_edge_are_computed_whole(pattern: ra.Pattern, edges: int) -> None:
    """Along each edge half a tile of 128 keys is computed for nothing; long blocks of a triangle leave slots idle."""
    one = ra.make_plan(pattern, tokens=2048, ranks=1, heads=4, head_dim=64, dtype="bfloat16", schedule="ring")
    computed, blocks = one.pairs() + edges * 4 * 2048 * 64, 4 * 2048 / 128
    seconds = computed * (4 * 64 + 100) / (1e12 * blocks / (blocks + 64))
    assert ra.simulate(one, MACHINE).compute == pytest.approx(seconds + 2 * 8192 * 64 * 2 / 1e11 + 1e-5)
    small = ra.make_plan(ra.Causal(), tokens=32, ranks=1, heads=4, head_dim=64, dtype="bfloat16", schedule="ring")
    whole = ra.make_plan(ra.Full(), tokens=32, ranks=1, heads=4, head_dim=64, dtype="bfloat16", schedule="ring")
    alone, all_pairs = (ra.simulate(x, MACHINE).compute for x in (small, whole))
    assert alone > all_pairs, "all pairs of one tile, in which slots are idle for longer"


def test_few_heads_and_small_heads_are_slow_for_their_flops() -> None:
    def rate(**sizes: int) -> float:
        one = plan(ranks=1, tokens=4096, **sizes)
        return one.heads * one.head_dim / ra.simulate(one, MACHINE).compute

    assert rate(heads=32, kv_heads=8) > 1.1 * rate(heads=2, kv_heads=2)
    assert rate(head_dim=128) > 1.1 * rate(head_dim=32)
    assert ra.simulate(plan(), MACHINE.changed(flops=1e12)).compute != ra.simulate(plan(), MACHINE).compute
    assert MACHINE.changed(flops=1e12).kernel_rates is None


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("host", [0.0, 1.0])
def test_solvers_agree(backward: bool, host: float) -> None:
    machine = MACHINE.changed(host=host, host_call=host)
    by_solver = [ra.simulate(plan(), machine, backward=backward, solver=solver) for solver in ("stencil", "events")]
    assert by_solver[0].seconds == pytest.approx(by_solver[1].seconds, rel=1e-12)
    for timeline in by_solver:
        assert timeline.compute + sum(timeline.exposed.values()) == pytest.approx(timeline.seconds)
        assert (timeline.exposed["host"] > 0) == bool(host)
    assert not host or by_solver[0].seconds >= 5.0


def test_one_gather_enters_a_node_once_and_merges_nothing() -> None:
    """By hand: a gather of 15 blocks passes every GPU of a node, the 8 blocks of the other node enter over 8 cards."""
    nodes = MACHINE.changed(ranks_per_node=8, node_latency=0.0, node_bandwidth=4e9, latency=0.0, gamma=None)
    gathered = plan("allgather", ranks=16)
    block = 512 * 2 * 2 * 64 * 2
    timeline = ra.simulate(gathered, nodes.changed(one_gather=True))
    far, near = 8 * block / 8 / 1e9, 15 * block / 4e9
    assert timeline.exposed["merge"] == 0
    assert timeline.exposed["wait for messages"] == pytest.approx(max(far, near))
    separate = ra.simulate(gathered, nodes)
    assert separate.exposed["merge"] > 0 and separate.seconds > timeline.seconds


def test_a_file_keeps_the_rates(tmp_path: Path) -> None:
    preset = get_machine("a100_nvlink_ib")
    write_machine(tmp_path / "machine.yaml", preset)
    read = read_machine(tmp_path / "machine.yaml")
    assert read.kernel_rates == preset.kernel_rates and read.source("kernel_rates") == "fitted"
    assert ra.simulate(plan(), read).seconds == ra.simulate(plan(), preset).seconds


def test_a_kernel_by_library() -> None:
    fast, slow = (get_machine(f"h100_nvlink_ib/{library}") for library in ("fa3", "fa2"))
    assert fast.kernel_rates == get_machine("h100_nvlink_ib").kernel_rates and fast.preset == "h100_nvlink_ib"
    assert ra.simulate(plan(), fast).compute < ra.simulate(plan(), slow).compute
    with pytest.raises(ra.InvalidInput, match="did you mean 'fa2'"):
        get_machine("a100_nvlink_ib/fa22")


def test_a_preset_tells_that_its_rates_and_band_are_of_16_bit_inputs() -> None:
    machine = ra.get_machine("h100_nvlink_ib")
    plans = {
        dtype: ra.make_plan(ra.Causal(), tokens=65536, ranks=8, heads=8, head_dim=128, dtype=dtype)
        for dtype in ("bfloat16", "float32")
    }
    notes = {dtype: " ".join(ra.simulate(plan, machine).notes) for dtype, plan in plans.items()}
    assert "published passes took" in notes["bfloat16"] and "16-bit" not in notes["bfloat16"]
    assert "published passes took" not in notes["float32"]
    assert "are for 16-bit inputs, and pairs of float32 take 8 times as long" in notes["float32"]


@pytest.mark.parametrize("pattern", ["strided_blocks(128, stride=8)", "Causal() & Documents([256, 768] * 32)"])
def test_the_first_tiles_of_a_visit_stand_for_the_others(pattern: str) -> None:
    written = pattern.replace("[256, 768] * 32", str([256, 768] * 32))
    plan = ra.make_plan(
        parse_pattern(written), tokens=32768, ranks=2, layout="contiguous", schedule="ulysses(2, ring)", heads=8
    )
    demand = plan.ring_plan(0)[0].demand
    every, some = demand.first_works(0, 0, None), demand.first_works(0, 0, 32)
    assert every == (demand.joined_works(0, 0), True) and not some[1]
    assert sum(len(work.k) * work.repeat for work in some[0]) <= 32 < sum(len(w.k) * w.repeat for w in every[0])
    exact, near = (modelled_seconds_per_pair(plan, RATES, False, False, [0], enough) for enough in (None, 32))
    assert near == pytest.approx(exact, rel=0.02)
