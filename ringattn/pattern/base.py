"""What a pattern is, and how patterns combine: `&`, `|` and `mix`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..cache import Value
from ..errors import InvalidInput
from .picture import draw
from .tile import Tile, difference, meet

ONE_HEAD = range(1)


def plain(value: Any) -> Any:
    """A NumPy integer as the Python integer that it is; any other value as it is."""
    return int(value) if isinstance(value, np.integer) else value


#: A first and a last position.
Run = tuple[int, int]
#: An end of a run that nothing bounds.
FAR = 1 << 62


class Pattern(Value, ABC):
    """Which query position attends which key position, for each head.

    A pattern says it twice, independently: `tiles` for the planner, and `visible`, from which the dense
    `mask` is made, as the oracle that the tiles are tested against.
    """

    #: True for a pattern that will not be met again, such as a selection made anew in every step: plans for it are
    #: not remembered.
    transient = False

    @property
    def branches(self) -> int:
        """Number of branches; a pair that two branches see counts twice in the softmax."""
        return 1

    @property
    def output_scale(self) -> float:
        """Outputs are multiplied by this; 1 but for conventions that ask for it."""
        return 1.0

    @property
    def union_hint(self) -> str:
        """What to write to make `|` take this pattern, where it does not; for its error message."""
        return ""

    def bind(self, heads: int, tokens: int) -> Pattern:
        """The pattern for known numbers of heads and tokens; itself, but where its meaning depends on them."""
        return self

    @abstractmethod
    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        """Lazily, the trimmed tiles that touch the rectangle q x k. Those of one branch are disjoint."""

    @abstractmethod
    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        """How often query q attends key k: integers (or bools) of the broadcast shape of int64 `q` and `k`."""

    def check(self, tokens: int, heads: int) -> None:
        """Raise InvalidInput where the pattern does not fit a sequence of `tokens` and `heads` heads."""

    def count(self, q: range, k: range, heads: range = ONE_HEAD) -> int:
        """Exact number of pairs in the rectangle q x k, over `heads` and branches (closed form per tile)."""
        return sum(len(tile.heads) * tile.pairs for tile in self.tiles(q, k, heads))

    def keys(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        """(heads, rows): the rows of `k` that some query of `q` sees, all of them; they may overlap."""
        for tile in self.tiles(q, k, heads):
            for rows in tile.key_rows():
                yield tile.heads, rows

    def queries(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        """(heads, rows): the rows of `q` that see some key of `k`, all of them; they may overlap."""
        for tile in self.tiles(q, k, heads):
            for rows in tile.query_rows():
                yield tile.heads, rows

    def key_run(self, first: int, last: int) -> Run | None:
        """The first and the last key that queries first .. last see together; they may lie beyond the sequence.

        None, unless in all heads every query sees one run of keys with its own position in it, and neither end of that
        run ever moves left from a query to the next. Then what a run of queries sees is one run as well, and is known
        without tiles.
        """
        return None

    def query_run(self, first: int, last: int) -> Run | None:
        """The first and the last query that see a key of first .. last; None where `key_run` is None."""
        return None

    def mask(self, tokens: int, heads: int = 1) -> np.ndarray:
        """How often each pair counts: int64 [heads, tokens, tokens]. The oracle, for small `tokens`."""
        self.check(tokens, heads)
        bound = self.bind(heads, tokens)
        position = np.arange(tokens, dtype=np.int64)
        shape = (tokens, tokens)
        rows = [bound.visible(position[:, None], position[None, :], h, tokens) for h in range(heads)]
        return np.stack([np.broadcast_to(row, shape).astype(np.int64) for row in rows])

    def row_mask(self, position: int, tokens: int, head: int = 0, heads: int | None = None) -> np.ndarray:
        """One row of `mask(tokens, heads)`: how often query `position` attends each key, int64 [tokens].

        `heads` says how many heads there are (default: `head` is the last), where the pattern depends on it.
        """
        keys = np.arange(tokens, dtype=np.int64)
        bound = self.bind(head + 1 if heads is None else heads, tokens)
        row = bound.visible(np.array([position], dtype=np.int64), keys, head, tokens)
        return np.broadcast_to(row, (tokens,)).astype(np.int64)

    def picture(
        self, tokens: int, *, head: int = 0, heads: int | None = None, cells: int = 32, ascii: bool = False
    ) -> str:
        """One head (the last of `heads`, unless told) drawn from exact counts, one character per cell of N x N."""
        heads = head + 1 if heads is None else heads
        self.check(tokens, heads)
        bound, shown = self.bind(heads, tokens), range(head, head + 1)
        return draw(lambda q, k: bound.count(q, k, shown), tokens, cells=cells, ascii=ascii)

    def __and__(self, other: Pattern) -> Pattern:
        return And(self, _pattern(other, "&"))

    def __or__(self, other: Pattern) -> Pattern:
        return Or(self, _pattern(other, "|"))


def _pattern(value: object, operation: str) -> Pattern:
    if not isinstance(value, Pattern):
        raise InvalidInput(
            f"{operation} combines two patterns, got {type(value).__name__} {value!r}; try Causal() & Window(4096)"
        )
    return value


@dataclass(frozen=True)
class And(Pattern):
    """Pairs that both patterns hold, written `a & b`. Distributes over the branches of either."""

    a: Pattern
    b: Pattern

    @property
    def branches(self) -> int:
        return self.a.branches * self.b.branches

    @property
    def output_scale(self) -> float:
        return self.a.output_scale * self.b.output_scale

    def bind(self, heads: int, tokens: int) -> Pattern:
        return And(self.a.bind(heads, tokens), self.b.bind(heads, tokens))

    def check(self, tokens: int, heads: int) -> None:
        self.a.check(tokens, heads)
        self.b.check(tokens, heads)

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        for left in self.a.tiles(q, k, heads):
            for right in self.b.tiles(left.q, left.k, left.heads):
                tile = meet(left, right, left.branch * self.b.branches + right.branch)
                if tile is not None:
                    yield tile

    def keys(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        whole = self._whole(q, k, heads)
        yield from super().keys(q, k, heads) if whole is None else whole.keys(q, k, heads)

    def queries(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        whole = self._whole(q, k, heads)
        yield from super().queries(q, k, heads) if whole is None else whole.queries(q, k, heads)

    def key_run(self, first: int, last: int) -> Run | None:
        return _meet(self.a.key_run(first, last), self.b.key_run(first, last))

    def query_run(self, first: int, last: int) -> Run | None:
        return _meet(self.a.query_run(first, last), self.b.query_run(first, last))

    def _whole(self, q: range, k: range, heads: range) -> Pattern | None:
        """The one of the two that alone decides, as the other holds all pairs of the rectangle."""
        for pattern, other in ((self.a, self.b), (self.b, self.a)):
            tile = next(pattern.tiles(q, k, heads), None)
            if tile is not None and tile.dense and (len(tile.heads), len(tile.q), len(tile.k)) == (
                len(heads), len(q), len(k),
            ):  # fmt: skip
                return other
        return None

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        left = np.asarray(self.a.visible(q, k, head, tokens), dtype=np.int64)
        return left * np.asarray(self.b.visible(q, k, head, tokens), dtype=np.int64)

    def __repr__(self) -> str:
        return f"({self.a!r} & {self.b!r})"


@dataclass(frozen=True)
class Or(Pattern):
    """Pairs that either pattern holds, each once, written `a | b`. Both have a single branch."""

    a: Pattern
    b: Pattern

    def __post_init__(self) -> None:
        for part in (self.a, self.b):
            if part.branches > 1:
                raise InvalidInput(
                    f"| takes patterns of one branch, but {part!r} has {part.branches}: a union counts each pair once, "
                    f"a mix counts it once per branch; try {part.union_hint}mix(a, b), or | inside the branches"
                )
        _same_scale(self.a, self.b)

    @property
    def output_scale(self) -> float:
        return self.a.output_scale

    def bind(self, heads: int, tokens: int) -> Pattern:
        return Or(self.a.bind(heads, tokens), self.b.bind(heads, tokens))

    def check(self, tokens: int, heads: int) -> None:
        self.a.check(tokens, heads)
        self.b.check(tokens, heads)

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        yield from self.a.tiles(q, k, heads)
        for tile in self.b.tiles(q, k, heads):
            rest = [tile]
            for taken in self.a.tiles(tile.q, tile.k, tile.heads):
                rest = [piece for left in rest for piece in difference(left, taken)]
            yield from rest

    def keys(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        for part in (self.a, self.b):
            yield from part.keys(q, k, heads)

    def queries(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        for part in (self.a, self.b):
            yield from part.queries(q, k, heads)

    def key_run(self, first: int, last: int) -> Run | None:
        return _hull(part.key_run(first, last) for part in (self.a, self.b))

    def query_run(self, first: int, last: int) -> Run | None:
        return _hull(part.query_run(first, last) for part in (self.a, self.b))

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        either = np.asarray(self.a.visible(q, k, head, tokens)) != 0
        return either | (np.asarray(self.b.visible(q, k, head, tokens)) != 0)

    def __repr__(self) -> str:
        return f"({self.a!r} | {self.b!r})"


@dataclass(frozen=True)
class Mix(Pattern):
    """Several attentions whose outputs mix by their softmax denominators: one softmax over the multiset union."""

    parts: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        _same_scale(*self.parts)

    @property
    def branches(self) -> int:
        return sum(part.branches for part in self.parts)

    @property
    def output_scale(self) -> float:
        return self.parts[0].output_scale

    def bind(self, heads: int, tokens: int) -> Pattern:
        return Mix(tuple(part.bind(heads, tokens) for part in self.parts))

    def check(self, tokens: int, heads: int) -> None:
        for part in self.parts:
            part.check(tokens, heads)

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        first = 0
        for part in self.parts:
            for tile in part.tiles(q, k, heads):
                yield replace(tile, branch=first + tile.branch)
            first += part.branches

    def keys(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        for part in self.parts:
            yield from part.keys(q, k, heads)

    def queries(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        for part in self.parts:
            yield from part.queries(q, k, heads)

    def key_run(self, first: int, last: int) -> Run | None:
        return _hull(part.key_run(first, last) for part in self.parts)

    def query_run(self, first: int, last: int) -> Run | None:
        return _hull(part.query_run(first, last) for part in self.parts)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        total = np.zeros(np.broadcast_shapes(q.shape, k.shape), dtype=np.int64)
        for part in self.parts:
            total = total + np.asarray(part.visible(q, k, head, tokens), dtype=np.int64)
        return total

    def __repr__(self) -> str:
        return f"mix({', '.join(map(repr, self.parts))})"


def _meet(a: Run | None, b: Run | None) -> Run | None:
    """What two runs share, each of which holds the positions it is asked for."""
    return None if a is None or b is None else (max(a[0], b[0]), min(a[1], b[1]))


def _hull(runs: Iterable[Run | None]) -> Run | None:
    """The union of runs, each of which holds the positions it is asked for."""
    known = []
    for run in runs:
        if run is None:
            return None
        known.append(run)
    return min(run[0] for run in known), max(run[1] for run in known)


def _same_scale(*patterns: Pattern) -> None:
    scales = {pattern.output_scale for pattern in patterns}
    if len(scales) > 1:
        raise InvalidInput(
            f"{' and '.join(map(repr, patterns))} scale their outputs differently ({scales}): they have no common softmax"
        )


def mix(*patterns: Pattern) -> Mix:
    """Multi-branch attention: a pair that several of the patterns hold counts once for each of them."""
    if not patterns:
        raise InvalidInput("mix() needs at least one pattern; try mix(Causal(), Window(256))")
    return Mix(tuple(_pattern(part, "mix") for part in patterns))
