"""What goes around in the backward: keys and values with their gradients, or queries with theirs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from .demand import Demand
from .errors import InvalidInput, did_you_mean
from .schedules import planner
from .steps import Part, RankPlan, Step
from .transposed import Transposed

ROTATE = ("auto", "keys", "queries")
#: The bytes of both ways are counted on at most this many ranks, evenly spaced.
SAMPLE = 64


def check_rotate(rotate: object) -> None:
    """Raise InvalidInput where `rotate` is none of what may rotate."""
    if rotate not in ROTATE:
        hint = did_you_mean(rotate, ROTATE) if isinstance(rotate, str) else ""
        raise InvalidInput(f"rotate={rotate!r}: {hint}expected {', '.join(ROTATE)}")


class Rotation:
    """The steps of ranks by a schedule without teams. `size` gives the bytes of a part of a message.

    `auto` takes the way that sends fewer bytes, keys where both send as many. With `rounds`, what travels is rounded:
    then weights computed again from rounded queries would not be those of the forward, and `auto` takes keys.
    """

    def __init__(
        self, schedule: str, demand: Demand, rotate: str, size: Callable[[Part], int], *, rounds: bool
    ) -> None:
        self.demand, self.size, self.rounds, self.rotate = demand, size, rounds, rotate
        self.transposed = Transposed(demand)
        self._known: dict[int, tuple[Step, ...]] = {}
        self.keys, self.queries = planner(schedule, demand), planner(schedule, self.transposed)

    @cached_property
    def chosen(self) -> str:
        """What rotates: "keys" or "queries"."""
        if self.rotate != "auto":
            return self.rotate
        ranks = self.demand.layout.ranks
        if self.rounds or ranks == 1:
            return "keys"
        count = min(ranks, SAMPLE)
        sample = [ranks * i // count for i in range(count)]
        keys, queries = ({rank: way(rank) for rank in sample} for way in (self.keys.backward, self.queries.queries))
        fewer = sum(map(self._sent, queries.values())) < sum(map(self._sent, keys.values()))
        self._known = queries if fewer else keys
        return "queries" if fewer else "keys"

    def steps(self, rank: int) -> RankPlan:
        """The steps of a rank."""
        keys = self.chosen == "keys"
        backward = self._known.pop(rank, None)  # planned already where the ways were compared
        if backward is None:
            backward = (self.keys.backward if keys else self.queries.queries)(rank)
        return RankPlan(rank, self.keys.forward(rank), backward, self.keys.held(rank) if keys else ())

    def _sent(self, steps: tuple[Step, ...]) -> int:
        return sum(self.size(part) for step in steps for hop in step.sends for part in hop.parts)
