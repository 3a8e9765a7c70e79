"""Dense attention: every query attends every key."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .base import BandPattern


@dataclass(frozen=True)
class Full(BandPattern):
    """Every query attends every key of the sequence, earlier and later ones: softmax(q k^T) without a mask."""

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        return None, None

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return np.ones(np.broadcast_shapes(q.shape, k.shape), dtype=bool)
