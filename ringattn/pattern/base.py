"""The interface of a pattern, and the combinations `a & b`, `a | b` and `mix(a, b)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import Any, Literal

import numpy as np

from ..cache import Numbered
from ..errors import InvalidInput
from ..text import shown
from .tile import Tile, intersect_tiles, make_tile, subtract_tile

ONE_HEAD = range(1)
#: The side of a pair that a method returns.
Side = Literal["keys", "queries"]
#: A position, or ascending positions of many runs: int64 [runs].
Position = int | np.ndarray
#: First and last position of a run of adjacent positions, or of many runs.
Run = tuple[Position, Position]
#: Stands for an unbounded end of a run; larger than every position.
FAR = 1 << 62


def check_integer(value: object, name: str, least: int, example: str) -> int:
    """`value` as a Python int, capped at FAR. Raises InvalidInput unless `value` is an integer >= `least`.

    NumPy integers are accepted, bools are not. No distance reaches FAR, so a huge value such as sys.maxsize means no
    bound. The error message quotes `name` and `example`.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InvalidInput(f"{name}={shown(value)} must be an integer >= {least}; try {example}")
    return min(int(value), FAR)


class Pattern(Numbered, ABC):
    """Which keys each query attends, given by their positions, for each head. Batch rows may differ, see `rows`.

    Positions are global, 0 .. tokens-1. A pattern is an immutable value that can be compared, hashed and pickled, and
    `repr(pattern)` is text that `parse_pattern` reads back. Patterns combine by `a & b` (pairs of both), `a | b` (pairs
    of either) and `mix(a, b)` (one branch each). A query that attends no key gets output 0 and lse -inf.

    A subclass is a frozen dataclass with two independent definitions of the same pairs: `tiles`, which all planning
    uses, and `visible`, from which `mask` is made. The tests compare `tiles` with `mask`.
    """

    #: True for a pattern that is used once, such as a selection made in every training step: its plans are not cached.
    transient = False
    #: Whether `tiles` stays short for an unbounded range of queries. A cache can then find the keys that no later query
    #: attends.
    endless = False

    @property
    def varies(self) -> bool:
        """Whether every training step usually has a new pattern, as with documents, so caching by shape is useless."""
        return self.transient

    @property
    def branches(self) -> int:
        """Number of branches. A pair that belongs to two branches counts twice in the softmax."""
        return 1

    @property
    def output_scale(self) -> float:
        """Factor by which the attention output is multiplied; 1 except for `Dilated(mix="group")`."""
        return 1.0

    @property
    def union_hint(self) -> str:
        """A suggestion for the error message of `|` on a pattern with several branches, or ""."""
        return ""

    @property
    def rows(self) -> int | None:
        """The batch size if each row of the batch has its own pattern (see `row`); None if all rows share this one."""
        return None

    def row(self, index: int) -> Pattern:
        """The pattern of one row of a batch; `self` where `rows` is None."""
        return self

    @property
    def unstacked(self) -> Pattern:
        """The batched pattern whose rows a `RowByRow` joins into one sequence; `self` for every other pattern."""
        return self

    def bind(self, heads: int, tokens: int) -> Pattern:
        """This pattern for a given number of query heads and tokens; `self` if it depends on neither."""
        return self

    @abstractmethod
    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        """Yield tiles that together cover the visible pairs of `q` x `k` in `heads`; tiles of a branch are disjoint.

        `q` and `k` are ranges of global positions with any positive step. Tiles are trimmed (see `Tile`). Raises
        InvalidInput if the pattern must be bound first (see `bind`).
        """

    @abstractmethod
    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        """How often each query attends each key: int or bool, in the shape to which int64 `q` and `k` broadcast."""

    def check(self, tokens: int, heads: int) -> None:
        """Raise InvalidInput if the pattern does not fit a sequence of `tokens` tokens and `heads` query heads."""

    def check_sides(self, keys: int, queries: int, heads: int) -> None:
        """Raise InvalidInput if the pattern does not fit keys 0 .. keys-1 and queries 0 .. queries-1."""
        self.check(max(keys, queries), heads)

    def count(self, q: range, k: range, heads: range = ONE_HEAD) -> int:
        """The exact number of query-key pairs in `q` x `k`, summed over `heads` and branches; closed form per tile."""
        return sum(len(tile.heads) * tile.pairs for tile in self.tiles(q, k, heads))

    def paired(self, side: Side, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        """Yield (heads, rows): ranges of keys (or queries, see `side`) that are in some pair of `q` x `k`.

        Ranges may overlap.
        """
        for tile in self.tiles(q, k, heads):
            for rows in tile.rows(side):
                yield tile.heads, rows

    @property
    def period(self) -> int | None:
        """The smallest known shift, in tokens, that leaves the pattern unchanged; None if none is known.

        Query q attends key k as often as query q + period attends key k + period, for every head, in every sequence
        that contains these four positions.
        """
        return None

    def run(self, side: Side, first: Position, last: Position) -> Run | None:
        """The first and the last key that any of the positions first .. last attends.

        For side "queries", the first and the last query that attends any of these positions. The results may lie
        outside the sequence. For arrays of ascending positions, returns arrays, or numbers that hold for all entries.
        Returns None unless in every head each query attends a single run of adjacent keys that includes its own
        position, and both ends of the run stay or move right from one query to the next. The keys of adjacent queries
        then form one run, which is found without listing tiles.
        """
        return None

    def mask(self, tokens: int, heads: int = 1) -> np.ndarray:
        """The mask as bool [heads, tokens, tokens]; with several branches int64, how often each pair counts.

        For small `tokens`; the tests compare `tiles` with it. Raises InvalidInput if the pattern does not fit `tokens`
        and `heads`.
        """
        self.check(tokens, heads)
        bound = self.bind(heads, tokens)
        position = np.arange(tokens, dtype=np.int64)
        shape = (tokens, tokens)
        masks = [bound.visible(position[:, None], position[None, :], head, tokens) for head in range(heads)]
        kind = bool if bound.branches == 1 else np.int64
        return np.stack([np.broadcast_to(mask, shape).astype(kind) for mask in masks])

    def row_mask(self, position: int, tokens: int, head: int = 0, heads: int | None = None) -> np.ndarray:
        """How often query `position` of `head` attends each key: int64 [tokens], a row of `mask(tokens, heads)`.

        `heads` defaults to head + 1; it matters only if the pattern depends on the number of heads.
        """
        keys = np.arange(tokens, dtype=np.int64)
        bound = self.bind(head + 1 if heads is None else heads, tokens)
        row = bound.visible(np.array([position], dtype=np.int64), keys, head, tokens)
        return np.broadcast_to(row, (tokens,)).astype(np.int64)

    def picture(
        self, tokens: int, *, head: int = 0, heads: int | None = None, cells: int = 32, ascii: bool = False
    ) -> str:
        """The pattern of one head as text: lines are queries, columns are keys, at most `cells` x `cells` characters.

        A character shows the exact share of pairs in its cell: "·" none, "░" under half, "▓" half or more, "█" all;
        with `ascii` ".", "-", "+" and "#". `heads` (default: head + 1) is the number of heads of the model.
        """
        heads = head + 1 if heads is None else heads
        self.check(tokens, heads)
        bound, cells = self.bind(heads, tokens), min(cells, tokens)
        blocks = [range(tokens * i // cells, tokens * (i + 1) // cells) for i in range(cells)]

        def mark(q: range, k: range) -> str:
            pairs, area = bound.count(q, k, range(head, head + 1)), len(q) * len(k)
            # Branches may count pairs twice.
            return (".-+#" if ascii else "·░▓█")[0 if not pairs else 3 if pairs >= area else 1 + (2 * pairs >= area)]

        return "\n".join("".join(mark(q, k) for k in blocks) for q in blocks)

    def __and__(self, other: Pattern) -> Pattern:
        return And(self, _check_pattern(other, "&"))

    def __or__(self, other: Pattern) -> Pattern:
        return Or(self, _check_pattern(other, "|"))


class BandPattern(Pattern):
    """A pattern in which each query q attends all keys k whose distance q - k lies between two fixed bounds."""

    period = 1
    endless = True

    @property
    @abstractmethod
    def bounds(self) -> tuple[int | None, int | None]:
        """The smallest and the largest distance q - k; None means no bound."""

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        tile = make_tile(heads, q, k, *self.bounds)
        if tile is not None:
            yield tile

    def run(self, side: Side, first: Position, last: Position) -> Run:
        lo, hi = self.bounds
        if side == "queries":
            lo, hi = None if hi is None else -hi, None if lo is None else -lo
        return -FAR if hi is None else first - hi, FAR if lo is None else last - lo


def pairs_once(
    parts: Sequence[Callable[[range, range, range], Iterator[Tile]]], q: range, k: range, heads: range
) -> Iterator[Tile]:
    """Yield disjoint tiles that cover the pairs of all `parts`, the `tiles` methods of patterns with one branch."""
    for index, part in enumerate(parts):
        for tile in part(q, k, heads):
            remaining = [tile]
            for taken in (t for other in parts[:index] for t in other(tile.q, tile.k, tile.heads)):
                remaining = [piece for rest in remaining for piece in subtract_tile(rest, taken)]
                if not remaining:
                    break
            yield from remaining


def _check_pattern(value: object, operation: str) -> Pattern:
    if not isinstance(value, Pattern):
        raise InvalidInput(
            f"{operation} combines two patterns, got {type(value).__name__} {shown(value)}; try Causal()"
        )
    return value


class Combination(Pattern):
    """A pattern made of other patterns, its operands."""

    @property
    @abstractmethod
    def operands(self) -> tuple[Pattern, ...]: ...

    @property
    def endless(self) -> bool:  # type: ignore[override]
        return all(operand.endless for operand in self.operands)

    def check(self, tokens: int, heads: int) -> None:
        for operand in self.operands:
            operand.check(tokens, heads)

    def check_sides(self, keys: int, queries: int, heads: int) -> None:
        for operand in self.operands:
            operand.check_sides(keys, queries, heads)

    @property
    def varies(self) -> bool:
        return any(operand.varies for operand in self.operands)

    @property
    def rows(self) -> int | None:
        """The batch size if some operand has one pattern per batch row, else None.

        Raises InvalidInput if the operands are for different batch sizes.
        """
        counts = {operand.rows for operand in self.operands} - {None}
        if len(counts) > 1:
            raise InvalidInput(
                f"{self!r} joins patterns for batches of {sorted(map(str, counts))} rows; give all the same number"
            )
        return counts.pop() if counts else None

    def bind(self, heads: int, tokens: int) -> Pattern:
        return self._with(tuple(operand.bind(heads, tokens) for operand in self.operands))

    def row(self, index: int) -> Pattern:
        return self if self.rows is None else self._with(tuple(operand.row(index) for operand in self.operands))

    def _with(self, operands: tuple[Pattern, ...]) -> Pattern:
        """The same combination of other operands."""
        return type(self)(*operands)

    @property
    def period(self) -> int | None:
        periods = [operand.period for operand in self.operands]
        shifts = [period for period in periods if period is not None]
        return lcm(*shifts) if len(shifts) == len(periods) else None


@dataclass(frozen=True)
class And(Combination):
    """The pairs that both patterns contain, written `a & b`. Each branch of `a` combines with each branch of `b`."""

    a: Pattern
    b: Pattern

    @property
    def operands(self) -> tuple[Pattern, ...]:
        return self.a, self.b

    @property
    def branches(self) -> int:
        return self.a.branches * self.b.branches

    @property
    def output_scale(self) -> float:
        return self.a.output_scale * self.b.output_scale

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        for left in self.a.tiles(q, k, heads):
            for right in self.b.tiles(left.q, left.k, left.heads):
                tile = intersect_tiles(left, right, left.branch * self.b.branches + right.branch)
                if tile is not None:
                    yield tile

    def paired(self, side: Side, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        deciding = self._deciding_operand(q, k, heads)
        yield from super().paired(side, q, k, heads) if deciding is None else deciding.paired(side, q, k, heads)

    def run(self, side: Side, first: Position, last: Position) -> Run | None:
        a, b = self.a.run(side, first, last), self.b.run(side, first, last)
        if a is None or b is None:
            return None
        larger, smaller = _extremes(first)
        return larger(a[0], b[0]), smaller(a[1], b[1])

    def _deciding_operand(self, q: range, k: range, heads: range) -> Pattern | None:
        """The operand that alone decides q x k because the other contains every pair of it; None if there is none."""
        for operand, other in ((self.a, self.b), (self.b, self.a)):
            tile = next(operand.tiles(q, k, heads), None)
            if tile is None or not tile.dense:
                continue
            if (len(tile.heads), len(tile.q), len(tile.k)) == (len(heads), len(q), len(k)):
                return other
        return None

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        left = np.asarray(self.a.visible(q, k, head, tokens), dtype=np.int64)
        return left * np.asarray(self.b.visible(q, k, head, tokens), dtype=np.int64)

    def __repr__(self) -> str:
        return f"({self.a!r} & {self.b!r})"


class Union(Combination):
    """Base of patterns that contain the pairs of any operand; all operands must have the same output scale."""

    def __post_init__(self) -> None:
        scales = {operand.output_scale for operand in self.operands}
        if len(scales) > 1:
            raise InvalidInput(
                f"{' and '.join(map(repr, self.operands))} scale their outputs differently ({scales}), so one "
                "softmax cannot combine them; try Dilated(..., mix='union')"
            )

    @property
    def output_scale(self) -> float:
        return self.operands[0].output_scale

    def paired(self, side: Side, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        for operand in self.operands:
            yield from operand.paired(side, q, k, heads)

    def run(self, side: Side, first: Position, last: Position) -> Run | None:
        larger, smaller = _extremes(first)
        union: Run | None = None
        for operand in self.operands:
            run = operand.run(side, first, last)
            if run is None:
                return None
            union = run if union is None else (smaller(union[0], run[0]), larger(union[1], run[1]))
        return union


@dataclass(frozen=True)
class Or(Union):
    """The pairs that either pattern contains, each pair once, written `a | b`. Both have a single branch."""

    a: Pattern
    b: Pattern

    def __post_init__(self) -> None:
        for operand in self.operands:
            if operand.branches > 1:
                raise InvalidInput(
                    f"| takes patterns of one branch (one softmax), but {operand!r} has {operand.branches}: a union "
                    f"counts each pair once, a mix counts it once per branch; try {operand.union_hint}mix(a, b), or | "
                    "inside the branches"
                )
        super().__post_init__()

    @property
    def operands(self) -> tuple[Pattern, ...]:
        return self.a, self.b

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        return pairs_once([part.tiles for part in self._parts], q, k, heads)

    @cached_property
    def _parts(self) -> list[Pattern]:
        """The operands of chained `|`, those with nested unions last, because earlier operands compute more tiles."""
        parts = [x for operand in self.operands for x in (operand._parts if isinstance(operand, Or) else [operand])]
        return sorted(parts, key=_count_unions)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        left = np.asarray(self.a.visible(q, k, head, tokens)) != 0
        return left | (np.asarray(self.b.visible(q, k, head, tokens)) != 0)

    def __repr__(self) -> str:
        return f"({self.a!r} | {self.b!r})"


@dataclass(frozen=True)
class Mix(Union):
    """The pattern `mix(a, b)`: one softmax in which a pair counts once for each operand that contains it.

    This is the same as computing attention for each operand and averaging the outputs, weighted by their softmax
    denominators, as LongNet does (Ding et al. 2023, arXiv:2307.02486).
    """

    parts: tuple[Pattern, ...]

    @property
    def operands(self) -> tuple[Pattern, ...]:
        return self.parts

    @property
    def branches(self) -> int:
        return sum(part.branches for part in self.parts)

    def _with(self, operands: tuple[Pattern, ...]) -> Pattern:
        return Mix(operands)

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        first = 0
        for part in self.parts:
            for tile in part.tiles(q, k, heads):
                yield replace(tile, branch=first + tile.branch)
            first += part.branches

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        total = np.zeros(np.broadcast_shapes(q.shape, k.shape), dtype=np.int64)
        for part in self.parts:
            total = total + np.asarray(part.visible(q, k, head, tokens), dtype=np.int64)
        return total

    def __repr__(self) -> str:
        return f"mix({', '.join(map(repr, self.parts))})"


def mix(*patterns: Pattern) -> Mix:
    """A multi-branch pattern: one softmax in which a pair counts once for each of the `patterns` that contain it.

    Raises InvalidInput for no pattern, or for patterns that scale their outputs differently.
    """
    if not patterns:
        raise InvalidInput("mix() needs at least one pattern; try mix(Causal(), Window(256))")
    return Mix(tuple(_check_pattern(part, "mix") for part in patterns))


def _count_unions(pattern: Pattern) -> int:
    """How many `|` a pattern has."""
    return isinstance(pattern, Or) + sum(map(_count_unions, getattr(pattern, "operands", ())))


def _extremes(position: Position) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(max, min) for positions of this kind: numbers, or arrays element by element."""
    return (np.maximum, np.minimum) if isinstance(position, np.ndarray) else (max, min)
