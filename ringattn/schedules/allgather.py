"""All-gather: everyone gets every block at once, needed or not. The baseline that other libraries recommend."""

from __future__ import annotations

from ..demand import Demand
from ..steps import Hop, Part, RankPlan, Step


def rank_plan(demand: Demand, rank: int) -> RankPlan:
    """The steps of `rank`: its own visit under the gather, then all others; gradients go straight home."""
    layout = demand.layout
    others = [(rank + i) % layout.ranks for i in range(1, layout.ranks)]
    filled = [other for other in others if layout.rows(other)]

    def needs(querier: int, owner: int) -> bool:
        return demand.needs(range(querier, querier + 1), range(owner, owner + 1))

    mine = Part("kv", rank)
    gather = Step(
        sends=tuple(Hop(peer, 0, (mine,)) for peer in others) if layout.rows(rank) else (),
        recvs=tuple(Hop(peer, 0, (Part("kv", peer),)) for peer in filled),
        visits=(rank,) if needs(rank, rank) else (),
    )
    visit = Step(visits=tuple(other for other in filled if needs(rank, other)))
    home = Step(
        sends=tuple(Hop(owner, 1, (Part("grad", owner),)) for owner in visit.visits),
        recvs=tuple(Hop(peer, 1, (Part("grad", rank),)) for peer in others if needs(peer, rank)),
    )
    forward = tuple(step for step in (gather, visit) if step)
    return RankPlan(rank, forward, forward + ((home,) if home else ()))
