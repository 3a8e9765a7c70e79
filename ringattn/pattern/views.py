"""Pattern views for planners: a slice of the heads (Ulysses), batch rows as one sequence, padded or cropped rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .base import FAR, ONE_HEAD, Pattern, Position, Run, Side
from .tile import Tile, clip, shift_range


class PatternView(Pattern):
    """Base of patterns that wrap another pattern, `pattern`, and keep its branches, output scale and runs of keys."""

    pattern: Pattern

    @property
    def branches(self) -> int:
        return self.pattern.branches

    @property
    def output_scale(self) -> float:
        return self.pattern.output_scale

    def run(self, side: Side, first: Position, last: Position) -> Run | None:
        return self.pattern.run(side, first, last)


@dataclass(frozen=True)
class HeadSlice(PatternView):
    """A view of some heads of `pattern`: head h of the view is head first + h of `pattern`.

    `pattern` must already be bound to the number of all its heads.
    """

    pattern: Pattern
    first: int

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        for tile in self.pattern.tiles(q, k, shift_range(heads, self.first)):
            yield replace(tile, heads=shift_range(tile.heads, -self.first))

    def count(self, q: range, k: range, heads: range = ONE_HEAD) -> int:
        return self.pattern.count(q, k, shift_range(heads, self.first))

    def paired(self, side: Side, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        for original_heads, rows in self.pattern.paired(side, q, k, shift_range(heads, self.first)):
            yield shift_range(original_heads, -self.first), rows

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return self.pattern.visible(q, k, head + self.first, tokens)


@dataclass(frozen=True)
class RowByRow(PatternView):
    """A pattern that joins the rows of a batch, `tokens` tokens each, into one sequence; rows do not attend each other.

    Position p of the sequence is position p % tokens of batch row p // tokens. `pattern` holds a pattern for each row
    and is bound to `tokens` tokens.
    """

    pattern: Pattern
    tokens: int

    @cached_property
    def _patterns(self) -> tuple[Pattern, ...]:
        return tuple(self.pattern.row(index) for index in range(self.pattern.rows or 1))

    @property
    def unstacked(self) -> Pattern:
        return self.pattern

    def _parts(self, q: range, k: range) -> Iterator[tuple[Pattern, int, range, range]]:
        """(pattern, first position, queries, keys) of each batch row that has both; rows count from first position."""
        if not q or not k:
            return
        size = self.tokens
        for index in range(max(q[0], k[0]) // size, min(q[-1], k[-1]) // size + 1):
            first = index * size
            mine, block = (clip(r, first, first + size - 1) for r in (q, k))
            if mine and block:
                yield self._patterns[index], first, shift_range(mine, -first), shift_range(block, -first)

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        for pattern, first, mine, block in self._parts(q, k):
            for tile in pattern.tiles(mine, block, heads):
                yield replace(tile, q=shift_range(tile.q, first), k=shift_range(tile.k, first))

    def count(self, q: range, k: range, heads: range = ONE_HEAD) -> int:
        return sum(pattern.count(mine, block, heads) for pattern, _, mine, block in self._parts(q, k))

    def paired(self, side: Side, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        for pattern, first, mine, block in self._parts(q, k):
            for some, rows in pattern.paired(side, mine, block, heads):
                yield some, shift_range(rows, first)

    def run(self, side: Side, first: Position, last: Position) -> Run | None:
        """The run of keys (or queries) for positions first .. last, which may lie in different batch rows.

        It reaches from the start of the run in the batch row of `first` to the end of the run in the batch row of
        `last`.
        """
        if isinstance(first, np.ndarray) and isinstance(last, np.ndarray):
            runs = [self.run(side, *ends) for ends in zip(first.tolist(), last.tolist(), strict=True)]
            if None in runs:
                return None
            lows, highs = np.array(runs, dtype=np.int64).reshape(-1, 2).T
            return lows, highs
        (one, start), (other, end) = divmod(first, self.tokens), divmod(last, self.tokens)
        most = self.tokens - 1
        low = self._patterns[one].run(side, start, end if one == other else most)
        high = self._patterns[other].run(side, start if one == other else 0, end)
        if low is None or high is None:
            return None
        return one * self.tokens + max(low[0], 0), other * self.tokens + min(high[1], most)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        total = np.zeros(np.broadcast_shapes(q.shape, k.shape), dtype=np.int64)
        (row, mine), (other, block) = np.divmod(q, self.tokens), np.divmod(k, self.tokens)
        for index, pattern in enumerate(self._patterns):
            seen = np.asarray(pattern.visible(mine, block, head, self.tokens), dtype=np.int64)
            total = total + np.where((row == index) & (other == index), seen, 0)
        return total


#: The runs of slots of a batch row, each as (first slot, slot - position), or (first slot, None) for padding.
Shifts = tuple[tuple[int, int | None], ...]
#: Every token is in the slot of its position.
UNSHIFTED: Shifts = ((0, 0),)


@dataclass(frozen=True)
class Slotted(PatternView):
    """A pattern for padded or cropped batch rows, in which a token's index in its row (its slot) is not its position.

    `shifts` says by how much slots and positions differ, with one entry per row or one for all rows. `pattern` refers
    to positions, which may outnumber the slots.
    """

    pattern: Pattern
    shifts: tuple[Shifts, ...] = (UNSHIFTED,)

    __hash__ = Pattern.kept_hash

    @property
    def rows(self) -> int | None:
        return len(self.shifts) if len(self.shifts) > 1 else self.pattern.rows

    def row(self, index: int) -> Pattern:
        return Slotted(self.pattern.row(index), (self.shifts[index if len(self.shifts) > 1 else 0],))

    @cached_property
    def _runs(self) -> tuple[tuple[int, int, int], ...]:
        """(first slot, last slot, slot - position) of each run of tokens of a single row."""
        (shifts,) = self.shifts
        by = dict(shifts)
        return tuple((run.start, run.stop - 1, by[run.start] or 0) for run in find_tokens(shifts))

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        for first, last, by in self._runs:
            rows = shift_range(clip(q, first, last), -by)
            for other_first, other_last, other_by in self._runs if rows else ():
                keys = shift_range(clip(k, other_first, other_last), -other_by)
                for tile in self.pattern.tiles(rows, keys, heads) if keys else ():
                    lo, hi = (None if x is None else x + by - other_by for x in (tile.lo, tile.hi))
                    moved = shift_range(tile.q, by), shift_range(tile.k, other_by)
                    yield replace(tile, q=moved[0], k=moved[1], lo=lo, hi=hi)

    def run(self, side: Side, first: Position, last: Position) -> Run | None:
        return super().run(side, first, last) if self.shifts == (UNSHIFTED,) else None

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        total = np.zeros(np.broadcast_shapes(q.shape, k.shape), dtype=np.int64)
        for first, last, by in self._runs:
            for other_first, other_last, other_by in self._runs:
                here = (first <= q) & (q <= last) & (other_first <= k) & (k <= other_last)
                rows, keys = np.clip(q - by, 0, None), np.clip(k - other_by, 0, None)
                seen = self.pattern.visible(np.minimum(rows, tokens - 1), np.minimum(keys, tokens - 1), head, tokens)
                total = total + np.where(here, np.asarray(seen, dtype=np.int64), 0)
        return total


def find_tokens(shifts: Shifts) -> list[range]:
    """The ranges of slots that hold tokens and no padding; the last range has no end."""
    ends = [*(first for first, _ in shifts[1:]), FAR]
    return [range(first, end) for (first, by), end in zip(shifts, ends, strict=True) if by is not None]
