"""Models that keep latents, or choose keys: what travels, which form is taken, and its costs, computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import ringattn as ra
from ringattn.kernels.expand import CHUNK_BYTES
from ringattn.lab.advise.search import least_attention_of_layers
from ringattn.lab.models.attention import FORMS, attention_flops, attention_of_layers, latent_sizes
from ringattn.lab.models.config import load_model
from ringattn.lab.models.inference import decode, prefill
from ringattn.lab.models.layer import LayerCosts
from ringattn.lab.models.parallel import Parallel, busiest_stage
from ringattn.lab.models.training import training_step
from ringattn.simulator.timing.costs import EXPANDED, memory
from ringattn.simulator.timing.kernel_seconds import pair_seconds

V3, GLM5 = load_model("deepseek_v3"), load_model("glm5")
#: Computing takes time, and nothing else: 1e12 flop/s.
COMPUTES = ra.Machine(1e12, 0.0, 1e30, merge=1e30)
LATENT: dict[str, Any] = {"heads": 4, "head_dim": 24, "value_dim": 10, "block": ((1, 16), (1, 8))}


@pytest.mark.parametrize("schedule", ["ring", "ulysses(2, ring)"])
def test_each_visit_expands_the_rows_that_it_needs(schedule: str) -> None:
    """With a full mask every rank visits all rows: FLOPs of pairs, 2 r H (dn + dv) of a row, and the bytes made."""
    plan = ra.make_plan("Full()", tokens=64, ranks=4, schedule=schedule, batch=3, dtype="bfloat16", **LATENT)
    assert plan.expand_flops == 2 * 16 * 4 * (24 - 8 + 10)
    machine = replace(COMPUTES, merge=5e11, matmul=2e12)
    # A rank of a group of two has two of four heads, and the rows of both.
    heads, rows = (4, 16) if schedule == "ring" else (2, 32)
    pairs = heads * rows * 64
    made = 64 * (2 * 16 * heads * 26 / 2e12 + 2 * 2 * heads * 34 / 1e12)
    for backward, factor, again in ((False, 1.0, 1), (True, 2.5, 3)):
        wanted = 3 * (pairs * 2 * 34 * factor / 1e12 + again * made)
        assert pairs * pair_seconds(plan, machine, backward) == pytest.approx(wanted)


def test_what_is_no_product_of_a_latent_costs_nothing() -> None:
    plain: dict[str, Any] = {"tokens": 64, "ranks": 2, "heads": 4, "head_dim": 24, "value_dim": 10}
    absorbed: dict[str, Any] = {"kv_heads": 1, "head_dim": 24, "value_dim": 16, "block": ((1, 16), (1, 8))}
    quantized: dict[str, Any] = {"block": ((4, 24, "int8"), (4, 10, "int8"), (4, 1))}
    for more in ({}, absorbed, quantized, {"value_dim": 24, "block": ((4, 24),)}):
        assert ra.make_plan("Causal()", **{**plain, **more}).expand_flops == 0
    long = {**LATENT, "tokens": 1 << 22, "ranks": 2, "schedule": "ring"}
    plan = ra.make_plan("Causal()", **long)
    assert memory(plan)["expanded rows"] == EXPANDED and memory(plan, backward=True)["expanded rows"] == 3 * EXPANDED
    assert EXPANDED == CHUNK_BYTES


def test_what_travels_in_each_form() -> None:
    """The bytes of docs/latents.md: DeepSeek-V3, 32k tokens on 8 ranks, MiB that rank 0 sends."""
    common: dict[str, Any] = {"tokens": 1 << 15, "ranks": 8, "layout": "zigzag", "schedule": "ring"}
    sent = {}
    for form in FORMS:
        plan = ra.make_plan("Causal()", dtype="bfloat16", **common, **latent_sizes(V3, form, 1))
        sent[form] = [round(plan.bytes_sent(0, backward=way) / 2**20, 1) for way in (False, True)]
    assert sent == {"expanded": [1120, 3822], "latents": [15.8, 90], "absorbed": [15.8, 90]}


def test_latents_travel_between_nodes_and_keys_stay_expanded_on_one_rank() -> None:
    h100 = ra.get_machine("h100_nvlink_ib")
    ((_, node),) = attention_of_layers(V3, h100, 1 << 15, Parallel())
    assert ", expanded (expanded" in node.plan
    ((count, far),) = attention_of_layers(V3, h100.changed(ranks_per_node=1), 1 << 15, Parallel(cp=8))
    assert count == 61 and ", latents (expanded" in far.plan
    # As `ra.simulate` of both plans: expanded 202 ms with its products, latents 57 ms.
    assert far.forward + far.backward == pytest.approx(0.057, rel=0.02)


@pytest.mark.parametrize(("chunk", "form"), [(128, "absorbed"), (256, "expanded")])
def test_few_queries_of_each_key_attend_in_absorbed_form(chunk: int, form: str) -> None:
    """Below r (dn + dv) / (2 r + rope - D - Dv) = 171 queries absorbing takes fewer FLOPs."""
    ((_, one),) = attention_of_layers(V3, COMPUTES, 1 << 15, Parallel(), backward=False, chunk=chunk)
    assert f", {form} (" in one.plan
    pairs = 128 * (chunk * (1 << 15) - chunk * (chunk - 1) / 2)
    rows, dims = (chunk, 576 + 512) if form == "absorbed" else (1 << 15, 192 + 128)
    assert one.forward == pytest.approx((2 * dims * pairs + 2 * 512 * 128 * 256 * rows) / 1e12, rel=1e-6)


def test_decoding_reads_latents_or_computes_with_them() -> None:
    machine = replace(COMPUTES, merge=5e11, matmul=1e14, node_bandwidth=1e9, node_latency=0.0, ranks_per_node=8)
    one = decode(V3, machine, 1 << 17, Parallel(cp=8, rows=2), merge="gather")
    rows = 2 * 61 * (1 << 14)
    assert one.memory["keys and values"] == rows * 576 * 2, "63 MiB in 4,480 of a layer"
    assert one.parts["keys and values"] == pytest.approx(
        max(rows * 1152 / 1e12, rows * 2 * 128 * (576 + 512) / 1e14), rel=1e-9
    )
    assert one.parts["merging over cp"] == pytest.approx(61 * 7 * 4 * 2 * 128 * 513 / 1e9)
    costs = LayerCosts(V3, machine, Parallel(rows=2), 2)
    assert one.parts["absorbing"] == pytest.approx(61 * costs.expand(2))
    split = decode(V3, machine, 1 << 17, Parallel(cp=8, tp=8, rows=2))
    assert split.memory["keys and values"] == one.memory["keys and values"], "tp ranks have whole latents"


def test_chosen_keys_count_what_is_scored_and_what_is_attended() -> None:
    """GLM-5: 32 heads of 128 score each visible pair; a query attends to 2,048 keys in absorbed form."""
    tokens = 1 << 13
    visible, chosen = tokens * (tokens + 1) // 2, 2048 * 2049 // 2 + 2048 * (tokens - 2048)
    ((_, one),) = attention_of_layers(GLM5, COMPUTES, tokens, Parallel())
    absorbing, pairs = 2 * tokens * 512 * 64 * (192 + 256), 2 * 64 * (576 + 512) * chosen
    assert one.forward == pytest.approx((pairs + absorbing + 2 * 32 * 129 * visible) / 1e12, rel=1e-6)
    assert one.backward == pytest.approx((2.5 * pairs + 2 * absorbing) / 1e12, rel=1e-6)
    assert "2,048 keys of each query chosen" in one.plan
    assert attention_flops(GLM5, tokens) == 78 * (6 * 64 * 512 * chosen + 2 * 32 * 128 * visible)
    # All latents and keys of the indexer travel in a prefill, and none in a decode.
    slow = replace(COMPUTES, flops=1e29, matmul=1e29, bandwidth=1e6)
    ((_, sent),) = attention_of_layers(GLM5, slow, tokens, Parallel(cp=4, schedule="ring"), backward=False)
    assert sent.forward == pytest.approx(3 * tokens / 4 * 2 * (576 + 128) / 1e6)
    machine = replace(COMPUTES, merge=5e11, matmul=1e30)
    read = decode(GLM5, machine, tokens, Parallel(cp=2))
    assert read.parts["keys and values"] == pytest.approx(78 * 2 * (1024 * 576 + tokens / 2 * 128) / 1e12)
    assert read.memory["keys and values"] == 78 * tokens / 2 * 2 * (576 + 128)


def test_steps_and_prefills_of_published_models() -> None:
    h100 = ra.get_machine("h100_nvlink_ib")
    for name in ("deepseek_v2_lite", "deepseek_v3", "kimi_k2", "glm5"):
        model = load_model(name)
        parallel = Parallel(cp=8, dp=8, tp=2, ep=32, schedule="ring")
        step = training_step(model, h100, 1 << 15, parallel)
        assert step.flops > 6 * model.active_parameters * step.tokens
        least = sum(count * one.forward for count, one in least_attention_of_layers(model, h100, 1 << 15, parallel))
        assert least <= step.parts["attention forward"]
        first = prefill(model, h100, 1 << 15, Parallel(cp=4, tp=8, schedule="ring"), chunk=1 << 14)
        assert first.memory["keys and values"] == model.layers * (1 << 13) * 2 * (576 + 128 * (name == "glm5"))
    # Without experts, the first layers hold the weights and gradients of their own columns only.
    staged = training_step(V3, h100, 1 << 13, Parallel(dp=8, pp=61, tp=8, ep=8))
    assert busiest_stage(V3, 1 << 13, staged.parallel.pp).parameters > V3.parameters / 61
