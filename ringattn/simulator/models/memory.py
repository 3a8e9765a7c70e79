"""Bytes of one GPU by category in a training step."""

from __future__ import annotations

from math import ceil

from ...machine.machine import Machine
from .attention import LayerAttention
from .config import ModelConfig
from .layer import LayerCosts
from .parallel import SHARDS, Parallel

#: Bytes per parameter of mixed precision with Adam, beside weights in the dtype of the activations: gradients in fp32,
#: and in fp32 a copy of the weights and two moments (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
#: Trillion Parameter Models", 2020; there with gradients in 16 bits, here in fp32, in which FSDP reduces them).
GRADIENT, OPTIMIZER = 4, 12
#: Rows whose logits exist at once: `chunk` of train.loss.linear_cross_entropy.
LOSS_ROWS = 512
#: The part of the memory that the driver, NCCL's buffers and fragments take [assumed].
RESERVED = 0.05


def training_memory(
    model: ModelConfig, machine: Machine, parallel: Parallel, costs: LayerCosts, attention: list[LayerAttention]
) -> dict[str, int]:
    """Bytes by category at the peak of a step. `attention` has one entry for each distinct window."""
    level = SHARDS.index(parallel.shard)
    shards = parallel.dp * parallel.cp
    local, layer = model.parameters / parallel.tp, model.layer / parallel.tp
    largest = max(layer, model.table / parallel.tp)
    kept = {
        "full": costs.input_bytes,
        "attention": costs.input_bytes + costs.attention_bytes,
        "none": costs.activation_bytes,
    }[parallel.checkpointing]
    again = 0 if parallel.checkpointing == "none" else costs.activation_bytes
    return {
        "weights": ceil(costs.item * local / (shards if level >= 3 else 1)),
        "gradients": ceil(GRADIENT * local / (shards if level >= 2 else 1)),
        "optimizer": ceil(OPTIMIZER * local / (shards if level >= 1 else 1)),
        # The layer that computes and the layer that is gathered meanwhile; the gradients of one before they are shared.
        "gathered weights and gradients": (
            ceil((2 * costs.item if level >= 3 else 0) * largest + (GRADIENT if level >= 2 else 0) * largest)
            if shards > 1
            else 0
        ),
        "activations": model.layers * kept + again,
        "attention buffers": max(one.buffers for one in attention),
        "logits": 2 * 4 * min(LOSS_ROWS, costs.rows) * ceil(model.vocab / parallel.tp),
        "reserved": int(RESERVED * (machine.memory or 0)),
    }
