"""The time of a plan by an event simulation of its own: a heap of events, pairs from dense masks, bytes from the plan's
rows. It shares no code with the timing model, and goes through every step of the pass on every rank."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np

from ringattn import Layout, Machine, Plan

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
    ready: int = 0


@dataclass
class Rank:
    """By step of the pass: busy seconds, and the messages whose end the rank waits for."""

    busy: list[float]
    open: list[set[int]]
    step: int = -1
    done: bool = False
    times: list[float] = field(default_factory=list)


class EventOracle:
    """A pass of `plan` on `machine`, with factors on ranks and links, and stalls (rank, step, seconds)."""

    def __init__(self, plan: Plan, machine: Machine, backward: bool, **faults: Any) -> None:
        self.plan, self.machine, self.backward = plan, machine, backward
        self.slow, self.slow_links = faults.get("slow") or {}, faults.get("slow_links") or {}
        planned = [plan.for_rank(rank) for rank in range(plan.ranks)]
        steps = [rank.backward if backward else rank.forward for rank in planned]
        clocks = sorted({step.clock for one in steps for step in one})
        self.count = len(clocks)
        end = 1 + max(int(x.positions(r).max(initial=-1)) for x in self._layouts() for r in range(plan.ranks))
        self.mask = plan.pattern.mask(end, plan.heads).astype(np.int64)
        by_clock = [{clocks.index(step.clock): step for step in one} for one in steps]
        self.messages: list[Sent] = []
        self._list_messages(by_clock, [[clocks.index(step.clock) for step in one] for one in steps])
        self._find_seconds()
        self.busy = [
            [self._busy(rank, k, by_clock[rank].get(k)) for k in range(self.count)] for rank in range(plan.ranks)
        ]
        if machine.cores is not None:
            self._share_cores(machine.cores)
        for stall in faults.get("stalls") or ():
            self.busy[stall.rank][stall.step] += stall.seconds

    def run(self, *, instant: bool = False) -> list[float]:
        """When each rank has finished; `begun` is then when it began each step, [steps + 1, ranks].

        `instant`: messages take no time.
        """
        slots = self.machine.buffers or 1
        ranks = [Rank(list(busy), [set() for _ in range(self.count)]) for busy in self.busy]
        begins: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for number, one in enumerate(self.messages):
            one.ready = 0
            # The sender posts at its step; the receiver has a free slot once it is slots - 1 steps behind.
            ends = {(one.source, one.post), (one.target, max(one.post - slots + 1, 0))}
            for end in ends:
                begins[end].append(number)
            one.ready = -len(ends)
            ranks[one.target].open[one.until[one.target]].add(number)
            if one.until[one.source] + slots - 1 < self.count:
                ranks[one.source].open[one.until[one.source] + slots - 1].add(number)
        heap: list[tuple[float, int, str, int]] = []
        serial = 0
        link_free: dict[tuple[int, int], float] = {}

        def push(at: float, what: str, which: int) -> None:
            nonlocal serial
            serial += 1
            heappush(heap, (at, serial, what, which))

        def go_on(rank: int, now: float) -> None:
            one = ranks[rank]
            if one.done and not one.open[one.step]:
                push(now, "begin", rank)
                one.done = False

        for rank in range(self.plan.ranks):
            push(0.0, "begin", rank)
        while heap:
            now, _, what, which = heappop(heap)
            if what == "begin":
                one = ranks[which]
                one.step += 1
                one.times.append(now)
                if one.step == self.count:
                    continue
                push(now + one.busy[one.step], "done", which)
                for number in begins[which, one.step]:
                    message = self.messages[number]
                    message.ready += 1
                    if message.ready == 0:
                        seconds, gap = (0.0, 0.0) if instant else (message.seconds, message.gap)
                        link = message.source, message.target
                        end = max(now + seconds, link_free.get(link, 0.0) + gap if slots > 1 else 0.0)
                        link_free[link] = end
                        push(end, "end", number)
            elif what == "done":
                ranks[which].done = True
                go_on(which, now)
            else:
                for rank in (self.messages[which].source, self.messages[which].target):
                    for waited in ranks[rank].open:
                        waited.discard(which)
                    go_on(rank, now)
        assert all(one.step == self.count for one in ranks), "ranks are stuck"
        self.begun = np.array([one.times for one in ranks]).T
        return [one.times[-1] for one in ranks]

    def _share_cores(self, cores: int) -> None:
        """Serve what the ranks of each node do at a step, from one end of a visit to the next."""
        for clock in range(self.count):
            for first in range(0, self.plan.ranks, self.machine.ranks_per_node):
                node = range(first, min(first + self.machine.ranks_per_node, self.plan.ranks))
                left = {rank: self.busy[rank][clock] for rank in node if self.busy[rank][clock]}
                now = 0.0
                while left:
                    speed = min(1.0, cores / len(left))
                    shortest = min(left.values())
                    now += shortest / speed
                    for rank in [rank for rank, seconds in left.items() if seconds == shortest]:
                        self.busy[rank][clock] = now
                        del left[rank]
                    left = {rank: seconds - shortest for rank, seconds in left.items()}

    def busiest(self) -> float:
        """Seconds for which the busiest rank is busy."""
        return max(map(sum, self.busy))

    def _list_messages(self, by_clock: list[dict[int, Any]], clock_of: list[list[int]]) -> None:
        until = {
            (hop.peer, rank, hop.tag): clock_of[rank][hop.until]
            for rank, steps in enumerate(by_clock)
            for step in steps.values()
            for hop in step.recvs
        }
        for rank, steps in enumerate(by_clock):
            for clock, step in steps.items():
                for hop in step.sends:
                    near = rank // self.machine.ranks_per_node == hop.peer // self.machine.ranks_per_node
                    latency, bandwidth = self.machine.latency, self.machine.bandwidth
                    if near and self.machine.node_latency is not None:
                        latency = self.machine.node_latency
                    if near and self.machine.node_bandwidth is not None:
                        bandwidth = self.machine.node_bandwidth
                    factor = self.slow_links.get(rank, 1.0)
                    ends = {rank: clock_of[rank][hop.until], hop.peer: until[rank, hop.peer, hop.tag]}
                    gap = factor * sum(map(self._bytes, hop.parts)) / bandwidth
                    self.messages.append(Sent(rank, hop.peer, near, clock, ends, factor * latency, gap))

    def _find_seconds(self) -> None:
        for one in self.messages:
            for end in ("source", "target"):
                here = getattr(one, end)
                alike = [
                    other
                    for other in self.messages
                    if (getattr(other, end), other.post, other.near) == (here, one.post, one.near)
                ]
                latency = sum(other.latency for other in alike)
                one.seconds = max(one.seconds, latency + sum(other.gap for other in alike))
                if self.machine.shared_nic and not one.near:
                    per_node = self.machine.ranks_per_node
                    shared = 0.0
                    for other in self.messages:
                        there = getattr(other, end)
                        if other.near or there // per_node != here // per_node:
                            continue
                        if one.post <= other.until[there] and other.post <= one.until[here]:
                            shared += min(one.gap, other.gap)
                    one.seconds = max(one.seconds, latency + shared)

    def _layouts(self) -> tuple[Layout, Layout]:
        """How the keys, and how the queries are cut."""
        return self.plan.layout, self.plan.q_layout or self.plan.layout

    def _bytes(self, part: Any) -> int:
        plan, item = self.plan, ITEM[self.plan.dtype]
        sums = max(item, 4)
        width = {
            "kv": (plan.head_dim + plan.value_dim) * item,
            "grad": (plan.head_dim + plan.value_dim) * sums,
            "q": (plan.head_dim + plan.value_dim) * item,
            "row": 2 * sums,
            "dq": plan.head_dim * sums,
            "query": plan.head_dim * item,
            "part": (plan.value_dim + 1) * sums,
        }[part.kind]
        if hasattr(part.row_set, "heads"):
            rows = len(part.row_set.heads) * sum(len(run) for run in part.row_set.rows[0])
        else:
            of_keys = part.kind in ("kv", "grad")
            rows = (plan.kv_heads if of_keys else plan.heads) * len(self._layouts()[not of_keys].positions(part.owner))
        return plan.batch * rows * width

    def _busy(self, rank: int, clock: int, step: Any) -> float:
        if step is None:
            return 0.0
        plan, factor = self.plan, self.slow.get(rank, 1.0)
        pairs = rows = 0
        for owner in {part.owner for part in step.visits}:
            turned = (plan.rotates if self.backward else plan.forward_rotates) == "queries"
            queries, keys = (owner, rank) if turned else (rank, owner)
            of_keys, of_queries = self._layouts()
            seen = self.mask[:, of_queries.positions(queries)][:, :, of_keys.positions(keys)]
            pairs += int(seen.sum())
            if self.backward or owner != rank:
                rows += int((seen > 0).any(axis=-1).sum())
        flops = 2 * (plan.head_dim + plan.value_dim) * (BACKWARD if self.backward else 1.0)
        visit = factor * plan.batch * pairs * flops / self.machine.flops
        merge = 0.0
        if self.machine.merge:
            width = plan.value_dim + 1.0
            if self.backward:
                width = plan.head_dim + (plan.head_dim + plan.value_dim) * plan.kv_heads / plan.heads
            merge = factor * PASSES * plan.batch * rows * width * max(ITEM[plan.dtype], 4) / self.machine.merge
        posted = [one for one in self.messages if one.post == clock]
        leaving = max((one.seconds for one in posted if one.source == rank), default=0.0)
        coming = max((one.seconds for one in posted if one.target == rank), default=0.0)
        cores, gamma = self.machine.cores, self.machine.gamma or 0.0
        if cores is not None and cores < min(self.machine.ranks_per_node, plan.ranks) and gamma:
            gamma = 1.0  # another rank computes on the core that copies a message
        return visit + merge + gamma * min(visit, 0.5 * leaving + 0.5 * coming)
