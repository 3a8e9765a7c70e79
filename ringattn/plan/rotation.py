"""What goes around in the backward: keys and values with their gradients, or queries with theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import lcm

from ..errors import InvalidInput, did_you_mean
from ..layout.regular import Contiguous
from .block_demand import BlockDemand
from .key_demand import KeyDemand
from .query_demand import QueryDemand
from .row_sets import RowSet, RowSets, total
from .schedules import planner
from .schedules.allgather import AllGatherSchedule
from .schedules.direct import DirectSchedule
from .schedules.relay import Way, all_along, kept_along, rows_along
from .schedules.ring import RingSchedule
from .schedules.route import Edge, Route
from .steps import BLOCKS, SUMS, Kind, Part, RankPlan, Step

ROTATE = ("auto", "keys", "queries")
#: Up to this many ranks the bytes of both ways are counted over all blocks; above, over SOME.
EXACT, SOME = 64, 16
#: Where there are more than EXACT ranks, so many arrivals of a rank tell what it keeps, and so many ranks what all get.
LATEST = 64


def check_rotate(rotate: object) -> None:
    """Raise InvalidInput where `rotate` is none of what may rotate."""
    if rotate not in ROTATE:
        hint = did_you_mean(rotate, ROTATE) if isinstance(rotate, str) else ""
        raise InvalidInput(f"rotate={rotate!r}: {hint}expected {', '.join(ROTATE)}")


class Rotation:
    """The steps of ranks by a schedule without teams. `size` gives the bytes of a part of a message.

    `auto` takes the way that sends fewer bytes, keys where both send as many: counted, above EXACT ranks over SOME blocks. A
    double ring is there to spare the links between nodes, so that there their bytes are compared first. With `rounds`,
    what travels is rounded: then weights computed again from rounded queries would not be those of the
    forward, and `auto` takes keys.
    """

    def __init__(
        self, schedule: str, demand: KeyDemand, rotate: str, size: Callable[[Part], int], *, rounds: bool
    ) -> None:
        self.demand, self.size, self.rounds, self.rotate = demand, size, rounds, rotate
        self.transposed = QueryDemand(demand)
        self.keys, self.queries = planner(schedule, demand), planner(schedule, self.transposed)

    @cached_property
    def chosen(self) -> str:
        """What rotates: "keys" or "queries"."""
        if self.rotate != "auto":
            return self.rotate
        if self.rounds or self.demand.layout.ranks == 1:
            return "keys"
        keys, queries = self.bytes()
        return "queries" if queries < keys else "keys"

    def bytes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Bytes (between nodes, in all) of a backward in which keys rotate, and of one in which queries do.

        Those of all blocks up to EXACT ranks. Above, those of the same few blocks either way, which tell the way that
        sends fewer.
        """
        row = RowSet((0,), ((range(1),),))
        size = {kind: self.size(Part(kind, 0, row)) for kind in (*BLOCKS, *SUMS)}
        out = size["q"] + size["row"]
        if isinstance(self.keys, AllGatherSchedule) or isinstance(self.queries, AllGatherSchedule):
            return self._gathered(self.demand, size["kv"], size["grad"]), self._gathered(
                self.transposed, out, size["dq"]
            )
        if not isinstance(self.keys, Route) or not isinstance(self.queries, Route):
            return self._counted(self.keys.backward), self._counted(self.queries.queries)
        if self.keys.inner > 1 and self.demand.layout.ranks > EXACT:
            return self._of_nodes(size)
        owners = _owners(self.demand)
        keys, queries = (_Moved.of(route, owners) for route in (self.keys, self.queries))
        # Along every edge a block moves, and what was gathered for it; keys that a rank has kept since the forward do not.
        whole = kept_along(self.demand, self.keys.ways) if isinstance(self.keys, RingSchedule) else None
        kept = [_kept(self.keys, rank) for rank in owners] if whole is None else [(whole, 0)]
        by_keys = keys.every * (size["kv"] + size["grad"]) - sum(rows for rows, _ in kept) * size["kv"]
        by_queries = queries.every * (out + size["dq"])
        if self.keys.inner == 1:
            return (by_keys, by_keys), (by_queries, by_queries)
        again = keys.ends - sum(rows for _, rows in kept)
        far_keys = keys.outer * size["grad"] + (keys.onward + again) * size["kv"]
        far_queries = queries.outer * out + (queries.onward + queries.ends) * size["dq"]
        return (far_keys, by_keys), (far_queries, by_queries)

    def steps(self, rank: int) -> RankPlan:
        """The steps of a rank."""
        keys = self.chosen == "keys"
        backward = (self.keys.backward if keys else self.queries.queries)(rank)
        return RankPlan(rank, self.keys.forward(rank), backward, self.keys.held(rank) if keys else ())

    def _counted(self, steps: Callable[[int], tuple[Step, ...]]) -> tuple[int, int]:
        """Bytes that some ranks send in their steps: for schedules of which no more is known."""
        hops = (hop for rank in _owners(self.demand) for step in steps(rank) for hop in step.sends)
        sent = sum(self.size(part) for hop in hops for part in hop.parts)
        return sent, sent

    def _gathered(self, wanted: BlockDemand, block: int, sums: int) -> tuple[int, int]:
        """Bytes of an all-gather of blocks, and of the sums that each rank which needs a block sends to its owner."""
        ranks, found = wanted.layout.ranks, 0
        for owner in _owners(self.demand):
            rows = wanted.block_heads * wanted.layout.rows(owner)
            # Both ways the same visits are made, so that of many ranks a few tell which way has fewer.
            others = (owner + 1 + i * (ranks - 1) // min(ranks - 1, EXACT) for i in range(min(ranks - 1, EXACT)))
            needed = sum(wanted.visits(other % ranks, owner) for other in others)
            found += rows * ((ranks - 1) * block + needed * (ranks - 1) // min(ranks - 1, EXACT) * sums)
        return found, found

    def _of_nodes(self, size: dict[Kind, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """An estimate from what some nodes send on along the ring of nodes.

        That is found by searches that skip what nobody needs; the steps of one rank alone may hold those of all.
        """
        demand = replace(self.demand, layout=self.demand.layout.grouped(self.keys.inner))
        transposed = QueryDemand(demand)
        along = Way(+1, demand.layout.ranks - 1)
        keys = queries = 0
        for owner in _owners(demand):
            block = demand.block_heads * demand.layout.rows(owner)
            rows = rows_along(demand, owner, along)
            keys += rows * (size["kv"] + size["grad"]) - min(rows, block) * size["kv"]
            queries += rows_along(transposed, owner, along) * (size["q"] + size["row"] + size["dq"])
        return (keys, keys), (queries, queries)


@dataclass(frozen=True)
class _Moved:
    """Rows of all heads of blocks that move along the edges of their routes."""

    every: int
    #: Those on edges between nodes, those of them that come from another rank than the owner and that no edge before
    #: brings back, and those that end in another node than that of their owner.
    outer: int = 0
    onward: int = 0
    ends: int = 0

    @classmethod
    def of(cls, route: Route, owners: list[int]) -> _Moved:
        """The rows of the blocks of `owners`."""
        wanted = route.demand
        if isinstance(route, RingSchedule):
            return cls(sum(all_along(wanted, owners, way) for way in route.ways))
        if isinstance(route, DirectSchedule):
            return cls(sum(_straight(route, owner) for owner in owners))
        counts = [0, 0, 0, 0]
        for owner in owners:
            todo: list[tuple[Edge, tuple[Edge, ...]]] = [(edge, ()) for edge in route.first(owner)]
            while todo:
                edge, siblings = todo.pop()
                further = route.onward(edge)
                todo += [(one, further) for one in further]
                counts[0] += _rows(route, edge.owner, route.cuts(edge))
                if edge.source // route.inner != edge.target // route.inner:
                    counts[1] += _rows(route, edge.owner, route.cuts(edge))
                    counts[2] += _rows(route, edge.owner, route.back(edge, siblings)) if edge.source != owner else 0
                if edge.target // route.inner != owner // route.inner:
                    counts[3] += _rows(route, edge.owner, route.ends(edge))
        return cls(*counts)


def _straight(route: DirectSchedule, owner: int) -> int:
    """Rows of all heads that an owner sends to the ranks that need them.

    Where more than LATEST of more than EXACT ranks need rows, LATEST evenly spaced ranks stand for all.
    """
    wanted, ranks = route.demand, route.demand.layout.ranks
    edges = list(islice(route.leaving(owner), LATEST + 1 if ranks > EXACT else None))
    if ranks <= EXACT or len(edges) <= LATEST:
        return sum(wanted.size(route.behind(edge), owner) for edge in edges)
    others = [(owner + 1 + (ranks - 1) * i // LATEST) % ranks for i in range(LATEST)]
    return sum(wanted.size((range(other, other + 1),), owner) for other in others) * (ranks - 1) // LATEST


def _kept(route: Route, rank: int) -> tuple[int, int]:
    """Rows of all heads that a rank keeps from the forward, and those of them that are of another node.

    Of more than EXACT ranks, those of the latest LATEST arrivals: a rank at which nothing ends has as many as there are ranks.
    """
    kept = route.kept(rank) if route.demand.layout.ranks <= EXACT else route.latest(rank, LATEST)
    rows = [
        (_rows(route, edge.owner, cuts), edge.owner // route.inner != rank // route.inner)
        for edge, cuts in kept.items()
    ]
    return sum(count for count, _ in rows), sum(count for count, far in rows if far)


def _rows(route: Route, owner: int, cuts: RowSets) -> int:
    return total(cuts, route.demand.block_heads, route.demand.layout.rows(owner))


def _owners(demand: KeyDemand) -> list[int]:
    """Ranks that stand for all: all of up to EXACT. Of more those of a period in the middle, where ranks repeat, or SOME
    evenly spaced ones."""
    layout, ranks = demand.layout, demand.layout.ranks
    if ranks <= EXACT:
        return list(range(ranks))
    repeats = demand.pattern.period if isinstance(layout, Contiguous) and layout.tokens % ranks == 0 else None
    if repeats is not None and layout.tokens:
        rows = layout.tokens // ranks
        size = lcm(repeats, rows) // rows
        if size <= SOME:
            return list(range(ranks // 2, ranks // 2 + size))
    return [ranks * (2 * i + 1) // (2 * SOME) for i in range(SOME)]
