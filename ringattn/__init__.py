"""Exact ring attention for any pattern, layout and number of ranks, real or virtual.

Nothing here imports torch until a name that needs it is used: plans and models do without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import CommFailure, InvalidInput, LaunchLimit, Mismatch, OutOfMemory, RingAttentionError, Unsupported
from .layout import Layout, make_layout
from .pattern import (
    BlockSparse,
    Causal,
    Dilated,
    Documents,
    Full,
    Pattern,
    Sinks,
    Strided,
    Window,
    dilated_blocks,
    from_block_mask,
    global_local,
    hierarchical,
    local_window,
    mix,
    parse_pattern,
    strided_blocks,
    top_k,
)
from .plan import Plan, make_plan
from .timing import Machine, Prediction, Stall, Timeline, predict, simulate

if TYPE_CHECKING:
    from . import nn as nn
    from .factories import (
        BlockSparseAdaptive,
        create_block_sparse_attention,
        create_dilated_attention,
        create_multihead_block_sparse,
        create_multihead_dilated_attention,
        get_block_sparse_preset,
    )
    from .functional import attention, ring_attention, virtual_attention
    from .pool import auto_batch_size, memory_pool
    from .remat import keep_attention

__version__ = "0.1.0"

_LAZY = {
    "create_multihead_dilated_attention": "factories",
    "create_multihead_block_sparse": "factories",
    "create_dilated_attention": "factories",
    "create_block_sparse_attention": "factories",
    "get_block_sparse_preset": "factories",
    "BlockSparseAdaptive": "factories",
    "attention": "functional",
    "auto_batch_size": "pool",
    "keep_attention": "remat",
    "memory_pool": "pool",
    "ring_attention": "functional",
    "virtual_attention": "functional",
}


def __getattr__(name: str) -> Any:
    if name == "nn":
        return import_module(".nn", __name__)
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "nn"})


__all__ = [
    "BlockSparse",
    "BlockSparseAdaptive",
    "Causal",
    "CommFailure",
    "Dilated",
    "Documents",
    "Full",
    "InvalidInput",
    "LaunchLimit",
    "Layout",
    "Machine",
    "Mismatch",
    "OutOfMemory",
    "Pattern",
    "Plan",
    "Prediction",
    "RingAttentionError",
    "Sinks",
    "Stall",
    "Strided",
    "Timeline",
    "Unsupported",
    "Window",
    "attention",
    "auto_batch_size",
    "create_block_sparse_attention",
    "create_dilated_attention",
    "create_multihead_block_sparse",
    "create_multihead_dilated_attention",
    "dilated_blocks",
    "from_block_mask",
    "get_block_sparse_preset",
    "global_local",
    "hierarchical",
    "keep_attention",
    "local_window",
    "make_layout",
    "make_plan",
    "memory_pool",
    "mix",
    "parse_pattern",
    "predict",
    "ring_attention",
    "simulate",
    "strided_blocks",
    "top_k",
    "virtual_attention",
]
