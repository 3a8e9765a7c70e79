"""Predicted time of a plan: the call that `auto` uses, from a few sampled ranks that are taken to run in step.

All numbers that come from here are modelled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..machine.machine import Machine
from ..plan.choice import Prediction
from .kernel_seconds import seconds_per_pair

if TYPE_CHECKING:
    from ..plan.plan import Plan
    from ..plan.steps import Step

#: The backward has five matrix products where the forward has two.
BACKWARD = 2.5
#: At most this many ranks of a plan are looked at, fewer of many: one of P costs O(P) where the pattern is dense.
SAMPLE, FEWEST, PLANNED = 8, 3, 192


def predict(plan: Plan, machine: Machine, *, backward: bool = False) -> Prediction:
    """The time of a forward, or of a backward: the sum over a rank's steps of max(visits, messages). Pure.

    Ranks are taken to run in step. Messages of a step follow each other, those sent beside those received and those
    within a node beside those between nodes, where a shared way out takes those of all its ranks; one that may last several steps counts in equal parts against each.
    """
    found = [_one(plan, machine, rank, backward) for rank in sampled(plan.ranks, machine.ranks_per_node)]
    worst = max(found, key=lambda one: one.seconds)
    most = {"bytes": max(one.bytes for one in found), "messages": max(one.messages for one in found)}
    return Prediction(worst.seconds, worst.compute, worst.exposed, **most)


def sampled(ranks: int, inner: int = 1) -> list[int]:
    """Evenly spaced ranks, the first and the last among them; in nodes of `inner`, first and last ones in turn."""
    count = min(ranks, max(FEWEST, min(SAMPLE, PLANNED // ranks)))
    spaced = [(ranks - 1) * i // max(count - 1, 1) for i in range(count)]
    edges = [rank - rank % inner + (inner - 1) * (i % 2) for i, rank in enumerate(spaced)]
    return sorted({min(rank, ranks - 1) for rank in edges} if inner > 1 else set(spaced))


def _one(plan: Plan, machine: Machine, rank: int, backward: bool) -> Prediction:
    steps = _steps(plan, rank, backward)
    per_pair = pair_seconds(plan, machine, backward)
    # By step: seconds of its messages, apart by direction and by link.
    moved: defaultdict[int, defaultdict[tuple[str, bool], float]] = defaultdict(lambda: defaultdict(float))
    for other in machine.node(rank, plan.ranks) if machine.shared_nic else (rank,):
        for index, way, near, seconds in _messages(plan, machine, other, backward):
            if other == rank or not near:
                moved[index][way, near] += seconds
    hops = [hop for step in steps for hop in step.sends]
    sent = sum(plan.part_bytes(part) for hop in hops for part in hop.parts)
    seconds = compute = 0.0
    for index, step in enumerate(steps):
        inner, met = visits(plan, rank, step, backward)
        busy = per_pair * sum(inner.demand.pairs(*visit) for visit in met)
        compute += busy
        seconds += max(busy, *moved[index].values(), 0.0)
    return Prediction(seconds, compute, seconds - compute, sent, len(hops))


def pair_seconds(plan: Plan, machine: Machine, backward: bool) -> float:
    """Seconds of the attention kernel per (query, key, head, branch) pair, for all elements of the batch."""
    flops = 2 * (plan.head_dim + plan.value_dim) * (BACKWARD if backward else 1.0)
    if machine.kernel is not None:
        places = sampled(plan.ring_plan(0)[0].ranks)
        return plan.batch * seconds_per_pair(plan, machine.kernel, flops, backward, places)
    return plan.batch * flops / machine.flops


def visits(plan: Plan, rank: int, step: Step, backward: bool) -> tuple[Plan, list[tuple[int, int]]]:
    """The plan of a rank's heads, and (rank with the queries, rank with the keys) of the visits of a step in it. That of an
    owner may be to several parts of its block."""
    inner, place = plan.ring_plan(rank)
    # Where queries rotate, the visit is that of their owner to the keys of this rank.
    turned = backward and plan.rotates == "queries"
    owners = sorted({part.owner for part in step.visits})
    return inner, [(owner, place) if turned else (place, owner) for owner in owners]


def _steps(plan: Plan, rank: int, backward: bool) -> tuple[Step, ...]:
    return plan.for_rank(rank).backward if backward else plan.forward_steps(rank)


def _messages(plan: Plan, machine: Machine, rank: int, backward: bool) -> Iterator[tuple[int, str, bool, float]]:
    """(step, direction, within a node, seconds): the parts of a rank's messages that fall into its steps."""
    for index, step in enumerate(_steps(plan, rank, backward)):
        for way, hops in (("send", step.sends), ("recv", step.recvs)):
            for hop in hops:
                near, latency, bandwidth = machine.link(rank, hop.peer)
                spanned = range(index, hop.until + 1)
                for i in spanned:
                    yield i, way, near, (latency + sum(map(plan.part_bytes, hop.parts)) / bandwidth) / len(spanned)
