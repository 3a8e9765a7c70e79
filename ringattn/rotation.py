"""What goes around in the backward: keys and values with their gradients, or queries with theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from .cut import Cut
from .demand import Demand
from .errors import InvalidInput, did_you_mean
from .schedules import planner
from .schedules.relay import rows_along, sampled, ways
from .steps import BLOCKS, SUMS, Part, RankPlan, Step
from .transposed import Transposed

ROTATE = ("auto", "keys", "queries")
#: Up to this many ranks all their backwards are planned, both ways, and their bytes counted.
EXACT = 16


def check_rotate(rotate: object) -> None:
    """Raise InvalidInput where `rotate` is none of what may rotate."""
    if rotate not in ROTATE:
        hint = did_you_mean(rotate, ROTATE) if isinstance(rotate, str) else ""
        raise InvalidInput(f"rotate={rotate!r}: {hint}expected {', '.join(ROTATE)}")


class Rotation:
    """The steps of ranks by a schedule without teams. `size` gives the bytes of a part of a message.

    `auto` takes the way that sends fewer bytes, keys where both send as many: counted, above EXACT ranks estimated. A
    double ring is there to spare the links between nodes, so that there their bytes are compared first. With `rounds`,
    what travels is rounded: then weights computed again from rounded queries would not be those of the
    forward, and `auto` takes keys.
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
        if ranks > EXACT:
            keys, queries = self._estimated()
            return "queries" if queries < keys else "keys"
        by_keys = {rank: self.keys.backward(rank) for rank in range(ranks)}
        by_queries = {rank: self.queries.queries(rank) for rank in range(ranks)}
        fewer = self._sent(by_queries) < self._sent(by_keys)
        self._known = by_queries if fewer else by_keys
        return "queries" if fewer else "keys"

    def steps(self, rank: int) -> RankPlan:
        """The steps of a rank."""
        keys = self.chosen == "keys"
        backward = self._known.pop(rank, None)  # planned already where the ways were compared
        if backward is None:
            backward = (self.keys.backward if keys else self.queries.queries)(rank)
        return RankPlan(rank, self.keys.forward(rank), backward, self.keys.held(rank) if keys else ())

    def _sent(self, plans: dict[int, tuple[Step, ...]]) -> tuple[int, int]:
        """Bytes between nodes, and all."""
        sent, inner = [0, 0], self.keys.inner
        for rank, steps in plans.items():
            for hop in (hop for step in steps for hop in step.sends):
                size = sum(map(self.size, hop.parts))
                sent[1] += size
                sent[0] += size if hop.peer // inner != rank // inner else 0
        return sent[0], sent[1]

    def _estimated(self) -> tuple[int, int]:
        """Bytes of either way for the blocks of some ranks, or nodes, from the rows that they send along a ring.

        That is found by searches that skip what nobody needs; the steps of one rank alone may hold those of all. Keys
        that end where they can be kept, one block for each direction, do not come back.
        """
        row = Cut((0,), ((range(1),),))
        sizes = {kind: self.size(Part(kind, 0, row)) for kind in (*BLOCKS, *SUMS)}
        layout = self.demand.layout
        demand = replace(self.demand, layout=layout.grouped(self.keys.inner)) if self.keys.inner > 1 else self.demand
        transposed = Transposed(demand) if demand is not self.demand else self.transposed
        keys = queries = 0
        for owner in sampled(demand.layout.ranks):
            block = demand.block_heads * demand.layout.rows(owner)
            for way in ways(demand):
                rows = rows_along(demand, owner, way)
                keys += rows * (sizes["kv"] + sizes["grad"]) - min(rows, block) * sizes["kv"]
            for way in ways(transposed):
                queries += rows_along(transposed, owner, way) * (sizes["q"] + sizes["row"] + sizes["dq"])
        return keys, queries
