"""The modelled time of a plan from a few sampled ranks, fast enough for `auto` to compare many plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...machine.kernel_times import BACKWARD
from ...machine.machine import Machine
from ...plan.choice import Prediction
from .kernel_seconds import modelled_seconds_per_pair, seconds_per_pair

if TYPE_CHECKING:
    from ...plan.plan import Plan
    from ...plan.steps import Step

#: Ranks of a plan that are sampled: at most MOST_RANKS, and fewer the more ranks there are, as the steps of one rank of
#: a dense pattern are as many as the ranks; about PLANNED_STEPS steps in all, but never fewer than FEWEST_RANKS ranks.
MOST_RANKS, FEWEST_RANKS, PLANNED_STEPS = 8, 3, 192


def predict(plan: Plan, machine: Machine, *, backward: bool = False) -> Prediction:
    """The modelled time of a forward, or of a backward: the sum over a rank's steps of max(visits, messages).

    The time is that of the slowest sampled rank; bytes and messages are the most of any sampled rank. All ranks are
    taken to begin each step together, so that they wait for messages and never for slow peers. The messages of a step
    follow each other, except that messages sent and received, and messages within a node and between nodes, travel at
    the same time. A shared card carries the bytes of its whole node. A message that may last several steps counts in
    equal parts against each of them.
    """
    predictions = [
        _predict_rank(plan, machine, rank, backward) for rank in sample_ranks(plan.ranks, machine.ranks_per_node)
    ]
    slowest = max(predictions, key=lambda prediction: prediction.seconds)
    return Prediction(
        slowest.seconds,
        slowest.compute,
        slowest.exposed,
        bytes=max(prediction.bytes for prediction in predictions),
        messages=max(prediction.messages for prediction in predictions),
    )


def sample_ranks(ranks: int, ranks_per_node: int = 1, most: int = MOST_RANKS) -> list[int]:
    """A few ranks, ascending and evenly spaced from first to last; of nodes, the first and the last rank in turn."""
    count = min(ranks, max(FEWEST_RANKS, min(most, PLANNED_STEPS // ranks)))
    spaced = [(ranks - 1) * i // max(count - 1, 1) for i in range(count)]
    if ranks_per_node == 1:
        return sorted(set(spaced))
    last = ranks_per_node - 1
    at_node_ends = (rank - rank % ranks_per_node + last * (i % 2) for i, rank in enumerate(spaced))
    return sorted({min(rank, ranks - 1) for rank in at_node_ends})


def _predict_rank(plan: Plan, machine: Machine, rank: int, backward: bool) -> Prediction:
    """The prediction of one rank."""
    steps = rank_steps(plan, rank, backward)
    per_pair = pair_seconds(plan, machine, backward)
    # By step: seconds of its messages by (direction, within a node).
    travel: defaultdict[int, defaultdict[tuple[str, bool], float]] = defaultdict(lambda: defaultdict(float))
    for sender in machine.node(rank, plan.ranks) if machine.shared_nic else (rank,):
        for index, direction, near, latency, transfer in _messages(plan, machine, sender, backward):
            if sender == rank or not near:
                travel[index][direction, near] += transfer + (latency if sender == rank else 0.0)
    hops = [hop for step in steps for hop in step.sends]
    sent_bytes = sum(plan.part_bytes(part) for hop in hops for part in hop.parts)
    total = compute = 0.0
    for index, step in enumerate(steps):
        ring_plan, met = visits(plan, rank, step, backward)
        busy = per_pair * sum(ring_plan.demand.pairs(*visit) for visit in met)
        compute += busy
        total += max(busy, *travel[index].values(), 0.0)
    return Prediction(total, compute, total - compute, sent_bytes, len(hops))


def pair_seconds(
    plan: Plan, machine: Machine, backward: bool, most: int = MOST_RANKS, enough: int | None = None
) -> float:
    """Seconds of the attention kernel per (query, key, head, branch) pair, for the whole batch.

    By measured kernel times where the machine has them, else by modelled rates, both averaged over the visits of at
    most `most` sampled ranks (the rates over the first `enough` tiles of these visits), and else by its flops:
    2 (D + Dv) FLOPs per pair in a forward.
    """
    flops = 2 * (plan.head_dim + plan.value_dim) * (BACKWARD if backward else 1.0)
    if machine.kernel is not None:
        ring_ranks = sample_ranks(plan.ring_plan(0)[0].ranks, most=most)
        return plan.batch * seconds_per_pair(plan, machine.kernel, flops, backward, ring_ranks)
    if machine.kernel_rates is not None:
        ring_ranks = sample_ranks(plan.ring_plan(0)[0].ranks, most=most)
        gathered = machine.one_gather and plan.schedule == "allgather"
        return plan.batch * modelled_seconds_per_pair(
            plan, machine.kernel_rates, gathered, backward, ring_ranks, enough
        )
    return plan.batch * flops / machine.flops


def visits(plan: Plan, rank: int, step: Step, backward: bool) -> tuple[Plan, list[tuple[int, int]]]:
    """The visits of a rank's step: the plan of the rank's heads, and (rank of the queries, rank of the keys) there.

    Visits to several parts of one owner's block count as one visit.
    """
    ring_plan, place = plan.ring_plan(rank)
    # Where queries rotate, the queries of the owner visit the keys of this rank.
    queries_arrive = backward and plan.rotates == "queries"
    owners = sorted({part.owner for part in step.visits})
    return ring_plan, [(owner, place) if queries_arrive else (place, owner) for owner in owners]


def rank_steps(plan: Plan, rank: int, backward: bool) -> tuple[Step, ...]:
    """The steps of a rank in one pass of a plan."""
    return plan.for_rank(rank).backward if backward else plan.forward_steps(rank)


def _messages(plan: Plan, machine: Machine, rank: int, backward: bool) -> Iterator[tuple[int, str, bool, float, float]]:
    """(step, direction, within a node, seconds beside its bytes, seconds of its bytes) of each of a rank's messages.

    The seconds are split evenly over the steps of the message.
    """
    for index, step in enumerate(rank_steps(plan, rank, backward)):
        for direction, hops in (("send", step.sends), ("recv", step.recvs)):
            for hop in hops:
                near, latency, bandwidth = machine.link(rank, hop.peer)
                lasts = range(index, hop.until + 1)
                transfer = sum(map(plan.part_bytes, hop.parts)) / bandwidth
                for i in lasts:
                    yield i, direction, near, latency / len(lasts), transfer / len(lasts)
