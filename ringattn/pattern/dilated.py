"""Dilated attention: every r-th position within each segment of the sequence (LongNet, and head groups)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import lcm

import numpy as np

from ..errors import InvalidInput
from ..text import did_you_mean, shown
from .base import ONE_HEAD, Pattern, check_integer, pairs_once
from .tile import Tile, intersect, make_tile

#: The branches of LongNet (Ding et al. 2023, arXiv:2307.02486). A rate need not divide its segment: 6 and 16384.
SEGMENTS = (2048, 4096, 8192, 16384, 32768)
RATES = (1, 2, 4, 6, 12)
OPTIONS = {"mix": ("lse", "group", "union"), "offsets": ("per_head", "group")}


@dataclass(frozen=True)
class Dilated(Pattern):
    """Dilated attention: branch i splits the sequence into segments and attends every r-th position within a segment.

    With w = segments[i] tokens and r = rates[i], position p belongs to branch i iff (p mod w) mod r == offset; it
    attends the positions of the branch in its own segment, with `causal` only those up to itself. A shorter last
    segment has fewer keys and no padding. The defaults are the segments and rates of LongNet (Ding et al. 2023,
    arXiv:2307.02486).

    - mix="lse" (LongNet): every head has every branch, and branch outputs are weighted by their softmax denominators,
      so that a pair in two branches counts twice.
    - mix="union": every head has every branch, and each pair counts once.
    - mix="group": heads are divided into len(segments) groups of adjacent heads; the first groups have one more head if
      the division leaves a remainder. A head has only the branch of its group, and outputs are divided by the number of
      branches. This needs the number of `heads`, which every plan sets (`bind`).
    - offsets="per_head": head j has offset j mod r; the default, except for mix="group".
    - offsets="group": branch i has offset i mod r for all heads; the only choice for mix="group".

    Raises InvalidInput for segments or rates that are not integers >= 1, for unequal numbers of segments and rates, and
    for unknown options.
    """

    segments: Sequence[int] = SEGMENTS
    rates: Sequence[int] = RATES
    causal: bool = False
    mix: str = "lse"
    offsets: str | None = None
    heads: int | None = None

    endless = True

    def __post_init__(self) -> None:
        self._normalize(segments=_check_integers("segments", self.segments), rates=_check_integers("rates", self.rates))
        if len(self.segments) != len(self.rates):
            raise InvalidInput(f"Dilated: {len(self.segments)} segments but {len(self.rates)} rates; give equally many")
        if self.heads is not None:
            self._normalize(heads=check_integer(self.heads, "Dilated: heads", 1, "heads=8"))
        if self.offsets is None:
            self._normalize(offsets="group" if self.mix == "group" else "per_head")
        for name, options in OPTIONS.items():
            value = getattr(self, name)
            if value not in options:
                hint = did_you_mean(value, options)
                raise InvalidInput(f"Dilated: {name}={shown(value)}; {hint}expected {' or '.join(map(repr, options))}")
        if self.mix == "group" and self.offsets == "per_head":
            raise InvalidInput("Dilated: mix='group' has one offset per group; leave out offsets='per_head'")

    @property
    def branches(self) -> int:
        return len(self.segments) if self.mix == "lse" else 1

    @property
    def output_scale(self) -> float:
        return 1.0 / len(self.segments) if self.mix == "group" else 1.0

    @property
    def union_hint(self) -> str:
        return "Dilated(..., mix='union'), which counts each pair once, " if self.mix == "lse" else ""

    def bind(self, heads: int, tokens: int) -> Dilated:
        return replace(self, heads=heads) if self.mix == "group" and self.heads is None else self

    def check(self, tokens: int, heads: int) -> None:
        if self.mix == "group" and self.heads is not None and heads > self.heads:
            raise InvalidInput(f"Dilated(mix='group', heads={self.heads}): got {heads} heads; try heads={heads}")

    @property
    def period(self) -> int | None:
        return lcm(*self.segments)  # offsets are counted from the start of a segment, so rates do not matter

    def count(self, q: range, k: range, heads: range = ONE_HEAD) -> int:
        if not q or q != k or q.step > 1 or q.start or self.mix == "union":
            return super().count(q, k, heads)
        # No segment crosses a multiple of the period, so the pairs of the first period repeat.
        size = lcm(*self.segments)
        periods = len(q) // size
        first, rest = range(size), range(periods * size, len(q))
        return (periods * super().count(first, first, heads) if periods else 0) + super().count(rest, rest, heads)

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        if not q or not k:
            return
        if self.mix == "union":
            branches = [partial(self.branch_tiles, branch) for branch in range(len(self.segments))]
            yield from pairs_once(branches, q, k, heads)
            return
        for branch in range(len(self.segments)):
            yield from self.branch_tiles(branch, q, k, heads)

    def branch_tiles(self, branch: int, q: range, k: range, heads: range) -> Iterator[Tile]:
        """Yield the tiles of branch number `branch`, which has one segment length and one rate."""
        if not q or not k:
            return
        width, rate = self.segments[branch], self.rates[branch]
        first, last = max(q[0], k[0]) // width, min(q[-1], k[-1]) // width
        if first > last:
            return
        groups = [(group, offset) for group, offset in self._heads_by_offset(branch, heads) if group and offset < width]
        lo, index = 0 if self.causal else None, branch if self.mix == "lse" else 0
        for segment in range(first, last + 1):
            for group, offset in groups:
                members = range(segment * width + offset, (segment + 1) * width, rate)
                tile = make_tile(group, intersect(q, members), intersect(k, members), lo, branch=index)
                if tile is not None:
                    yield tile

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        total = np.zeros(np.broadcast_shapes(q.shape, k.shape), dtype=np.int64)
        for i, (width, rate) in enumerate(zip(self.segments, self.rates, strict=True)):
            if self.mix == "group" and self._branch_of(head) != i:
                continue
            offset = head % rate if self.offsets == "per_head" else i % rate
            pair = (q // width == k // width) & (q % width % rate == offset) & (k % width % rate == offset)
            total += pair & (k <= q) if self.causal else pair
        return total != 0 if self.mix == "union" else total

    def _heads_by_offset(self, branch: int, heads: range) -> Iterator[tuple[range, int]]:
        """(heads, offset) for each offset of a branch, without heads that lack the branch."""
        rate = self.rates[branch]
        if self.offsets == "per_head":
            for offset in range(min(rate, heads.stop)):
                yield intersect(heads, range(offset, heads.stop, rate)), offset
        elif self.mix == "group":
            yield intersect(heads, self._heads_of(branch)), branch % rate
        else:
            yield heads, branch % rate

    def _heads_of(self, branch: int) -> range:
        """The heads of a branch under mix="group"."""
        if self.heads is None:
            raise InvalidInput("Dilated(mix='group') must know how many heads there are; try Dilated(..., heads=8)")
        share, extra = divmod(self.heads, len(self.segments))
        start = branch * share + min(branch, extra)
        return range(start, start + share + (branch < extra))

    def _branch_of(self, head: int) -> int:
        """The branch of a head under mix="group"."""
        ends = np.cumsum([len(self._heads_of(branch)) for branch in range(len(self.segments))])
        return int(np.searchsorted(ends, head, side="right"))


def _check_integers(name: str, source: object) -> tuple[int, ...]:
    """The integers >= 1 of a list, tuple or one-dimensional NumPy array, as Python ints."""
    values = source.tolist() if isinstance(source, np.ndarray) else source
    if isinstance(values, str | bytes) or not isinstance(values, Sequence) or not values:
        raise InvalidInput(f"Dilated: {name} must be a list of integers >= 1, got {shown(values)}; try {name}=(2, 4)")
    return tuple(check_integer(value, f"Dilated: a value of {name}", 1, f"{name}=(2, 4)") for value in values)
