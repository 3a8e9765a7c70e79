"""The time of a plan by an event simulation of its own: a heap of events, pairs from dense masks, bytes from the plan's
rows. It shares no code with the timing model but the seconds of measured and modelled kernels, and goes through every
step of the pass on every rank. The rules are those of docs/simulation.md and docs/decisions.md."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from math import ceil, log2
from typing import Any

import numpy as np

from ringattn import Layout, Machine, Plan
from ringattn.plan.steps import Step
from ringattn.simulator.timing.kernel_seconds import pair_seconds, visit_seconds

#: FLOPs of a backward over those of a forward, and how often a merge moves the bytes of a partial result.
BACKWARD, PASSES = 2.5, 3
ITEM = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass
class Sent:
    """A message: its ends, the steps of the pass in which each end has it in flight, and what it takes alone."""

    source: int
    target: int
    near: bool
    post: int
    until: dict[int, int]
    latency: float
    gap: float
    seconds: float = 0.0


class EventOracle:
    """A pass of `plan` on `machine`, with factors on ranks and links, and stalls (rank, step, seconds)."""

    def __init__(self, plan: Plan, machine: Machine, backward: bool, **faults: Any) -> None:
        self.plan, self.machine, self.backward = plan, machine, backward
        self.slow, self.slow_links = faults.get("slow") or {}, faults.get("slow_links") or {}
        ulysses = re.match(r"ulysses\((\d+),", plan.schedule)
        self.group = int(ulysses[1]) if ulysses else 1
        self.heads, self.kv_heads = plan.heads // self.group, max(plan.kv_heads // self.group, 1)
        #: How the keys, and how the queries are cut, and how many ranks each node has.
        self.layouts = plan.layout, plan.q_layout or plan.layout
        self.members = Counter(self._node(rank) for rank in range(plan.ranks))
        self.cores = machine.cores if machine.cores is not None and machine.cores < self.members[0] else None
        self.gathers = machine.one_gather and plan.schedule == "allgather"
        planned = [plan.for_rank(rank) for rank in range(plan.ranks)]
        self.steps = [rank.backward if backward else rank.forward for rank in planned]
        if self.gathers:
            self.steps = [self._call_after_gather(steps) for steps in self.steps]
        clocks = {clock: k for k, clock in enumerate(sorted({step.clock for one in self.steps for step in one}))}
        self.count = len(clocks)
        self.clocks = [[clocks[step.clock] for step in one] for one in self.steps]
        end = 1 + max(int(x.positions(r).max(initial=-1)) for x in self.layouts for r in range(plan.ranks))
        self.mask = plan.pattern.mask(end, plan.heads).astype(np.int64)
        self.messages = list(self._list_messages())
        self._find_seconds()
        self.busy = [[0.0] * self.count for _ in range(plan.ranks)]
        for rank, own in enumerate(self.clocks):
            for k, step in zip(own, self.steps[rank], strict=True):
                self.busy[rank][k] = self._busy(rank, k, sorted({part.owner for part in step.visits}))
        if self.cores is not None:
            self._share_cores(self.cores)
        for stall in faults.get("stalls") or ():
            self.busy[stall.rank][stall.step] += stall.seconds

    def run(self, *, instant: bool = False) -> list[float]:
        """When each rank has finished; `begun` is then when it began each step, [steps + 1, ranks].

        `instant`: messages take no time.
        """
        self.begun = np.zeros((self.count + 1, self.plan.ranks))
        posts: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        # By (rank, step), what has to end before the next step: the rank's own work, and messages.
        missing = {(rank, k): 1 for rank in range(self.plan.ranks) for k in range(self.count)}
        awaited, unposted = [], []
        for number, one in enumerate(self.messages):
            ends = {(one.source, one.post), (one.target, one.post)}
            for end in ends:
                posts[end].append(number)
            unposted.append(len(ends))
            waiting = (one.target, one.until[one.target]), (one.source, one.until[one.source])
            awaited.append([end for end in waiting if end in missing])
            for end in awaited[-1]:
                missing[end] += 1
        heap: list[tuple[float, int, list[tuple[int, int]]]] = []
        serial = count()

        def begin(rank: int, step: int, now: float) -> None:
            self.begun[step, rank] = now
            if step < self.count:
                heappush(heap, (now + self.busy[rank][step], next(serial), [(rank, step)]))
            for number in posts[rank, step]:
                unposted[number] -= 1
                if not unposted[number]:
                    message = self.messages[number]
                    ended = now + (0.0 if instant else message.seconds)
                    heappush(heap, (ended, next(serial), awaited[number]))

        for rank in range(self.plan.ranks):
            begin(rank, 0, 0.0)
        while heap:
            now, _, ends = heappop(heap)
            for rank, step in ends:
                missing[rank, step] -= 1
                if not missing[rank, step]:
                    begin(rank, step + 1, now)
        assert not any(missing.values()), "ranks are stuck"
        return self.begun[-1].tolist()

    def busiest(self) -> float:
        """Seconds for which the busiest rank is busy."""
        return max(map(sum, self.busy))

    def seconds(self, finish: float) -> float:
        """Seconds of the pass whose steps end at `finish`: the host starts them, and a call takes time beside them."""
        machine = self.machine
        visits = [[1 if self.gathers else len({p.owner for p in s.visits}) for s in steps] for steps in self.steps]
        starts = max(sum(max(one, 1) for one in each) for each in visits)
        host = (machine.host_call or 0.0) + (machine.host or 0.0) * starts
        return (finish if self.plan.ranks == 1 else max(finish, host)) + self._call()  # one rank queues calls ahead

    def _call(self) -> float:
        plan, machine = self.plan, self.machine
        call, sweep = machine.call, machine.sweep
        if self.backward:
            call = call if machine.call_backward is None else machine.call_backward
            sweep = sweep if machine.sweep_backward is None else machine.sweep_backward
        seconds = call or 0.0
        deferred = (machine.host is not None or call is None) if machine.deferred is None else machine.deferred
        if not deferred:
            seconds += ceil(log2(plan.ranks)) * self._link(self.members[0] == plan.ranks)[0]
        if sweep is not None:
            keys, queries = (ceil(layout.tokens / plan.ranks) for layout in self.layouts)
            width = (plan.heads * queries + plan.kv_heads * keys) * (plan.head_dim + plan.value_dim)
            seconds += plan.batch * width * ITEM[plan.dtype] / sweep
        return seconds * self.members[0] / (self.cores or self.members[0])

    def _node(self, rank: int) -> int:
        return rank // self.machine.ranks_per_node

    def _link(self, near: bool) -> tuple[float, float]:
        """Latency and bandwidth of the links within a node, or between nodes."""
        latency, bandwidth = self.machine.latency, self.machine.bandwidth
        if near and self.machine.node_latency is not None:
            latency = self.machine.node_latency
        if near and self.machine.node_bandwidth is not None:
            bandwidth = self.machine.node_bandwidth
        return latency, bandwidth

    def _list_messages(self) -> Iterator[Sent]:
        received = {
            (hop.peer, rank, hop.tag): self.clocks[rank][hop.until]
            for rank, steps in enumerate(self.steps)
            for step in steps
            for hop in step.recvs
        }
        for rank, steps in enumerate(self.steps):
            for clock, step in zip(self.clocks[rank], steps, strict=True):
                for hop in step.sends:
                    near, factor, sharing = self._node(rank) == self._node(hop.peer), self.slow_links.get(rank, 1.0), 1
                    if near and self.machine.switch is not None and not self.gathers:
                        apart, members = abs(rank - hop.peer), self.members[self._node(rank)]
                        if rank // self.plan.ulysses_size == hop.peer // self.plan.ulysses_size:
                            members = min(members, self.plan.ulysses_size)
                        if self.machine.switch < members:
                            sharing = min(apart, members - apart, self.machine.switch)
                    latency, bandwidth = self._link(near)
                    ends = {rank: self.clocks[rank][hop.until], hop.peer: received.pop((rank, hop.peer, hop.tag))}
                    gap = factor * sharing * sum(map(self._bytes, hop.parts)) / bandwidth
                    yield Sent(rank, hop.peer, near, clock, ends, factor * latency, gap)
        assert not received, "messages that nobody sends"

    def _find_seconds(self) -> None:
        """Messages of one step, direction and kind of link follow each other; a card is shared by all that it has."""
        self.longest: defaultdict[tuple[str, int, int], float] = defaultdict(float)
        for end in ("source", "target"):
            alike: defaultdict[Any, list[tuple[Sent, float]]] = defaultdict(list)
            cards: defaultdict[int, list[tuple[Sent, float]]] = defaultdict(list)
            for one in self.messages:
                here, gap = getattr(one, end), one.gap
                if self.gathers:  # every byte enters a node once, over all its ranks, and then passes each of these
                    members = self.members[self._node(here)]
                    gap *= (self.plan.ranks - 1) / (members - 1) if one.near else 1 / members
                alike[here, one.post, one.near].append((one, gap))
                cards[self._node(here)].extend([] if one.near else [(one, gap)])
            for (here, _, near), each in alike.items():
                latency = sum(one.latency for one, _ in each) / (len(each) if self.gathers else 1)
                for one, gap in each:
                    seconds = sum(gap for _, gap in each)
                    if self.machine.shared_nic and not near:
                        seconds = max(seconds, self._on_card(cards[self._node(here)], end, one, gap))
                    one.seconds = max(one.seconds, latency + seconds)
        for one in self.messages:
            for where in (("source", one.source, one.post), ("target", one.target, one.post)):
                self.longest[where] = max(self.longest[where], one.seconds)

    def _on_card(self, card: list[tuple[Sent, float]], end: str, one: Sent, gap: float) -> float:
        """Seconds of bytes of `gap` seconds on a card that serves all messages of overlapping steps evenly."""
        last = one.until[getattr(one, end)]
        together = (each for each in card if one.post <= each[0].until[getattr(each[0], end)] and each[0].post <= last)
        return sum(min(gap, other) for _, other in together)

    def _positions(self, layout: Layout, place: int) -> np.ndarray:
        """What a rank has of the sequence, or its Ulysses group together."""
        return np.concatenate([layout.positions(place * self.group + i) for i in range(self.group)])

    def _bytes(self, part: Any) -> float:
        plan, item, both = self.plan, ITEM[self.plan.dtype], self.plan.head_dim + self.plan.value_dim
        sums = max(item, 4)
        if part.kind in ("qkv", "dqkv", "out", "dout"):
            keys, queries = (len(layout.positions(part.owner)) for layout in self.layouts)
            if part.kind in ("out", "dout"):
                return plan.batch * self.heads * queries * (plan.value_dim * item + sums)
            return plan.batch * item * (self.heads * queries * plan.head_dim + self.kv_heads * keys * both)
        sent, sent_sums = (item, sums) if plan.comm_dtype is None else (ITEM[plan.comm_dtype],) * 2
        exact = {"row": 2 * sums, "query": plan.head_dim * item, "part": (plan.value_dim + 1) * sums}
        blocks = {"kv": both * sent, "q": both * sent, "grad": both * sent_sums, "dq": plan.head_dim * sent_sums}
        if hasattr(part.row_set, "heads"):
            rows = len(part.row_set.heads) * sum(len(run) for run in part.row_set.rows[0])
        else:
            of_keys = part.kind in ("kv", "grad")
            block = self._positions(self.layouts[not of_keys], part.owner)
            rows = (self.kv_heads if of_keys else self.heads) * len(block)
        return plan.batch * rows * (exact | blocks)[part.kind]

    @staticmethod
    def _call_after_gather(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """The steps of a rank with one kernel call, which begins when everything is gathered."""
        if len(steps) == 1:
            steps += (Step(clock=steps[0].clock + 1),)
        visits = tuple(part for step in steps for part in step.visits)
        return tuple(replace(step, visits=visits if number == 1 else ()) for number, step in enumerate(steps))

    def _busy(self, rank: int, clock: int, owners: list[int]) -> float:
        plan, factor, (of_keys, of_queries) = self.plan, self.slow.get(rank, 1.0), self.layouts
        passes_q = (plan.rotates if self.backward else plan.forward_rotates) == "q"
        place, first = rank // self.group, rank % self.group * self.heads
        visit = merge = 0.0
        for owner in owners:
            queries, keys = (owner, place) if passes_q else (place, owner)
            seen = self.mask[first : first + self.heads, self._positions(of_queries, queries)]
            seen = seen[:, :, self._positions(of_keys, keys)]
            visit += factor * self._kernel_seconds(rank, queries, keys, int(seen.sum()))
            if self.machine.merge and not self.gathers:
                merge += factor * self._merged_bytes(rank, queries, keys, seen) / self.machine.merge
        message = (self.longest["source", rank, clock] + self.longest["target", rank, clock]) / 2
        gamma = self.machine.gamma or 0.0
        if self.cores is not None and gamma:
            gamma = 1.0  # another rank computes on the core that copies a message
        return visit + merge + gamma * min(visit, message)

    def _kernel_seconds(self, rank: int, queries: int, keys: int, pairs: int) -> float:
        plan, machine = self.plan, self.machine
        flops = 2 * (plan.head_dim + plan.value_dim) * (BACKWARD if self.backward else 1.0)
        if machine.kernel is not None:
            between = plan.ring_plan(rank)[0]
            return plan.batch * visit_seconds(between, machine.kernel, flops, self.backward, queries, keys)
        if machine.kernel_rates is not None:
            return pairs * pair_seconds(plan, machine, self.backward)
        return plan.batch * pairs * flops / machine.flops

    def _merged_bytes(self, rank: int, queries: int, keys: int, seen: np.ndarray) -> float:
        """Bytes of the rows whose result is merged; with measured kernels, of each work of a forward's visit."""
        plan, width = self.plan, self.plan.value_dim + 1.0
        rows = int((seen > 0).any(axis=-1).sum()) if self.backward or queries != keys else 0
        if self.machine.kernel is not None and not self.backward:
            works = plan.ring_plan(rank)[0].demand.joined_works(queries, keys)
            alone = queries == keys and len(works) == 1
            rows = 0 if alone else sum(len(work.q) * len(work.heads) * work.repeat for work in works)
        if self.backward:
            width = plan.head_dim + (plan.head_dim + plan.value_dim) * self.kv_heads / self.heads
        return PASSES * plan.batch * rows * width * max(ITEM[plan.dtype], 4)

    def _share_cores(self, cores: int) -> None:
        """Serve what the ranks of each node do at a step, from one end of a visit to the next."""
        for clock in range(self.count):
            for node in self.members:
                ranks = [rank for rank in range(self.plan.ranks) if self._node(rank) == node]
                left = {rank: self.busy[rank][clock] for rank in ranks if self.busy[rank][clock]}
                now = 0.0
                while left:
                    shortest = min(left.values())
                    now += shortest / min(1.0, cores / len(left))
                    for rank in [rank for rank, seconds in left.items() if seconds == shortest]:
                        self.busy[rank][clock] = now
                        del left[rank]
                    left = {rank: seconds - shortest for rank, seconds in left.items()}
