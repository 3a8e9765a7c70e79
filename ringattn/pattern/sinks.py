"""Attention sinks: every query attends the first keys of the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .base import ONE_HEAD, Pattern, check_integer
from .ranges import clip
from .tile import Tile, make_tile


@dataclass(frozen=True)
class Sinks(Pattern):
    """Every query attends the keys 0 .. n-1, also those later than itself.

    StreamingLLM (Xiao et al. 2023, arXiv:2309.17453) is `Causal() & (Sinks(4) | Window(4095))`. Raises InvalidInput
    unless `n` is an integer >= 0.
    """

    n: int

    def __post_init__(self) -> None:
        self._normalize(n=check_integer(self.n, "Sinks: number of tokens n", 0, "Sinks(4)"))

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        tile = make_tile(heads, q, clip(k, 0, self.n - 1))
        if tile is not None:
            yield tile

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return np.broadcast_to(k < self.n, np.broadcast_shapes(q.shape, k.shape))
