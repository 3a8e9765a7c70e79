"""Dense attention: every query attends every key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .base import FAR, ONE_HEAD, Pattern, Run
from .tile import Tile, make_tile


@dataclass(frozen=True)
class Full(Pattern):
    """Every query attends every key of the sequence, earlier and later ones: softmax(q k^T) without a mask."""

    @property
    def period(self) -> int | None:
        return 1

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        tile = make_tile(heads, q, k)
        if tile is not None:
            yield tile

    def key_run(self, first: int, last: int) -> Run:
        return -FAR, FAR

    def query_run(self, first: int, last: int) -> Run:
        return -FAR, FAR

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return np.ones(np.broadcast_shapes(q.shape, k.shape), dtype=bool)
