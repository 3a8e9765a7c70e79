"""Ulysses: inside teams of consecutive ranks, tokens are exchanged for heads; another schedule runs between the teams.

Before attention every rank of a team gets the rows of all of them for its share of the heads, and gives the output
back after it. Member i of each team then runs the other schedule with the members i of the other teams.
"""

from __future__ import annotations

from dataclasses import replace

from ...layout.regular import Layout
from ..steps import Hop, Kind, Part, RankPlan, Step


def around(plan: RankPlan, rank: int, size: int, layout: Layout) -> RankPlan:
    """The steps of `rank`, which is a member of a team of `size`, around those of `plan` between the teams."""
    first, member = rank - rank % size, rank % size
    team = [first + i for i in range(size) if first + i != rank]

    def exchange(kind: Kind, place: int, *, there: bool) -> Step:
        """Rows of this rank go to all members (there) or rows of all members go to their owners."""
        tag = int(not there)
        sends = tuple(Hop(peer, tag, (Part(kind, rank if there else peer),), place) for peer in team)
        recvs = tuple(Hop(peer, tag, (Part(kind, peer if there else rank),), place) for peer in team)
        sends, recvs = (tuple(h for h in hops if layout.rows(h.parts[0].owner)) for hops in (sends, recvs))
        return Step(sends, recvs)

    def inside(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(
            replace(step, sends=_moved(step.sends, size, member), recvs=_moved(step.recvs, size, member))
            for step in steps
        )

    forward = (exchange("qkv", 0, there=True), *inside(plan.forward))
    backward = (exchange("dout", 0, there=True), *inside(plan.backward))
    return RankPlan(
        rank,
        (*forward, exchange("out", len(forward), there=False)),
        (*backward, exchange("dqkv", len(backward), there=False)),
        plan.kept,
    )


def _moved(hops: tuple[Hop, ...], size: int, member: int) -> tuple[Hop, ...]:
    """Messages between teams as messages between their members, one step later."""
    return tuple(replace(hop, peer=hop.peer * size + member, until=hop.until + 1) for hop in hops)
