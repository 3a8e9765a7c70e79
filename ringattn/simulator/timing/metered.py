"""A budget for the lookups of tiles, so that a search ends before it takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ...pattern import Pattern, Tile
from ...pattern.base import ONE_HEAD, Run, Runs
from ...plan.key_demand import KeyDemand
from ...plan.plan import Plan

#: The budget of `count_lookups`: about a second.
BUDGET = 60_000
#: A lookup between rows with steps costs as much as this many lookups between adjacent rows.
STRIDED = 10
#: An answer that a pattern gives for a whole rectangle, without tiles, costs as much as this many lookups.
WHOLE_RECTANGLE = 10


class TooMany(Exception):
    """The budget of lookups is spent."""


class Metered(Pattern):
    """The same pattern, which counts the lookups of its tiles. Raises TooMany when `left`, the budget, is spent."""

    def __init__(self, pattern: Pattern, budget: int) -> None:
        self.pattern, self.left = pattern, budget

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
