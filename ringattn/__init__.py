"""Exact ring attention for any pattern, layout and number of ranks, real or virtual.

Nothing here imports torch until a name that needs it is used: plans answer at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import CommFailure, InvalidInput, Mismatch, RingAttentionError, Unsupported
from .layout import Layout, make_layout
from .pattern import (
    Causal,
    Dilated,
    Documents,
    Full,
    Pattern,
    Sinks,
    Strided,
    Window,
    mix,
    parse_pattern,
)
from .plan import Plan, make_plan

if TYPE_CHECKING:
    from . import nn as nn
    from .functional import attention, ring_attention, virtual_attention

__version__ = "0.1.0"

_LAZY = {"attention": "functional", "ring_attention": "functional", "virtual_attention": "functional"}


def __getattr__(name: str) -> Any:
    if name == "nn":
        return import_module(".nn", __name__)
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "nn"})


__all__ = [
    "Causal",
    "CommFailure",
    "Dilated",
    "Documents",
    "Full",
    "InvalidInput",
    "Layout",
    "Mismatch",
    "Pattern",
    "Plan",
    "RingAttentionError",
    "Sinks",
    "Strided",
    "Unsupported",
    "Window",
    "attention",
    "make_layout",
    "make_plan",
    "mix",
    "parse_pattern",
    "ring_attention",
    "virtual_attention",
]
