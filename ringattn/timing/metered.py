"""A budget for the lookups of tiles, so that a search ends before it takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import numpy as np

from ..layout.regular import Layout
from ..pattern import Pattern, Tile
from ..pattern.base import ONE_HEAD, And, BandPattern, Run, Runs
from ..plan.key_demand import KeyDemand
from ..plan.plan import Plan

#: The budget of `count_lookups`: about a second.
BUDGET = 60_000
#: A lookup between rows with steps costs as much as this many lookups between adjacent rows.
STRIDED = 10
#: An answer that a pattern gives for a whole rectangle, without tiles, costs as much as this many lookups.
WHOLE_RECTANGLE = 10

#: Runs of keys are listed for up to this many queries.
MOST_RUNS = 1 << 18


class TooMany(Exception):
    """The budget of lookups is spent."""


class KeyRuns:
    """The run of keys that each query of a sequence sees, as arrays: pairs are counted without tiles."""

    def __init__(self, first: np.ndarray, last: np.ndarray) -> None:
        tokens = len(first)
        #: Of each query, the first and the last key. Neither moves left from one query to the next.
        self.first = first if first[0] >= 0 else np.maximum(first, 0)
        self.last = last if last[-1] < tokens else np.minimum(last, tokens - 1)
        #: Pairs of all queries up to each position, but for one pair of each query.
        self.pairs = np.cumsum(self.last - self.first)

    def count(self, q: range, k: range) -> int:
        """The pairs of one head in `q` x `k`, whose keys are adjacent."""
        if q.step == 1 and len(k) == len(self.first):
            before = int(self.pairs[q.start - 1]) if q.start else 0
            return int(self.pairs[q.stop - 1]) - before + len(q)
        rows = slice(q.start, q.stop, q.step)
        seen = np.minimum(self.last[rows], k[-1]) - np.maximum(self.first[rows], k[0]) + 1
        return int(seen[seen > 0].sum())


class Metered(Pattern):
    """The same pattern, which counts the lookups of its tiles. Raises TooMany when `left`, the budget, is spent.

    With `tokens`, those of the sequence, pairs are counted by `KeyRuns` where these are known.
    """

    def __init__(self, pattern: Pattern, budget: int, tokens: int = 0) -> None:
        self.pattern, self.left, self.tokens = pattern, budget, tokens

    @cached_property
    def _operands(self) -> tuple[Pattern, ...]:
        return self.pattern.operands if isinstance(self.pattern, And) else (self.pattern,)

    @cached_property
    def _runs(self) -> KeyRuns | None:
        """The keys of all queries, where the pattern knows them at once, and where a count may take many tiles."""
        known = all(type(operand).key_spans is not Pattern.key_spans for operand in self._operands)
        if not 0 < self.tokens <= MOST_RUNS or not known or self._band:
            return None
        positions = np.arange(self.tokens)
        runs = self.pattern.key_spans(positions, positions)
        return None if runs is None else KeyRuns(*runs)

    @property
    def _band(self) -> bool:
        return all(isinstance(operand, BandPattern) for operand in self._operands)

    def count_pairs(self, layout: Layout, heads: range) -> list[int] | None:
        """The pairs of each rank; None where counting them may take many tiles."""
        if self._runs is None and not self._band:
            return None
        positions = range(layout.tokens)
        return [sum(self.count(q, positions, heads) for q in layout.shard(rank)) for rank in range(layout.ranks)]

    @property
    def branches(self) -> int:
        return self.pattern.branches

    @property
    def output_scale(self) -> float:
        return self.pattern.output_scale

    @property
    def period(self) -> int | None:
        return self.pattern.period

    def _spend(self, lookups: int) -> None:
        self.left -= lookups
        if self.left < 0:
            raise TooMany

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        cost = STRIDED if q.step > 1 or k.step > 1 else 1
        self._spend(cost)
        for tile in self.pattern.tiles(q, k, heads):
            self._spend(cost)
            yield tile

    def key_run(self, first: int, last: int) -> Run | None:
        self._spend(1)
        return self.pattern.key_run(first, last)

    def query_run(self, first: int, last: int) -> Run | None:
        self._spend(1)
        return self.pattern.query_run(first, last)

    def key_spans(self, first: np.ndarray, last: np.ndarray) -> Runs | None:
        self._spend(WHOLE_RECTANGLE)
        return self.pattern.key_spans(first, last)

    def query_spans(self, first: np.ndarray, last: np.ndarray) -> Runs | None:
        self._spend(WHOLE_RECTANGLE)
        return self.pattern.query_spans(first, last)

    def count(self, q: range, k: range, heads: range = ONE_HEAD) -> int:
        if self._runs is not None and k.step == 1 and q and k:
            return len(heads) * self._runs.count(q, k)
        if type(self.pattern).count is Pattern.count:
            return super().count(q, k, heads)  # by tiles, which are metered
        self._spend(WHOLE_RECTANGLE)
        return self.pattern.count(q, k, heads)

    def keys(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        by_tiles = type(self.pattern).keys is Pattern.keys
        yield from super().keys(q, k, heads) if by_tiles else self._rows(self.pattern.keys, q, k, heads)

    def queries(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        by_tiles = type(self.pattern).queries is Pattern.queries
        yield from super().queries(q, k, heads) if by_tiles else self._rows(self.pattern.queries, q, k, heads)

    def _rows(
        self, find: Callable[[range, range, range], Iterator[tuple[range, range]]], q: range, k: range, heads: range
    ) -> Iterator[tuple[range, range]]:
        self._spend(WHOLE_RECTANGLE)
        return find(q, k, heads)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return self.pattern.visible(q, k, head, tokens)


def count_lookups(plan: Plan, rank: int) -> int | None:
    """The number of lookups of tiles that the steps of a rank take; None where it exceeds BUDGET.

    Afterwards the plan has the answers, and makes these steps without a second search.
    """
    ring_plan, place = plan.ring_plan(rank)  # with Ulysses groups, the plan between the groups asks
    if not plan.batch:
        return 0
    metered = Metered(ring_plan.pattern, BUDGET)
    demand = KeyDemand(metered, ring_plan.layout, ring_plan.heads, ring_plan.kv_heads)
    try:
        ring_plan.make_rotation(demand).steps(place)
    except TooMany:
        return None
    ring_plan.demand.share_answers(demand)
    return BUDGET - metered.left
