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

#: Bytes of a weight of a layer, or of a number of a key or a value, in 8 bits.
FP8 = 1
#: Bytes of the score and the position of a key that a rank proposes.
CANDIDATE = 8
#: Kernels of a layer in a decode by CUDA graphs, and the seconds that each takes to start, and to fill and drain the
#: queue of the memory. Spector et al., "Look Ma, No Bubbles" (2025): the 2.47e9 bytes of Llama-1B, with a hundred
#: kernels in 16 layers, are read at 50 % of H100's 3.35e12 bytes/s instead of 80 %: 0.56 ms more; 1.3 us are the start.
KERNELS, KERNEL_START = 7, 5e-6
#: How far such times were from published ones (docs/cluster.md).
ERRORS = {
    "prefill": "ten published prefills on Hopper were modelled with errors of 15 and 23 % (median, P90)",
    "decode": "nine published decodes on Hopper were modelled with errors of 4.5 and 12 % (median, P90)",
}
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
    costs = LayerCosts(model, machine, parallel, parallel.rows * ceil(queries / parallel.cp), training=False)
    layers = attention_of_layers(model, machine, tokens, parallel, backward=False, chunk=chunk)
    layers = [(count, one.queued(costs.seconds)) for count, one in layers]
    recurrent = recurrence_of_layers(model, machine, queries, parallel)
    here = ceil(tokens / parallel.cp)
    # On the rank that holds the newest tokens: a layer with a window keeps only the keys of its window.
    memory = _memory(costs, sum(here if x is None else min(x, here) for x in model.windows), parallel.rows)
    memory["activations"] = costs.activation_bytes + 2 * costs.input_bytes
    memory["attention buffers"] = max((one.buffers for _, one in layers), default=0)
    return ModelEstimate(
        parts={
            "attention": sum(count * one.forward for count, one in layers),
            "recurrence": recurrent[0] * recurrent[1].forward,
            **costs.products(model.layers),
            "logits": costs.logits(parallel.rows),
            "tp": model.layers * costs.exchanges,
            "ep": model.expert_layers * costs.dispatch,
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

    Each matrix costs the longer of two times: reading it once, or computing with it. Keys and values are read once, or
    computed with if that takes longer; latents are attended to in absorbed form. They are sharded by tokens over the cp
    ranks, as in `ringattn.KVCache`, and keys and values by heads over the tp ranks. Each cp rank computes attention to
    its shard, and the ranks merge their outputs and lse in fp32; `merge` is "gather", "scatter" or the faster one (see
    `merge_seconds`). For queries that choose keys, a rank scores its shard, and all gather the best scores. With
    windows="copy", each rank holds the whole windows, and layers with a window send nothing. Raises the errors of
    `training_step`.
    """
    model = _check(model, machine, context, parallel)
    batch = parallel.rows
    costs = LayerCosts(model, machine, parallel, batch, training=False)
    copied = 1 if windows == "copy" else parallel.cp
    kept = [ceil(context / parallel.cp) if x is None else ceil(min(x, context) / copied) for x in model.windows]
    memory = _memory(costs, sum(kept), batch)
    merging = sum(windows != "copy" or window is None for window in model.windows)
    width = model.value_dim if model.latent is None else model.latent.rank
    way, seconds = merge_seconds(machine, 4 * batch * costs.heads * (width + 1), parallel.cp, parallel.tp, merge)
    candidates = batch * CANDIDATE * (model.chosen or 0)
    seconds += merge_seconds(machine, candidates, parallel.cp, parallel.tp, "gather")[1] if candidates else 0.0
    return ModelEstimate(
        parts={
            "keys and values": _attend(costs, kept),
            "states": 2 * memory["states"] / memory_bandwidth(machine),
            **costs.products(model.layers),
            "absorbing": model.having["a"] * costs.expand(batch),
            "logits": costs.logits(),
            "tp": model.layers * costs.exchanges,
            "ep": model.expert_layers * costs.dispatch,
            "merging over cp": merging * seconds,
            "starts": model.layers * KERNELS * KERNEL_START if machine.kernel_rates is not None else 0.0,
        },
        memory=memory,
        parallel=parallel,
        tokens=batch * parallel.dp,
        machine=machine,
        plan=f"keys of {plural(parallel.cp, 'rank')}, merge={way}" if parallel.cp > 1 else "",
    )


def _attend(costs: LayerCosts, kept: list[int]) -> float:
    """Seconds in which a query of each sequence attends to the tokens that a rank has of it, `kept` in each layer."""
    model, latent, tokens = costs.model, costs.model.latent, sum(kept)
    moved, flops = float(tokens * _kept_numbers(costs)), 4.0 * costs.heads * model.head_dim * tokens
    if latent is not None:
        share = ceil((model.chosen or 0) / costs.parallel.cp)
        chosen = sum(min(share, here) for here in kept) if share else tokens
        moved -= (tokens - chosen) * (latent.rank + latent.rope)
        heads, dim, _ = latent.index or (0, 0, 0)
        flops = 2.0 * (costs.heads * (2 * latent.rank + latent.rope) * chosen + heads * dim * tokens)
    rate = costs.machine.matmul or costs.machine.flops
    return costs.parallel.rows * max(_kept_item(costs) * moved / memory_bandwidth(costs.machine), flops / rate)


def _kept_numbers(costs: LayerCosts) -> int:
    """The numbers that a rank keeps of a token in a layer; every tp rank has whole latents."""
    latent = costs.model.latent
    return 2 * costs.kv_heads * costs.model.head_dim if latent is None else latent.kept


def _kept_item(costs: LayerCosts) -> int:
    """Bytes of one of these numbers."""
    return FP8 if costs.software.fp8_cache else costs.item


def _memory(costs: LayerCosts, kept: int, rows: int) -> dict[str, int]:
    """Bytes of weights, and of keys and values of `rows` sequences; `kept`: tokens held, summed over layers."""
    model, tp = costs.model, costs.parallel.tp
    one = model.recurrence
    state = 0 if one is None else one.heads * one.keys * one.values * STATE_ITEM
    # A head of keys and values that several ranks hold is stored on each of them.
    copied = (costs.kv_heads - model.kv_heads / tp) * 2 * model.head_dim * model.hidden * model.having["a"]
    elsewhere = model.layers * model.routed * (1 - 1 / costs.parallel.ep) * (model.mlp_item or costs.item)
    return {
        "states": rows * model.having["r"] * state // tp,
        "weights": ceil(
            (model.stored_bytes(costs.item) - elsewhere) / tp + (model.attention_item or costs.item) * copied
        ),
        "keys and values": rows * kept * _kept_numbers(costs) * _kept_item(costs),
        "reserved": int(RESERVED * (costs.machine.memory or 0)),
    }
