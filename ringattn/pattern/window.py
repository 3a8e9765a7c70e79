"""A sliding window around each query."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidInput
from .base import ONE_HEAD, Pattern, Run, plain
from .tile import Tile, make


@dataclass(frozen=True)
class Window(Pattern):
    """-right <= qpos - kpos <= left, so Window(4095) sees 4,096 keys: itself and the 4,095 before it."""

    left: int
    right: int = 0

    def __post_init__(self) -> None:
        for name, value in (("left", self.left), ("right", self.right)):
            value = plain(value)
            object.__setattr__(self, name, value)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidInput(
                    f"Window({name}={value!r}): the reach to the {name} is a number of tokens, an integer >= 0; "
                    "try Window(4095) for 4,096 keys, or Full() for no bound"
                )

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        tile = make(heads, q, k, lo=-self.right, hi=self.left)
        if tile is not None:
            yield tile

    def key_run(self, first: int, last: int) -> Run:
        return first - self.left, last + self.right

    def query_run(self, first: int, last: int) -> Run:
        return first - self.right, last + self.left

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return (q - self.left <= k) & (k <= q + self.right)
