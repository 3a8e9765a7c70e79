"""Exact ring attention for any pattern, layout and number of ranks, real or virtual.

A module is imported when one of its names is first used: plans and simulations do not need torch, and attention does
not need the simulator.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import nn as nn
    from . import train as train
    from .call.chosen import top_keys as top_keys
    from .call.functional import attention as attention
    from .call.functional import ring_attention as ring_attention
    from .call.functional import synchronize as synchronize
    from .call.functional import virtual_attention as virtual_attention
    from .call.graph_op import keep_attention as keep_attention
    from .call.graph_op import save_attention_policy as save_attention_policy
    from .call.planner import make_plan as make_plan
    from .call.planner import make_plans as make_plans
    from .call.rows import Rows as Rows
    from .errors import CommFailure as CommFailure
    from .errors import InvalidInput as InvalidInput
    from .errors import LaunchLimit as LaunchLimit
    from .errors import Mismatch as Mismatch
    from .errors import OutOfMemory as OutOfMemory
    from .errors import RingAttentionError as RingAttentionError
    from .errors import Unsupported as Unsupported
    from .inference.cache import KVCache as KVCache
    from .inference.choice import Chooser as Chooser
    from .integrations.context_parallel import context_parallel as context_parallel
    from .integrations.context_parallel import context_parallel_unshard as context_parallel_unshard
    from .kernels.dropout import Dropout as Dropout
    from .kernels.memory import auto_batch_size as auto_batch_size
    from .layout.regular import Layout as Layout
    from .layout.regular import make_layout as make_layout
    from .machine.machine import Machine as Machine
    from .machine.presets import MACHINES as MACHINES
    from .machine.presets import get_machine as get_machine
    from .nn.factories import BlockSparseAdaptive as BlockSparseAdaptive
    from .nn.factories import create_block_sparse_attention as create_block_sparse_attention
    from .nn.factories import create_dilated_attention as create_dilated_attention
    from .nn.factories import create_multihead_block_sparse as create_multihead_block_sparse
    from .nn.factories import create_multihead_dilated_attention as create_multihead_dilated_attention
    from .nn.factories import get_block_sparse_preset as get_block_sparse_preset
    from .pattern import BlockSparse as BlockSparse
    from .pattern import Causal as Causal
    from .pattern import Dilated as Dilated
    from .pattern import Documents as Documents
    from .pattern import Full as Full
    from .pattern import Pattern as Pattern
    from .pattern import Sinks as Sinks
    from .pattern import Strided as Strided
    from .pattern import Window as Window
    from .pattern import dilated_blocks as dilated_blocks
    from .pattern import from_block_mask as from_block_mask
    from .pattern import global_local as global_local
    from .pattern import hierarchical as hierarchical
    from .pattern import local_window as local_window
    from .pattern import mix as mix
    from .pattern import parse_pattern as parse_pattern
    from .pattern import strided_blocks as strided_blocks
    from .pattern import top_k as top_k
    from .plan.choice import Prediction as Prediction
    from .plan.plan import Plan as Plan
    from .recurrence.layers import affine_scan as affine_scan
    from .recurrence.layers import causal_conv1d as causal_conv1d
    from .recurrence.layers import gated_delta_rule as gated_delta_rule
    from .recurrence.layers import selective_scan as selective_scan
    from .recurrence.layers import ssd as ssd
    from .simulator.timing.auto import predict as predict
    from .simulator.timing.simulation import simulate as simulate
    from .simulator.timing.solvers.recurrence import Stall as Stall
    from .simulator.timing.timeline import Timeline as Timeline

__version__ = "0.1.0"

#: Public names by the module that defines them, separated by spaces.
_NAMES = {
    "errors": "CommFailure InvalidInput LaunchLimit Mismatch OutOfMemory RingAttentionError Unsupported",
    "pattern": (
        "BlockSparse Causal Dilated Documents Full Pattern Sinks Strided Window dilated_blocks from_block_mask"
        " global_local hierarchical local_window mix parse_pattern strided_blocks top_k"
    ),
    "kernels.dropout": "Dropout",
    "layout.regular": "Layout make_layout",
    "machine.machine": "Machine",
    "machine.presets": "MACHINES get_machine",
    "plan.plan": "Plan",
    "call.planner": "make_plan make_plans",
    "plan.choice": "Prediction",
    "simulator.timing.auto": "predict",
    "simulator.timing.simulation": "simulate",
    "simulator.timing.solvers.recurrence": "Stall",
    "simulator.timing.timeline": "Timeline",
    "call.rows": "Rows",
    "call.chosen": "top_keys",
    "call.functional": "attention ring_attention synchronize virtual_attention",
    "inference.cache": "KVCache",
    "inference.choice": "Chooser",
    "integrations.context_parallel": "context_parallel context_parallel_unshard",
    "recurrence.layers": "affine_scan causal_conv1d gated_delta_rule selective_scan ssd",
    "kernels.memory": "auto_batch_size",
    "call.graph_op": "keep_attention save_attention_policy",
    "nn.factories": (
        "BlockSparseAdaptive create_block_sparse_attention create_dilated_attention create_multihead_block_sparse"
        " create_multihead_dilated_attention get_block_sparse_preset"
    ),
}
#: The module of each public name.
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in ("nn", "train"):
        return import_module(f".{name}", __name__)
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "nn", "train"})


__all__ = sorted(_HOMES)
