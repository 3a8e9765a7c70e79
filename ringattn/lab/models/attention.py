"""Attention of the layers of a model: the modelled passes of the plan of one layer for each distinct window."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Any

from ...call.planner import make_plans
from ...layout.composed import join_layouts, shift_layout
from ...layout.regular import make_layout
from ...machine.machine import Machine
from ...pattern import Causal, Pattern, Window
from ...simulator.timing.simulation import simulate
from .config import ModelConfig
from .parallel import Parallel

#: Categories of a pass's memory that are activations, which a model counts itself.
_ACTIVATIONS = ("q, k, v", "output", "lse")


@dataclass(frozen=True)
class LayerAttention:
    """Attention of one layer on the ranks of one context-parallel group."""

    #: Seconds.
    forward: float
    backward: float
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
    """(number of layers, attention of such a layer) for each distinct window, all on one layout.

    `chunk`: of a prompt that comes in chunks of so many tokens, the attention of the last chunk to all tokens. Raises
    what plans raise.
    """
    tp = parallel.tp
    if parallel.cp == 1:  # one kernel call in a queue that the host fills ahead
        machine = replace(machine, host=None, host_call=None)
    if tp > 1:  # every tp-th rank of a node is in the group
        shared = machine.bandwidth / min(tp, machine.ranks_per_node) if machine.shared_nic else machine.bandwidth
        machine = replace(machine, ranks_per_node=max(machine.ranks_per_node // tp, 1), bandwidth=shared)
    # A window that hides nothing is none.
    windows = Counter(None if window is None or window >= tokens else window for window in model.windows)
    common = gcd(*windows.values())
    layers = _attend(
        tuple((window, count // common) for window, count in windows.items()),
        chunk or tokens,
        parallel.layout,
        backward,
        tokens=tokens,
        ranks=parallel.cp,
        schedule=parallel.schedule,
        heads=model.heads // tp,
        kv_heads=max(model.kv_heads // tp, 1),
        head_dim=model.head_dim,
        batch=parallel.rows,
        dtype=dtype,
        machine=machine,
    )
    return list(zip(windows.values(), layers, strict=True))


def describe_layers(layers: list[tuple[int, LayerAttention]]) -> str:
    """What was planned for each kind of layer, in words."""
    return "; ".join(f"{count} layers: {one.plan}" for count, one in layers)


def _causal(window: int | None) -> Pattern:
    """The causal mask, or the part of it that a window leaves."""
    return Causal() if window is None else Causal() & Window(window - 1)


@lru_cache(maxsize=4096)
def count_pairs(window: int | None, tokens: int) -> int:
    """(query, key) pairs of one head that such a layer sees in a sequence."""
    return _causal(window).count(range(tokens), range(tokens))


@lru_cache(maxsize=4096)
def _attend(
    windows: tuple[tuple[int | None, int], ...], chunk: int, layout: str, backward: bool, **sizes: Any
) -> list[LayerAttention]:
    """Attention of a layer of each window, of which there are so many; `sizes` are those of `make_plans`.

    The latest are remembered, as a search asks for the same layers many times.
    """
    tokens, ranks = sizes["tokens"], sizes["ranks"]
    cut: dict[str, Any] = {"layout": layout}
    if chunk < tokens:  # the keys of all chunks, cut chunk by chunk
        starts = range(0, tokens, chunk)
        chunks = [make_layout(layout, tokens=min(chunk, tokens - start), ranks=ranks) for start in starts]
        chunks = [shift_layout(one, start) for one, start in zip(chunks, starts, strict=True)]
        cut = {"layout": join_layouts(chunks), "q_layout": chunks[-1]}
    plans = make_plans([_causal(window) for window, _ in windows], [count for _, count in windows], **cut, **sizes)
    layers = []
    for plan in plans:
        passes = [simulate(plan, sizes["machine"], backward=way) for way in ((False, True) if backward else (False,))]
        buffers = max(sum(size for part, size in one.memory.items() if part not in _ACTIVATIONS) for one in passes)
        planned = f"{layout if 'q_layout' in cut else plan.layout.name}, {plan.schedule} ({passes[0].solver})"
        seconds = passes[0].seconds, passes[-1].seconds if backward else 0.0
        layers.append(LayerAttention(*seconds, buffers, planned))
    return layers
