"""`prefill` and `decode`: modelled time to first token, time per token, and memory of keys and values."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from ...dtypes import ITEM_BYTES
from ...errors import InvalidInput
from ...inference import merge_seconds
from ...machine.machine import Machine
from ...recurrence.runs import STATE_ITEM
from ...text import plural
from .attention import attention_of_layers, describe_layers, recurrence_of_layers
from .config import ModelConfig
from .layer import RESERVED, LayerCosts, ModelEstimate, memory_bandwidth
from .parallel import Parallel

#: Bytes of a weight of a layer in 8 bits.
FP8 = 1
#: Maximum number of chunks in a prompt.
MOST_CHUNKS = 1024


def prefill(
    model: ModelConfig, machine: Machine, tokens: int, parallel: Parallel, *, chunk: int | None = None
) -> ModelEstimate:
    """Predict the time to the first token of `parallel.rows` prompts of `tokens` tokens in each dp group.

    It resembles the forward passes of a training step without loss and gradients; but only tp shards the weights, so no
    weights are gathered, and logits are computed for the last token only. With `chunk`, prompts come in chunks of that
    many tokens, one after another; each chunk attends to all tokens so far, as in `ringattn.KVCache`, reads the
    weights, and holds its own activations. Raises the errors of `training_step`.
    """
    model = _check(model, machine, tokens, parallel)
    if chunk is not None and (chunk < parallel.cp or tokens > MOST_CHUNKS * chunk):
        raise InvalidInput(
            f"chunk={chunk}: each chunk is planned separately, so {tokens:,} tokens come in at most "
            f"{MOST_CHUNKS:,} chunks of at least cp={parallel.cp} tokens; try chunk={max(tokens // 32, parallel.cp)}"
        )
    if chunk is not None and chunk < tokens:
        ends = [*range(chunk, tokens, chunk), tokens]
        return _join_chunks([_prefill(model, machine, end, parallel, chunk) for end in ends])
    return _prefill(model, machine, tokens, parallel, tokens)


def _check(model: ModelConfig, machine: Machine, tokens: int, parallel: Parallel) -> ModelConfig:
    """The model with its weights as they are stored. Raises InvalidInput."""
    parallel.check(model, machine, tokens)
    if parallel.ep > 1:
        raise InvalidInput(f"ep={parallel.ep}: expert parallelism is modelled for training only; leave ep out")
    if not parallel.software.fp8:
        return model
    item = ITEM_BYTES[parallel.software.dtype]
    mlp, attention = (min(stored or item, FP8) for stored in (model.mlp_item, model.attention_item))
    return replace(model, mlp_item=mlp, attention_item=attention)


def _join_chunks(chunks: list[ModelEstimate]) -> ModelEstimate:
    """A prefill of chunks one after another: the summed times, the largest memory, and the last chunk's logits."""
    last = chunks[-1]
    parts = {name: sum(one.parts[name] for one in chunks) for name in last.parts} | {"logits": last.parts["logits"]}
    memory = {name: max(one.memory[name] for one in chunks) for name in last.memory}
    return replace(last, parts=parts, memory=memory, plan=f"{len(chunks)} chunks, the last: {last.plan}")


def _prefill(model: ModelConfig, machine: Machine, tokens: int, parallel: Parallel, chunk: int) -> ModelEstimate:
    """The prefill of the last chunk of `tokens` tokens."""
    queries = (tokens - 1) % chunk + 1
    costs = LayerCosts(model, machine, parallel, parallel.rows * ceil(queries / parallel.cp))
    layers = attention_of_layers(model, machine, tokens, parallel, backward=False, chunk=chunk)
    recurrent = recurrence_of_layers(model, machine, queries, parallel)
    here = ceil(tokens / parallel.cp)
    # On the rank that holds the newest tokens: a layer with a window keeps only the keys of its window.
    memory = _memory(costs, sum(here if x is None else min(x, here) for x in model.windows), parallel.rows)
    memory["activations"] = costs.activation_bytes + 2 * costs.input_bytes
    memory["attention buffers"] = max(one.buffers for _, one in layers)
    return ModelEstimate(
        parts={
            "attention": sum(count * one.forward for count, one in layers),
            "recurrence": recurrent[0] * recurrent[1].forward,
            **costs.products(model.layers),
            "logits": costs.logits(parallel.rows),
            "tp": model.layers * costs.exchanges,
        },
        memory=memory,
        parallel=parallel,
        tokens=tokens * parallel.rows * parallel.dp,
        machine=machine,
        plan=describe_layers(layers, recurrent),
    )


def decode(
    model: ModelConfig, machine: Machine, context: int, parallel: Parallel, merge: str = "auto", windows: str = "shard"
) -> ModelEstimate:
    """Predict the time to generate one token of each sequence (`rows` in each dp group), after `context` tokens.

    Each matrix costs the longer of two times: reading it once, or computing with it. Keys and values are read once;
    they are sharded by tokens over the cp ranks, as in `ringattn.KVCache`, and by heads over the tp ranks. Each cp rank
    computes attention to its shard, and the ranks merge their outputs and lse in fp32; `merge` is "gather", "scatter"
    or the faster one (see `merge_seconds`). With windows="copy", each rank holds the whole windows, and layers with a
    window send nothing. Raises the errors of `training_step`.
    """
    model = _check(model, machine, context, parallel)
    batch = parallel.rows
    costs = LayerCosts(model, machine, parallel, batch)
    copied = 1 if windows == "copy" else parallel.cp
    kept = [ceil(context / parallel.cp) if x is None else ceil(min(x, context) / copied) for x in model.windows]
    memory = _memory(costs, sum(kept), batch)
    merging = sum(windows != "copy" or window is None for window in model.windows)
    partial = 4 * batch * costs.heads * (model.head_dim + 1)
    way, seconds = merge_seconds(machine, partial, parallel.cp, parallel.tp, merge)
    return ModelEstimate(
        parts={
            "keys and values": memory["keys and values"] / memory_bandwidth(machine),
            "states": 2 * memory["states"] / memory_bandwidth(machine),
            **costs.products(model.layers),
            "logits": costs.logits(),
            "tp": model.layers * costs.exchanges,
            "merging over cp": merging * seconds,
        },
        memory=memory,
        parallel=parallel,
        tokens=batch * parallel.dp,
        machine=machine,
        plan=f"keys of {plural(parallel.cp, 'rank')}, merge={way}" if parallel.cp > 1 else "",
    )


def _memory(costs: LayerCosts, kept: int, rows: int) -> dict[str, int]:
    """Bytes of weights, and of keys and values of `rows` sequences; `kept`: tokens held, summed over layers."""
    one = costs.model.recurrence
    states = (
        0 if one is None else rows * one.layers * one.heads * one.keys * one.values * STATE_ITEM // costs.parallel.tp
    )
    return {
        "states": states,
        "weights": ceil(costs.model.stored_bytes(costs.item) / costs.parallel.tp),
        "keys and values": rows * kept * 2 * costs.kv_heads * costs.model.head_dim * costs.item,
        "reserved": int(RESERVED * (costs.machine.memory or 0)),
    }
