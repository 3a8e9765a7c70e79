"""Strided attention: a query attends the keys at multiples of a step from its own position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .base import ONE_HEAD, Pattern, check_integer
from .ranges import intersect
from .tile import Tile, make_tile


@dataclass(frozen=True)
class Strided(Pattern):
    """Query q attends key k iff (q - k) % step == 0, earlier and later keys; one tile per residue class.

    Source: the strided head of Sparse Transformers (Child et al. 2019, arXiv:1904.10509), which adds `Causal()`. Raises
    InvalidInput unless `step` is an integer >= 1.
    """

    step: int

    def __post_init__(self) -> None:
        self._normalize(step=check_integer(self.step, "Strided: step", 1, "Strided(4)"))

    @property
    def period(self) -> int | None:
        return 1

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        if not q or not k:
            return
        for residue in range(self.step):
            rows = intersect(q, range(residue, q[-1] + 1, self.step))
            keys = intersect(k, range(residue, k[-1] + 1, self.step))
            tile = make_tile(heads, rows, keys)
            if tile is not None:
                yield tile

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return (q - k) % self.step == 0
