"""Patterns: which query sees which key. One idea per file, imported when it is used first; every pattern is a set of
affine tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInput
from ..registry import Registry
from .base import Mix, Pattern, mix
from .parse import parse
from .tile import Tile

if TYPE_CHECKING:
    from .block_mask import from_block_mask
    from .block_table import BlockSparse
    from .causal import Causal
    from .dilated import Dilated
    from .documents import Documents
    from .families import global_local, local_window, strided_blocks
    from .full import Full
    from .levels import dilated_blocks, hierarchical
    from .selection import top_k
    from .sinks import Sinks
    from .strided import Strided
    from .window import Window

#: What a written pattern may name.
PATTERNS: Registry[Callable[..., Pattern]] = Registry(
    "patterns",
    {
        "BlockSparse": "pattern.block_table:BlockSparse",
        "Full": "pattern.full:Full",
        "Causal": "pattern.causal:Causal",
        "Window": "pattern.window:Window",
        "Dilated": "pattern.dilated:Dilated",
        "Documents": "pattern.documents:Documents",
        "Sinks": "pattern.sinks:Sinks",
        "Strided": "pattern.strided:Strided",
        "dilated_blocks": "pattern.levels:dilated_blocks",
        "global_local": "pattern.families:global_local",
        "hierarchical": "pattern.levels:hierarchical",
        "local_window": "pattern.families:local_window",
        "mix": "pattern.base:mix",
        "strided_blocks": "pattern.families:strided_blocks",
    },
)
#: Functions that take arrays, so that no text writes them.
_UNWRITTEN = {"from_block_mask": "block_mask", "top_k": "selection"}


def __getattr__(name: str) -> Any:
    if name in _UNWRITTEN:
        return getattr(import_module(f".{_UNWRITTEN[name]}", __name__), name)
    if name in PATTERNS.own:
        return PATTERNS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def parse_pattern(text: str) -> Pattern:
    """The pattern whose repr is `text`, such as "Causal() & Window(4096)"; parsed with ast, never evaluated."""
    return parse(text, PATTERNS)


def as_pattern(given: Pattern | str) -> Pattern:
    """The pattern given, or the one that a text writes. Raises InvalidInput for anything else."""
    if isinstance(given, str):
        return parse_pattern(given)
    if not isinstance(given, Pattern):
        raise InvalidInput(
            f"pattern must be a ringattn pattern such as Causal(), or its text, such as 'Causal() & Window(4096)', "
            f"got {given!r}"
        )
    return given


__all__ = [
    "PATTERNS",
    "BlockSparse",
    "Causal",
    "Dilated",
    "Documents",
    "Full",
    "Mix",
    "Pattern",
    "Sinks",
    "Strided",
    "Tile",
    "Window",
    "as_pattern",
    "dilated_blocks",
    "from_block_mask",
    "global_local",
    "hierarchical",
    "local_window",
    "mix",
    "parse_pattern",
    "strided_blocks",
    "top_k",
]
