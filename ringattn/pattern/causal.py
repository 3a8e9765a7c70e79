"""Causal attention: a query attends its own position and earlier positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .base import FAR, ONE_HEAD, Pattern, Run
from .tile import Tile, make_tile


@dataclass(frozen=True)
class Causal(Pattern):
    """Query q attends key k iff k <= q, so q attends q + 1 keys. `Causal() & Sinks(4)` hides the future of sinks."""

    @property
    def period(self) -> int | None:
        return 1

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        tile = make_tile(heads, q, k, lo=0)
        if tile is not None:
            yield tile

    def key_run(self, first: int, last: int) -> Run:
        return -FAR, last

    def query_run(self, first: int, last: int) -> Run:
        return first, FAR

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return k <= q
