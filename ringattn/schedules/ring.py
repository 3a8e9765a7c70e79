"""The ring: blocks are relayed from neighbour to neighbour, as far as somebody needs them.

The backward is the forward run in reverse: a block starts at the far end of its way, and comes home with the
gradients that it gathered. Its K/V and the gradients of the block before it share a message, so that every
transfer, the last one included, travels under a visit.
"""

from __future__ import annotations

from ..demand import Demand
from ..steps import Hop, Part, RankPlan, Step
from .relay import Way, passing, reach, ways


class _Neighbourhood:
    """One rank's view along one way: what passes here and at the next rank."""

    def __init__(self, demand: Demand, rank: int, way: Way) -> None:
        self.demand, self.rank, self.way = demand, rank, way
        ranks = demand.layout.ranks
        self.next, self.previous = (rank + way.sign) % ranks, (rank - way.sign) % ranks
        self.here = set(passing(demand, rank, way))
        self.beyond = set(passing(demand, self.next, way))
        self.last = max(self.here, default=0)
        self.reach = reach(demand, rank, way)

    def block(self, distance: int) -> int:
        return (self.rank - self.way.sign * distance) % self.demand.layout.ranks

    def tag(self, distance: int, *, fetch: bool = False) -> int:
        return 4 * distance + 2 * (self.way.sign < 0) + fetch

    def ends_here(self, distance: int) -> bool:
        return distance in self.here and distance + 1 not in self.beyond

    @property
    def kept(self) -> int | None:
        """The block that the forward leaves here and the backward starts with."""
        return self.block(self.last) if self.last and self.ends_here(self.last) else None

    def end_keeps_mine(self) -> bool:
        """Whether the far end of this rank's own block still holds it after the forward."""
        end = (self.rank + self.way.sign * self.reach) % self.demand.layout.ranks
        return max(passing(self.demand, end, self.way)) == self.reach

    def forward(self, distance: int) -> tuple[list[Hop], list[Hop]]:
        """Sends and receives posted while the block at `distance` is computed."""
        sends, recvs = [], []
        tag = self.tag(distance)
        if distance + 1 in self.beyond:
            sends.append(Hop(self.next, tag, (Part("kv", self.block(distance)),)))
        if distance + 1 in self.here:
            recvs.append(Hop(self.previous, tag, (Part("kv", self.block(distance + 1)),)))
        return sends, recvs

    def backward(self, distance: int) -> tuple[list[Hop], list[Hop]]:
        """The same on the way back: gradients lag one step behind the K/V that they belong to."""
        sends, recvs = [], []
        tag, fetch = self.tag(distance), self.tag(distance, fetch=True)
        parts = []
        if distance + 1 in self.here:
            parts.append(Part("grad", self.block(distance + 1)))
        if distance in self.here and distance > 1:
            parts.append(Part("kv", self.block(distance)))
        if parts:
            sends.append(Hop(self.previous, tag, tuple(parts)))
        parts = []
        if distance + 1 in self.beyond:
            parts.append(Part("grad", self.block(distance)))
        if distance in self.beyond and distance > 1:
            parts.append(Part("kv", self.block(distance - 1)))
        if parts:
            recvs.append(Hop(self.next, tag, tuple(parts)))
        # A far end that no longer holds the block gets it again, straight from the owner.
        if distance == self.reach + 1 > 1 and not self.end_keeps_mine():
            end = (self.rank + self.way.sign * self.reach) % self.demand.layout.ranks
            sends.append(Hop(end, fetch, (Part("kv", self.rank),)))
        if distance > 1 and self.ends_here(distance - 1) and distance - 1 != self.last:
            owner = self.block(distance - 1)
            recvs.append(Hop(owner, fetch, (Part("kv", owner),)))
        return sends, recvs


def rank_plan(demand: Demand, rank: int) -> RankPlan:
    """The steps of `rank` in a ring."""
    sides = [_Neighbourhood(demand, rank, way) for way in ways(demand) if way.limit]
    distances = {0}
    for side in sides:
        near = side.here | side.beyond | {side.reach}
        distances |= {d + i for d in near for i in (-1, 0, 1) if d + i >= 0}
    order = sorted(distances)

    def needed(owner: int) -> bool:
        return demand.needs(range(rank, rank + 1), range(owner, owner + 1))

    def step(distance: int, back: bool) -> Step:
        hops = [side.backward(distance) if back else side.forward(distance) for side in sides]
        blocks = [side.block(distance) for side in sides if distance in side.here] if distance else [rank]
        return Step(
            sends=tuple(hop for sent, _ in hops for hop in sent),
            recvs=tuple(hop for _, received in hops for hop in received),
            visits=tuple(block for block in blocks if needed(block)),
        )

    forward = tuple(step for step in (step(d, False) for d in order) if step)
    backward = tuple(step for step in (step(d, True) for d in reversed(order)) if step)
    kept = tuple(side.kept for side in sides if side.kept is not None)
    return RankPlan(rank, forward, backward, kept)
