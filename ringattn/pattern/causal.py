"""Causal attention: a query attends its own position and earlier positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .base import BandPattern


@dataclass(frozen=True)
class Causal(BandPattern):
    """Query q attends key k iff k <= q, so q attends q + 1 keys. `Causal() & Sinks(4)` hides the future of sinks."""

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        return 0, None

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return k <= q
