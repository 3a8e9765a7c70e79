"""Dilated attention: segments, and within them every r-th position. LongNet, and the head-grouped convention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from math import lcm

import numpy as np

from ..errors import InvalidInput, did_you_mean
from .base import ONE_HEAD, Or, Pattern, plain
from .ranges import intersect
from .tile import Tile, make

#: The branches of LongNet (Ding et al. 2023). 16384 is no multiple of 6: a class need not fill its segment.
SEGMENTS = (2048, 4096, 8192, 16384, 32768)
RATES = (1, 2, 4, 6, 12)


@dataclass(frozen=True)
class Dilated(Pattern):
    """Branch i cuts the sequence into segments of w = segments[i] tokens; position p takes part in it where
    (p mod w) mod r == offset, with r = rates[i], and attends the positions of its own segment and class.

    mix="lse" (LongNet): every head runs every branch, and branches mix by their softmax denominators. The offset
    of head j is j mod r (offsets="per_head"), or i mod r for all heads (offsets="group").
    mix="group": the heads are dealt to the branches, extra heads to the first; a head runs its own branch only,
    with the offset i mod r; outputs are divided by the number of branches. It has a single branch, and needs
    to know how many heads there are: a plan tells it (`bind`).
    """

    segments: tuple[int, ...] = SEGMENTS
    rates: tuple[int, ...] = RATES
    causal: bool = False
    mix: str = "lse"
    offsets: str | None = None
    heads: int | None = None

    def __post_init__(self) -> None:
        for name in ("segments", "rates"):
            values = getattr(self, name)
            values = values.tolist() if isinstance(values, np.ndarray) else values
            if not isinstance(values, list | tuple) or not values:
                raise InvalidInput(f"Dilated: {name} must be a list of integers >= 1, got {values!r}")
            values = [plain(x) for x in values]
            if any(isinstance(x, bool) or not isinstance(x, int) or x < 1 for x in values):
                raise InvalidInput(f"Dilated: {name} must be integers >= 1, got {values!r}")
            object.__setattr__(self, name, tuple(values))
        if len(self.segments) != len(self.rates):
            raise InvalidInput(
                f"Dilated: {len(self.segments)} segments but {len(self.rates)} rates; give one rate per segment, "
                "such as Dilated((2048, 4096), (1, 2))"
            )
        if self.offsets is None:
            object.__setattr__(self, "offsets", "group" if self.mix == "group" else "per_head")
        for name, options in (("mix", ("lse", "group", "union")), ("offsets", ("per_head", "group"))):
            value = getattr(self, name)
            if value not in options:
                hint = did_you_mean(value, options)
                raise InvalidInput(f"Dilated: {name}={value!r}; {hint}expected {' or '.join(map(repr, options))}")
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
            raise InvalidInput(
                f"Dilated(mix='group', heads={self.heads}) deals {self.heads} heads, but there are {heads}; "
                f"try heads={heads}, or leave it out"
            )

    @property
    def period(self) -> int | None:
        return lcm(*self.segments)  # classes are counted from the start of a segment, so that rates do not matter

    def count(self, q: range, k: range, heads: range = ONE_HEAD) -> int:
        if not q or q != k or q.step > 1 or q.start or self.mix == "union":
            return super().count(q, k, heads)
        # No segment crosses a multiple of the period: the pairs of the first period repeat.
        size = self.period
        assert size is not None
        turns = len(q) // size
        first, last = range(size), range(turns * size, len(q))
        return (turns * super().count(first, first, heads) if turns else 0) + super().count(last, last, heads)

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        if not q or not k:
            return
        if self.mix == "union":
            parts: list[Pattern] = [_Branch(self, branch) for branch in range(len(self.segments))]
            yield from reduce(Or, parts).tiles(q, k, heads)
            return
        for branch in range(len(self.segments)):
            yield from self.branch_tiles(branch, q, k, heads)

    def branch_tiles(self, branch: int, q: range, k: range, heads: range) -> Iterator[Tile]:
        """The tiles of one (segment, rate)."""
        if not q or not k:
            return
        width, rate = self.segments[branch], self.rates[branch]
        first, last = max(q[0], k[0]) // width, min(q[-1], k[-1]) // width
        if first > last:
            return
        classes = [(group, offset) for group, offset in self._classes(branch, heads) if group and offset < width]
        for segment in range(first, last + 1):
            for group, offset in classes:
                members = range(segment * width + offset, (segment + 1) * width, rate)
                tile = make(
                    group, intersect(q, members), intersect(k, members), lo=0 if self.causal else None,
                    branch=branch if self.mix == "lse" else 0,
                )  # fmt: skip
                if tile is not None:
                    yield tile

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        total = np.zeros(np.broadcast_shapes(q.shape, k.shape), dtype=np.int64)
        for i, (width, rate) in enumerate(zip(self.segments, self.rates, strict=True)):
            if self.mix == "group" and self._group_of(head) != i:
                continue
            offset = head % rate if self.offsets == "per_head" else i % rate
            pair = (q // width == k // width) & (q % width % rate == offset) & (k % width % rate == offset)
            total += pair & (k <= q) if self.causal else pair
        return total != 0 if self.mix == "union" else total

    def _classes(self, branch: int, heads: range) -> Iterator[tuple[range, int]]:
        """(heads, offset) of a branch."""
        rate = self.rates[branch]
        if self.offsets == "per_head":
            for offset in range(rate):
                yield intersect(heads, range(offset, heads.stop, rate)), offset
        elif self.mix == "group":
            yield intersect(heads, self._group(branch)), branch % rate
        else:
            yield heads, branch % rate

    def _group(self, branch: int) -> range:
        """The heads of a branch under mix="group"."""
        share, extra = divmod(self._known_heads(), len(self.segments))
        start = branch * share + min(branch, extra)
        return range(start, start + share + (branch < extra))

    def _group_of(self, head: int) -> int:
        edges = np.cumsum([len(self._group(branch)) for branch in range(len(self.segments))])
        return int(np.searchsorted(edges, head, side="right"))

    def _known_heads(self) -> int:
        if self.heads is None:
            raise InvalidInput(
                "Dilated(mix='group') deals the heads to its branches and must know how many there are; "
                "a plan knows, elsewhere write Dilated(..., mix='group', heads=8)"
            )
        return self.heads


@dataclass(frozen=True)
class _Branch(Pattern):
    """One branch of a Dilated as a pattern of its own: a part of the union."""

    whole: Dilated
    branch: int

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        return self.whole.branch_tiles(self.branch, q, k, heads)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        raise NotImplementedError("Dilated.visible speaks for all branches")
