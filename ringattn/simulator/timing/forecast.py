"""Estimates the time of a forward from few ranks and steps, at a bounded cost, so that `auto` can compare plans.

For a rank that receives few blocks, all its steps are examined. For other ranks, evenly spaced steps represent the
steps between them, and the time of the visits is scaled to the rank's exact number of pairs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise, product
from typing import TYPE_CHECKING

from ...cache import cached
from ...errors import Unsupported
from ...machine.machine import Machine
from ...plan.choice import Prediction
from ...plan.demand import KeyDemand, QueryDemand, sampled_ranks
from ...plan.row_sets import ONE_ROW
from ...plan.schedules import make_schedule
from ...plan.schedules.allgather import AllGatherSchedule
from ...plan.schedules.base import Edge, Route
from ...plan.schedules.direct import DirectSchedule
from ...plan.steps import Kind, Part
from .kernel_seconds import FEWEST_RANKS, pair_seconds
from .rates import Rates
from .solvers.event_loop import share_cores

if TYPE_CHECKING:
    from ...plan.plan import Plan

#: Up to ALL ranks, all are examined; above, the busiest of COUNTED ranks, and the ends.
ALL, COUNTED = 8, 16
#: If a rank receives more blocks than this, about this many of its steps are examined.
SAMPLED_STEPS = 16
#: For the seconds of a pair, at most this many tiles of a visit are read, and no more visits once as many were read.
ENOUGH_TILES = 256


def estimate(plan: Plan, machine: Machine, demand: KeyDemand, most: int = SAMPLED_STEPS) -> tuple[Prediction, str]:
    """(prediction, basis): an estimate of a forward's time, and a text on how many ranks and steps it is based on.

    `demand` replaces the plan's demand; with Ulysses groups, give the demand between the first ranks of the groups.
    About `most` steps of a rank are examined at most.
    """
    size, ring_plan = plan.ulysses_size, plan.ring_plan(0)[0]
    rates, between = Rates(plan, machine, backward=False), machine
    if size > 1:
        # Ranks with the same place in their groups form one ring; `per_node` of them share a node.
        per_node = ring_plan.ranks if machine.ranks_per_node >= plan.ranks else max(machine.ranks_per_node // size, 1)
        between = replace(machine, ranks_per_node=per_node, one_gather=False)
    crowd = min(size, machine.ranks_per_node)
    ring, started, basis = _RingEstimate(ring_plan, between, demand, crowd, most).make()
    # The first exchange precedes all visits and the last follows them: nothing hides them.
    exchange, sent, exchanges = count_exchanges(plan, machine)
    seconds = max(ring.seconds + exchange, host_seconds(plan.ranks, machine, started + exchanges)) + rates.call
    messages = ring.messages + exchanges * (size - 1)
    exposed = max(seconds - ring.compute, 0.0)  # the sums round differently
    return Prediction(seconds, ring.compute, exposed, ring.bytes + sent, messages), basis


def host_seconds(ranks: int, machine: Machine, calls: int) -> float:
    """Seconds that the host needs to start a pass with this many `calls`: blocks computed, and steps without any.

    None on one rank: it waits for nobody, and its host starts a call while the device still computes others.
    """
    return 0.0 if ranks == 1 else (machine.host_call or 0.0) + calls * (machine.host or 0.0)


def count_exchanges(plan: Plan, machine: Machine) -> tuple[float, int, int]:
    """(seconds, bytes sent by a rank, number of exchanges) of the exchanges within a Ulysses group in a forward.

    (0, 0, 0) without Ulysses groups.
    """
    peers = plan.ulysses_size - 1
    near = min(plan.ulysses_size, machine.ranks_per_node) - 1
    kinds: tuple[Kind, ...] = ("qkv", "out") if peers else ()
    seconds, sent = 0.0, 0
    for message in (plan.part_bytes(Part(kind, 0)) for kind in kinds):
        sent += peers * message
        inside = _seconds(machine, near, machine.parts_in_turn(near + 1) * message, True)
        seconds += max(inside, _seconds(machine, peers - near, (peers - near) * message, False, machine.ranks_per_node))
    return seconds, sent, len(kinds)


def _seconds(machine: Machine, messages: float, size: float, near: bool, crowd: int = 1) -> float:
    """Seconds of messages of `size` bytes in total; between nodes, `crowd` ranks with as many bytes share a card."""
    latency, bandwidth = machine.rates(near)
    return messages * latency + size / bandwidth * (crowd if machine.shared_nic and not near else 1)


@cached
def count_pairs(demand: KeyDemand, rank: int) -> int:
    """The number of (query, key, head, branch) pairs of a rank."""
    positions, heads = range(demand.layout.tokens), range(demand.heads)
    return sum(demand.pattern.count(q, positions, heads) for q in demand.layout.shard(rank))


@cached
def _merged_rows(demand: KeyDemand, rank: int, owner: int) -> int:
    """The number of (query row, head) of a rank that see a key of the block of `owner` and so need a merge."""
    rows = demand.layout.rows(rank) * demand.heads
    if demand.pairs(rank, owner) == rows * demand.layout.rows(owner):
        return rows
    return QueryDemand(demand).count_needed((range(owner, owner + 1),), rank)


class _RingEstimate:
    """The estimate of a plan without Ulysses groups.

    Each rank of the plan stands for `crowd` ranks of a node: the members of a Ulysses group.
    """

    def __init__(self, plan: Plan, machine: Machine, demand: KeyDemand, crowd: int, most: int) -> None:
        self.plan, self.machine, self.demand, self.crowd, self.most = plan, machine, demand, crowd, most
        schedule = make_schedule(plan.schedule, demand)
        self.gathers = isinstance(schedule, AllGatherSchedule)
        route = DirectSchedule(demand) if self.gathers else schedule  # the same visits
        if not isinstance(route, Route):
            raise Unsupported(
                f"the schedule {plan.schedule} does not tell the route of its messages, so auto cannot estimate its "
                "time; name another schedule"
            )
        self.route: Route = route
        self.row_bytes = plan.part_bytes(Part("kv", 0, ONE_ROW))
        self.rates = Rates(plan, machine, backward=False)
        self.edge_bytes: dict[Edge, int] = {}
        #: By (rank, step): seconds of work, and the edges to the rank that are in flight.
        self.times: dict[tuple[int, int], tuple[float, list[Edge]]] = {}
        #: By step: the most seconds of any rank, times the number of steps that the step represents.
        self.slowest: defaultdict[int, float] = defaultdict(float)

    def make(self) -> tuple[Prediction, int, str]:
        """(prediction, calls, basis) of a forward: the slowest examined rank's time, and what was examined, as text.

        `calls` is the largest number of calls that an examined rank's host starts.
        """
        chosen = self._choose_ranks()
        arrivals = {rank: list(islice(self.route.arrivals(rank), self.most + 1)) for rank in chosen}
        few = max(map(len, arrivals.values())) <= self.most
        last = max((edges[0].step for edges in arrivals.values() if edges), default=0)
        sampled = self._sample_steps(last)
        predictions, started = [], 0
        for rank, edges in arrivals.items():
            busy = {0, *(step for edge in edges for step in range(edge.post, edge.step + 1))}
            steps = [(step, 1.0) for step in sorted(busy)] if few else sampled
            predictions.append(self._predict_rank(rank, steps))
            visited = Counter(edge.step for edge in edges)
            posted = {edge.post for edge in edges} - {0, *visited}
            met = len(edges) if few else last * max(visited.values(), default=0)
            started = max(started, 1 + met + (0 if self.gathers else len(posted)))
        slowest = max(predictions, key=lambda prediction: prediction.seconds)
        seconds = slowest.seconds
        if few and len(chosen) == self.plan.ranks and not self.gathers:
            seconds = self._run_together()
        elif self.route.ranks_per_node > 1:  # ranks of a node wait for the slowest message to any of them
            seconds = sum(self.slowest.values())
        slowest = replace(
            slowest,
            seconds=seconds,
            bytes=max(prediction.bytes for prediction in predictions),
            messages=max(prediction.messages for prediction in predictions),
        )
        basis = (
            _describe(len(chosen), self.plan.ranks, "rank"),
            _describe(last + 1 if few else len(sampled), last + 1, "step"),
        )
        return slowest, 2 if self.rates.one_gather else started, ", ".join(basis)

    def _choose_ranks(self) -> list[int]:
        """The ranks to examine, ascending; all up to ALL ranks."""
        ranks, inner = self.plan.ranks, self.machine.ranks_per_node
        if ranks <= ALL:
            return list(range(ranks))
        busiest = max(sampled_ranks(ranks, COUNTED, ends=True), key=lambda rank: count_pairs(self.demand, rank))
        # Ranks wait for each other, so a link between nodes sets the pace of all ranks: examine its ends.
        ends_of_links = (inner - 1, ranks - inner) if 1 < inner < ranks else ()
        return sorted({0, busiest, ranks - 1, *ends_of_links})

    def _sample_steps(self, last: int) -> list[tuple[int, float]]:
        """(step, weight) of the steps that represent steps 0 .. `last`."""
        inner = self.route.ranks_per_node
        if inner == 1:
            return _spread(last + 1, self.most)
        outside, inside = _spread(last // inner + 1, self.most // 4), _spread(inner, 4)
        return [(t * inner + j, a * b) for (t, a), (j, b) in product(outside, inside)]

    def _predict_rank(self, rank: int, steps: list[tuple[int, float]]) -> Prediction:
        """The prediction for the forward of a rank, from (step, weight) pairs."""
        owners = [self._met(rank, step) for step, _ in steps]
        pairs = [self._pairs(rank, step) for step, _ in steps]
        weighted = sum(weight * count for (_, weight), count in zip(steps, pairs, strict=True))
        per_pair = pair_seconds(self.plan, self.machine, False, FEWEST_RANKS, ENOUGH_TILES)
        compute = per_pair * count_pairs(self.demand, rank)
        gather, sent, messages = self._gather(rank) if self.gathers else (0.0, 0.0, 0.0)
        if self.rates.one_gather:
            compute *= self._stretch(rank, partial(count_pairs, self.demand))
            return Prediction(gather + compute, compute, gather, round(sent), round(messages))
        seconds = waiting = 0.0
        for (step, weight), met, count in zip(steps, owners, pairs, strict=True):
            visit = compute * count / weighted if weighted else 0.0
            edges = [] if self.gathers else list(self._in_flight(rank, step))
            by_link = (sum(self._message_seconds(e) for e in edges if self._near(e) == near) for near in (True, False))
            received = max(*by_link, gather if step == 0 else 0.0)
            posted = [edge for edge in edges if edge.post == step]
            sent += weight * sum(map(self._edge_bytes, posted))
            messages += weight * len(posted)
            merged = (_merged_rows(self.demand, rank, owner) for owner in met if owner != rank)
            merge = self.rates.merge(sum(merged)) if self.machine.merge is not None else 0.0
            stretch = self._stretch(rank, partial(self._pairs, step=step))
            waiting += weight * visit * (stretch - 1)
            worked = (visit + merge + self.rates.gamma * min(visit, received)) * stretch
            self.times[rank, step] = worked, edges
            seconds += weight * max(worked, received)
            self.slowest[step] = max(self.slowest[step], weight * max(worked, received))
        compute += waiting
        return Prediction(seconds, compute, seconds - compute, round(sent), round(messages))

    def _met(self, rank: int, step: int) -> list[int]:
        """The owners of the blocks that a rank computes with at a step."""
        return [edge.owner for edge in self.route.edges_at(rank, step)] if step else [rank]

    def _pairs(self, rank: int, step: int) -> int:
        return sum(self.demand.pairs(rank, owner) for owner in dict.fromkeys(self._met(rank, step)))

    def _stretch(self, rank: int, pairs: Callable[[int], int]) -> float:
        """The factor by which a rank works longer than on its own core, as the ranks of its node share cores.

        `pairs` gives the pairs of each rank.
        """
        node, cores = self.machine.node(rank, self.plan.ranks), self.machine.cores
        if cores is None or cores >= len(node) * self.crowd:
            return 1.0
        loads = [pairs(member) for member in node for _ in range(self.crowd)]
        index = (rank - node.start) * self.crowd
        return share_cores(loads, cores)[index] / loads[index] if loads[index] else 1.0

    def _in_flight(self, rank: int, step: int) -> Iterator[Edge]:
        """The edges to a rank that carry rows and are in flight at a step."""
        inner = self.route.ranks_per_node
        for arrival in {step + 1, step - step % inner + inner}:
            for edge in self.route.edges_at(rank, arrival):
                if edge.post <= step and self._edge_bytes(edge):
                    yield edge

    def _message_seconds(self, edge: Edge) -> float:
        """Seconds of a message per step; it is divided equally among its steps."""
        near, size = self._near(edge), float(self._edge_bytes(edge))
        if not near and self.machine.shared_nic:
            node = self.machine.node(edge.target, self.plan.ranks)
            arriving = (other for member in node for other in self.route.edges_at(member, edge.step))
            alike = [other for other in arriving if other.post == edge.post and not self._near(other)]
            others = [other for other in alike if other.target != edge.target]  # shared equally among the own messages
            size += sum(map(self._edge_bytes, others)) / (len(alike) - len(others))
        if near:
            size *= self.rates.crowd(edge.source, edge.target, self.crowd)
        return _seconds(self.machine, 1, size, near, self.crowd) / (edge.step - edge.post)

    def _run_together(self) -> float:
        """Seconds until all ranks have finished.

        A message begins when both its sender and its receiver have begun the step; both wait for its end.
        """
        begun = [0.0] * self.plan.ranks
        for step in sorted({step for _, step in self.times}):
            after, edges = list(begun), []
            for rank in range(self.plan.ranks):
                worked, arriving = self.times.get((rank, step), (0.0, []))
                after[rank] += worked
                edges += arriving
            # By (rank, within a node, receiving): messages of a rank in one direction over one link type queue up.
            busy: defaultdict[tuple[int, bool, bool], float] = defaultdict(float)
            for edge in edges:
                busy[edge.target, self._near(edge), True] += self._message_seconds(edge)
                busy[edge.source, self._near(edge), False] += self._message_seconds(edge)
            for edge in edges:
                near = self._near(edge)
                seconds = max(busy[edge.target, near, True], busy[edge.source, near, False])
                end = max(begun[edge.source], begun[edge.target]) + seconds
                after[edge.source], after[edge.target] = max(after[edge.source], end), max(after[edge.target], end)
            begun = after
        return max(begun)

    def _gather(self, rank: int) -> tuple[float, float, float]:
        """(seconds, bytes, messages) of an all-gather, in which each rank sends its block to every other rank."""
        block = self.row_bytes * self.demand.block_heads * self.demand.layout.rows(rank)
        inside = len(self.machine.node(rank, self.plan.ranks)) - 1
        seconds = [0.0]
        for near, count in ((True, inside), (False, self.plan.ranks - 1 - inside)):
            if count:
                start, share = self.rates.gather_factors(near, count, inside + 1)
                if near:
                    share *= sum(self.rates.crowd(0, apart, self.crowd) for apart in range(1, inside + 1)) / inside
                crowd = self.crowd * (inside + 1)
                seconds.append(_seconds(self.machine, start * count, share * count * block, near, crowd))
        return max(seconds), block * (self.plan.ranks - 1), self.plan.ranks - 1

    def _near(self, edge: Edge) -> bool:
        """True if the edge is within a node."""
        return self.machine.link(edge.source, edge.target)[0]

    def _edge_bytes(self, edge: Edge) -> int:
        if edge not in self.edge_bytes:
            self.edge_bytes[edge] = self.row_bytes * self.demand.count_needed(self.route.served(edge), edge.owner)
        return self.edge_bytes[edge]


def _describe(some: int, every: int, noun: str) -> str:
    """Text on how many of all things were examined."""
    if every == 1:
        return f"the only {noun}"
    return f"{some:,} of {every:,} {noun}s" if some < every else f"all {every:,} {noun}s"


def _spread(count: int, most: int) -> list[tuple[int, float]]:
    """(index, weight) pairs that represent 0 .. count - 1: all up to `most`, else the first, the last and some between.

    The weights sum to `count`; each index between represents an equal part of the indices between.
    """
    if count <= max(most, 2):
        return [(i, 1.0) for i in range(count)]
    edges = [1 + (count - 2) * i // (most - 2) for i in range(most - 1)]
    return [(0, 1.0), *(((a + b) // 2, float(b - a)) for a, b in pairwise(edges)), (count - 1, 1.0)]
