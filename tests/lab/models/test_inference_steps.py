"""The models of prefill and decode against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import pytest

import ringattn as ra
from ringattn.errors import InvalidInput
from ringattn.inference import merge_seconds
from ringattn.lab.models.attention import attention_of_layers
from ringattn.lab.models.config import ModelConfig, load_model
from ringattn.lab.models.inference import decode, prefill
from ringattn.lab.models.parallel import Parallel, Software
from ringattn.lab.models.training import training_step

MODEL = ModelConfig("small", 2, 256, 4, 2, 64, 512, 1024, windows=(100, None))
MACHINE = ra.Machine(
    flops=1e12, latency=1e-5, bandwidth=1e8, merge=5e11, matmul=2e13, memory=1e9, peak=4e12, ranks_per_node=2
)


def test_a_prefill_is_the_forwards_of_a_step_and_the_last_logits() -> None:
    parallel = Parallel(cp=2, tp=2)
    first, step = prefill(MODEL, MACHINE, 2048, parallel), training_step(MODEL, MACHINE, 2048, parallel)
    assert first.parts["attention"] == step.parts["attention forward"]
    assert 3 * first.parts["mlp"] == pytest.approx(step.parts["mlp"])
    assert 2 * first.parts["tp"] == pytest.approx(step.parts["tp"])
    moved = 2 * (256 + 256 * 512 + 512)  # one row
    assert first.parts["logits"] == pytest.approx(moved / 1e12 + 2 * 256 * 512 / 2e13)
    assert first.tokens_per_second == 2048 / first.seconds / 4
    # Keys and values of a window and of half of all tokens, of one of the two heads, in 16 bits.
    assert first.memory["keys and values"] == (100 + 1024) * 2 * 64 * 2
    assert first.memory["weights"] == MODEL.parameters and first.fits


def test_a_prefill_in_chunks_attends_what_was_before() -> None:
    """Products and keys are those of one prefill; weights are read, and activations held, for each chunk."""
    parallel, chunk = Parallel(cp=2), 512
    whole, parts = (prefill(MODEL, MACHINE, 2000, parallel, chunk=size) for size in (None, chunk))
    ends = 512, 1024, 1536, 2000
    options: dict[str, Any] = {"backward": False, "chunk": chunk}
    layers = [attention_of_layers(MODEL, MACHINE, end, parallel, **options) for end in ends]
    seconds = sum(count * one.forward for each in layers for count, one in each)
    assert parts.parts["attention"] == pytest.approx(seconds)
    assert parts.memory["keys and values"] == whole.memory["keys and values"]
    assert parts.parts["logits"] == whole.parts["logits"]
    assert parts.memory["activations"] < 0.3 * whole.memory["activations"]
    assert parts.plan.startswith("4 chunks, the last: ")
    assert prefill(MODEL, MACHINE, 2000, parallel, chunk=4096) == whole
    for chunk in (0, 1):
        with pytest.raises(InvalidInput, match=f"chunk={chunk}: each chunk is planned separately"):
            prefill(MODEL, MACHINE, 2000, parallel, chunk=chunk)


def test_a_decoded_token_reads_weights_and_keys_once() -> None:
    one = decode(MODEL, MACHINE, 2048, Parallel(cp=2, dp=3, rows=4))
    assert one.memory["keys and values"] == 4 * (50 + 1024) * 2 * 2 * 64 * 2
    assert one.parts["keys and values"] == pytest.approx(one.memory["keys and values"] / 1e12)
    qkv, out = 4 * 256 + 256 * 512 + 4 * 512, 4 * 256 + 256 * 256 + 4 * 256
    assert one.parts["projections"] == pytest.approx(2 * (2 * (qkv + out) / 1e12 + 2 * 4 * 256 * 768 / 2e13))
    # Two ranks of a node send fp32 outputs and lse of 4 heads and 4 sequences to each other, in each of 2 layers.
    merged = 4 * 4 * 4 * 65
    assert one.parts["merging over cp"] == pytest.approx(2 * (1e-5 + merged / 1e8))
    assert one.tokens_per_second == pytest.approx(12 / one.seconds / 6)
    wide = decode(MODEL, MACHINE, 2048, Parallel(cp=2, dp=3, rows=4096))
    assert wide.parts["mlp"] == pytest.approx(
        2 * (2 * 4096 * 3 * 256 * 512 / 2e13 + 2 * (4096 * (256 + 1024 + 512 + 256) + 3 * 256 * 512) / 1e12)
    )


def test_a_switch_adds_what_ranks_have() -> None:
    """Each byte passes a link once at a share of its rate, and results need no copies; training gathers as before."""
    parallel, size = Parallel(tp=2), 2048 * 256 * 2
    switched = replace(MACHINE, node_latency=1e-5, node_bandwidth=1e9, in_switch=0.6)
    ring = replace(switched, in_switch=None)
    tps = [prefill(MODEL, machine, 2048, parallel).parts["tp"] for machine in (ring, switched)]
    assert tps == pytest.approx([8 * (1e-5 + size / 2 / 1e9 + 2 * size / 1e12), 4 * (2.5e-5 + size / 2 / 6e8)])
    steps = [training_step(MODEL, machine, 2048, parallel).parts["tp"] for machine in (ring, switched)]
    assert steps[0] == steps[1]
    assert prefill(MODEL, switched, 2048, Parallel(tp=4)).parts["tp"] > 2 * tps[1], "two nodes have no switch in common"


def test_kernels_of_a_decode_start_one_by_one() -> None:
    h100 = ra.get_machine("h100_nvlink_ib")
    one = decode(MODEL, h100, 2048, Parallel())
    assert (
        one.parts["starts"] == pytest.approx(2 * 7 * 5e-6)
        and decode(MODEL, MACHINE, 64, Parallel()).parts["starts"] == 0
    )


def test_published_prefills_and_decodes() -> None:
    """70B and 405B on one NVLink domain of 32 (NVIDIA, "Low Latency Inference Chapter 2", 2024); 70B and 8B in 8 bits

    on H100 (NVIDIA, NIM for LLMs, benchmarking, version 1.8); 8 sequences of 8B and 70B on H200 (vLLM, build 9515).
    """
    h100, h200 = map(ra.get_machine, ("h100_nvlink_ib", "h200_nvlink_ib"))
    domain, eight = replace(h100, ranks_per_node=32), Software(fp8=True)
    prefills = [
        (0.472, load_model("llama3_70b"), domain, 32768, Parallel(tp=32, software=eight)),
        (1.627, load_model("llama3_405b"), domain, 32768, Parallel(tp=32, software=eight)),
        (7.508, load_model("llama3_405b"), domain, 122880, Parallel(tp=32, software=eight)),
        (0.40677, load_model("llama3_70b"), h100, 5000, Parallel(tp=2, software=eight)),
    ]
    decodes = [
        (0.01858, load_model("llama3_70b"), h100, 5250, Parallel(tp=2, software=eight)),
        (0.00463, load_model("llama3_8b"), h100, 300, Parallel(software=eight)),
        (0.00591, load_model("llama3_8b"), h100, 300, Parallel(rows=50, software=eight)),
        (2.07753 / 128, load_model("llama3_70b"), h200, 96, Parallel(tp=4, rows=8)),
        (0.833421 / 128, load_model("llama3_8b"), h200, 96, Parallel(rows=8)),
    ]
    for phase, rows, most in ((prefill, prefills, 0.22), (decode, decodes, 0.25)):
        errors = [phase(*how).seconds / published - 1 for published, *how in rows]
        assert max(map(abs, errors)) < most and median(map(abs, errors)) < 0.16, errors


def test_more_ranks_hold_fewer_keys_and_few_experts_are_read() -> None:
    full = replace(MODEL, windows=(None,) * 2)
    sizes = [
        decode(full, MACHINE, 4096, Parallel(cp=cp, tp=tp)).memory["keys and values"]
        for cp, tp in ((1, 1), (4, 1), (4, 2), (4, 4))
    ]
    assert sizes == [sizes[0], sizes[0] // 4, sizes[0] // 8, sizes[0] // 8], "heads are repeated beyond two ranks"
    experts = replace(MODEL, experts=8, experts_per_token=2)
    one = decode(experts, MACHINE, 64, Parallel())
    dense = decode(MODEL, MACHINE, 64, Parallel())
    assert one.parts["mlp"] == pytest.approx(2 * dense.parts["mlp"], rel=0.01), "two experts of eight"
    with pytest.raises(InvalidInput, match="rows=0 must be"):
        decode(MODEL, MACHINE, 64, Parallel(rows=0))
    for phase in (decode, prefill):
        whole, shared = (phase(experts, MACHINE, 64, Parallel(dp=2, ep=ep, rows=64)) for ep in (1, 2))
        assert whole.memory["weights"] - shared.memory["weights"] == 2 * 4 * 3 * 256 * 512 * 2, "four of eight experts"
        assert shared.parts["mlp"] < whole.parts["mlp"] and whole.parts["ep"] == 0
        rows = 64 if phase is decode else 64 * 64
        # To the other rank of the node, half of the rows of two experts, and back, in each of 2 layers.
        assert shared.parts["ep"] == pytest.approx(2 * 2 * (1e-5 + rows * 2 * 256 * 2 / 2 / 1e8))
        with pytest.raises(InvalidInput, match="ep=2 does not divide the 8 experts"):
            phase(experts, MACHINE, 64, Parallel(ep=2))


def test_ranks_merge_by_the_messages_of_a_step() -> None:
    """The 8B shape at P = 8: 115,584 bytes a rank and layer by gather, 28,896 by scatter."""
    size, node = 4 * 32 * 129, replace(MACHINE, ranks_per_node=8)
    assert 7 * size == 115_584 and 2 * 7 * size / 8 == 28_896
    assert merge_seconds(node, size, 8, 1, "gather") == ("gather", pytest.approx(1e-5 + 115_584 / 1e8))
    assert merge_seconds(node, size, 8, 1) == ("scatter", pytest.approx(2e-5 + 28_896 / 1e8)), "bytes prevail"
    late = replace(node, latency=1e-2)
    assert merge_seconds(late, size, 8, 1) == ("gather", pytest.approx(1e-2 + 115_584 / 1e8)), "rounds prevail"
    # Two of 8 ranks in a node: 6 messages leave it, through a card that the node's two ranks share.
    shared = replace(MACHINE, shared_nic=True)
    assert merge_seconds(shared, size, 8, 1, "gather")[1] == pytest.approx(1e-5 + 6 * size * 2 / 1e8)
    copy = decode(MODEL, MACHINE, 2048, Parallel(cp=2, rows=4), windows="copy")
    assert copy.memory["keys and values"] == 4 * (100 + 1024) * 2 * 2 * 64 * 2
    shard = decode(MODEL, MACHINE, 2048, Parallel(cp=2, rows=4))
    assert 2 * copy.parts["merging over cp"] == shard.parts["merging over cp"], "a window sends nothing"
