"""The model of a training step against arithmetic by hand, its order, and published throughputs."""

from __future__ import annotations

from dataclasses import replace
from math import exp, expm1, log2, sqrt
from typing import Any

import pytest

import ringattn as ra
from ringattn.errors import InvalidInput
from ringattn.simulator.models.config import ModelConfig, load_model
from ringattn.simulator.models.parallel import Parallel
from ringattn.simulator.models.pipeline import Pipeline, pipelined_step
from ringattn.simulator.models.training import StepEstimate, training_step

MODEL = ModelConfig("small", 2, 256, 4, 2, 64, 512, 1024)
#: A memory of 1e12 bytes/s (twice the rate of merging), matrix products of 2e12 flop/s, nodes of 4.
MACHINE = ra.Machine(
    flops=1e12,
    latency=1e-5,
    bandwidth=1e8,
    ranks_per_node=4,
    node_latency=1e-6,
    node_bandwidth=1e9,
    merge=5e11,
    peak=4e12,
    matmul=2e12,
    memory=1e9,
)
TOKENS = 2048
#: Elements of the matrices of attention, of the MLP, and of the embedding.
ATTENTION, MLP, TABLE = 256 * 64 * 12, 3 * 256 * 512, 1024 * 256


def step(
    machine: ra.Machine = MACHINE, tokens: int = TOKENS, model: ModelConfig = MODEL, **spread: Any
) -> StepEstimate:
    return training_step(model, machine, tokens, Parallel(**spread))


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
    # Twice the multiplications of each matrix, in the forward and (gradients of inputs and weights) in the backward.
    projections, mlp, logits = (2 * TOKENS * size / 2e12 for size in (ATTENTION, MLP, TABLE))
    # Elements of a token that norms, residuals, rotary positions and the activation read and write, of two bytes.
    norms = TOKENS * 2 * (10 * 256 + 2 * 6 * 64 + 3 * 512) / 1e12
    parameters = 2 * (ATTENTION + MLP) + 256 + 2 * TABLE
    assert MODEL.parameters == parameters
    assert one.parts == pytest.approx(
        {
            "attention forward": 2 * forward,
            "attention backward": 2 * backward,
            "attention again": 2 * forward,
            "projections": 6 * projections,
            "mlp": 6 * mlp,
            "norms": 6 * norms,
            "all else again": 2 * (projections + mlp + norms),
            "loss": 4 * logits + 6 * 4 * TOKENS * 1024 / 1e12,
            "optimiser": (4 + 24 + 2) * parameters / 1e12,
            "tp": 0.0,
            "fsdp": 0.0,
        }
    )
    flops = 6 * (2 * (ATTENTION + MLP) + 256 + TABLE) * TOKENS + 2 * 12 * 64 * 4 * TOKENS * (TOKENS + 1) / 2
    assert one.flops == flops and one.mfu == pytest.approx(flops / one.seconds / 4e12)
    assert one.tokens_per_second == TOKENS / one.seconds and one.band is None and one.seconds_band is None
    rows = TOKENS * 2  # bytes of a column of activations
    activations = rows * (4 * 256 + 3 * 512 + 8 * 64) + TOKENS * 4 * (64 * 2 + 4)
    assert one.memory["activations"] == 2 * rows * 256 + activations
    assert [one.memory[name] for name in ("weights", "gradients", "optimizer")] == [
        size * parameters for size in (2, 4, 12)
    ]
    assert one.memory["logits"] == 2 * 4 * 512 * 1024 and one.memory["reserved"] == 5e7


def test_collectives_of_weights_are_exposed_where_they_take_longer_than_a_layer() -> None:
    """dp=8 on nodes of 4: a ring over 4 cards of 2e7 bytes/s, after 3 latencies."""
    far = step(replace(MACHINE, bandwidth=2e7), dp=8)
    layer, outer = ATTENTION + MLP, 256 + 2 * TABLE

    def seconds(parameters: float, item: int) -> float:
        return 3 * 1e-5 + item * parameters * 7 / 8 / 8e7

    gather, reduce = seconds(layer, 2), seconds(layer, 4)
    forward, backward = attention(TOKENS)
    parts = far.parts
    beside = (parts["projections"] + parts["mlp"] + parts["norms"]) / 6
    # The first gather and the last reduction hide behind nothing, those of the other layer behind a layer's computing.
    exposed = gather - (forward + beside) + gather + reduce - (backward + forward + 3 * beside)
    assert parts["fsdp"] == pytest.approx(
        gather + reduce + exposed + 2 * seconds(outer, 2) + seconds(outer, 4) - parts["loss"]
    )
    assert step(dp=4).parts["fsdp"] < step(dp=8).parts["fsdp"] < parts["fsdp"]
    quick = replace(MACHINE, bandwidth=1e15, node_bandwidth=1e15, latency=0.0, node_latency=0.0)
    assert step(quick, dp=8).parts["fsdp"] < 1e-7
    for shard, factors in (("none", (1, 1, 1)), ("optimizer", (1, 1, 8)), ("gradients", (1, 8, 8))):
        memory = step(dp=8, shard=shard).memory
        sizes = zip((2, 4, 12), factors, strict=True)
        names = ("weights", "gradients", "optimizer")
        assert [memory[name] for name in names] == [size * MODEL.parameters / factor for size, factor in sizes]


def test_tensor_parallelism_cuts_matrices_and_exchanges_activations() -> None:
    one, two = step(), step(tp=2)
    size = TOKENS * 256 * 2
    assert two.parts["tp"] == pytest.approx(2 * 2 * 4 * (1e-6 * log2(2) + size / 2 / 1e9))
    assert two.parts["mlp"] == pytest.approx(one.parts["mlp"] / 2)
    assert two.memory["weights"] == one.memory["weights"] / 2
    assert two.parts["attention forward"] == pytest.approx(2 * attention(TOKENS, heads=2, kv_heads=1)[0])


def test_each_distinct_window_is_simulated() -> None:
    hybrid = replace(MODEL, windows=(100, None))
    assert step(model=hybrid).parts["attention backward"] == pytest.approx(
        attention(TOKENS, 100)[1] + attention(TOKENS)[1]
    )
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


def test_checkpointing_trades_time_for_memory() -> None:
    steps = [step(checkpointing=name, cp=2, tokens=4096) for name in ("none", "attention", "full")]
    assert steps[0].seconds < steps[1].seconds < steps[2].seconds
    kept = [one.memory["activations"] for one in steps]
    assert kept[1] - kept[2] == 2 * 2048 * 4 * (64 * 2 + 4), "the output and lse of two layers"
    deep = replace(MODEL, layers=20, windows=(None,) * 20)
    kept = [step(model=deep, checkpointing=name).memory["activations"] for name in ("none", "attention", "full")]
    assert kept[0] > kept[1] > kept[2]


def test_more_of_anything_is_not_slower_and_more_tokens_are() -> None:
    base = step(cp=2, dp=4)
    for name in ("bandwidth", "node_bandwidth", "matmul", "merge", "flops"):
        assert step(replace(MACHINE, **{name: 2 * getattr(MACHINE, name)}), cp=2, dp=4).seconds <= base.seconds, name
    assert step(cp=2, dp=4, tokens=2 * TOKENS).seconds > base.seconds
    assert step(cp=2, dp=4, rows=2).tokens_per_second > base.tokens_per_second, "collectives are hidden better"
    assert (
        step(replace(MACHINE, memory=1e6)).fits is False
        and step().fits
        and step(replace(MACHINE, memory=None)).fits is None
    )


def test_cost_energy_and_failures() -> None:
    one = step(dp=4)
    seconds = 1e9 / (4 * TOKENS) * one.seconds * 4
    assert one.cost_per_billion_tokens(3.6) == pytest.approx(seconds * 1e-3)
    assert one.energy_per_billion_tokens(720.0) == pytest.approx(seconds * 2e-4)
    mean, tau = 1000 * 3600 / 4, sqrt(2 * 50 * 1000 * 3600 / 4)
    expected = mean * exp(100 / mean) * expm1((tau + 50) / mean) / tau
    assert one.effective_seconds(1000, 50, 100) == pytest.approx(one.seconds * expected)
    for wrong, message in (((1000, 0, 1), "checkpoint_seconds=0"), ((0.001, 50, 1), "4 GPUs fail every 0.9 s|900 ms")):
        with pytest.raises(InvalidInput, match=message):
            one.effective_seconds(*wrong)


def test_what_does_not_fit_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"cp": 0}, "cp=0 must be a whole number"),
        ({"shard": "all"}, "shard='all': expected one of none"),
        ({"checkpointing": "ful"}, "did you mean 'full'"),
        ({"tp": 3}, "tp=3 does not divide the 4 heads"),
        ({"cp": 4096}, "at least cp=4096"),
        ({"tp": 2, "dp": 3, "machine": replace(MACHINE, ranks_per_node=3)}, "tp=2 does not fit nodes of 3"),
        ({"machine": replace(MACHINE, merge=None)}, "give machine.merge"),
        ({"machine": "cpu"}, "dtype=bfloat16: the rates of this machine are those of float32"),
    ]
    for arguments, message in cases:
        machine = ra.get_machine(arguments.pop("machine", MACHINE))
        with pytest.raises(InvalidInput, match=message):
            step(machine, **arguments)


def test_published_throughputs() -> None:
    """torchtitan on 64 A100 and on 8 H100 limited to 500 W, 8,192 tokens; Llama 3 report, table 4, on H100.

    docs/models_cost.md shows these errors. "selective layer" computes every other layer again, "selective op" about
    every other product.
    """
    a100, h100 = ra.get_machine("a100_nvlink_ib"), ra.get_machine("h100_nvlink_ib")

    def tokens_per_second(machine: ra.Machine, name: str, parallel: Parallel, *checkpointing: str) -> float:
        steps = [
            training_step(load_model(name), machine, 8192, replace(parallel, checkpointing=kind))
            for kind in checkpointing
        ]
        assert all(0 < one.seconds_band[0] < one.seconds_band[1] for one in steps)  # type: ignore[index]
        return len(steps) / sum(1 / one.tokens_per_second for one in steps)

    def mfu(tokens: int, **spread: int) -> float:
        parallel = Parallel(tp=8, schedule="ring", **spread, shard="gradients", checkpointing="none")
        one = pipelined_step(load_model("llama3_405b"), h100, tokens, parallel, Pipeline(16, interleaved=7))
        assert one.mfu is not None
        return 100 * one.mfu

    wide, limited = Parallel(dp=64), Parallel(dp=8, rows=2)
    rows = [
        (2904, 0.109, tokens_per_second(a100, "llama3_8b", wide, "none", "full")),
        (2973, 0.102, tokens_per_second(a100, "llama3_8b", wide, "none", "attention")),
        (331, 0.0425, tokens_per_second(a100, "llama3_70b", wide, "full")),
        (6667, 0.388, tokens_per_second(h100, "llama3_8b", limited, "none", "attention")),
        (43, 0.104, mfu(8192, dp=64, rows=32)),
        (41, 0.071, mfu(8192, dp=128, rows=16)),
        (38, 0.042, mfu(131072, cp=16, dp=8, rows=16)),
    ]
    assert [modelled / published - 1 for published, _, modelled in rows] == pytest.approx(
        [error for _, error, _ in rows], abs=0.001
    )
