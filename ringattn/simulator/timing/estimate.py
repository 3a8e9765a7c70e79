"""The estimated time of a forward from few ranks and few steps: `auto` compares plans by it, at a bounded cost.

Where few blocks come to a rank, the estimate looks at all steps of the rank. Of other ranks, evenly spaced steps stand
for the steps between them, and the time of the visits is scaled to the exact number of the rank's pairs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from ...cache import cached
from ...errors import Unsupported
from ...machine.machine import Machine
from ...plan.choice import Prediction
from ...plan.demand import KeyDemand, QueryDemand
from ...plan.row_sets import ONE_ROW
from ...plan.schedules import make_schedule
from ...plan.schedules.allgather import AllGatherSchedule
from ...plan.schedules.direct import DirectSchedule
from ...plan.schedules.double_ring import DoubleRingSchedule
from ...plan.schedules.ring import RingSchedule
from ...plan.schedules.route import Edge, Route
from ...plan.steps import Kind, Part
from .forecast import FEWEST_RANKS, pair_seconds
from .rates import Rates

if TYPE_CHECKING:
    from ...plan.plan import Plan

#: The busiest rank is looked for among this many ranks, where the pairs of all ranks are not known.
COUNTED = 16
#: Plans of up to this many ranks: all ranks are looked at.
ALL = 8
#: Where more blocks than this come to a rank, about this many of its steps are looked at.
SAMPLED_STEPS = 16
#: The seconds of a pair are taken from the first so many tiles of a visit, and from no visit after as many.
ENOUGH_TILES = 256
#: Cycles of a double ring that are looked at, and steps of each cycle.
CYCLES, INSIDE = 4, 4
#: Ranks of a node that are looked at where all of them share one NIC.
MEMBERS = 3


@dataclass(frozen=True)
class Estimate:
    """A predicted forward, and what it was made from."""

    prediction: Prediction
    #: (ranks that were looked at, all ranks), and (steps that were looked at, all steps).
    ranks: tuple[int, int]
    steps: tuple[int, int]
    #: The steps that the host of a rank starts.
    started: int


@dataclass(frozen=True)
class _SampledStep:
    """What a rank does at step `step`, which stands for `weight` steps."""

    step: int
    weight: float
    #: Ranks with whose blocks the rank computes, and edges to the rank whose messages are posted at this step.
    owners: tuple[int, ...]
    posted: tuple[Edge, ...]


@dataclass(frozen=True)
class _StepTime:
    """Seconds that a rank works in a step, seconds of the messages that it receives, and their edges."""

    worked: float = 0.0
    received: float = 0.0
    posted: tuple[Edge, ...] = ()


def estimate(
    plan: Plan, machine: Machine, demand: KeyDemand, steps: int = SAMPLED_STEPS, pairs: Sequence[int] | None = None
) -> Estimate:
    """The time of a forward of `plan` on `machine`. Pure.

    `demand` answers in place of the plan's demand; with Ulysses groups, of the demand between their first members.
    `pairs` are those of each rank of this demand, where they are known. Raises Unsupported where the schedule has no
    routes.
    """
    size, ring_plan = plan.ulysses_size, plan.ring_plan(0)[0]
    if size == 1:
        return _add_host(_RingEstimate(plan, machine, demand, 1, steps, pairs).make(), plan, machine, 0)
    # The ranks with the same place in their groups run one ring: this many of them are in one node.
    per_node = ring_plan.ranks if machine.ranks_per_node >= plan.ranks else max(machine.ranks_per_node // size, 1)
    thinned = replace(machine, ranks_per_node=per_node, one_gather=False)
    between = _RingEstimate(ring_plan, thinned, demand, min(size, machine.ranks_per_node), steps, pairs).make()
    seconds, sent = count_exchanges(plan, machine)
    ring = between.prediction
    # The last exchange follows the last visit, and the first precedes all visits: nothing hides the exchanges.
    prediction = Prediction(
        ring.seconds + seconds, ring.compute, ring.exposed + seconds, ring.bytes + sent, ring.messages + 2 * (size - 1)
    )
    return _add_host(replace(between, prediction=prediction), plan, machine, 2)


def _add_host(estimated: Estimate, plan: Plan, machine: Machine, exchanges: int) -> Estimate:
    """The estimate with what a call takes, and no faster than the host starts all steps and `exchanges`."""
    prediction = estimated.prediction
    started = estimated.started + exchanges
    host = host_seconds(machine, started)
    seconds = max(prediction.seconds, host) + Rates(plan, machine, False).call
    prediction = replace(prediction, seconds=seconds, exposed=max(seconds - prediction.compute, 0.0))
    return replace(estimated, prediction=prediction, started=started)


def host_seconds(machine: Machine, steps: int) -> float:
    """Seconds in which the host starts `steps` steps of a pass."""
    return (machine.host_call or 0.0) + steps * (machine.host or 0.0)


def count_exchanges(plan: Plan, machine: Machine) -> tuple[float, int]:
    """(seconds, bytes that a rank sends) of exchanging tokens for heads and back in a Ulysses group."""
    peers = plan.ulysses_size - 1
    near = min(plan.ulysses_size, machine.ranks_per_node) - 1
    links = (near, True, 1), (peers - near, False, machine.ranks_per_node)
    seconds, sent = 0.0, 0
    kinds: tuple[Kind, ...] = ("qkv", "out")
    for kind in kinds:
        message = plan.part_bytes(Part(kind, 0))
        sent += peers * message
        seconds += max(_seconds(machine, [message] * count, inside, crowd) for count, inside, crowd in links)
    return seconds, sent


def _seconds(machine: Machine, sizes: list[int], near: bool, crowd: int) -> float:
    """Seconds of messages that follow each other; between nodes, `crowd` ranks with as many messages share the card."""
    latency, bandwidth = machine.rates(near)
    transfer = sum(size / bandwidth for size in sizes)
    return len(sizes) * latency + (transfer * crowd if machine.shared_nic and not near else transfer)


@cached
def _pairs(demand: KeyDemand, rank: int) -> int:
    """The number of (query, key, head, branch) pairs of a rank."""
    positions, heads = range(demand.layout.tokens), range(demand.heads)
    return sum(demand.pattern.count(q, positions, heads) for q in demand.layout.shard(rank))


def mean_pairs(demand: KeyDemand) -> float:
    """The mean number of pairs of COUNTED evenly spaced ranks."""
    spaced = _spaced(demand)
    return sum(_pairs(demand, rank) for rank in spaced) / len(spaced)


def _spaced(demand: KeyDemand) -> list[int]:
    ranks = demand.layout.ranks
    count = min(ranks, COUNTED)
    return [(ranks - 1) * i // max(count - 1, 1) for i in range(count)]


@cached
def _merged_rows(demand: KeyDemand, rank: int, owner: int) -> int:
    """The number of (query row, head) of a rank that see a key of the block of `owner`: a merge goes through them."""
    rows = demand.layout.rows(rank) * demand.heads
    if demand.pairs(rank, owner) == rows * demand.layout.rows(owner):
        return rows
    return QueryDemand(demand).count_needed((range(owner, owner + 1),), rank)


class _RingEstimate:
    """The estimate of a plan without Ulysses groups.

    `crowd` ranks of a node stand for each rank of the plan: the members of a Ulysses group. `most` steps of a rank are
    looked at.
    """

    def __init__(
        self,
        plan: Plan,
        machine: Machine,
        demand: KeyDemand,
        crowd: int,
        most: int,
        pairs: Sequence[int] | None,
    ) -> None:
        self.plan, self.machine, self.demand, self.crowd, self.most = plan, machine, demand, crowd, most
        self.known_pairs = pairs
        schedule = make_schedule(plan.schedule, demand)
        self.gathers = isinstance(schedule, AllGatherSchedule)
        if isinstance(schedule, AllGatherSchedule):
            schedule = DirectSchedule(demand)
        if not isinstance(schedule, Route):
            raise Unsupported(
                f"the schedule {plan.schedule} has no routes, from which auto estimates its time; name the layout, too"
            )
        self.route: Route = schedule
        self.row_bytes = plan.part_bytes(Part("kv", 0, ONE_ROW))
        self.rates = Rates(plan, machine, backward=False)
        self.pair_seconds = pair_seconds(plan, machine, backward=False, most=FEWEST_RANKS, enough=ENOUGH_TILES)
        self.edge_bytes: dict[Edge, int] = {}
        #: By (rank, step).
        self.times: dict[tuple[int, int], _StepTime] = {}

    def make(self) -> Estimate:
        """The time of the slowest rank that was looked at."""
        ranks = self.plan.ranks
        chosen = self._choose_ranks()
        arrivals = {rank: list(islice(self.route.arrivals(rank), self.most + 1)) for rank in chosen}
        few = max(map(len, arrivals.values())) <= self.most
        last = max((edges[0].step for edges in arrivals.values() if edges), default=0)
        steps = {
            rank: self._list_steps(rank, edges) if few else self._sample_steps(rank, last)
            for rank, edges in arrivals.items()
        }
        forwards = [self._estimate_rank(rank, listed) for rank, listed in steps.items()]
        predictions = [prediction for prediction, _ in forwards]
        slowest = max(predictions, key=lambda prediction: prediction.seconds)
        seconds = slowest.seconds
        if isinstance(self.route, DoubleRingSchedule):
            # In every cycle the ranks of a node wait for the slowest outer message of all nodes.
            cycles = {cycle for _, by_cycle in forwards for cycle in by_cycle}
            seconds = sum(max(by_cycle.get(cycle, 0.0) for _, by_cycle in forwards) for cycle in cycles)
        elif few and len(chosen) == ranks and not self.gathers:
            seconds = self._run_together()
        prediction = replace(
            slowest,
            seconds=seconds,
            exposed=max(seconds - slowest.compute, 0.0),  # the two sums round differently
            bytes=max(prediction.bytes for prediction in predictions),
            messages=max(prediction.messages for prediction in predictions),
        )
        looked_at = last + 1 if few else len(self._sample_steps(0, last))
        started = 2 if self.gathers else max(map(len, steps.values())) if few else last + 1
        return Estimate(prediction, (len(chosen), ranks), (looked_at, last + 1), started)

    def _choose_ranks(self) -> list[int]:
        """The ranks that are looked at, ascending: all of up to ALL ranks."""
        ranks, inner = self.plan.ranks, self.machine.ranks_per_node
        if ranks <= ALL:
            return list(range(ranks))
        counted = _spaced(self.demand) if self.known_pairs is None else range(ranks)
        # Ranks wait for each other, so that a link between nodes sets the pace of all ranks: look at its ends.
        ends_of_links = (inner - 1, ranks - inner) if 1 < inner < ranks else ()
        return sorted({0, max(counted, key=self._count), ranks - 1, *ends_of_links})

    def _count(self, rank: int) -> int:
        return _pairs(self.demand, rank) if self.known_pairs is None else self.known_pairs[rank]

    def _count_visits(self, rank: int, steps: list[_SampledStep]) -> list[int]:
        """The pairs of a rank at each step. At step 0, its own block has those that are left, if all are known."""
        later = [sum(self.demand.pairs(rank, owner) for owner in step.owners) for step in steps[1:]]
        left = self.known_pairs is not None and all(step.weight == 1 for step in steps)
        return [self._count(rank) - sum(later) if left else self.demand.pairs(rank, rank), *later]

    def _estimate_rank(self, rank: int, steps: list[_SampledStep]) -> tuple[Prediction, dict[int, float]]:
        """The forward of a rank, and in a double ring the seconds of each cycle."""
        counted = self._count_visits(rank, steps)
        weighted = sum(step.weight * pairs for step, pairs in zip(steps, counted, strict=True))
        per_pair = self.pair_seconds * self._count(rank) / weighted if weighted else 0.0
        compute = per_pair * weighted
        visits = [per_pair * pairs for pairs in counted]
        if self.gathers:
            return self._estimate_gather(rank, steps, visits, compute), {}
        seconds = sent = messages = 0.0
        cycles: dict[int, list[float]] = {}
        for step, visit in zip(steps, visits, strict=True):
            received, outer = self._message_seconds(rank, step)
            worked = visit + self._merge_seconds(rank, step) + self.rates.gamma * min(visit, received)
            longest = max(worked, received)
            self.times[rank, step.step] = _StepTime(worked, received, step.posted)
            if isinstance(self.route, DoubleRingSchedule):
                cycle = cycles.setdefault(step.step // self.route.ranks_per_node, [0.0, 0.0])
                cycle[0] += step.weight * longest
                cycle[1] += step.weight * outer
            seconds += step.weight * longest
            sent += step.weight * sum(map(self._edge_bytes, step.posted))
            messages += step.weight * len(step.posted)
        slowest = {number: max(pair) for number, pair in cycles.items()}
        seconds = sum(slowest.values()) if slowest else seconds
        return Prediction(seconds, compute, seconds - compute, round(sent), round(messages)), slowest

    def _run_together(self) -> float:
        """Seconds until all ranks have finished.

        A message begins when its sender and its receiver have begun the step, and both of them wait for the message.
        """
        ranks = range(self.plan.ranks)
        begun = [0.0 for _ in ranks]
        for step in sorted({step for _, step in self.times}):
            times = [self.times.get((rank, step), _StepTime()) for rank in ranks]
            # By (rank, within a node, receiving): messages of a rank in one direction over one link follow each other.
            busy: defaultdict[tuple[int, bool, bool], float] = defaultdict(float)
            for rank, time in enumerate(times):
                for edge in time.posted:
                    near = self._near(edge)
                    seconds = _seconds(self.machine, [self._edge_bytes(edge)], near, self.crowd)
                    busy[rank, near, True] += seconds
                    busy[edge.source, near, False] += seconds
            after = [start + time.worked for start, time in zip(begun, times, strict=True)]
            for rank, time in enumerate(times):
                for edge in time.posted:
                    near = self._near(edge)
                    seconds = max(busy[rank, near, True], busy[edge.source, near, False])
                    if self.machine.shared_nic and not near:
                        seconds = max(seconds, time.received)  # with all messages to the node
                    end = max(begun[rank], begun[edge.source]) + seconds
                    after[rank], after[edge.source] = max(after[rank], end), max(after[edge.source], end)
            begun = after
        return max(begun)

    def _estimate_gather(self, rank: int, steps: list[_SampledStep], visits: list[float], compute: float) -> Prediction:
        """The forward of a rank of an all-gather, which computes only its own visit during the gather."""
        outside, inside = self._gathered_bytes(rank)
        gather = max(
            self._gather_seconds(outside, False, self.crowd * self.machine.ranks_per_node),
            self._gather_seconds(inside, True, 1),
        )
        if self.rates.one_gather:
            sent, messages = sum(outside) + sum(inside), self.plan.ranks - 1
            return Prediction(gather + compute, compute, gather, sent, messages)
        own = visits[0]
        seconds = max(own + self.rates.gamma * min(own, gather), gather)
        later = zip(steps[1:], visits[1:], strict=True)
        seconds += sum(step.weight * (visit + self._merge_seconds(rank, step)) for step, visit in later)
        return Prediction(seconds, compute, seconds - compute, sum(outside) + sum(inside), self.plan.ranks - 1)

    def _gather_seconds(self, sizes: list[int], near: bool, crowd: int) -> float:
        """Seconds of the messages of a gather over one kind of link."""
        if not self.rates.one_gather or not sizes:
            return _seconds(self.machine, sizes, near, crowd)
        (latency, bandwidth), (start, share) = self.machine.rates(near), self.rates.gather_factors(near, len(sizes))
        transfer = sum(share * size / bandwidth for size in sizes)
        return len(sizes) * start * latency + (transfer * crowd if self.machine.shared_nic and not near else transfer)

    def _merge_seconds(self, rank: int, step: _SampledStep) -> float:
        """Seconds of merging what the visits of a step give."""
        if self.machine.merge is None:
            return 0.0
        rows = sum(_merged_rows(self.demand, rank, owner) for owner in step.owners if owner != rank)
        return float(self.rates.merge(rows))

    def _message_seconds(self, rank: int, step: _SampledStep) -> tuple[float, float]:
        """Seconds of the messages that end with a step, and of the messages that end with its cycle (double ring)."""
        seconds = {(near, outer): 0.0 for near in (True, False) for outer in (True, False)}
        for edge in step.posted:
            near = self._near(edge)
            outer = isinstance(self.route, DoubleRingSchedule) and edge.ring > 0
            sizes = [self._edge_bytes(edge)]
            if not near and self.machine.shared_nic and self.machine.ranks_per_node > 1:
                sizes = [sum(self._node_bytes(rank, edge.step))]
            seconds[near, outer] += _seconds(self.machine, sizes, near, self.crowd)
        of_step, of_cycle = (max(seconds[near, outer] for near in (True, False)) for outer in (False, True))
        return of_step, of_cycle

    def _near(self, edge: Edge) -> bool:
        """Whether the edge lies within a node."""
        return edge.source // self.machine.ranks_per_node == edge.target // self.machine.ranks_per_node

    def _node_bytes(self, rank: int, step: int) -> list[int]:
        """Bytes of each message that comes to the node of a rank from other nodes for one step."""
        node = self.machine.node(rank, self.plan.ranks)
        if isinstance(self.route, RingSchedule):
            edges = [edge for end in sorted({node[0], node[-1]}) for edge in self.route.edges_at(end, step)]
            return [self._edge_bytes(edge) for edge in edges if not self._near(edge)]
        # The messages of a few ranks stand for the messages of all ranks of the node.
        members = sorted({node[len(node) * i // MEMBERS] for i in range(MEMBERS)} | {rank})
        far = [
            self._edge_bytes(edge)
            for member in members
            for edge in self.route.edges_at(member, step)
            if not self._near(edge)
        ]
        return [round(sum(far) / len(far))] * max(round(len(far) * len(node) / len(members)), 1)

    def _edge_bytes(self, edge: Edge) -> int:
        if edge not in self.edge_bytes:
            self.edge_bytes[edge] = self.row_bytes * self.demand.count_needed(self.route.served(edge), edge.owner)
        return self.edge_bytes[edge]

    def _gathered_bytes(self, rank: int) -> tuple[list[int], list[int]]:
        """Bytes of the block of a rank for each rank of another node, and for each other rank of its own node."""
        block = self.row_bytes * self.demand.block_heads * self.demand.layout.rows(rank)
        inside = len(self.machine.node(rank, self.plan.ranks)) - 1
        return [block] * (self.plan.ranks - 1 - inside), [block] * inside

    def _list_steps(self, rank: int, arrivals: list[Edge]) -> list[_SampledStep]:
        """All steps of a rank at which a block arrives, or a message is posted for a block."""
        edges_by_step: dict[int, list[Edge]] = {}
        for edge in arrivals:
            edges_by_step.setdefault(edge.step, []).append(edge)
        steps = {0, *edges_by_step, *(edge.post for edge in arrivals)}
        return [self._step(rank, step, 1.0, lambda at: tuple(edges_by_step.get(at, ()))) for step in sorted(steps)]

    def _sample_steps(self, rank: int, last: int) -> list[_SampledStep]:
        """Steps of a rank that stand for the steps 0 .. `last`."""
        chosen = _spread(last + 1, self.most)
        if isinstance(self.route, DoubleRingSchedule):
            inner = self.route.ranks_per_node
            inside = _spread(inner, INSIDE)
            chosen = [(t * inner + j, a * b) for t, a in _spread(last // inner + 1, CYCLES) for j, b in inside]
        return [self._step(rank, step, weight, lambda at: self.route.edges_at(rank, at)) for step, weight in chosen]

    def _step(self, rank: int, step: int, weight: float, edges_at: Callable[[int], tuple[Edge, ...]]) -> _SampledStep:
        owners = [edge.owner for edge in edges_at(step)] if step else [rank]
        posted = edges_at(step + 1)
        if isinstance(self.route, DoubleRingSchedule):
            posted = tuple(edge for edge in posted if not edge.ring)
            if step % self.route.ranks_per_node == 0:
                posted += tuple(edge for edge in edges_at(step + self.route.ranks_per_node) if edge.ring)
        return _SampledStep(step, weight, tuple(dict.fromkeys(owners)), posted)


def _spread(count: int, most: int) -> list[tuple[int, float]]:
    """(number, weight) pairs that stand for 0 .. count - 1: all up to `most`, else first, last and some between.

    The weights add up to `count`: each number between stands for an equal part of the numbers between.
    """
    if count <= max(most, 2):
        return [(i, 1.0) for i in range(count)]
    edges = [1 + (count - 2) * i // (most - 2) for i in range(most - 1)]
    return [(0, 1.0), *(((a + b) // 2, float(b - a)) for a, b in pairwise(edges)), (count - 1, 1.0)]
