"""Lookups of tiles that are counted, so that a search may end before it takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

from ..pattern import Pattern, Tile
from ..plan.key_demand import KeyDemand
from ..plan.plan import Plan

#: What `within_reach` spends: about a second.
REACH = 60_000
#: A lookup between rows with steps costs as much as this many others.
STRIDED = 10
#: So does an answer that a pattern gives of a whole rectangle, without tiles.
SUMMED = 10


class TooMany(Exception):
    """The budget of lookups is spent."""


class Metered:
    """A pattern that counts how often it is asked, and stops answering when its budget is spent."""

    def __init__(self, pattern: Pattern, budget: int) -> None:
        self.pattern, self.left = pattern, budget

    @property
    def period(self) -> int | None:
        return self.pattern.period

    def _spend(self, lookups: int) -> None:
        self.left -= lookups
        if self.left < 0:
            raise TooMany

    def tiles(self, q: range, k: range, heads: range = range(1)) -> Iterator[Tile]:
        cost = STRIDED if q.step > 1 or k.step > 1 else 1
        self._spend(cost)
        for tile in self.pattern.tiles(q, k, heads):
            self._spend(cost)
            yield tile

    def key_run(self, first: int, last: int) -> tuple[int, int] | None:
        self._spend(1)
        return self.pattern.key_run(first, last)

    def query_run(self, first: int, last: int) -> tuple[int, int] | None:
        self._spend(1)
        return self.pattern.query_run(first, last)

    def count(self, q: range, k: range, heads: range = range(1)) -> int:
        if type(self.pattern).count is Pattern.count:
            return sum(len(tile.heads) * tile.pairs for tile in self.tiles(q, k, heads))
        self._spend(SUMMED)
        return self.pattern.count(q, k, heads)

    def keys(self, q: range, k: range, heads: range = range(1)) -> Iterator[tuple[range, range]]:
        yield from self._rows(Pattern.keys, q, k, heads)

    def queries(self, q: range, k: range, heads: range = range(1)) -> Iterator[tuple[range, range]]:
        yield from self._rows(Pattern.queries, q, k, heads)

    def _rows(self, find: Callable[..., Iterator[tuple[range, range]]], *asked: range) -> Iterator[tuple[range, range]]:
        own = getattr(self.pattern, find.__name__)
        if own.__func__ is find:
            yield from find(self, *asked)  # by tiles
        else:
            self._spend(SUMMED)
            yield from own(*asked)


def within_reach(plan: Plan, rank: int) -> tuple[Plan, int] | None:
    """The plan with the steps of a rank made, and the lookups of tiles that they took; None where they take too many."""
    inner, place = plan.ring_plan(rank)  # with teams it is the plan between them that is asked
    metered = Metered(inner.pattern, REACH)
    asked = replace(inner.demand, pattern=cast(Pattern, metered))
    try:
        inner.asking(asked).for_rank(place)
    except TooMany:
        return None
    known = plan.asking(sharing(plan.demand, asked)) if plan.ulysses_size == 1 else plan
    return known, REACH - metered.left


def sharing(demand: KeyDemand, other: KeyDemand) -> KeyDemand:
    """`demand`, knowing the answers that `other` has found."""
    same: Any = replace(demand)
    vars(same)["memory"] = other.memory
    return cast(KeyDemand, same)
