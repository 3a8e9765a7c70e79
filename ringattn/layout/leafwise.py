"""Layouts whose borders lie on a grid of leaves: `leaves(zigzag, 64)` cuts at multiples of 64 tokens only."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256

from ..errors import InvalidInput
from ..pattern.base import Pattern
from ..pattern.documents import Documents, find_documents
from . import MAX_RANGES, Layout, nonempty

#: The prefix of the names of these layouts.
LEAVES = "leaves"
#: The layouts that a call with whole tensors rounds to the grid.
ROUNDED = re.compile(r"\s*(contiguous|zigzag|balanced)\s*")


@lru_cache(maxsize=64)
def find_borders(pattern: Pattern | None, tokens: int, length: int) -> tuple[int, ...]:
    """The first position of each leaf, then `tokens`; in packed documents, leaves begin anew with each document."""
    documents = None if pattern is None else find_documents(pattern)
    starts = (documents or Documents((tokens,))).split(length).starts
    return tuple(sorted({*starts, tokens}))


@dataclass(frozen=True)
class LeafBorders(Layout):
    """A layout that gives whole leaves to ranks, as `inner`, a layout of leaves, says.

    Leaf number i has the positions borders[i] .. borders[i + 1] - 1, at most `length`.
    """

    inner: Layout
    length: int
    borders: tuple[int, ...]

    __hash__ = Layout.kept_hash

    @property
    def name(self) -> str:
        return f"{LEAVES}({self.inner.name}, {self.length})"

    @property
    def digest(self) -> str:
        regular = find_borders(None, self.tokens, self.length) == self.borders
        return (
            self.inner.digest if regular else sha256(repr((self.borders, self.inner.digest)).encode()).hexdigest()[:16]
        )

    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        found, exact = self.inner.span(ranks)
        runs = [run for r in found for run in ([r] if r.step == 1 else [range(i, i + 1) for i in r])]
        if len(ranks) > 1 and len(runs) > MAX_RANGES:
            return nonempty(range(self.tokens)), len(ranks) == self.ranks
        return nonempty(*(range(self.borders[run.start], self.borders[run.stop]) for run in runs)), exact

    def owner(self, position: int) -> int:
        return self.inner.owner(bisect_right(self.borders, position) - 1)

    def grouped(self, size: int) -> Layout:
        return replace(self, ranks=self.ranks // size, inner=self.inner.grouped(size))


def round_layout(layout: str | Layout, length: int | None) -> str | Layout:
    """The name of this layout with borders on the grid of leaves of this length, if there is one; else the layout."""
    if not isinstance(length, int) or isinstance(length, bool) or length < 1 or not isinstance(layout, str):
        return layout  # other checks report a wrong value
    if layout.strip() == "auto":
        raise InvalidInput(f"reproducible={length} with layout='auto': name a layout; try layout='zigzag'")
    if ROUNDED.fullmatch(layout) is None:
        return layout
    return f"balanced({length})" if layout.strip() == "balanced" else f"{LEAVES}({layout.strip()}, {length})"


def read_leafwise(name: str) -> tuple[str, int]:
    """(name of the layout of leaves, length of a leaf) of a name such as "leaves(zigzag, 64)". Raises InvalidInput."""
    match = re.fullmatch(rf"\s*{LEAVES}\s*\((.*),\s*([1-9]\d*)\s*\)\s*", name)
    if match is None or not re.match(r"\s*(contiguous|zigzag|striped)\b", match[1]):
        raise InvalidInput(
            f"unknown layout {name!r}; expected leaves(zigzag, 64), with contiguous or striped(1), which deals leaves "
            "one by one, in place of zigzag"
        )
    return match[1].strip(), int(match[2])


def make_leafwise(name: str, tokens: int, pattern: Pattern | None, make: Callable[[str, int], Layout]) -> Layout:
    """The layout called `name`; `make` makes the layout of its leaves from a name and their number."""
    inner, length = read_leafwise(name)
    borders = find_borders(pattern, tokens, length)
    of_leaves = make(inner, len(borders) - 1)
    return LeafBorders(tokens, of_leaves.ranks, of_leaves, length, borders)
