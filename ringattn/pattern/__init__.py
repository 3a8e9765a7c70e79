"""Patterns: which query position attends which key position. Each pattern is a set of tiles.

To add a pattern, write a frozen dataclass with `tiles` and `visible` (see `Pattern`). In this package, add a line to
PATTERNS; in another package, register an entry point (see `ringattn.registry.Registry`). Text such as
`pattern="Mine(3) & Causal()"` then works everywhere a pattern is accepted, on the command line too.

A pattern's module is imported when its name is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInput
from ..registry import Registry
from ..text import shorten, shown
from .base import Mix as Mix
from .base import Pattern as Pattern
from .base import mix as mix
from .tile import Tile as Tile
from .tile import make_tile as make_tile

if TYPE_CHECKING:
    from .block_table import BlockSparse as BlockSparse
    from .dilated import Dilated as Dilated
    from .documents import Documents as Documents
    from .families import dilated_blocks as dilated_blocks
    from .families import global_local as global_local
    from .families import hierarchical as hierarchical
    from .families import local_window as local_window
    from .families import strided_blocks as strided_blocks
    from .from_arrays import from_block_mask as from_block_mask
    from .from_arrays import top_k as top_k
    from .simple import Causal as Causal
    from .simple import Full as Full
    from .simple import Sinks as Sinks
    from .simple import Strided as Strided
    from .simple import Window as Window

#: The functions and classes that pattern text may call.
PATTERNS: Registry[Callable[..., Pattern]] = Registry(
    "patterns",
    {
        "BlockSparse": "pattern.block_table:BlockSparse",
        "Causal": "pattern.simple:Causal",
        "Dilated": "pattern.dilated:Dilated",
        "Documents": "pattern.documents:Documents",
        "Full": "pattern.simple:Full",
        "Sinks": "pattern.simple:Sinks",
        "Strided": "pattern.simple:Strided",
        "Window": "pattern.simple:Window",
        "dilated_blocks": "pattern.families:dilated_blocks",
        "global_local": "pattern.families:global_local",
        "hierarchical": "pattern.families:hierarchical",
        "local_window": "pattern.families:local_window",
        "mix": "pattern.base:mix",
        "strided_blocks": "pattern.families:strided_blocks",
    },
)


def __getattr__(name: str) -> Any:
    if name in PATTERNS.builtin:
        return PATTERNS[name]
    if name in ("from_block_mask", "top_k"):  # not in PATTERNS: text cannot contain arrays
        return getattr(import_module(".from_arrays", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def parse_pattern(text: str) -> Pattern:
    """The pattern whose repr is `text`, such as "Causal() & Window(4096)"; parsed with ast, never evaluated.

    Raises InvalidInput, with a hint for a misspelled name, if `text` does not spell a pattern.
    """
    patterns = parse_patterns(text)
    if len(patterns) != 1:
        raise InvalidInput(f"{len(patterns)} patterns where one is expected: {shorten(text, 100)}; give one of them")
    return patterns[0]


def parse_patterns(text: str) -> list[Pattern]:
    """The patterns in text such as "[Causal(), Causal() & Window(127)]"; one pattern gives a list of one."""
    from .parse import PatternParser  # few calls give their pattern as text

    return PatternParser(text, PATTERNS).parse()


def as_pattern(pattern: Pattern | str) -> Pattern:
    """A pattern unchanged, or text parsed by `parse_pattern`. Raises InvalidInput for anything else."""
    if isinstance(pattern, str):
        return parse_pattern(pattern)
    if not isinstance(pattern, Pattern):
        raise InvalidInput(f"pattern must be a ringattn pattern such as Causal(), or its text, got {shown(pattern)}")
    return pattern
