"""Patterns: which query sees which key. One idea per file; every pattern is a set of affine tiles."""

from __future__ import annotations

from collections.abc import Callable

from .base import Mix, Pattern, mix
from .causal import Causal
from .dilated import Dilated
from .documents import Documents
from .full import Full
from .parse import parse
from .sinks import Sinks
from .strided import Strided
from .tile import Tile
from .window import Window

#: The names that a written pattern may use.
NAMES: dict[str, Callable[..., Pattern]] = {
    "Full": Full,
    "Causal": Causal,
    "Window": Window,
    "Dilated": Dilated,
    "Documents": Documents,
    "Sinks": Sinks,
    "Strided": Strided,
    "mix": mix,
}


def parse_pattern(text: str) -> Pattern:
    """The pattern whose repr is `text`, such as "Causal() & Window(4096)"; parsed with ast, never evaluated."""
    return parse(text, NAMES)


__all__ = [
    "NAMES",
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
    "mix",
    "parse_pattern",
]
