"""A pattern seen from some of its heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from .base import ONE_HEAD, Pattern, Run
from .tile import Tile


@dataclass(frozen=True)
class HeadSlice(Pattern):
    """Head h of this is head `first` + h of `pattern`, which knows how many heads there are."""

    pattern: Pattern
    first: int

    @property
    def branches(self) -> int:
        return self.pattern.branches

    @property
    def output_scale(self) -> float:
        return self.pattern.output_scale

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        for tile in self.pattern.tiles(q, k, _moved(heads, self.first)):
            yield replace(tile, heads=_moved(tile.heads, -self.first))

    def count(self, q: range, k: range, heads: range = ONE_HEAD) -> int:
        return self.pattern.count(q, k, _moved(heads, self.first))

    def keys(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        for found, rows in self.pattern.keys(q, k, _moved(heads, self.first)):
            yield _moved(found, -self.first), rows

    def queries(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        for found, rows in self.pattern.queries(q, k, _moved(heads, self.first)):
            yield _moved(found, -self.first), rows

    def key_run(self, first: int, last: int) -> Run | None:
        return self.pattern.key_run(first, last)

    def query_run(self, first: int, last: int) -> Run | None:
        return self.pattern.query_run(first, last)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return self.pattern.visible(q, k, head + self.first, tokens)


def _moved(heads: range, by: int) -> range:
    return range(heads.start + by, heads.stop + by, heads.step)
