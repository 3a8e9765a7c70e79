"""Attention of the layers of a model: the modelled passes of the plan of one layer for each distinct window."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from ...machine.bands import BANDS, size_class
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
    model: ModelConfig, machine: Machine, tokens: int, parallel: Parallel, dtype: str, *, backward: bool = True
) -> list[tuple[int, LayerAttention]]:
    """(number of layers, attention of such a layer) for each distinct window. Raises what plans raise."""
    on_machine = _thinned(machine, parallel.tp)
    sizes, place = _sizes_of_layer(model, parallel), (parallel.cp, parallel.layout, parallel.schedule)
    return [
        (count, _attention(on_machine, tokens, window, sizes, place, dtype, backward))
        for window, count in Counter(_normal(window, tokens) for window in model.windows).items()
    ]


def describe_layers(layers: list[tuple[int, LayerAttention]]) -> str:
    """What was planned for each kind of layer, in words."""
    return "; ".join(f"{count} layers: {one.plan}" for count, one in layers)


def plan_of_widest_layer(
    model: ModelConfig, machine: Machine, tokens: int, parallel: Parallel, dtype: str
) -> tuple[Plan, Machine]:
    """The plan of a layer with the widest window, and the machine as the ranks of its group see it."""
    on_machine = _thinned(machine, parallel.tp)
    windows = [_normal(window, tokens) for window in model.windows]
    widest = None if None in windows else max(window for window in windows if window is not None)
    place = (parallel.cp, parallel.layout, parallel.schedule)
    return _plan_layer(on_machine, tokens, widest, _sizes_of_layer(model, parallel), place, dtype), on_machine


def _sizes_of_layer(model: ModelConfig, parallel: Parallel) -> tuple[int, int, int, int]:
    """Query heads and key/value heads of one rank, head dim, and sequences."""
    return (model.heads // parallel.tp, max(model.kv_heads // parallel.tp, 1), model.head_dim, parallel.rows)


def error_band(machine: Machine, parallel: Parallel, tokens: int) -> tuple[float, float] | None:
    """Factors on the modelled seconds of attention between which 90 % of measured passes lie; None: not known."""
    band = BANDS.get(machine.preset)
    of_size = band and band[size_class(parallel.rows * -(-tokens // parallel.cp))]
    return (of_size.low, of_size.high) if of_size else machine.interval(1.0)


def _normal(window: int | None, tokens: int) -> int | None:
    """The window, or None where it hides nothing."""
    return None if window is None or window >= tokens else window


def _thinned(machine: Machine, tp: int) -> Machine:
    """The machine as the ranks of one context-parallel group see it: every tp-th rank of its nodes."""
    if tp == 1:
        return machine
    shared = machine.bandwidth / min(tp, machine.ranks_per_node) if machine.shared_nic else machine.bandwidth
    return replace(machine, ranks_per_node=max(machine.ranks_per_node // tp, 1), bandwidth=shared)


@lru_cache(maxsize=4096)
def _attention(
    machine: Machine,
    tokens: int,
    window: int | None,
    sizes: tuple[int, int, int, int],
    place: tuple[int, str, str],
    dtype: str,
    backward: bool,
) -> LayerAttention:
    """Attention of a layer; the latest are remembered, as a search asks for the same layer many times."""
    plan = _plan_layer(machine, tokens, window, sizes, place, dtype)
    passes = [simulate(plan, machine, backward=direction) for direction in ((False, True) if backward else (False,))]
    buffers = max(sum(size for name, size in one.memory.items() if name not in _ACTIVATIONS) for one in passes)
    return LayerAttention(
        passes[0].seconds,
        passes[-1].seconds if backward else 0.0,
        _pattern(window).count(range(tokens), range(tokens)),
        buffers,
        f"{plan.layout.name}, {plan.schedule} ({passes[0].solver})",
    )


def _plan_layer(
    machine: Machine,
    tokens: int,
    window: int | None,
    sizes: tuple[int, int, int, int],
    place: tuple[int, str, str],
    dtype: str,
) -> Plan:
    heads, kv_heads, head_dim, rows = sizes
    ranks, layout, schedule = place
    return make_plan(
        _pattern(window),
        tokens=tokens,
        ranks=ranks,
        layout=layout,
        schedule=schedule,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        batch=rows,
        dtype=dtype,
        machine=machine,
    )


def _pattern(window: int | None) -> Pattern:
    return Causal() if window is None else Causal() & Window(window - 1)
