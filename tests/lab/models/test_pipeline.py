"""A pipeline against arithmetic by hand: its bubble, what repeats, and what the first stage keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ringattn as ra
from ringattn.errors import InvalidInput
from ringattn.lab.models.config import ModelConfig
from ringattn.lab.models.parallel import Parallel
from ringattn.lab.models.training import training_step

MODEL = ModelConfig("small", 8, 256, 4, 2, 64, 512, 1024, windows=(100, None) * 4)
MACHINE = ra.Machine(flops=1e12, latency=1e-5, bandwidth=1e8, merge=5e11, matmul=2e12, memory=1e9, peak=4e12)


@pytest.mark.parametrize(("interleaved", "kept"), [(1, 4.0), (2, 4 + 3 / 2)])
def test_stages_repeat_and_wait(interleaved: int, kept: float) -> None:
    """Four stages of two layers, eight micro-batches of one sequence, with the gradients of all reduced at once."""
    parallel = Parallel(dp=2, rows=8, shard="gradients", checkpointing="none")
    one = training_step(MODEL, MACHINE, 512, replace(parallel, pp=4, interleaved=interleaved))
    stage = replace(MODEL, layers=2, windows=(100, None), tied=True)
    micro = training_step(stage, MACHINE, 512, replace(parallel, rows=1))
    again = micro.seconds - micro.parts["optimiser"] - micro.parts["fsdp"]
    sent = 1e-5 + 2 * 512 * 256 / 1e8  # the activations of a micro-batch, forward and backward for each part
    assert one.parts["pp"] == pytest.approx(8 * max(2 * interleaved * sent - again, 0))
    assert one.parts["fsdp"] == micro.parts["fsdp"] and one.parts["mlp"] == 8 * micro.parts["mlp"]
    assert one.parts["bubble"] == pytest.approx(3 / interleaved * again)
    others = micro.parts["optimiser"] + micro.parts["fsdp"] + one.parts["pp"]
    assert one.seconds == pytest.approx((8 + 3 / interleaved) * again + others)
    assert one.memory["activations"] == kept * micro.memory["activations"]
    assert one.memory["weights"] == micro.memory["weights"] < 2 * MODEL.parameters / 3
    assert one.gpus == 8 and one.tokens == 2 * 8 * 512
    assert one.flops == training_step(MODEL, MACHINE, 512, Parallel(dp=2, rows=8)).flops
    parallel = replace(parallel, shard="weights")
    micro = training_step(stage, MACHINE, 512, replace(parallel, rows=1))
    assert training_step(MODEL, MACHINE, 512, replace(parallel, pp=4)).parts["fsdp"] == 8 * micro.parts["fsdp"]


def test_messages_between_stages_are_exposed_where_they_take_longer_than_computing() -> None:
    parallel = Parallel(tp=2, rows=2, pp=2, checkpointing="none")
    slow = replace(MACHINE, bandwidth=1e5, ranks_per_node=2, node_bandwidth=1e9, shared_nic=True)
    one, near = (training_step(MODEL, machine, 512, parallel) for machine in (slow, replace(slow, ranks_per_node=4)))
    repeated = one.parts["bubble"]  # what a stage repeats for each micro-batch
    assert one.parts["pp"] == pytest.approx(2 * (2 * (1e-5 + 2 * 512 * 256 / 1e5) - repeated)), "two ranks share a card"
    assert near.parts["pp"] == 0.0


def test_the_stage_with_the_output_matrix_has_one_layer_fewer_where_layers_are_left_over() -> None:
    seven = replace(MODEL, layers=7, windows=(None,) * 7, vocab=1 << 16)
    stage = training_step(
        replace(seven, layers=2, windows=(None,) * 2, tied=True), MACHINE, 512, Parallel(checkpointing="none")
    )
    layer = sum(s for name, s in stage.parts.items() if name not in ("loss", "optimiser", "fsdp")) / 2
    one = training_step(seven, MACHINE, 512, Parallel(rows=4, pp=4, checkpointing="none"))
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
        training_step(MODEL, MACHINE, 512, Parallel(rows=4, **pipeline))
