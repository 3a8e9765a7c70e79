"""Exact pairs and rows of all ranks at once, where a plan is one band over equal chunks. Counted, in closed form.

Where the whole mask is one tile lo <= q - k <= hi and every rank owns one chunk of n tokens (contiguous) or two
(zigzag), the pairs of two chunks depend on their distance alone. That makes counts of 262,144 ranks a few array
operations; `Demand` counts the same numbers visit by visit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from ...cache import cached
from ...errors import plural
from ...layout.regular import Contiguous, Zigzag

if TYPE_CHECKING:
    from ...plan.plan import Plan

#: Pairs of a visit, and those of one head in all visits of a rank, stay below this, so that int64 is exact.
LARGEST = 1 << 62


@dataclass(frozen=True)
class Banded:
    """A band over chunks of `size` tokens, `chunks` of which each rank owns (1, or 2 that mirror each other)."""

    ranks: int
    size: int
    chunks: int
    lo: int | None
    hi: int | None
    heads: int

    @property
    def dense(self) -> bool:
        """Whether every query sees every key."""
        return self.lo is None and self.hi is None

    @property
    def rows(self) -> int:
        """Tokens of each rank."""
        return self.size * self.chunks

    @property
    def transposed(self) -> Banded:
        """The band seen from its keys: whose queries they see."""
        lo, hi = (None if bound is None else -bound for bound in (self.lo, self.hi))
        return replace(self, lo=hi, hi=lo)

    def pairs(self, queriers: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """(query, key, head) pairs of visits, int64, by ranks of equal shape."""
        return self.seen(queriers, owners) * self.heads

    def seen(self, queriers: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """(query, key) pairs of visits that one head sees, int64."""
        found = np.zeros(np.broadcast_shapes(queriers.shape, owners.shape), dtype=np.int64)
        for q in self._chunks(queriers):
            for k in self._chunks(owners):
                found += self.area(q - k)
        return found

    def rows_seeing(self, queriers: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """Query rows of visits that see a key, int64, by ranks of equal shape."""
        n, shape = self.size, np.broadcast_shapes(queriers.shape, owners.shape)
        total = np.zeros(shape, dtype=np.int64)
        for q in self._chunks(queriers):
            pieces = []
            for k in self._chunks(owners):
                shift = np.broadcast_to((q - k) * n, shape)
                first = np.zeros_like(shift) if self.lo is None else np.clip(self.lo - shift, 0, n)
                last = np.full_like(shift, n) if self.hi is None else np.clip(self.hi - shift + n, 0, n)
                pieces.append((first, last))
            total += _union(pieces, n)
        return total

    def rows_beyond(self, owners: np.ndarray, sign: int, first: np.ndarray | int, last: int) -> np.ndarray:
        """Rows of each owner's block that ranks at distances first .. last along a direction see, int64 [owners]."""
        total = np.zeros(owners.shape, dtype=np.int64)
        low, high = (owners + first, owners + last) if sign > 0 else (owners - last, owners - first)
        runs: list[
            tuple[np.ndarray, np.ndarray]
        ] = []  # of ranks, without the turn from the last to the first; empty ones end before they begin
        for turn in (-self.ranks, 0, self.ranks):
            run = np.maximum(low, turn) - turn, np.minimum(high, turn + self.ranks - 1) - turn
            mirrored = 2 * self.ranks - 1 - run[1], 2 * self.ranks - 1 - run[0]
            runs += [run] if self.chunks == 1 else [run, mirrored]
        for k in self._chunks(owners):
            total += _union([self._seen(k, *run) for run in runs], self.size)
        return total

    def _chunks(self, ranks: np.ndarray) -> list[np.ndarray]:
        return [ranks] if self.chunks == 1 else [ranks, 2 * self.ranks - 1 - ranks]

    def area(self, distance: np.ndarray) -> np.ndarray:
        """Pairs of two chunks at a distance, of one head."""
        shift = distance * self.size
        found = np.full(shift.shape, self.size**2, dtype=np.int64)
        if self.hi is not None:
            found = _at_most(self.hi - shift, self.size)
        if self.lo is not None:
            found = found - _at_most(self.lo - 1 - shift, self.size)
        return found

    def _seen(self, chunk: np.ndarray, first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows [start, stop) of a key chunk that the query chunks first .. last see; start >= stop: none."""
        n = self.size
        start = np.zeros(chunk.shape, dtype=np.int64)
        stop = np.full(chunk.shape, n, dtype=np.int64)
        if self.hi is not None:
            start = np.maximum(start, (first - chunk) * n - self.hi)
        if self.lo is not None:
            stop = np.minimum(stop, (last - chunk + 1) * n - self.lo)
        return np.where(first <= last, start, n), np.where(first <= last, stop, 0)


def _at_most(bound: np.ndarray, n: int) -> np.ndarray:
    """Pairs (i, j) of 0 .. n-1 with i - j <= bound."""
    below = np.clip(n + bound, 0, n)  # bound < 0: a triangle of this side
    above = np.clip(n - 1 - bound, 0, n)
    return np.where(bound < 0, below * (below + 1) // 2, n * n - above * (above + 1) // 2)


def _union(pieces: list[tuple[np.ndarray, np.ndarray]], n: int) -> np.ndarray:
    """How many of 0 .. n-1 lie in some of the pieces [start, stop), elementwise."""
    starts = np.stack([np.where(start < stop, start, n) for start, stop in pieces])
    stops = np.stack([np.where(start < stop, stop, 0) for start, stop in pieces])
    order = np.argsort(starts, axis=0, kind="stable")
    starts, stops = np.take_along_axis(starts, order, 0), np.take_along_axis(stops, order, 0)
    total, reached = np.zeros(starts.shape[1:], dtype=np.int64), np.zeros(starts.shape[1:], dtype=np.int64)
    for start, stop in zip(starts, stops, strict=True):
        total += np.maximum(stop - np.maximum(start, reached), 0)
        reached = np.maximum(reached, stop)
    return total


def banded(plan: Plan) -> Banded | None:
    """The band of a plan whose mask is one tile over equal chunks; None where it is another.

    That is read off the tiles and the layout, as integers: the first tile of the whole mask is all there is, it spans all
    heads, queries and keys, and the tokens divide into the chunks.
    """
    tokens, heads, layout = plan.tokens, plan.heads, plan.layout
    chunks = {Contiguous: 1, Zigzag: 2}.get(type(layout), 0)
    whole = range(tokens)
    found = list(islice(plan.pattern.tiles(whole, whole, range(heads)), 2))
    if len(found) != 1 or (found[0].q, found[0].k, found[0].heads) != (whole, whole, range(heads)):
        return None
    tile = found[0]
    if tile.dense and not chunks and _even(plan):
        chunks = 1  # where all see all, it does not matter which tokens a rank owns
    if not chunks or tokens % (chunks * plan.ranks):
        return None
    size = tokens // (chunks * plan.ranks)
    if 4 * size**2 * heads > LARGEST or (not tile.dense and size * chunks * tokens > LARGEST):
        return None
    return Banded(plan.ranks, size, chunks, tile.lo, tile.hi, heads)


def unequal(plan: Plan) -> str:
    """Why a plan's ranks are not alike whatever its mask, or nothing."""
    tokens, ranks = plan.tokens, plan.ranks
    if ranks > tokens:
        return f"{ranks:,} ranks are more than {plural(tokens, 'token')}, so that some have none"
    chunks = 2 * ranks if isinstance(plan.layout, Zigzag) else ranks
    if tokens % chunks:
        return f"{tokens:,} tokens do not divide into {chunks:,} equal chunks, so that shards are unequal"
    return ""


@cached
def _even(plan: Plan) -> bool:
    """Whether all ranks own as many tokens."""
    each, rest = divmod(plan.tokens, plan.ranks)
    return not rest and all(plan.layout.rows(rank) == each for rank in range(plan.ranks))
