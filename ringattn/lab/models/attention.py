"""Attention of a model's layers: the simulated plan of one layer for each distinct window."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil, gcd
from typing import Any

from ...call.planner import make_plans
from ...dtypes import ITEM_BYTES
from ...layout.composed import join_layouts, shift_layout
from ...layout.regular import make_layout
from ...machine.machine import Machine
from ...pattern import Causal, Documents, Pattern, Window
from ...simulator.timing.simulation import simulate
from ...text import duration
from .config import ModelConfig
from .layer import LayerCosts
from .parallel import Parallel
from .recurrence import LayerRecurrence, recur

#: The forms of attention to latents, and whose rows have a product beside the visits: of the keys, which are expanded
#: and travel; of none, as latents travel and are expanded at each visit; of the queries, which become as wide as
#: latents, and attend to these.
FORMS = {"expanded": "keys", "latents": "", "absorbed": "queries"}
#: Memory categories of a pass that are activations; the model counts these itself.
_ACTIVATIONS = ("q, k, v", "output", "lse")


@dataclass(frozen=True)
class LayerAttention:
    """The predicted cost of attention in one layer: seconds, and buffer bytes on one rank.

    The layer runs on the ranks of one context-parallel group.
    """

    #: Seconds.
    forward: float
    backward: float
    #: Bytes per rank besides q, k, v, output and lse: message buffers, accumulators, gradients.
    buffers: int
    #: Layout, schedule and solver, in words.
    plan: str
    #: Seconds of visits of the busiest rank in a forward / their mean over ranks.
    imbalance: float = 1.0
    #: By how many seconds the host takes longer to start a forward, and a backward, than the rank takes to run it.
    late: tuple[float, float] = (0.0, 0.0)
    #: Seconds of a forward that is computed again.
    again: float = 0.0

    def repeated(self, times: int, kept: int) -> LayerAttention:
        """The attention of a layer that computes this one `times` times in turn, and keeps so many bytes meanwhile."""
        late, buffers = (times * self.late[0], times * self.late[1]), self.buffers + kept
        return replace(self, forward=times * self.forward, backward=times * self.backward, late=late, buffers=buffers)

    def scaled(self, factor: float) -> LayerAttention:
        """The attention of sequences with `factor` times the pairs."""
        return replace(self, forward=self.forward * factor, backward=self.backward * factor)

    def queued(self, forward: float, backward: float = 0.0, again: float = 0.0) -> LayerAttention:
        """The attention where the rest of the layer takes these seconds, in which the host starts calls ahead."""
        first, second = self.late
        added = [max(late - rest, 0.0) for late, rest in ((first, forward), (second, backward), (first, again))]
        one, two, three = (self.forward + added[0], self.backward + added[1], self.forward + added[2])
        return replace(self, forward=one, backward=two, again=three)


def attention_of_layers(
    model: ModelConfig,
    machine: Machine,
    tokens: int,
    parallel: Parallel,
    *,
    backward: bool = True,
    chunk: int | None = None,
) -> list[tuple[int, LayerAttention]]:
    """Predict the attention of all layers: (number of layers, attention of one of them) for each distinct window.

    All layers have the same layout. With `chunk`, the prompt comes in chunks of that many tokens, and the result is for
    the last chunk, which attends to all tokens. Latents travel in the one of `FORMS` that takes the least time; queries
    that choose keys attend in absorbed form. Raises the errors of planning.
    """
    tp = parallel.tp
    if not model.having["a"]:
        return []
    if tp > 1:  # every tp-th rank of a node is in the group
        shared = machine.bandwidth / min(tp, machine.ranks_per_node) if machine.shared_nic else machine.bandwidth
        machine = replace(machine, ranks_per_node=max(machine.ranks_per_node // tp, 1), bandwidth=shared)
    # A window as long as the sequence hides nothing.
    windows = Counter(None if window is None or window >= tokens else window for window in model.windows)
    common = gcd(*windows.values())
    sizes: dict[str, Any] = {"tokens": tokens, "ranks": parallel.cp, "schedule": parallel.schedule}
    sizes |= {"batch": parallel.rows, "dtype": parallel.software.dtype}
    queries = chunk or tokens
    documents = parallel.lengths(tokens)
    attend = partial(_attend, chunk=queries, layout=parallel.layout, documents=documents, **sizes)
    if model.latent is None:
        weights = tuple((window, count // common) for window, count in windows.items())
        pieces, heads = parallel.pieces(model), model.heads // tp
        kv = {"kv_heads": max(model.kv_heads // tp, 1) // pieces, "head_dim": model.head_dim}
        layers = attend(weights, backward=backward, heads=heads // pieces, machine=machine, **kv)
        # The gradient of the output of the other pieces.
        columns = (heads - heads // pieces) * model.head_dim * ITEM_BYTES[parallel.software.dtype]
        kept = parallel.rows * ceil(tokens / parallel.cp) * columns
        return [(count, one.repeated(pieces, kept)) for count, one in zip(windows.values(), layers, strict=True)]
    # Products that make keys and values, or queries and outputs, of latents, on the rank with the most rows.
    costs = LayerCosts(model, machine, parallel, 1)
    last = (tokens - 1) % queries + 1
    seen, attended = (
        count_pairs(one, tokens, documents) - (count_pairs(one, tokens - last) if last < tokens else 0)
        for one in (None, model.chosen)
    )
    found = {}
    for form, own in FORMS.items():
        if (model.latent.index is not None and form != "absorbed") or (parallel.cp == 1 and not own):
            continue  # on one rank, nothing travels
        attending = latent_sizes(model, form, tp) | {"machine": _faster(machine, attended / seen)}
        (layer,) = attend(((None, 1),), backward=backward, **attending)
        rows = {"": 0, "keys": tokens, "queries": last}[own]
        product = costs.expand(parallel.rows * ceil(rows / parallel.cp)) if rows else 0.0
        found[form] = replace(layer, forward=layer.forward + product, backward=layer.backward + 2 * product * backward)
    form = min(found, key=lambda name: found[name].forward + found[name].backward)
    times = ", ".join(f"{name} {duration(one.forward + one.backward)}" for name, one in found.items())
    layer = replace(found[form], plan=f"{found[form].plan}, {form} ({times} a layer)")
    if model.latent.index is not None:
        heads, dim, keys = model.latent.index
        # The score of a pair is its value; nothing of it has a backward.
        scored = {"heads": heads, "kv_heads": 1, "head_dim": dim, "value_dim": 1, "block": ((1, dim),)}
        (indexer,) = attend(((None, 1),), backward=False, machine=machine, **scored)
        words = f"{layer.plan}, {keys:,} keys of each query chosen in {duration(indexer.forward)}"
        layer = replace(
            layer, forward=layer.forward + indexer.forward, buffers=max(layer.buffers, indexer.buffers), plan=words
        )
    return [(model.having["a"], layer)]


def latent_sizes(model: ModelConfig, form: str, tp: int) -> dict[str, Any]:
    """Arguments of `make_plan` for a layer that keeps latents, in one of `FORMS`."""
    latent, heads = model.latent, model.heads // tp
    assert latent is not None
    if form == "absorbed":
        sizes = {"kv_heads": 1, "head_dim": latent.rank + latent.rope, "value_dim": latent.rank}
    else:
        sizes = {"head_dim": model.head_dim, "value_dim": latent.value}
    block = None if form == "expanded" else ((1, latent.rank), (1, latent.rope))
    return {"heads": heads, "block": block, **sizes}


def _faster(machine: Machine, share: float) -> Machine:
    """The machine whose kernel takes `share` of the time for a pair, as it computes only this share of the pairs."""
    rates = machine.kernel_rates
    if share == 1:
        return machine
    if rates is not None:
        rates = replace(rates, forward=rates.forward / share, backward=rates.backward / share)
    return replace(machine, flops=machine.flops / share, kernel=None, kernel_rates=rates)


def attention_flops(model: ModelConfig, tokens: int, documents: tuple[int, ...] = ()) -> float:
    """FLOPs of attention in a forward and a backward for one sequence: 6 (D + Dv) for each attended pair and head.

    An indexer scores each visible pair, in the forward.
    """
    windows = Counter(model.chosen if window is None else window for window in model.windows)
    pairs = sum(count * count_pairs(window, tokens, documents) for window, count in windows.items())
    heads, dim, _ = (0, 0, 0) if model.latent is None or model.latent.index is None else model.latent.index
    scores = 2.0 * heads * dim * model.having["a"] * count_pairs(None, tokens, documents)
    return 6.0 * (model.head_dim + model.value_dim) * model.heads * pairs + scores


def describe_layers(layers: list[tuple[int, LayerAttention]], recurrent: tuple[int, LayerRecurrence]) -> str:
    """Layout and schedule of each kind of layer, as text."""
    plans = [(count, one.plan) for count, one in layers] + [(recurrent[0], f"recurrent, {recurrent[1].plan}")]
    return "; ".join(f"{count} layers: {plan}" for count, plan in plans if count)


def recurrence_of_layers(
    model: ModelConfig, machine: Machine, tokens: int, parallel: Parallel
) -> tuple[int, LayerRecurrence]:
    """(number of recurrent layers, predicted cost of one of them); (0, no cost) for a model without any."""
    if model.recurrence is None:
        return 0, LayerRecurrence(0.0, 0.0, "")
    sizes: Any = {"cp": parallel.cp, "tp": parallel.tp, "layout": parallel.layout, "batch": parallel.rows}
    return model.having["r"], recur(model.recurrence, machine, tokens, dtype=parallel.software.dtype, **sizes)


def _causal(window: int | None, documents: tuple[int, ...] = ()) -> Pattern:
    """The causal mask, limited to the last `window` keys and to each of the documents, if given."""
    pattern = Causal() if window is None else Causal() & Window(window - 1)
    return pattern & Documents(documents) if documents else pattern


@lru_cache(maxsize=4096)
def count_pairs(window: int | None, tokens: int, documents: tuple[int, ...] = ()) -> int:
    """How many (query, key) pairs one head of a layer with this window computes, also in packed documents."""
    beyond = ((length, max(length - (window or length), 0)) for length in documents or (tokens,))
    return sum((length * (length + 1) - hidden * (hidden + 1)) // 2 for length, hidden in beyond)


@lru_cache(maxsize=4096)
def _attend(
    windows: tuple[tuple[int | None, int], ...],
    chunk: int,
    layout: str,
    documents: tuple[int, ...],
    backward: bool,
    **sizes: Any,
) -> list[LayerAttention]:
    """Attention of a layer for each (window, number of its layers); `sizes` are arguments of `make_plans`.

    Cached, as a search asks for the same layers many times.
    """
    tokens, ranks = sizes["tokens"], sizes["ranks"]
    cut: dict[str, Any] = {"layout": layout}
    if chunk < tokens:  # shard the keys chunk by chunk
        starts = range(0, tokens, chunk)
        chunks = [make_layout(layout, tokens=min(chunk, tokens - start), ranks=ranks) for start in starts]
        chunks = [shift_layout(one, start) for one, start in zip(chunks, starts, strict=True)]
        cut = {"layout": join_layouts(chunks), "q_layout": chunks[-1]}
    patterns = [_causal(window, documents) for window, _ in windows]
    plans = make_plans(patterns, [count for _, count in windows], **cut, **sizes)
    layers = []
    for plan in plans:
        passes = [simulate(plan, sizes["machine"], backward=way) for way in ((False, True) if backward else (False,))]
        buffers = max(sum(size for part, size in one.memory.items() if part not in _ACTIVATIONS) for one in passes)
        planned = f"{layout if 'q_layout' in cut else plan.layout.name}, {plan.schedule} ({passes[0].solver})"
        late = passes[0].exposed["host"], passes[-1].exposed["host"] if backward else 0.0
        seconds = passes[0].seconds - late[0], passes[-1].seconds - late[1] if backward else 0.0
        one = passes[0]
        imbalance = 1 + (one.exposed["imbalance"] / one.compute if one.compute else 0.0)
        layers.append(LayerAttention(*seconds, buffers, planned, imbalance, late))
    return layers
