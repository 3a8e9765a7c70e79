"""Attention sinks: the first keys are seen by all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidInput
from .base import ONE_HEAD, Pattern, plain
from .ranges import clip
from .tile import Tile, make


@dataclass(frozen=True)
class Sinks(Pattern):
    """Keys 0 .. n-1 are seen by every query (the future too: write `Causal() & (Sinks(4) | Window(4095))`)."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", plain(self.n))
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 0:
            raise InvalidInput(f"Sinks(n={self.n!r}): n is a number of tokens, an integer >= 0; try Sinks(4)")

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        tile = make(heads, q, clip(k, 0, self.n - 1))
        if tile is not None:
            yield tile

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return np.broadcast_to(k < self.n, np.broadcast_shapes(q.shape, k.shape))
