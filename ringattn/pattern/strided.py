"""A query attends the keys at a multiple of `step` from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidInput
from .base import ONE_HEAD, Pattern, plain
from .ranges import intersect
from .tile import Tile, make


@dataclass(frozen=True)
class Strided(Pattern):
    """(qpos - kpos) % step == 0: one tile per residue class."""

    step: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", plain(self.step))
        if isinstance(self.step, bool) or not isinstance(self.step, int) or self.step < 1:
            raise InvalidInput(f"Strided(step={self.step!r}): the step is an integer >= 1; try Strided(4)")

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        if not q or not k:
            return
        for residue in range(self.step):
            rows = intersect(q, range(residue, q[-1] + 1, self.step))
            keys = intersect(k, range(residue, k[-1] + 1, self.step))
            tile = make(heads, rows, keys)
            if tile is not None:
                yield tile

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return (q - k) % self.step == 0
