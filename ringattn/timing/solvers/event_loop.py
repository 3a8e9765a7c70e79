"""The steps of all ranks of a plan, event by event: for any schedule, and for nodes whose ranks share a NIC.

A message begins when both of its ends have posted it. The messages that a rank posts in one step over one kind of link
follow each other, so that all of them end together; a node's shared NIC sends, and receives, messages in the order in
which they are ready. A rank begins its next step when its visits are done and the messages that are due have ended at
both ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from ...errors import InvalidInput, Unsupported
from ...progress import track
from ..forecast import visits
from ..rates import Faults, Rates
from ..resources import Loads, Traffic
from .base import Solved
from .jitter import draw_factors

if TYPE_CHECKING:
    from ...plan.plan import Plan
    from ...plan.steps import Hop, Step

#: The most ranks, and the most steps and messages over all ranks: each step and each message is an object of Python.
MOST_RANKS, MOST_EVENTS = 4096, 1_000_000
#: Ranks whose steps are counted before the steps of all ranks are planned.
RANKS_COUNTED_FIRST = 8
#: Called as observe(rank, step, seconds at which the step begins, seconds for which the rank is busy), and once more
#: with the number of steps when a rank has finished.
Observer = Callable[[int, int, float, float], None]


@dataclass
class _TimedHop:
    """One message: its ends, its seconds, when each end posted it, and the step of each end that waits for it.

    `near` says whether both ends are in one node.
    """

    source: int
    target: int
    near: bool
    seconds: float = 0.0
    posted: dict[int, float] = field(default_factory=dict)
    awaited: dict[int, int] = field(default_factory=dict)


@dataclass
class _RankProgress:
    """A rank's steps, and where the rank is among them.

    By step: `busy` seconds and posted messages. `begun` is when step `step` began, `done` when its visits are done,
    None before that. By step, `open` counts the awaited messages that have not ended, and `ended` holds the latest end
    of those that have.
    """

    busy: list[float] = field(default_factory=list)
    posts: list[list[_TimedHop]] = field(default_factory=list)
    begun: float = 0.0
    step: int = 0
    open: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    ended: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    done: float | None = None


def simulate_events(
    rates: Rates,
    faults: Faults,
    why: str = "every step of every rank",
    noise: np.random.Generator | None = None,
    observe: Observer | None = None,
) -> Solved:
    """Simulate every step and message of a plan; `why` says in reports and errors why that is done.

    With `noise`, visits vary by the machine's jitter. Raises Unsupported for plans with too many ranks or steps,
    InvalidInput where a rank has fewer steps than one of its stalls says.
    """
    _check_size(rates, why)
    ranks, loads, traffic = _prepare(rates, faults, noise)
    _EventQueue(rates, ranks, observe).run()
    stuck = [index for index, rank in enumerate(ranks) if rank.step < len(rank.busy)]
    assert not stuck, f"ranks {stuck[:5]} wait for messages that nobody sends"
    finish = np.array([rank.begun for rank in ranks])
    return Solved("events", float(finish.max(initial=0.0)), finish, why, loads, traffic)


class _EventQueue:
    """The beginnings of steps in the order of their time."""

    def __init__(self, rates: Rates, ranks: list[_RankProgress], observe: Observer | None) -> None:
        self.machine, self.ranks, self.observe = rates.machine, ranks, observe
        #: (seconds, serial number, rank): the serial number keeps the order of equal times.
        self.heap: list[tuple[float, int, int]] = []
        self.serial = 0
        #: By node, when its shared NIC is free to send and to receive.
        self.send_free: defaultdict[int, float] = defaultdict(float)
        self.receive_free: defaultdict[int, float] = defaultdict(float)

    def run(self) -> None:
        """Run all ranks until none has a step left, or all of them wait."""
        for index in range(len(self.ranks)):
            self._push(index, 0.0)
        while self.heap:
            now, _, index = heappop(self.heap)
            rank = self.ranks[index]
            rank.begun = now
            finished = rank.step == len(rank.busy)
            if self.observe is not None:
                self.observe(index, rank.step, now, 0.0 if finished else rank.busy[rank.step])
            if finished:
                continue
            rank.done = now + rank.busy[rank.step]
            changed = {index: None}
            for message in rank.posts[rank.step]:
                message.posted[index] = now
                if len(message.posted) == 2:
                    changed |= self._transfer(message, now)
            for end in changed:
                self._begin_next_step(end)

    def _push(self, index: int, seconds: float) -> None:
        self.serial += 1
        heappush(self.heap, (seconds, self.serial, index))

    def _transfer(self, message: _TimedHop, now: float) -> dict[int, None]:
        """Transfer a message that both ends have posted; return the ranks at its ends, in their order."""
        start = now
        if self.machine.shared_nic and not message.near:
            nics = (
                (self.send_free, message.source // self.machine.ranks_per_node),
                (self.receive_free, message.target // self.machine.ranks_per_node),
            )
            start = max(now, *(free[node] for free, node in nics))
            for free, node in nics:
                free[node] = start + message.seconds
        for end, step in message.awaited.items():
            rank = self.ranks[end]
            rank.open[step] -= 1
            rank.ended[step] = max(rank.ended[step], start + message.seconds)
        return dict.fromkeys(message.awaited)

    def _begin_next_step(self, index: int) -> None:
        """Begin the next step of a rank whose visits are done, once all messages that the rank waits for have ended."""
        rank = self.ranks[index]
        if rank.done is None or rank.open[rank.step]:
            return
        seconds = max(rank.done, rank.ended[rank.step])
        rank.step, rank.done = rank.step + 1, None
        self._push(index, seconds)


def rank_steps(plan: Plan, rank: int, backward: bool) -> tuple[Step, ...]:
    """The steps of a rank in one pass of a plan."""
    return plan.for_rank(rank).backward if backward else plan.forward_steps(rank)


def _check_size(rates: Rates, why: str) -> None:
    plan = rates.plan
    if rates.buffers > 1:
        raise Unsupported(
            f"buffers={rates.buffers}: plans that are simulated step by step have one receive slot, as the executor "
            "has; leave machine.buffers out"
        )
    if plan.ranks > MOST_RANKS:
        raise Unsupported(
            f"{plan.ranks:,} ranks are more than the {MOST_RANKS:,} that are simulated step by step, as this plan "
            f"must be: {why}. Try schedule=ring with Full, Causal or Window on contiguous or zigzag ranks of equal "
            "size, the backward of such a plan without machine.shared_nic, or a mask that repeats on contiguous ranks "
            "of equal size"
        )
    counted = sorted({plan.ranks * i // RANKS_COUNTED_FIRST for i in range(RANKS_COUNTED_FIRST)})
    sizes = [sum(1 + len(step.sends) for step in rank_steps(plan, rank, rates.backward)) for rank in counted]
    if sum(sizes) * plan.ranks > 2 * MOST_EVENTS * len(counted):  # far too many: the other ranks need no plan
        raise Unsupported(_too_many_events(f"about {sum(sizes) * plan.ranks // len(counted):,}"))


def _too_many_events(count: str) -> str:
    return (
        f"{count} steps and messages are more than the {MOST_EVENTS:,} that are simulated; try fewer ranks, or a "
        "narrower mask"
    )


def _prepare(
    rates: Rates, faults: Faults, noise: np.random.Generator | None
) -> tuple[list[_RankProgress], Loads, Traffic]:
    """All ranks before their first step, with what they will do and send."""
    plan = rates.plan
    messages: dict[tuple[int, int, int], _TimedHop] = {}
    link_bytes: defaultdict[tuple[int, int], int] = defaultdict(int)
    loads = Loads.none(plan.ranks)
    ranks: list[_RankProgress] = []
    events = message_count = 0
    visit_seconds: list[list[float]] = [[] for _ in range(plan.ranks)]
    for index in track(range(plan.ranks), plan.ranks, "ranks"):
        steps, rank = rank_steps(plan, index, rates.backward), _RankProgress()
        if rates.one_gather and len(steps) > 1:  # the only call comes after the gather
            gather, call, *home = steps
            steps = (replace(gather, visits=()), replace(call, visits=(*gather.visits, *call.visits)), *home)
        message_count += sum(len(step.sends) for step in steps)
        events += sum(1 + len(step.sends) for step in steps)
        if events > MOST_EVENTS:
            raise Unsupported(_too_many_events(f"more than {MOST_EVENTS:,}"))
        _check_stalls(faults, index, len(steps))
        for number, step in enumerate(steps):
            compute, merge = _busy_seconds(rates, faults, index, step, noise)
            stalled = _stall_seconds(faults, index, number)
            loads.compute[index] += compute
            loads.merge[index] += merge
            loads.stalls[index] += stalled
            visit_seconds[index].append(compute)
            rank.busy.append(sum((compute, merge, stalled)))
            rank.posts.append(_post_messages(rates, faults, index, step, messages, link_bytes))
            for message in rank.posts[-1]:
                rank.open[message.awaited[index]] += 1
        ranks.append(rank)
    for index, rank in enumerate(ranks):  # only now are the seconds of all messages known, which both ends decide
        for number, (visit, posts) in enumerate(zip(visit_seconds[index], rank.posts, strict=True)):
            interference = rates.gamma * min(visit, max((message.seconds for message in posts), default=0.0))
            loads.interference[index] += interference
            rank.busy[number] += interference
    sizes = [size for size in link_bytes.values() if size]
    return ranks, loads, Traffic(sum(sizes), max(sizes, default=0), len(sizes), message_count)


def _check_stalls(faults: Faults, index: int, steps: int) -> None:
    for stall in faults.stalls:
        if stall.rank == index and stall.step >= steps:
            raise InvalidInput(
                f"{stall}: rank {index} has the steps 0 .. {steps - 1}, as the plan is simulated step by step; try one "
                "of these steps"
            )


def _busy_seconds(
    rates: Rates, faults: Faults, index: int, step: Step, noise: np.random.Generator | None
) -> tuple[float, float]:
    """Seconds of the visits of a step, and of merging their results."""
    ring_plan, step_visits = visits(rates.plan, index, step, rates.backward)
    slow = faults.factor(index)
    compute = slow * rates.pair * sum(ring_plan.demand.pairs(*visit) for visit in step_visits)
    if noise is not None and rates.machine.jitter:
        compute *= float(draw_factors(rates.machine.jitter, noise, 1)[0])
    rows = sum(
        ring_plan.query_demand.count_needed((range(keys, keys + 1),), queries)
        for queries, keys in step_visits
        if rates.machine.merge is not None and rates.merges(queries == keys)
    )
    return compute, slow * rates.merge(rows)


def _stall_seconds(faults: Faults, index: int, number: int) -> float:
    return sum(stall.seconds for stall in faults.stalls if (stall.rank, stall.step) == (index, number))


def _post_messages(
    rates: Rates,
    faults: Faults,
    index: int,
    step: Step,
    messages: dict[tuple[int, int, int], _TimedHop],
    link_bytes: defaultdict[tuple[int, int], int],
) -> list[_TimedHop]:
    """The messages that a rank posts in a step, shared with their other ends through `messages`.

    A message takes as long as all messages of its kind of link together, at the end where these take longer. Bytes that
    the rank sends are added to `link_bytes`.
    """
    posted = []
    for hops, sends in ((step.sends, True), (step.recvs, False)):
        timed: list[tuple[Hop, _TimedHop, float]] = []
        for hop in hops:
            source, target = (index, hop.peer) if sends else (hop.peer, index)
            near, latency, bandwidth = rates.machine.link(source, target)
            size = sum(map(rates.plan.part_bytes, hop.parts))
            if sends:
                link_bytes[source, target] += size
            message = messages.setdefault((source, target, hop.tag), _TimedHop(source, target, near))
            start, share = rates.gather_factors(near, len(hops))
            timed.append((hop, message, faults.link_factor(source) * (start * latency + share * size / bandwidth)))
        together = {
            near: sum(seconds for _, message, seconds in timed if message.near == near) for near in (True, False)
        }
        for hop, message, seconds in timed:
            queued = rates.machine.shared_nic and not message.near  # the NIC's queue lets messages follow each other
            message.seconds = max(message.seconds, seconds if queued else together[message.near])
            message.awaited[index] = hop.until
            posted.append(message)
    return posted
