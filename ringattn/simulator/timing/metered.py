"""A budget for the lookups of tiles, so that a search ends before it takes long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...pattern import Pattern, Tile
from ...pattern.base import ONE_HEAD, Position, Run, Side
from ...plan.demand import KeyDemand
from ...plan.plan import Plan

#: The budget of `count_lookups`: about a second.
BUDGET = 60_000
#: A lookup between rows with steps costs as much as this many lookups between adjacent rows.
STRIDED = 10
#: An answer that a pattern gives for a whole rectangle, without tiles, costs as much as this many lookups.
WHOLE_RECTANGLE = 10


class TooMany(Exception):
    """The budget of lookups is spent."""


def _ask(name: str) -> Any:
    """A method that asks the pattern where it answers for whole rectangles itself, else the metered tiles."""

    def ask(self: Metered, *arguments: Any) -> Any:
        if getattr(type(self.pattern), name) is getattr(Pattern, name):
            return getattr(Pattern, name)(self, *arguments)
        self._spend(WHOLE_RECTANGLE)
        return getattr(self.pattern, name)(*arguments)

    return ask


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

    count, paired = _ask("count"), _ask("paired")

    def run(self, side: Side, first: Position, last: Position) -> Run | None:
        self._spend(WHOLE_RECTANGLE if isinstance(first, np.ndarray) else 1)
        return self.pattern.run(side, first, last)

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
