"""All-gather: everyone gets every block at once, needed or not. The baseline that other libraries recommend."""

from __future__ import annotations

from ..demand import Demand
from ..steps import Hop, Part, RankPlan, Step


class AllGather:
    """No route: whole blocks go to everybody at once."""

    def __init__(self, demand: Demand) -> None:
        self.demand = demand

    def steps(self, rank: int) -> RankPlan:
        """The steps of `rank`: its own visit under the gather, then all others; gradients go straight home."""
        layout = self.demand.layout
        others = [(rank + i) % layout.ranks for i in range(1, layout.ranks)]
        filled = [other for other in others if layout.rows(other)]

        mine = Part("kv", rank)
        visited = [other for other in filled if self.demand.visits(rank, other)]
        gather = Step(
            sends=tuple(Hop(peer, 0, (mine,), 0) for peer in others) if layout.rows(rank) else (),
            recvs=tuple(Hop(peer, 0, (Part("kv", peer),), 0) for peer in filled),
            visits=(mine,) if self.demand.visits(rank, rank) else (),
        )
        visit = Step(visits=tuple(Part("kv", other) for other in visited))
        forward = tuple(step for step in (gather, visit) if step)
        last = len(forward)
        home = Step(
            sends=tuple(Hop(owner, 1, (Part("grad", owner),), last) for owner in visited),
            recvs=tuple(Hop(peer, 1, (Part("grad", rank),), last) for peer in others if self.demand.visits(peer, rank)),
        )
        return RankPlan(rank, forward, forward + ((home,) if home else ()))
