"""`prefill` and `decode`: modelled time to the first token, time per token, and memory of keys and values."""

from __future__ import annotations

from math import ceil

from ...dtypes import ITEM_BYTES
from ...machine.machine import Machine
from .attention import attention_of_layers, describe_layers, error_band
from .config import ModelConfig
from .layer import RESERVED, LayerCosts, ModelEstimate, check_dtype, collective_seconds, memory_bandwidth
from .parallel import Parallel, check_counts


class InferenceEstimate(ModelEstimate):
    """A prefill, or one decoded token of each sequence."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values on one GPU."""
        return self.memory["keys and values"]


def prefill(
    model: ModelConfig, machine: Machine, tokens: int, parallel: Parallel, dtype: str = "bfloat16"
) -> InferenceEstimate:
    """The modelled prefill of `parallel.rows` prompts of `tokens` tokens in each dp group: its time to first token.

    All forwards of a training step, without a loss, gathers or gradients: each rank holds its part of the weights by
    tp. Logits are those of the last token. Raises as `training_step`.
    """
    parallel.check(model, machine, tokens)
    check_dtype(machine, dtype)
    costs = LayerCosts(model, machine, parallel, parallel.rows * ceil(tokens / parallel.cp), ITEM_BYTES[dtype])
    layers = attention_of_layers(model, machine, tokens, parallel, dtype, backward=False)
    memory = _memory(costs, tokens, parallel.rows)
    memory["activations"] = costs.activation_bytes + 2 * costs.input_bytes
    memory["attention buffers"] = max(one.buffers for _, one in layers)
    return InferenceEstimate(
        parts={
            "attention": sum(count * one.forward for count, one in layers),
            **costs.products(model.layers),
            "logits": costs.logits(parallel.rows),
            "tp": model.layers * costs.exchanges,
        },
        memory=memory,
        gpus=parallel.gpus,
        tokens=tokens * parallel.rows * parallel.dp,
        machine=machine,
        plan=describe_layers(layers),
        band=error_band(machine, parallel, tokens),
    )


def decode(
    model: ModelConfig, machine: Machine, context: int, batch: int, parallel: Parallel, dtype: str = "bfloat16"
) -> InferenceEstimate:
    """The modelled time of one token of each of `batch` sequences of a dp group, after `context` tokens.

    Every matrix is read once, and computes with `batch` rows where that takes longer. Keys and values are read once,
    cut by tokens over the cp ranks and by heads over the tp ranks; each cp rank attends its part, and the parts are
    merged by an all-reduce of outputs and lse in fp32, as flash-decoding does within a GPU (Dao et al., 2023). Raises
    as `training_step`.
    """
    parallel.check(model, machine, context)
    check_dtype(machine, dtype)
    check_counts(batch=batch)
    costs = LayerCosts(model, machine, parallel, batch, ITEM_BYTES[dtype])
    memory = _memory(costs, context, batch)
    merged = 4 * batch * costs.heads * (model.head_dim + 1)
    # All cp ranks of a group read as long as the rank with the newest keys, which has the windows.
    merging = 2 * model.layers * collective_seconds(machine, merged, parallel.cp, parallel.tp)
    return InferenceEstimate(
        parts={
            "keys and values": memory["keys and values"] / memory_bandwidth(machine),
            **costs.products(model.layers),
            "logits": costs.logits(),
            "tp": model.layers * costs.exchanges,
            "merging over cp": merging,
        },
        memory=memory,
        gpus=parallel.gpus,
        tokens=batch * parallel.dp,
        machine=machine,
    )


def _memory(costs: LayerCosts, tokens: int, rows: int) -> dict[str, int]:
    """Bytes of weights and of the keys and values of `rows` sequences, on the rank that holds the newest tokens.

    A layer with a window keeps only the keys of its window.
    """
    model, here = costs.model, ceil(tokens / costs.parallel.cp)
    kept = sum(here if window is None else min(window, here) for window in model.windows)
    return {
        "weights": ceil(model.stored_bytes(costs.item) / costs.parallel.tp),
        "keys and values": rows * kept * 2 * costs.kv_heads * model.head_dim * costs.item,
        "reserved": int(RESERVED * (costs.machine.memory or 0)),
    }
