"""The model of a training step against arithmetic by hand, its order, and published throughputs."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp, expm1, gcd, sqrt
from statistics import harmonic_mean
from typing import Any

import pytest

import ringattn as ra
from ringattn.errors import InvalidInput
from ringattn.lab.models.config import ModelConfig, load_model
from ringattn.lab.models.layer import collective_seconds
from ringattn.lab.models.packing import Lognormal, draw
from ringattn.lab.models.parallel import CHECKPOINTING, SHARDS, Parallel, Software
from ringattn.lab.models.training import StepEstimate, training_step
from ringattn.lab.verbs.settings import AdviseConfig, read_documents

MODEL = ModelConfig("small", 2, 256, 4, 2, 64, 512, 1024)
#: A memory of 1e12 bytes/s (twice the rate of merging), matrix products of 2e12 flop/s, nodes of 4.
LINKS: dict[str, Any] = {"ranks_per_node": 4, "node_latency": 1e-6, "node_bandwidth": 1e9}
MACHINE = ra.Machine(1e12, 1e-5, 1e8, merge=5e11, peak=4e12, matmul=2e12, memory=1e9, host_bandwidth=1e9, **LINKS)
TOKENS = 2048
#: Elements of the matrices of attention, of the MLP, and of the embedding.
ATTENTION, MLP, TABLE = 256 * 64 * 12, 3 * 256 * 512, 1024 * 256


def step(
    machine: ra.Machine = MACHINE, tokens: int = TOKENS, model: ModelConfig = MODEL, **spread: Any
) -> StepEstimate:
    return training_step(model, machine, tokens, Parallel(**spread))


def product(columns: int, inner: int, item: int = 2, rows: int = TOKENS, rate: float = 2e12) -> float:
    """Seconds in which a product computes, and reads and writes its operands; the result has 2 bytes."""
    return 2 * rows * columns * inner / rate + (item * inner * (rows + columns) + 2 * rows * columns) / 1e12


def attention(tokens: int, window: int | None = None, **sizes: Any) -> list[float]:
    """Seconds of the forward and of the backward of a layer's attention, by its plan."""
    pattern = ra.Causal() if window is None else ra.Causal() & ra.Window(window - 1)
    sizes = {"heads": 4, "kv_heads": 2, "ranks": 1, **sizes}
    plan = ra.make_plan(
        pattern, tokens=tokens, layout="zigzag", schedule="ring", head_dim=64, dtype="bfloat16", **sizes
    )
    return [ra.simulate(plan, MACHINE, backward=backward).seconds for backward in (False, True)]


def test_the_parts_of_a_step_on_one_gpu() -> None:
    one = step()
    forward, backward = attention(TOKENS)
    # Three products of each matrix: in the forward, and the gradients of inputs and of weights.
    projections, down, logits = product(512, 256) + product(256, 256), product(256, 512), product(1024, 256)
    mlp = product(1024, 256) + down
    # Elements of a token that norms, residuals, rotary positions and the activation read and write, of two bytes.
    norms = TOKENS * 2 * (10 * 256 + 2 * 6 * 64 + 3 * 512) / 1e12
    parameters = 2 * (ATTENTION + MLP) + 256 + 2 * TABLE
    assert MODEL.parameters == parameters
    wanted = {
        **{"attention forward": 2 * forward, "attention backward": 2 * backward, "attention again": 2 * forward},
        **{"projections": 6 * projections, "mlp": 6 * mlp, "norms": 6 * norms},
        "all else again": 2 * (projections + mlp - down + norms),
        "loss": 4 * logits + 24 * TOKENS * 1024 / 1e12,
        **{"gradients": 6 * parameters / 1e12, "optimiser": (4 + 24 + 2) * parameters / 1e12},
        **dict.fromkeys(
            ("tp", "ep", "fsdp", "pp", "bubble", "recurrence", "recurrence again", "adapters", "host"), 0.0
        ),
    }
    assert one.parts == pytest.approx(wanted)
    flops = 6 * (2 * (ATTENTION + MLP) + 256 + TABLE) * TOKENS + 2 * 12 * 64 * 4 * TOKENS * (TOKENS + 1) / 2
    assert one.flops == flops and one.mfu == pytest.approx(flops / one.seconds / 4e12)
    assert one.tokens_per_second == TOKENS / one.seconds and one.seconds_band is None
    rows = TOKENS * 2  # bytes of a column of activations
    activations = rows * (2 * 256 + 2 * 512 + 8 * 64) + TOKENS * 4 * (64 * 2 + 4)
    assert one.memory["activations"] == rows * 256 + activations, "the input of the layer that is computed again, once"
    assert one.memory["gradients"] == 4 * parameters - 2 * rows * 256, "gradients replace what layers keep"
    assert [one.memory[name] for name in ("weights", "optimizer")] == [size * parameters for size in (2, 12)]
    assert one.memory["logits"] == 4 * 512 * 1024 and one.memory["reserved"] == 5e7
    assert one.needed == sum(one.memory.values()) - 5e7 and one.reserved == int(1.08 * one.needed) + 8 * 512 * 1024


def test_collectives_of_weights_are_exposed_where_they_take_longer_than_a_layer() -> None:
    """dp=8 on nodes of 4: a ring over 4 cards of 2e7 bytes/s; it starts in 6.6 us, one hop of 7 is between nodes."""
    far = step(replace(MACHINE, bandwidth=2e7), dp=8)
    layer, outer = ATTENTION + MLP, 256 + 2 * TABLE

    def seconds(parameters: float, item: int) -> float:
        return 6.6e-6 + 3.4e-6 + item * parameters * 7 / 8 / 8e7

    gather, reduce = seconds(layer, 2), seconds(layer, 4)
    forward, backward = attention(TOKENS)
    parts = far.parts
    beside, again = (parts["projections"] + parts["mlp"] + parts["norms"]) / 6, parts["all else again"] / 2
    # The first gather and the last reduction hide behind nothing, those of the other layer behind a layer's computing.
    exposed = gather - (forward + beside) + gather + reduce - (backward + forward + 2 * beside + again)
    assert parts["fsdp"] == pytest.approx(
        gather + reduce + exposed + 2 * seconds(outer, 2) + seconds(outer, 4) - parts["loss"]
    )
    # What is hidden slows down what computes: 20 of 132 multiprocessors, and three bytes of memory for one sent.
    quick = replace(MACHINE, bandwidth=1e11, node_bandwidth=1e11)
    gather, reduce, gathers, reduces = (1e-5 + item * size * 7 / 8 / 1e11 for size in (layer, outer) for item in (2, 4))
    slowed = 20 / 132 * (2 * gather + reduce + 2 * gathers + reduces) + 3 * 8 * (layer + outer) / 1e12
    assert step(quick, dp=8).parts["fsdp"] == pytest.approx(gather + reduce + slowed)
    assert step(dp=4).parts["fsdp"] < step(dp=8).parts["fsdp"] < parts["fsdp"]
    quick = replace(MACHINE, bandwidth=1e15, node_bandwidth=1e15, latency=0.0, node_latency=0.0)
    assert step(quick, dp=8).parts["fsdp"] == pytest.approx(3 * 8 * (layer + outer) / 1e12, rel=1e-3)
    for shard, factors in (("none", (1, 1, 1)), ("optimizer", (1, 1, 8)), ("gradients", (1, 8, 8))):
        parallel = Parallel(dp=8, shard=shard, rows=2, micro_batches=2)  # so that gradients are kept
        memory = training_step(MODEL, MACHINE, TOKENS, parallel).memory
        sizes = zip((2, 4, 12), factors, strict=True)
        names = ("weights", "gradients", "optimizer")
        assert [memory[name] for name in names] == [size * MODEL.parameters / factor for size, factor in sizes]


def test_a_collective_over_more_ranks_takes_more_hops() -> None:
    """NCCL's rings: 6.6 us to start, 3.4 us for a hop in a node of 8, 13.4 us for one between nodes."""
    h100, size = ra.get_machine("h100_nvlink_ib"), 1e6
    times = [collective_seconds(h100, size, ranks, 1) for ranks in (2, 8, 512, 16384)]
    bytes_of = [size * (1 - 1 / ranks) for ranks in (2, 8, 512, 16384)]
    rates = [3.6e11, 3.6e11, 8 * 4e10, 8 * 4e10]
    hops = [(1, 0), (7, 0), (448, 63), (14336, 2047)]
    expected = [
        6.6e-6 + near * 3.4e-6 + far * 13.4e-6 + moved / rate
        for (near, far), moved, rate in zip(hops, bytes_of, rates, strict=True)
    ]
    assert times == pytest.approx(expected)


def test_software_changes_what_a_layer_costs() -> None:
    """8 bits: products of layers at twice the rate with operands of a byte, and casts; steps instead of fused norms."""
    base = step()
    fast = replace(MACHINE, matmul_fp8=4e12)
    eight = step(fast, software=Software(fp8=True))
    with pytest.raises(InvalidInput, match="fp8=true: this machine has no rate"):
        step(software=Software(fp8=True))
    assert eight.parts["mlp"] == pytest.approx(6 * (product(1024, 256, 1, rate=4e12) + product(256, 512, 1, rate=4e12)))
    casts = TOKENS * 4 * (2 * 256 + 256 + 512) / 1e12
    assert eight.parts["norms"] - base.parts["norms"] == pytest.approx(6 * casts)
    assert all(eight.parts[name] == base.parts[name] for name in ("loss", "attention forward"))
    eager = step(software=Software(compiled=False)).parts["norms"] - base.parts["norms"]
    assert eager == pytest.approx(6 * TOKENS * (64 * 256 + 16 * 6 * 64 + 4 * 512) / 1e12)
    whole = step(software=Software(loss_rows=None))
    assert whole.memory["logits"] == 4 * TOKENS * 1024 and whole.parts["loss"] < base.parts["loss"]
    late = step(software=Software(stops_early=False)).parts["all else again"] - base.parts["all else again"]
    assert late == pytest.approx(2 * product(256, 512))
    two = step(tp=2)
    every = step(tp=2, software=Software(exchanges=7))
    assert every.parts["tp"] == pytest.approx(7 / 4 * two.parts["tp"])
    quick = replace(MACHINE, node_bandwidth=1e11)
    hidden = step(quick, tp=2, software=Software(hides_exchanges=True)).parts["tp"]
    assert hidden == pytest.approx(20 / 132 * step(quick, tp=2).parts["tp"] + 16 * 3 * TOKENS * 512 / 1e12)
    wide = step(tp=2, software=Software(splits_loss=False, loss_rows=None)).memory["logits"]
    assert wide == 2 * step(tp=2, software=Software(loss_rows=None)).memory["logits"]


def test_200_changes_of_a_machine_or_a_job_never_slow_down_what_should_be_quicker() -> None:
    """More bandwidth or a faster kernel, less latency, fewer tokens or sequences: never slower."""
    draw = random.Random(7)
    better = {
        **dict.fromkeys(("flops", "bandwidth", "node_bandwidth", "merge", "matmul"), 1.0),
        **dict.fromkeys(("latency", "node_latency"), -1.0),
    }
    h100 = ra.get_machine("h100_nvlink_ib").changed(flops=5e14)
    for _ in range(200):
        coin = [draw.random() < 0.5 for _ in range(2)]
        software = Software(
            fp8=draw.random() < 0.3, compiled=coin[0], exchanges=draw.choice((4, 7)), hides_exchanges=coin[1]
        )
        experts = draw.choice((1, 32))
        model = replace(MODEL, experts=experts, experts_per_token=min(experts, 4))
        cp, dp, tp, rows = map(draw.choice, ((1, 2), (1, 2, 8, 16), (1, 2), (1, 2)))
        options = {"checkpointing": draw.choice(CHECKPOINTING), "shard": draw.choice(SHARDS), "software": software}
        parallel = Parallel(cp=cp, dp=dp, tp=tp, rows=rows, schedule="ring", **options)
        parallel = replace(parallel, ep=draw.choice((1, gcd(experts, parallel.group))))
        machine, tokens = draw.choice((replace(MACHINE, matmul_fp8=4e12), h100)), draw.choice((1024, 1536, 2048))
        before = training_step(model, machine, tokens, parallel).seconds
        name, factor = draw.choice(sorted(better)), draw.uniform(1.0, 8.0)
        changed = replace(machine, **{name: getattr(machine, name) * factor ** better[name]})
        after = training_step(model, changed, tokens, parallel).seconds
        assert after <= before * (1 + 1e-12), (name, factor, parallel)
        fewer = training_step(model, machine, tokens // 2, parallel).seconds
        assert fewer <= before * (1 + 1e-12), (tokens, parallel)


def test_tensor_parallelism_cuts_matrices_and_exchanges_activations() -> None:
    one, two = step(), step(tp=2)
    size = TOKENS * 256 * 2
    assert two.parts["tp"] == pytest.approx(2 * 2 * 4 * (1e-6 + size / 2 / 1e9 + 2 * size / 1e12))
    assert two.parts["mlp"] == pytest.approx(6 * (product(512, 256) + product(256, 256)))
    assert two.memory["weights"] == one.memory["weights"] / 2
    assert two.parts["attention forward"] == pytest.approx(2 * attention(TOKENS, heads=2, kv_heads=1)[0])


def test_each_distinct_window_is_simulated() -> None:
    hybrid = replace(MODEL, windows=(100, None))
    assert step(model=hybrid).parts["attention backward"] == pytest.approx(
        attention(TOKENS, 100)[1] + attention(TOKENS)[1]
    )
    masks = [ra.Causal() & ra.Window(99), ra.Causal()]
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "machine": MACHINE}
    plans = ra.make_plans(masks, tokens=TOKENS, ranks=4, layout="auto", **sizes)
    shared = step(model=hybrid, cp=4, layout="auto").parts["attention forward"]
    assert shared == pytest.approx(sum(ra.simulate(plan, MACHINE).seconds for plan in plans)), "both on one layout"
    wide = step(model=replace(MODEL, windows=(TOKENS,) * 2))
    assert wide.parts == step().parts, "a window of all tokens hides nothing"


def test_experts() -> None:
    """Eight experts, two of a token: products of two experts a token, memory and gathers of all eight."""
    experts = replace(MODEL, experts=8, experts_per_token=2)
    one, dense = step(model=experts), step()
    router = 2 * TOKENS * 256 * 8 / 2e12
    assert one.parts["mlp"] == pytest.approx(
        2 * dense.parts["mlp"] + 6 * max(router, 2 * TOKENS * 264 / 1e12), rel=1e-2
    )
    assert experts.parameters - MODEL.parameters == 2 * (7 * MLP + 256 * 8)
    assert experts.active_parameters - MODEL.active_parameters == 2 * (MLP + 256 * 8)


def test_experts_in_parallel() -> None:
    """dp=8 on two nodes of 4: each rank has a quarter, or an eighth, of the experts, and gathers over the others."""
    experts = replace(MODEL, experts=8, experts_per_token=2)
    one, four, eight = (step(model=experts, dp=8, ep=ep) for ep in (1, 4, 8))
    rows = TOKENS * 2 * 256 * 2  # bytes of the rows of two experts for each token
    # Read and written to sort them by rank and back and, where a rank has several experts, by expert.
    assert [four.parts["norms"] - each.parts["norms"] for each in (one, eight)] == pytest.approx(
        [6 * 4 * rows / 1e12] * 2
    )
    near, far = 1e-6 + rows * 3 / 4 / 1e9, 1e-5 + rows * 4 / 8 / 1e8
    # There and back in the forward, when it is computed again, and in the backward; of 2 layers.
    assert [each.parts["ep"] for each in (one, four, eight)] == pytest.approx([0.0, 12 * near, 12 * far])
    alone, within = (step(on, model=experts, dp=8, ep=2).parts["ep"] for on in (MACHINE, replace(MACHINE, switch=2)))
    assert alone == within, "a pair needs no link that it shares"
    paired, crowded = (
        step(replace(MACHINE, **change), model=experts, dp=8, ep=ep).parts["ep"]
        for change, ep in (({"switch": 2}, 4), ({"shared_nic": True}, 8))
    )
    assert paired == pytest.approx(12 * (1e-6 + rows * 4 / 4 / 1e9)), "two cards send two parts each over their link"
    assert crowded == pytest.approx(12 * (1e-5 + rows * 4 * 4 / 8 / 1e8)), "four ranks share a card"
    dense, every = experts.parameters - 16 * MLP, 16 * MLP
    for shard, held in (("weights", (dense + every) / 8), ("gradients", dense + every / 4)):
        assert step(model=experts, dp=8, ep=4, shard=shard).memory["weights"] == 2 * held
    assert four.parts["gradients"] == pytest.approx(14 * (dense + every / 4) / 1e12)
    assert four.memory["gathered weights and gradients"] == (2 * 2 + 4) * (ATTENTION + 256 * 8 + 2 * MLP)
    # Equal products of matrices that are read once for twice the tokens; the router's is the same.
    read = step(model=replace(experts, experts=2), dp=8).parts["mlp"] - 6 * product(2, 256)
    assert four.parts["mlp"] - 6 * product(8, 256) == pytest.approx(read)
    slow = replace(MACHINE, node_bandwidth=1e8, bandwidth=2e7)
    gathers = [step(slow, model=experts, dp=8, ep=ep).parts["fsdp"] for ep in (1, 2, 4, 8)]
    assert sorted(gathers, reverse=True) == gathers
    kept = [step(model=experts, dp=8, ep=ep, checkpointing="selective").memory["activations"] for ep in (1, 4)]
    assert kept[1] - kept[0] == 2 * rows, "what ranks received of each other, of the layer that keeps it"


def test_checkpointing_trades_time_for_memory() -> None:
    steps = [step(checkpointing=name, cp=2, tokens=4096) for name in CHECKPOINTING]
    assert sorted(steps, key=lambda one: one.seconds) == steps
    kept = [one.memory["activations"] for one in steps]
    assert kept[2] - kept[3] == 2048 * 4 * (64 * 2 + 4), "the output and lse of the layer that is not computed again"
    assert kept[1] - kept[2] == 2048 * 2 * (256 + 6 * 64 + 512), "q, v, gate and the last product of a layer"
    deep = replace(MODEL, layers=20, windows=(None,) * 20)
    kept = [step(model=deep, checkpointing=name).memory["activations"] for name in CHECKPOINTING]
    assert sorted(kept, reverse=True) == kept


def test_memory_of_the_host_takes_inputs_and_states() -> None:
    """The input of each layer, 256 columns of 4,096 rows in 2 bytes, goes and comes; states travel once."""
    full, host = (step(checkpointing=name, tokens=4096) for name in ("full", "host"))
    for category in ("optimizer", "activations", "gradients"):
        assert host.memory[category] < full.memory[category]
    inputs = 2 * 4096 * 256 * 2
    assert host.host_bytes == 16 * MODEL.parameters + inputs and full.host_bytes == 0
    states = (4 + 2 + 30) * MODEL.parameters
    assert host.parts["host"] == 0, "layers compute for longer than their inputs travel"
    assert host.parts["optimiser"] == pytest.approx(states / 1e9)
    slow = step(checkpointing="host", tokens=4096, machine=MACHINE.changed(host_bandwidth=1.0))
    assert slow.parts["host"] == pytest.approx(2 * inputs, rel=1e-3)
    several = step(checkpointing="host", tokens=4096, rows=4, micro_batches=4)
    assert several.parts["optimiser"] == host.parts["optimiser"] and several.parts["mlp"] == 4 * host.parts["mlp"]
    for kind in ("host", "offload"):
        with pytest.raises(InvalidInput, match=rf"checkpointing={kind}: .* no rate to the host's memory; give machine"):
            step(checkpointing=kind, machine=MACHINE.changed(host_bandwidth=None))


def test_only_inputs_of_layers_are_on_the_host() -> None:
    """Of 20 layers, two inputs stay; gradients, states and the optimiser are those of "full"."""
    deep = replace(MODEL, layers=20, windows=(None,) * 20)
    full, host = (step(model=deep, checkpointing=name, tokens=4096) for name in ("full", "offload"))
    one = 4096 * 256 * 2
    assert full.memory["activations"] - host.memory["activations"] == 18 * one and host.host_bytes == 20 * one
    assert host.memory["optimizer"] == full.memory["optimizer"] and host.parts["optimiser"] == full.parts["optimiser"]
    assert host.seconds == pytest.approx(full.seconds) and host.parts["host"] == 0
    staged: dict[str, Any] = {"model": deep, "tokens": 4096, "pp": 2, "rows": 4}
    full, host = (step(checkpointing=name, **staged) for name in ("full", "offload"))
    assert host.host_bytes == 2 * 10 * one, "two micro-batches at once on the first stage, of 10 layers"
    assert full.memory["activations"] - host.memory["activations"] == (2 * 10 - 2) * one
    slow = step(model=deep, checkpointing="offload", tokens=4096, machine=MACHINE.changed(host_bandwidth=1.0))
    assert slow.parts["host"] == pytest.approx(20 * 2 * one, rel=1e-3)


def test_heads_one_after_another_take_the_memory_of_one() -> None:
    """Of two key/value heads a rank attends with one: half of q, k and v, and of attention's buffers but of dO."""
    host, heads = (step(checkpointing=name, tokens=4096) for name in ("host", "heads"))
    halves = 4096 * 64 * 2 * 4  # of q, k and v, with 4, 2 and 2 heads of 64 columns in 2 bytes
    assert host.memory["activations"] - heads.memory["activations"] == halves
    one, half = (part.memory["attention buffers"] for part in (host, heads))
    gradient = 4096 * 4 * 64 * 2
    assert half - gradient == pytest.approx((one - gradient) / 2)
    alone = attention(4096, heads=2, kv_heads=1)
    assert heads.parts["attention forward"] == pytest.approx(2 * 2 * alone[0])
    assert heads.host_bytes == host.host_bytes and heads.flops == host.flops
    single = replace(MODEL, kv_heads=1)
    assert step(model=single, checkpointing="heads").memory == step(model=single, checkpointing="host").memory
    with pytest.raises(InvalidInput, match="checkpointing=heads: all heads of deepseek_v3 share latents"):
        step(ra.get_machine("h100_nvlink_ib"), model=load_model("deepseek_v3"), checkpointing="heads")


@pytest.mark.parametrize(
    ("tokens", "gpus", "machine", "checkpointing"),
    [
        (500_000, 1, "h100_nvlink_ib", "host"),  # ALST, arXiv:2506.13996
        (3_700_000, 8, "h100_nvlink_ib", "host"),
        (15_000_000, 32, "h100_nvlink_ib", "host"),
        (5_000_000, 8, "h100_nvlink_ib", "heads"),  # UPipe, arXiv:2602.21196
        (2_000_000, 4, "a100_nvlink_ib", "heads"),  # FPDT, arXiv:2408.16978, which takes chunks of the sequence
    ],
)
def test_published_lengths_fit(tokens: int, gpus: int, machine: str, checkpointing: str) -> None:
    """The longest sequences of Llama 3 8B that systems train, computed as these do; four times as long does not fit."""
    for factor, fits in ((1, True), (4, False)):
        parallel = Parallel(cp=gpus, schedule="ring", checkpointing=checkpointing)
        one = training_step(load_model("llama3_8b"), ra.get_machine(machine), factor * tokens, parallel)
        assert one.fits is fits, one.bytes / 2**30


def test_more_tokens_take_longer_and_more_sequences_hide_collectives() -> None:
    base = step(cp=2, dp=4)
    assert step(cp=2, dp=4, tokens=2 * TOKENS).seconds > base.seconds
    assert step(cp=2, dp=4, rows=2).tokens_per_second > base.tokens_per_second, "collectives are hidden better"
    assert step().fits
    assert [step(replace(MACHINE, memory=memory)).fits for memory in (1e6, None)] == [False, None]


def test_cost_energy_and_failures() -> None:
    rate = 12 * MODEL.parameters / 4 / 50  # a checkpoint of 50 s
    one = step(replace(MACHINE, mtbf=1000 * 3600.0, checkpoint=rate, restart=100.0), dp=4)
    seconds = 1e9 / (4 * TOKENS) * one.seconds * 4
    assert one.gpu_hours == pytest.approx(seconds / 3600)
    mean, tau = 1000 * 3600 / 4, sqrt(2 * 50 * 1000 * 3600 / 4)
    expected = mean * exp(100 / mean) * expm1((tau + 50) / mean) / tau
    assert one.effective_seconds == pytest.approx(one.seconds * expected) and step().effective_seconds is None
    with pytest.raises(InvalidInput, match="4 GPUs fail every 900 ms"):
        _ = replace(one, machine=replace(one.machine, mtbf=3.6)).effective_seconds


def test_what_does_not_fit_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"cp": 0}, "cp=0 must be a whole number"),
        ({"checkpointing": "ful"}, "did you mean 'full'"),
        ({"ep": 2, "dp": 2}, "ep=2: small has no experts; leave ep out"),
        ({"tp": 3}, "tp=3 does not divide the 4 heads"),
        ({"cp": 4096}, "at least cp=4096"),
        ({"tp": 2, "dp": 3, "machine": replace(MACHINE, ranks_per_node=3)}, "tp=2 splits nodes of 3"),
        ({"machine": replace(MACHINE, merge=None)}, "its rate as machine.merge"),
        ({"machine": "cpu"}, "dtype=bfloat16: this machine's rates are for float32"),
    ]
    for arguments, message in cases:
        machine = ra.get_machine(arguments.pop("machine", MACHINE))
        with pytest.raises(InvalidInput, match=message):
            step(machine, **arguments)


def test_published_throughputs() -> None:
    """torchtitan on 64 A100, 8,192 tokens; Llama 3 report, table 4, on H100; experts on H100, 4,096 tokens.

    benchmarks/published.md has these errors. "selective layer" computes every other layer again.
    """
    a100, h100, cudnn = map(ra.get_machine, ("a100_nvlink_ib", "h100_nvlink_ib", "h100_nvlink_ib/cudnn"))
    meta = {"tp": 8, "pp": 16, "interleaved": 7, "schedule": "ring", "shard": "gradients", "checkpointing": "none"}
    hidden = {"checkpointing": "none", "software": Software(loss_rows=None, hides_exchanges=True)}

    def run(name: str, machine: ra.Machine, tokens: int, **spread: Any) -> StepEstimate:
        one = step(machine, tokens, load_model(name), **spread)
        assert one.seconds_band is not None and 0 < one.seconds_band[0] < one.seconds_band[1]
        return one

    def rate(*how: Any, **spread: Any) -> float:
        return run(*how, **spread).tokens_per_second

    kinds = ("none", "full", "selective")
    none, full, selective = (rate("llama3_8b", a100, 8192, dp=64, checkpointing=kind) for kind in kinds)
    every = {"pp": 4, "micro_batches": 8, "shard": "optimizer", "dp": 16, "ep": 8, "rows": 32}
    rows: list[tuple[float, float, Any]] = [
        (2904, -0.011, harmonic_mean([none, full])),
        (2973, -0.048, selective),
        (331, -0.024, rate("llama3_70b", a100, 8192, dp=64)),
        (0.43, 0.114, run("llama3_405b", h100, 8192, dp=64, rows=32, **meta).mfu),
        (0.41, 0.076, run("llama3_405b", h100, 8192, dp=128, rows=16, **meta).mfu),
        (0.38, 0.032, run("llama3_405b", h100, 131072, cp=16, dp=8, rows=16, **meta).mfu),
        (5630, 0.219, rate("gpt_oss_120b", cudnn, 4096, **every, **hidden)),
        (7626, -0.131, rate("gpt_oss_120b", cudnn, 4096, dp=64, ep=64, rows=8, micro_batches=4, **hidden)),
        (13058, 0.259, rate("gpt_oss_20b", cudnn, 4096, dp=8, ep=8, rows=32, micro_batches=16, **hidden)),
    ]
    errors = [modelled / published - 1 for published, _, modelled in rows]
    assert errors == pytest.approx([error for _, error, _ in rows], abs=0.001)


#: A model of eight layers, and a machine whose nodes have one rank.
DEEP = replace(MODEL, layers=8, windows=(100, None) * 4)
EVEN = replace(MACHINE, ranks_per_node=1, node_latency=None, node_bandwidth=None)


@pytest.mark.parametrize(("interleaved", "kept"), [(1, 4.0), (2, 4 + 3 / 2)])
def test_stages_repeat_and_wait(interleaved: int, kept: float) -> None:
    """Four stages of two layers, eight micro-batches of one sequence, with the gradients of all reduced at once."""
    parallel = Parallel(dp=2, rows=8, shard="gradients", checkpointing="none")
    one = training_step(DEEP, EVEN, 512, replace(parallel, pp=4, interleaved=interleaved))
    stage = replace(DEEP, layers=2, windows=(100, None), tied=True)
    micro = training_step(stage, EVEN, 512, replace(parallel, rows=1))
    again = micro.seconds - micro.parts["optimiser"] - micro.parts["fsdp"]
    sent = 1e-5 + 2 * 512 * 256 / 1e8  # the activations of a micro-batch, forward and backward for each part
    assert one.parts["pp"] == pytest.approx(8 * max(2 * interleaved * sent - again, 0))
    assert one.parts["fsdp"] == micro.parts["fsdp"] and one.parts["mlp"] == 8 * micro.parts["mlp"]
    assert one.parts["bubble"] == pytest.approx(3 / interleaved * again)
    others = micro.parts["optimiser"] + micro.parts["fsdp"] + one.parts["pp"]
    assert one.seconds == pytest.approx((8 + 3 / interleaved) * again + others)
    assert one.memory["activations"] == kept * micro.memory["activations"]
    assert one.memory["weights"] == micro.memory["weights"] < 2 * DEEP.parameters / 3
    assert one.gpus == 8 and one.tokens == 2 * 8 * 512
    assert one.flops == training_step(DEEP, EVEN, 512, Parallel(dp=2, rows=8)).flops
    parallel = replace(parallel, shard="weights")
    micro = training_step(stage, EVEN, 512, replace(parallel, rows=1))
    assert training_step(DEEP, EVEN, 512, replace(parallel, pp=4)).parts["fsdp"] == 8 * micro.parts["fsdp"]


def test_messages_between_stages_are_exposed_where_they_take_longer_than_computing() -> None:
    parallel = Parallel(tp=2, rows=2, pp=2, checkpointing="none")
    slow = replace(EVEN, bandwidth=1e5, ranks_per_node=2, node_bandwidth=1e9, shared_nic=True)
    one, near = (training_step(DEEP, machine, 512, parallel) for machine in (slow, replace(slow, ranks_per_node=4)))
    repeated = one.parts["bubble"]  # what a stage repeats for each micro-batch
    assert one.parts["pp"] == pytest.approx(2 * (2 * (1e-5 + 2 * 512 * 256 / 1e5) - repeated)), "two ranks share a card"
    assert near.parts["pp"] == 0.0


def test_the_stage_with_the_output_matrix_has_one_layer_fewer_where_layers_are_left_over() -> None:
    seven = replace(DEEP, layers=7, windows=(None,) * 7, vocab=1 << 16)
    stage = training_step(
        replace(seven, layers=2, windows=(None,) * 2, tied=True), EVEN, 512, Parallel(checkpointing="none")
    )
    layer = sum(s for name, s in stage.parts.items() if name not in ("loss", "optimiser", "fsdp")) / 2
    one = training_step(seven, EVEN, 512, Parallel(rows=4, pp=4, checkpointing="none"))
    assert one.parts["loss"] == pytest.approx(4 * (stage.parts["loss"] - layer)) and one.parts["loss"] > 0


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ({"pp": 0}, "pp=0 must be a whole number"),
        ({"pp": 9}, "small has 8 layers"),
        ({"pp": 2, "micro_batches": 3}, "micro_batches=3 must divide the batch=4"),
        ({"pp": 2, "interleaved": 0}, "interleaved=0"),
        ({"pp": 3, "interleaved": 2}, "interleaved=2 needs a multiple of pp=3"),
    ],
)
def test_pipelines_that_cannot_be_cut_are_refused(pipeline: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        training_step(DEEP, EVEN, 512, Parallel(rows=4, **pipeline))


def test_frozen_weights_have_no_gradients_and_adapters_have_the_parameters_of_peft() -> None:
    """PEFT prints 41,943,040 trainable parameters for rank 16 beside all seven matrices of Llama 3 8B."""
    model, machine = load_model("llama3_8b"), ra.get_machine("h100_nvlink_ib")
    assert model.adapters(16) == 41_943_040
    shapes = [(model.hidden, 4096), (model.hidden, 1024), (model.hidden, 1024), (4096, 4096), *[(4096, 14336)] * 3]
    assert model.adapters(8) == 32 * 8 * sum(map(sum, shapes))
    whole, frozen = (
        training_step(model, machine, 8192, Parallel(dp=8, software=Software(lora=rank))) for rank in (None, 16)
    )
    share = model.adapters(16) / model.parameters
    for name in ("projections", "mlp"):  # a forward and one product of the backward, instead of two
        assert frozen.parts[name] == pytest.approx(whole.parts[name] * 2 / 3)
    assert frozen.parts["norms"] == whole.parts["norms"] and frozen.parts["adapters"] > 0 == whole.parts["adapters"]
    assert frozen.memory["weights"] == whole.memory["weights"]
    assert frozen.memory["optimizer"] == pytest.approx(share * whole.memory["optimizer"], rel=1e-6)
    assert frozen.parts["optimiser"] == pytest.approx(share * whole.parts["optimiser"])
    assert frozen.checkpoint_bytes == pytest.approx(share * whole.checkpoint_bytes)
    assert frozen.flops < whole.flops and "LoRA" in frozen.outside


def test_documents_compute_their_own_pairs() -> None:
    """Packed in one sequence, attention computes the pairs of each; equal ones are as fast as rows of a batch."""
    model, machine, lengths = load_model("llama3_8b"), ra.get_machine("h100_nvlink_ib"), (3000, 1000, 96)
    parallel = Parallel(cp=2, layout="contiguous", schedule="ring")
    step = training_step(model, machine, 4096, replace(parallel, documents=lengths))
    plain = training_step(model, machine, 4096, parallel)
    pairs = 4096 * 4097 // 2 - sum(length * (length + 1) // 2 for length in lengths)
    assert plain.flops - step.flops == 12 * 128 * 32 * 32 * pairs
    halves = training_step(model, machine, 1 << 17, replace(parallel, documents=(1 << 16, 1 << 16)))
    alone = training_step(model, machine, 1 << 16, Parallel(dp=2))
    for part in ("attention forward", "attention backward"):  # each rank has its own document, and waits for none
        assert halves.parts[part] == pytest.approx(alone.parts[part], rel=0.05), part
    with pytest.raises(InvalidInput, match=r"their 4,096 tokens do not fill a sequence of 8,192"):
        training_step(model, machine, 8192, replace(parallel, documents=lengths))


def test_the_rest_of_a_layer_hides_the_host() -> None:
    """What the host takes to start a ring counts only where it exceeds the whole layer."""
    model, machine = load_model("llama3_8b"), ra.get_machine("h100_nvlink_ib")
    parallel = Parallel(cp=8, layout="zigzag", schedule="ring")
    free = training_step(model, replace(machine, host=None, host_call=None), 8192, parallel)
    slow = training_step(model, replace(machine, host=1.0, host_call=0.0), 8192, parallel)
    assert free.parts["attention forward"] <= training_step(model, machine, 8192, parallel).parts["attention forward"]
    # 8 calls of a second in each of 32 layers; the rest of the layer is hidden behind them.
    rest = {name: sum(slow.parts[x] for x in ("projections", "mlp", "norms")) / 3 for name in ("forward",)}
    total = slow.parts["attention forward"] + rest["forward"]
    assert total == pytest.approx(32 * 8.0, rel=1e-3)


def test_machines_of_published_steps_have_their_band() -> None:
    plain, sheet = (
        training_step(MODEL, ra.get_machine(f"{name}/{kernel}"), TOKENS, Parallel())
        for name, kernel in (("h100_nvlink_ib", "fa2"), ("mi300x_ib", "ck"))
    )
    assert plain.outside == () and "GPUs of mi300x_ib" in sheet.outside


def test_drawn_documents_are_the_same_everywhere_and_the_slowest_group_is_waited_for() -> None:
    """Half of the lengths are below the median; the time of attention is that of the group with the most pairs."""
    drawn = Lognormal(200, 1.2, 7)
    lengths = draw(drawn, 1 << 16)
    assert sum(lengths) == 1 << 16 and lengths[:6] == (139, 91, 159, 23, 46, 715)  # on every machine
    assert 0.4 < sum(length < 200 for length in lengths) / len(lengths) < 0.6
    assert draw(drawn, 1 << 16, 1) != lengths != draw(replace(drawn, seed=8), 1 << 16)
    groups = [
        [sum(length * (length + 1) // 2 for length in draw(drawn, TOKENS, number)) for number in (group, group + 4)]
        for group in range(4)
    ]
    packed = step(dp=4, rows=2, documents=drawn)
    first = step(rows=2, documents=draw(drawn, TOKENS))
    most = max(map(sum, groups))
    assert packed.parts["attention forward"] == pytest.approx(
        first.parts["attention forward"] * most / 2 / groups[0][0]
    )
    assert packed.imbalance == (1.0, pytest.approx(most / (sum(map(sum, groups)) / 4)))
    assert packed.unequal == f"attention takes {packed.imbalance[1]:.2f} times the mean in the slowest of 4 dp groups"
    alike = step(dp=4, rows=2, documents=draw(drawn, TOKENS))
    assert packed.flops - alike.flops == 12 * 64 * 4 * 2 * (sum(map(sum, groups)) - 8 * groups[0][0])
    assert alike.imbalance == (1.0, 1.0) and step(dp=4).unequal == step(dp=4).packed == ""


def test_the_busiest_rank_of_packed_documents_is_told() -> None:
    """One document of 1,536 tokens and four of 128: the first of two ranks computes most of the pairs."""
    parallel: dict[str, Any] = {"cp": 2, "layout": "contiguous", "schedule": "ring"}
    machine = MACHINE.changed(gamma=None)
    uneven = step(machine, documents=(1536, 128, 128, 128, 128), **parallel)
    plan = ra.make_plan(
        ra.Causal() & ra.Documents((1536, 128, 128, 128, 128)), tokens=TOKENS, ranks=2, layout="contiguous", heads=4
    )
    assert uneven.imbalance[0] == pytest.approx(plan.imbalance) and plan.imbalance > 1.05
    assert uneven.packed == "5 documents of 128 to 1,536 tokens in a sequence"
    assert f"{plan.imbalance:.2f} times the mean on the busiest of 2 cp ranks" in uneven.unequal


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("lognormal(2k, 1.2)", Lognormal(2048, 1.2)),
        ("lognormal(2000, 0.5, 3)", Lognormal(2000, 0.5, 3)),
        ([3000, "1k"], (3000, 1024)),
        (None, ()),
        ("lognormal(2000)", None),
        ("lognormal(0, 1)", None),
        ("normal(2000, 1)", None),
        ("lognormal(2000, 9)", None),
    ],
)
def test_documents_are_lengths_or_a_distribution(given: object, found: object) -> None:
    config = AdviseConfig(documents=given)
    if found is None:
        with pytest.raises(InvalidInput, match=r"^documents=.*try 'documents=\[3000, 1096\]' or 'documents=lognormal"):
            read_documents(config)
    else:
        assert read_documents(config) == found
