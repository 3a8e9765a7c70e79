"""A contiguous range of the heads of another pattern, for ranks that hold only some heads (Ulysses)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from .base import ONE_HEAD, Pattern, Position, Run, Side
from .ranges import shift_range
from .tile import Tile


@dataclass(frozen=True)
class HeadSlice(Pattern):
    """Head h of this pattern is head first + h of `pattern`, which must be bound to the number of all heads."""

    pattern: Pattern
    first: int

    @property
    def branches(self) -> int:
        return self.pattern.branches

    @property
    def output_scale(self) -> float:
        return self.pattern.output_scale

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        for tile in self.pattern.tiles(q, k, shift_range(heads, self.first)):
            yield replace(tile, heads=shift_range(tile.heads, -self.first))

    def count(self, q: range, k: range, heads: range = ONE_HEAD) -> int:
        return self.pattern.count(q, k, shift_range(heads, self.first))

    def paired(self, side: Side, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        for original_heads, rows in self.pattern.paired(side, q, k, shift_range(heads, self.first)):
            yield shift_range(original_heads, -self.first), rows

    def run(self, side: Side, first: Position, last: Position) -> Run | None:
        return self.pattern.run(side, first, last)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return self.pattern.visible(q, k, head + self.first, tokens)
