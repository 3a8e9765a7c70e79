"""Ulysses: ranks of a group exchange tokens for heads; another schedule runs between the groups.

A group is a run of consecutive ranks. Before attention, each rank of a group gets the rows of the whole group for a
share of the heads; after attention, it sends the output of these rows back. Member i of each group runs the other
schedule with the members i of the other groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..steps import Hop, Kind, Part, RankPlan, Step


def wrap_in_exchanges(plan: RankPlan, size: int, ranks: int, rows: Callable[[Kind, int], tuple[int, ...]]) -> RankPlan:
    """The steps of a rank in a Ulysses group of `size` ranks: `plan`, with an exchange within the group at either end.

    `plan` has the rank's steps between the groups. `rows(kind, rank)` is the number of rows that a rank has in each
    tensor of a kind.
    """
    rank = plan.rank
    first, member = rank - rank % size, rank % size
    peers = [first + i for i in range(size) if first + i != rank]
    last = ranks + 2  # beyond every clock between the groups, up or down

    def exchange(kind: Kind, index: int, *, there: bool) -> Step:
        """A step that sends this rank's rows to all members; if not `there`, each member's rows back to it."""
        tag = int(not there)
        sends = tuple(Hop(peer, tag, (Part(kind, rank if there else peer),), index) for peer in peers)
        recvs = tuple(Hop(peer, tag, (Part(kind, peer if there else rank),), index) for peer in peers)
        sends, recvs = (tuple(h for h in hops if any(rows(kind, h.parts[0].owner))) for hops in (sends, recvs))
        return Step(sends, recvs, clock=-last if there else last)

    def between(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(
            replace(step, sends=_renumber(step.sends, size, member), recvs=_renumber(step.recvs, size, member))
            for step in steps
        )

    forward = (exchange("qkv", 0, there=True), *between(plan.forward))
    backward = (exchange("dout", 0, there=True), *between(plan.backward))
    return RankPlan(
        rank,
        (*forward, exchange("out", len(forward), there=False)),
        (*backward, exchange("dqkv", len(backward), there=False)),
        plan.saved,
    )


def _renumber(hops: tuple[Hop, ...], size: int, member: int) -> tuple[Hop, ...]:
    """Messages between groups, rewritten as messages between their members, one step later."""
    return tuple(hop._replace(peer=hop.peer * size + member, until=hop.until + 1) for hop in hops)
