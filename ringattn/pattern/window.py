"""Sliding-window attention: a query attends the positions near its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .base import BandPattern, check_integer


@dataclass(frozen=True)
class Window(BandPattern):
    """Query q attends key k iff q - left <= k <= q + right; distances are in tokens.

    Window(4095) attends 4,096 keys: the query's own position and the 4,095 before it. Source: the sliding window of
    Longformer (Beltagy et al. 2020, arXiv:2004.05150). Raises InvalidInput unless both are integers >= 0.
    """

    left: int
    right: int = 0

    def __post_init__(self) -> None:
        example = "Window(4095) for 4,096 keys, or Full() for no bound"
        self._normalize(
            left=check_integer(self.left, "Window: left", 0, example),
            right=check_integer(self.right, "Window: right", 0, example),
        )

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        return -self.right, self.left

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return (q - self.left <= k) & (k <= q + self.right)
