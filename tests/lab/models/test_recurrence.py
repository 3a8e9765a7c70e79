"""Recurrent layers in the costs of hybrid models: FLOPs counted apart, and the messages of the exchange itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import ringattn as ra
from ringattn.lab.models.config import load_model
from ringattn.lab.models.inference import decode, prefill
from ringattn.lab.models.parallel import Parallel, busiest_stage
from ringattn.lab.models.recurrence import recur
from ringattn.lab.models.training import training_step
from ringattn.recurrence.runs import plan_rows, plan_states
from ringattn.text import size

MODEL, MACHINE = load_model("qwen3_next_80b"), ra.get_machine("h100_nvlink_ib")
assert MODEL.recurrence is not None
LAYER = MODEL.recurrence


def test_flops_of_a_chunk_are_those_of_its_products() -> None:
    c, k, v = 64, LAYER.keys, LAYER.values
    products = [(c, c, k), (c, c, k), (c, c, v), (c, k, v), (c, k, v), (c, k, v)]
    solve = c * c * (k + v)
    assert LAYER.flops(summary=False) * c == LAYER.heads * (sum(2 * a * b * d for a, b, d in products) + solve)


@pytest.mark.parametrize("cp", [1, 2, 8, 128])
def test_a_layer_sends_what_its_exchange_sends(cp: int) -> None:
    sizes: Any = {"cp": cp, "tp": 1, "layout": "zigzag", "batch": 2, "dtype": "bfloat16"}
    one = recur(LAYER, MACHINE, 1 << 20, **sizes)
    layout = ra.make_layout("zigzag", tokens=1 << 20, ranks=cp)
    plans = [plan_states(layout, None, 2 * 32 * 128 * 256 * 4, MACHINE), plan_rows(layout, None, 3, 2 * 8192 * 2)]
    by_rank = [
        {rank: sum(x for (_, sender, _), x in plan.messages.items() if sender == rank) for rank in range(cp)}
        for plan in plans
    ]
    assert f"{size(sum(max(sent.values()) for sent in by_rank))} and " in one.plan or cp == 1
    longer = recur(LAYER, MACHINE, 1 << 23, **sizes)
    for each in (one, longer):  # a backward computes twice as long, and exchanges as long
        assert 2 * each.forward - each.backward == pytest.approx(sum(plan.seconds(MACHINE) for plan in plans), rel=1e-6)
    assert (one.plan == "no exchange") == (cp == 1) and longer.plan == one.plan


def test_every_phase_counts_recurrent_layers() -> None:
    parallel = Parallel(cp=4, dp=2, layout="zigzag", schedule="ring")
    step = training_step(MODEL, MACHINE, 1 << 16, parallel)
    one = recur(LAYER, MACHINE, 1 << 16, cp=4, tp=1, layout="zigzag", batch=1, dtype="bfloat16")
    assert step.parts["recurrence"] == pytest.approx(36 * (one.forward + one.backward))
    assert "12 layers" in step.plan and "36 layers: recurrent" in step.plan
    alone = training_step(replace(MODEL, recurrence=None, windows=(), kinds=()), MACHINE, 1 << 16, parallel)
    assert step.parts["attention forward"] == pytest.approx(alone.parts["attention forward"] / 4)
    assert prefill(MODEL, MACHINE, 1 << 16, parallel).parts["recurrence"] == pytest.approx(36 * one.forward)
    token = decode(MODEL, MACHINE, 1 << 16, parallel)
    assert token.memory["states"] == 36 * 32 * 128 * 128 * 4 and token.parts["states"] > 0
    with pytest.raises(ra.Unsupported, match="runs of consecutive tokens"):
        training_step(MODEL, MACHINE, 1 << 16, replace(parallel, layout="striped(1)"))


@pytest.mark.parametrize(
    ("name", "pp", "attending", "recurrent"),
    [
        ("qwen3_next_80b", 2, 6, 18),
        ("kimi_linear_48b", 4, 2, 5),
        ("nemotron_h_8b", 4, 1, 6),
        ("falcon_h1_34b", 8, 9, 9),
    ],
)
def test_the_busiest_stage_has_the_layers_of_its_place(name: str, pp: int, attending: int, recurrent: int) -> None:
    """Of Kimi Linear, layers 8 to 14, with 8 and 12; of Nemotron-H, layers 14 to 26, with 19; others repeat."""
    model, tokens = load_model(name), 1 << 20
    step = training_step(model, MACHINE, tokens, Parallel(cp=8, pp=pp, rows=pp, schedule="ring"))
    assert step.plan.startswith(f"{attending} layers: ") and f"{recurrent} layers: recurrent" in step.plan
    stage = busiest_stage(model, tokens, pp)
    # What is counted over layers is the same, whether a layer is counted alone or in the whole.
    parts = [model.part(i, i + 1) for i in range(model.layers)]
    for count in ("active_parameters", "parameters"):
        outside = model.hidden + model.table * (2 if count == "parameters" else 1)
        alone, whole = ([getattr(one, count) - outside for one in each] for each in (parts, [model]))
        assert sum(alone) == whole[0]
    assert sum(len(one.windows) for one in parts) == model.having["a"] and stage.layers == -(-model.layers // pp)


def test_a_layer_with_both_takes_the_time_of_both() -> None:
    """Falcon-H1 attends and recurs in each layer: collectives hide behind the sum, and no layer is counted twice."""
    model = load_model("falcon_h1_34b")
    parallel = Parallel(dp=8, rows=1, checkpointing="none", shard="weights")
    step = training_step(model, MACHINE, 1 << 15, parallel)
    alone = training_step(replace(model, kinds=("am",) * 72, recurrence=None), MACHINE, 1 << 15, parallel)
    assert step.parts["attention forward"] == alone.parts["attention forward"]
    assert step.parts["norms"] == alone.parts["norms"] and step.parts["projections"] > alone.parts["projections"]
    assert step.memory["activations"] > alone.memory["activations"]
