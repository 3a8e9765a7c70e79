"""Estimated time of a forward from few ranks and few steps: what `auto` compares plans by, at a bounded cost.

Of a rank to which few blocks come, all steps are looked at. Of any other rank, evenly spaced steps stand for those
between them, and the time of its visits is scaled to the exact number of its pairs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from ..cache import cached
from ..errors import Unsupported
from ..machine.machine import Machine
from ..plan.choice import Prediction
from ..plan.key_demand import KeyDemand
from ..plan.query_demand import QueryDemand
from ..plan.row_sets import ONE_ROW
from ..plan.schedules import make_schedule
from ..plan.schedules.allgather import AllGatherSchedule
from ..plan.schedules.direct import DirectSchedule
from ..plan.schedules.double_ring import DoubleRingSchedule
from ..plan.schedules.ring import RingSchedule
from ..plan.schedules.route import Edge, Route
from ..plan.steps import Kind, Part
from .forecast import pair_seconds
from .rates import Rates

if TYPE_CHECKING:
    from ..plan.plan import Plan

#: Of so many ranks the pairs are counted, to find the busiest.
COUNTED = 16
#: Of up to so many ranks all are looked at.
ALL = 8
#: Where more blocks than this come to a rank, about so many of its steps are looked at.
SAMPLED_STEPS = 16
#: Cycles of a double ring that are looked at, and steps of each.
CYCLES, INSIDE = 4, 4
#: Ranks of a node that are looked at where all of them share its way out.
MEMBERS = 3


@dataclass(frozen=True)
class Estimate:
    """A predicted forward, and how many ranks and steps were looked at to find it."""

    prediction: Prediction
    ranks: tuple[int, int]
    steps: tuple[int, int]

    @property
    def exact(self) -> bool:
        """Whether all steps of all ranks were looked at."""
        return self.ranks[0] == self.ranks[1] and self.steps[0] == self.steps[1]


@dataclass(frozen=True)
class _SampledStep:
    """What a rank does at step `at`, which stands for `weight` steps."""

    at: int
    weight: float
    #: Ranks whose blocks are computed with, and the edges whose messages are posted at this step.
    owners: tuple[int, ...]
    posted: tuple[Edge, ...]


def estimate(plan: Plan, machine: Machine, demand: KeyDemand, steps: int = SAMPLED_STEPS) -> Estimate:
    """The time of a forward of `plan` on `machine`. Pure.

    `demand` is asked instead of that of the plan, or, where ranks form Ulysses teams, of that of the first members.
    """
    size, inner = plan.ulysses_size, plan.ring_plan(0)[0]
    if size == 1:
        return _Between(plan, machine, demand, 1, steps).found()
    # Ranks with the same place in their teams: so many of them are in one node.
    per_node = inner.ranks if machine.ranks_per_node >= plan.ranks else max(machine.ranks_per_node // size, 1)
    between = _Between(
        inner, replace(machine, ranks_per_node=per_node), demand, min(size, machine.ranks_per_node), steps
    ).found()
    seconds, sent = _exchanges(plan, machine)
    one = between.prediction
    # The last exchange follows the last visit, and the first precedes all of them: nothing hides them.
    whole = Prediction(
        one.seconds + seconds, one.compute, one.exposed + seconds, one.bytes + sent, one.messages + 2 * (size - 1)
    )
    return replace(between, prediction=whole)


def _exchanges(plan: Plan, machine: Machine) -> tuple[float, int]:
    """Seconds of exchanging tokens for heads and back in a team, and the bytes that a rank sends in it."""
    near = min(plan.ulysses_size, machine.ranks_per_node) - 1
    seconds, sent = 0.0, 0
    kinds: tuple[Kind, ...] = ("qkv", "out")
    for kind in kinds:
        one = plan.part_bytes(Part(kind, 0))
        sent += (plan.ulysses_size - 1) * one
        ways = (near, True, 1), (plan.ulysses_size - 1 - near, False, machine.ranks_per_node)
        seconds += max(_seconds(machine, [one] * count, near, crowd) for count, near, crowd in ways)
    return seconds, sent


def _seconds(machine: Machine, sizes: list[int], near: bool, crowd: int) -> float:
    """Seconds of messages that follow each other; between nodes beside those of `crowd` ranks that share a way out."""
    latency, bandwidth = machine.rates(near)
    alone = sum(latency + size / bandwidth for size in sizes)
    return alone * crowd if machine.shared_nic and not near else alone


@cached
def _pairs(demand: KeyDemand, rank: int) -> int:
    """(query, key, head, branch) pairs of a rank."""
    whole, heads = range(demand.layout.tokens), range(demand.heads)
    return sum(demand.pattern.count(q, whole, heads) for q in demand.layout.shard(rank))


@cached
def busiest(demand: KeyDemand) -> int:
    """The rank with the most pairs of COUNTED evenly spaced ones."""
    return max(_spaced(demand), key=lambda rank: _pairs(demand, rank))


@cached
def mean_pairs(demand: KeyDemand) -> float:
    """The mean pairs of COUNTED evenly spaced ranks."""
    spaced = _spaced(demand)
    return sum(_pairs(demand, rank) for rank in spaced) / len(spaced)


def _spaced(demand: KeyDemand) -> list[int]:
    ranks = demand.layout.ranks
    count = min(ranks, COUNTED)
    return [(ranks - 1) * i // max(count - 1, 1) for i in range(count)]


@cached
def _merged(demand: KeyDemand, rank: int, owner: int) -> int:
    """(query row, head)s of a rank that see a key of the block of `owner`."""
    rows = demand.layout.rows(rank) * demand.heads
    if demand.pairs(rank, owner) == rows * demand.layout.rows(owner):
        return rows
    return QueryDemand(demand).count_needed((range(owner, owner + 1),), rank)


class _Between:
    """The estimate of a plan without teams. `crowd` ranks of a node stand for each of its ranks, as members of a team."""

    def __init__(self, plan: Plan, machine: Machine, demand: KeyDemand, crowd: int, steps: int) -> None:
        self.plan, self.machine, self.demand, self.crowd, self.most = plan, machine, demand, crowd, steps
        schedule = make_schedule(plan.schedule, demand)
        self.gathers = isinstance(schedule, AllGatherSchedule)
        if isinstance(schedule, AllGatherSchedule):
            schedule = DirectSchedule(demand)
        if not isinstance(schedule, Route):
            raise Unsupported(f"there is no estimate of the schedule {plan.schedule}, which has no routes")
        self.route: Route = schedule
        self.row = plan.part_bytes(Part("kv", 0, ONE_ROW))
        self.rates = Rates(plan, machine, backward=False)
        self.pair = pair_seconds(plan, machine, backward=False)
        #: By rank and step: seconds of the rank's visits, seconds of the messages that it receives, and their edges.
        self.times: dict[tuple[int, int], tuple[float, float, tuple[Edge, ...]]] = {}

    def found(self) -> Estimate:
        """The time of the slowest rank that was looked at."""
        ranks, inner = self.plan.ranks, self.machine.ranks_per_node
        # Ranks wait for each other, so that a link between nodes sets the pace of all: where some are, they are looked at.
        looked = {0, busiest(self.demand), ranks - 1, *((inner - 1, ranks - inner) if 1 < inner < ranks else ())}
        looked |= set(range(ranks)) if ranks <= ALL else set()
        arrivals = {rank: list(islice(self.route.arrivals(rank), self.most + 1)) for rank in sorted(looked)}
        few = max(map(len, arrivals.values())) <= self.most
        last = max((edges[0].step for edges in arrivals.values() if edges), default=0)
        each = [
            self._one(rank, self._listed(rank, edges) if few else self._sampled(rank, last))
            for rank, edges in arrivals.items()
        ]
        worst = max((one for one, _ in each), key=lambda one: one.seconds)
        seconds = worst.seconds
        if isinstance(self.route, DoubleRingSchedule):
            # The ranks of a node wait in every cycle for the slowest outer message of all.
            cycles = {cycle for _, found in each for cycle in found}
            seconds = sum(max(found.get(cycle, 0.0) for _, found in each) for cycle in cycles)
        elif few and len(looked) == ranks and not self.gathers:
            seconds = self._together()
        steps = len(self._sampled(0, last)) if not few else last + 1
        most = {"bytes": max(one.bytes for one, _ in each), "messages": max(one.messages for one, _ in each)}
        whole = replace(worst, seconds=seconds, exposed=seconds - worst.compute, **most)
        return Estimate(whole, (len(looked), ranks), (steps, last + 1))

    def _one(self, rank: int, steps: list[_SampledStep]) -> tuple[Prediction, dict[int, float]]:
        """The forward of a rank, and the seconds of its cycles in a double ring."""
        counted = [sum(self.demand.pairs(rank, owner) for owner in step.owners) for step in steps]
        guessed = sum(step.weight * pairs for step, pairs in zip(steps, counted, strict=True))
        per_pair = self.pair * _pairs(self.demand, rank) / guessed if guessed else 0.0
        compute = per_pair * guessed
        busy = [self._busy(rank, step, per_pair * pairs) for step, pairs in zip(steps, counted, strict=True)]
        if self.gathers:
            return self._gathered(rank, steps, busy, compute), {}
        seconds = sent = messages = 0.0
        cycles: dict[int, list[float]] = {}
        for step, (visit, merge) in zip(steps, busy, strict=True):
            alone, outer = self._messages(rank, step)
            worked = visit + merge + self.rates.gamma * min(visit, alone)
            longest = max(worked, alone)
            self.times[rank, step.at] = worked, alone, step.posted
            if isinstance(self.route, DoubleRingSchedule):
                cycle = cycles.setdefault(step.at // self.route.inner, [0.0, 0.0])
                cycle[0] += step.weight * longest
                cycle[1] += step.weight * outer
            seconds += step.weight * longest
            sent += step.weight * sum(map(self._size, step.posted))
            messages += step.weight * len(step.posted)
        slowest = {number: max(pair) for number, pair in cycles.items()}
        seconds = sum(slowest.values()) if slowest else seconds
        return Prediction(seconds, compute, seconds - compute, round(sent), round(messages)), slowest

    def _together(self) -> float:
        """Seconds until all ranks have finished.

        A message begins when its sender and its receiver have begun the step, and both of them wait for the message.
        """
        ranks = range(self.plan.ranks)
        begun = [0.0 for _ in ranks]
        for time in sorted({at for _, at in self.times}):
            known = [self.times.get((rank, time), (0.0, 0.0, ())) for rank in ranks]
            # Messages of a rank over one kind of link follow each other, those that it sends as those that it receives.
            lasts: defaultdict[tuple[int, bool, bool], float] = defaultdict(float)
            for rank, (_, _, posted) in enumerate(known):
                for edge in posted:
                    near = self._near(edge)
                    alone = _seconds(self.machine, [self._size(edge)], near, self.crowd)
                    lasts[rank, near, True] += alone
                    lasts[edge.source, near, False] += alone
            after = [start + worked for start, (worked, _, _) in zip(begun, known, strict=True)]
            for rank, (_, received, posted) in enumerate(known):
                for edge in posted:
                    near = self._near(edge)
                    last = max(lasts[rank, near, True], lasts[edge.source, near, False])
                    if self.machine.shared_nic and not near:
                        last = max(last, received)  # all that comes to the node
                    end = max(begun[rank], begun[edge.source]) + last
                    after[rank], after[edge.source] = max(after[rank], end), max(after[edge.source], end)
            begun = after
        return max(begun)

    def _gathered(
        self, rank: int, steps: list[_SampledStep], busy: list[tuple[float, float]], compute: float
    ) -> Prediction:
        """The forward of a rank of an all-gather, whose own visit is all that computes meanwhile."""
        sizes = self._blocks(rank)
        crowds = self.crowd * self.machine.ranks_per_node, 1
        gather = max(_seconds(self.machine, sizes[near], bool(near), crowds[near]) for near in (0, 1))
        own = busy[0][0]
        seconds = max(own + self.rates.gamma * min(own, gather), gather)
        seconds += sum(step.weight * sum(one) for step, one in zip(steps[1:], busy[1:], strict=True))
        return Prediction(seconds, compute, seconds - compute, sum(map(sum, sizes)), self.plan.ranks - 1)

    def _busy(self, rank: int, step: _SampledStep, visit: float) -> tuple[float, float]:
        """Seconds of the visits of a step, and of merging what they give."""
        if self.machine.merge is None:
            return visit, 0.0
        rows = sum(_merged(self.demand, rank, owner) for owner in step.owners if owner != rank)
        return visit, self.rates.merge(rows)

    def _messages(self, rank: int, step: _SampledStep) -> tuple[float, float]:
        """Seconds of the messages that end with a step, and of those that have its whole cycle of a double ring."""
        seconds = {(near, whole): 0.0 for near in (True, False) for whole in (True, False)}
        for edge in step.posted:
            near = self._near(edge)
            whole = isinstance(self.route, DoubleRingSchedule) and edge.ring > 0
            sizes = [self._size(edge)]
            if not near and self.machine.shared_nic and self.machine.ranks_per_node > 1:
                sizes = self._of_node(rank, edge.step)
            seconds[near, whole] += _seconds(self.machine, sizes, near, self.crowd)
        return tuple(max(seconds[near, whole] for near in (True, False)) for whole in (False, True))  # type: ignore[return-value]

    def _near(self, edge: Edge) -> bool:
        return edge.source // self.machine.ranks_per_node == edge.target // self.machine.ranks_per_node

    def _of_node(self, rank: int, time: int) -> list[int]:
        """Bytes of the messages that come to the node of a rank from other nodes for one step."""
        node = self.machine.node(rank, self.plan.ranks)
        if isinstance(self.route, RingSchedule):
            ends = [edge for end in sorted({node[0], node[-1]}) for edge in self.route.edges_at(end, time)]
            return [self._size(edge) for edge in ends if not self._near(edge)]
        # Those of a few ranks stand for all.
        looked = sorted({node[len(node) * i // MEMBERS] for i in range(MEMBERS)} | {rank})
        far = [
            self._size(edge)
            for ring_plan in looked
            for edge in self.route.edges_at(ring_plan, time)
            if not self._near(edge)
        ]
        return [round(sum(far) / len(far))] * max(round(len(far) * len(node) / len(looked)), 1)

    def _size(self, edge: Edge) -> int:
        return self.row * self.demand.count_needed(self.route.served(edge), edge.owner)

    def _blocks(self, rank: int) -> tuple[list[int], list[int]]:
        """Bytes of the block of a rank for each rank of another node, and for each other rank of its own."""
        one = self.row * self.demand.block_heads * self.demand.layout.rows(rank)
        inside = len(self.machine.node(rank, self.plan.ranks)) - 1
        return [one] * (self.plan.ranks - 1 - inside), [one] * inside

    def _listed(self, rank: int, arrivals: list[Edge]) -> list[_SampledStep]:
        """All steps of a rank at which a block arrives, or a message is posted for one."""
        known: dict[int, list[Edge]] = {}
        for edge in arrivals:
            known.setdefault(edge.step, []).append(edge)
        times = {0, *known, *(edge.post for edge in arrivals)}
        return [self._step(rank, time, 1.0, lambda at: tuple(known.get(at, ()))) for time in sorted(times)]

    def _sampled(self, rank: int, last: int) -> list[_SampledStep]:
        """Steps of a rank that stand for 0 .. `last`."""
        chosen = _spread(last + 1, self.most)
        if isinstance(self.route, DoubleRingSchedule):
            inner = self.route.inner
            inside = _spread(inner, INSIDE)
            chosen = [(t * inner + j, a * b) for t, a in _spread(last // inner + 1, CYCLES) for j, b in inside]
        return [self._step(rank, time, weight, lambda at: self.route.edges_at(rank, at)) for time, weight in chosen]

    def _step(self, rank: int, time: int, weight: float, at: Callable[[int], tuple[Edge, ...]]) -> _SampledStep:
        owners = [edge.owner for edge in at(time)] if time else [rank]
        posted = at(time + 1)
        if isinstance(self.route, DoubleRingSchedule):
            posted = tuple(edge for edge in posted if not edge.ring)
            if time % self.route.inner == 0:
                posted += tuple(edge for edge in at(time + self.route.inner) if edge.ring)
        return _SampledStep(time, weight, tuple(dict.fromkeys(owners)), posted)


def _spread(count: int, most: int) -> list[tuple[int, float]]:
    """(number, weight): 0 .. count - 1, or the first, the last, and evenly spaced ones that stand for those between."""
    if count <= max(most, 2):
        return [(i, 1.0) for i in range(count)]
    edges = [1 + (count - 2) * i // (most - 2) for i in range(most - 1)]
    return [(0, 1.0), *(((a + b) // 2, float(b - a)) for a, b in pairwise(edges)), (count - 1, 1.0)]
