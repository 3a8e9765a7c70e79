"""Patterns with a single rule: dense, causal, sliding window, attention sinks, strided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from .base import ONE_HEAD, BandPattern, Pattern, check_integer
from .tile import Tile, clip, intersect, make_tile


@dataclass(frozen=True)
class Full(BandPattern):
    """Every query attends every key of the sequence, earlier and later ones: softmax(q k^T) without a mask."""

    bounds = None, None

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return np.ones(np.broadcast_shapes(q.shape, k.shape), dtype=bool)


@dataclass(frozen=True)
class Causal(BandPattern):
    """The pattern in which query q attends the keys k <= q, including its own position.

    In `Causal() & Sinks(4)`, a query does not see sinks later than itself.
    """

    bounds = 0, None

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return k <= q


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


@dataclass(frozen=True)
class Sinks(Pattern):
    """Every query attends the keys 0 .. n-1, even those later than itself.

    StreamingLLM (Xiao et al. 2023, arXiv:2309.17453) is `Causal() & (Sinks(4) | Window(4095))`. Raises InvalidInput
    unless `n` is an integer >= 0.
    """

    n: int

    endless = True

    def __post_init__(self) -> None:
        self._normalize(n=check_integer(self.n, "Sinks: number of tokens n", 0, "Sinks(4)"))

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        tile = make_tile(heads, q, clip(k, 0, self.n - 1))
        if tile is not None:
            yield tile

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return np.broadcast_to(k < self.n, np.broadcast_shapes(q.shape, k.shape))


@dataclass(frozen=True)
class Strided(Pattern):
    """A pattern in which query q attends every `step`-th key, earlier or later: each k with (q - k) % step == 0.

    Its pairs form one tile for each value of q % step. Source: the strided head of Sparse Transformers (Child et al.
    2019, arXiv:1904.10509), which adds `Causal()`. Raises InvalidInput unless `step` is an integer >= 1.
    """

    step: int

    def __post_init__(self) -> None:
        self._normalize(step=check_integer(self.step, "Strided: step", 1, "Strided(4)"))

    period, endless = 1, True

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        if not q or not k:
            return
        for residue in min(_residues(q, self.step), _residues(k, self.step), key=len):
            rows = intersect(q, range(residue, q[-1] + 1, self.step))
            keys = intersect(k, range(residue, k[-1] + 1, self.step))
            tile = make_tile(heads, rows, keys)
            if tile is not None:
                yield tile

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return (q - k) % self.step == 0


def _residues(rows: range, step: int) -> Sequence[int]:
    """The residues modulo `step` of a progression, ascending."""
    shared = gcd(rows.step, step)
    if len(rows) < step // shared:
        return sorted(row % step for row in rows)
    return range(rows.start % shared, step, shared)
