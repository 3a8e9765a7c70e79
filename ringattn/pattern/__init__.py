"""Patterns: which query sees which key. One idea per file; every pattern is a set of affine tiles."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import InvalidInput
from .base import Mix, Pattern, mix
from .block_mask import from_block_mask
from .block_table import BlockSparse
from .causal import Causal
from .dilated import Dilated
from .documents import Documents
from .families import global_local, local_window, strided_blocks
from .full import Full
from .levels import dilated_blocks, hierarchical
from .parse import parse
from .sinks import Sinks
from .strided import Strided
from .tile import Tile
from .top_k import top_k
from .window import Window

#: The names that a written pattern may use.
NAMES: dict[str, Callable[..., Pattern]] = {
    "BlockSparse": BlockSparse,
    "Full": Full,
    "Causal": Causal,
    "Window": Window,
    "Dilated": Dilated,
    "Documents": Documents,
    "Sinks": Sinks,
    "Strided": Strided,
    "dilated_blocks": dilated_blocks,
    "global_local": global_local,
    "hierarchical": hierarchical,
    "local_window": local_window,
    "mix": mix,
    "strided_blocks": strided_blocks,
}


def parse_pattern(text: str) -> Pattern:
    """The pattern whose repr is `text`, such as "Causal() & Window(4096)"; parsed with ast, never evaluated."""
    return parse(text, NAMES)


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
    "NAMES",
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
