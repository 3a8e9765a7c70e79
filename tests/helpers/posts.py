"""The messages that ranks post, in order, and whether they meet on a fabric that has no tags, as NCCL has none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

from ringattn.plan.plan import Plan
from ringattn.plan.steps import Hop


class Op(NamedTuple):
    """One send to, or receive from, a peer."""

    sends: bool
    peer: int
    tag: int
    size: int


#: What one rank posts at once.
Batch = list[Op]


def planned_posts(plan: Plan, rank: int, *, backward: bool) -> list[Batch]:
    """What the executor posts, batch by batch, receives first, in the order of the plan."""

    def read(hops: Sequence[Hop], *, sends: bool) -> Batch:
        sizes = (sum(plan.part_bytes(part, as_sent=True) for part in hop.parts) for hop in hops)
        return [Op(sends, hop.peer, hop.tag, size) for hop, size in zip(hops, sizes, strict=True)]

    steps = plan.for_rank(rank).backward if backward else plan.for_rank(rank).forward
    return [read(recvs, sends=False) + read(sends, sends=True) for step in steps for _, sends, recvs in step.posts]


def find_violation(posts: Sequence[Sequence[Batch]]) -> str | None:
    """What goes wrong where the batches of each rank run one after another, and messages of a pair meet by their order.

    `posts[rank]` are the batches of a rank. A batch begins when the batch before has ended, and ends when the other
    sides of all its messages have begun. None if all messages meet the right ones, and all batches end.
    """
    needs: list[list[list[tuple[int, int]]]] = [[[] for _ in batches] for batches in posts]
    for sender, receiver in permutations(range(len(posts)), 2):
        sent, received = (
            [(op, number) for number, batch in enumerate(posts[rank]) for op in batch if op[:2] == (sends, peer)]
            for rank, sends, peer in ((sender, True, receiver), (receiver, False, sender))
        )
        if [op[2:] for op, _ in sent] != [op[2:] for op, _ in received]:
            return f"messages from rank {sender} meet others at rank {receiver}"
        for (_, begun), (_, other) in zip(sent, received, strict=True):
            needs[sender][begun].append((receiver, other))
            needs[receiver][other].append((sender, begun))
    current, before = [0] * len(posts), None
    while current != before:
        before = list(current)
        for rank, batches in enumerate(needs):
            while current[rank] < len(batches) and all(current[peer] >= at for peer, at in batches[current[rank]]):
                current[rank] += 1
    late = [rank for rank, batches in enumerate(posts) if current[rank] < len(batches)]
    return f"ranks {late} wait for each other" if late else None
