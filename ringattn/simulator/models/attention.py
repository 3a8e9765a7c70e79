"""Attention of the layers of a model: the modelled passes of the plan of one layer for each distinct window."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ...layout.composed import join_layouts, shift_layout
from ...layout.regular import make_layout
from ...machine.machine import Machine
from ...pattern import Causal, Pattern, Window
from ...plan.plan import Plan
from ...planner import make_plan
from ..timing.simulation import simulate
from .config import ModelConfig
from .parallel import Parallel

#: Categories of a pass's memory that are activations, which a model counts itself.
_ACTIVATIONS = ("q, k, v", "output", "lse")


@dataclass(frozen=True)
class _Layer:
    """Attention of one layer on the ranks of a context-parallel group: what `make_plan` takes, but for the window."""

    window: int | None
    tokens: int
    #: The last tokens, whose queries these are: a chunk of a prompt. All tokens before are keys, cut in such chunks.
    queries: int
    chunk: int
    ranks: int
    layout: str
    schedule: str
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    dtype: str
    #: As the ranks of the group see it.
    machine: Machine

    @property
    def pattern(self) -> Pattern:
        """The causal mask, or the part of it that the window leaves."""
        return Causal() if self.window is None else Causal() & Window(self.window - 1)

    def plan(self) -> Plan:
        """The plan of this attention. Raises what plans raise."""
        sizes: dict[str, Any] = {
            name: x for name, x in vars(self).items() if name not in ("window", "queries", "chunk", "layout")
        }
        if self.queries == self.tokens:
            return make_plan(self.pattern, layout=self.layout, **sizes)
        chunks = [
            shift_layout(make_layout(self.layout, tokens=min(self.chunk, self.tokens - first), ranks=self.ranks), first)
            for first in range(0, self.tokens, self.chunk)
        ]
        return make_plan(self.pattern, layout=join_layouts(chunks), q_layout=chunks[-1], **sizes)


@dataclass(frozen=True)
class LayerAttention:
    """Attention of one layer on the ranks of one context-parallel group."""

    #: Seconds.
    forward: float
    backward: float
    #: (query, key) pairs of one head and one sequence: of all ranks.
    pairs: int
    #: Bytes of one rank beside q, k, v, output and lse: message buffers, accumulators, gradients.
    buffers: int
    #: Layout, schedule and solver, in words.
    plan: str


def attention_of_layers(
    model: ModelConfig,
    machine: Machine,
    tokens: int,
    parallel: Parallel,
    dtype: str,
    *,
    backward: bool = True,
    chunk: int | None = None,
) -> list[tuple[int, LayerAttention]]:
    """(number of layers, attention of such a layer) for each distinct window. Raises what plans raise.

    `chunk`: of a prompt that comes in chunks of so many tokens, the attention of the last chunk to all tokens.
    """
    layers = _layers(model, machine, tokens, parallel, dtype, chunk or tokens)
    return [(count, _attention(layer, backward)) for count, layer in layers]


def describe_layers(layers: list[tuple[int, LayerAttention]]) -> str:
    """What was planned for each kind of layer, in words."""
    return "; ".join(f"{count} layers: {one.plan}" for count, one in layers)


def _layers(
    model: ModelConfig, machine: Machine, tokens: int, parallel: Parallel, dtype: str, chunk: int
) -> list[tuple[int, _Layer]]:
    """(number of layers, what such a layer computes) for each distinct window; one that hides nothing is none."""
    tp = parallel.tp
    if parallel.cp == 1:  # one kernel call in a queue that the host fills ahead
        machine = replace(machine, host=None, host_call=None)
    if tp > 1:  # every tp-th rank of a node is in the group
        shared = machine.bandwidth / min(tp, machine.ranks_per_node) if machine.shared_nic else machine.bandwidth
        machine = replace(machine, ranks_per_node=max(machine.ranks_per_node // tp, 1), bandwidth=shared)
    heads, kv_heads = model.heads // tp, max(model.kv_heads // tp, 1)
    sizes = parallel.cp, parallel.layout, parallel.schedule, heads, kv_heads, model.head_dim, parallel.rows, dtype
    windows = Counter(None if window is None or window >= tokens else window for window in model.windows)
    queries = (tokens - 1) % chunk + 1
    return [(count, _Layer(window, tokens, queries, chunk, *sizes, machine)) for window, count in windows.items()]


@lru_cache(maxsize=4096)
def _attention(layer: _Layer, backward: bool) -> LayerAttention:
    """Attention of a layer; the latest are remembered, as a search asks for the same layer many times."""
    plan, every = layer.plan(), range(layer.tokens)
    queries = every[-layer.queries :]
    ways = (False, True) if backward else (False,)
    passes = [simulate(plan, layer.machine, backward=way) for way in ways]
    buffers = max(sum(size for name, size in one.memory.items() if name not in _ACTIVATIONS) for one in passes)
    return LayerAttention(
        passes[0].seconds,
        passes[-1].seconds if backward else 0.0,
        layer.pattern.count(queries, every),
        buffers,
        f"{layer.layout if layer.queries < layer.tokens else plan.layout.name}, {plan.schedule} ({passes[0].solver})",
    )
