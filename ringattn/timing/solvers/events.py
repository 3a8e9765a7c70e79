"""solver events: the steps of all ranks of a plan, event by event. Any schedule, and nodes whose ranks share a way out.

A message begins when both ends have posted it. Those that a rank posts in one step over one kind of link follow each
other, so that all of them end together; a node's shared way out, and in, takes messages in the order in which they are
ready. A rank begins its next step when its visits are done and the messages that are due have ended at both sides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from ...errors import InvalidInput, Unsupported
from ...progress import track
from ..forecast import visits
from ..rates import Faults, Rates
from ..resources import Loads, Traffic
from .jitter import factor
from .recurrence import Solved

if TYPE_CHECKING:
    from ...plan.steps import Hop, Step

#: More ranks, or more steps and messages over all of them, are refused: each is an object of Python.
RANKS, EVENTS = 4096, 1_000_000
#: Ranks whose steps are counted before those of all are made.
LOOKED_AT = 8


@dataclass
class _MessageTimes:
    """One message: who posted it when, how long each side's link needs for it, and which step of a side waits for it."""

    source: int
    target: int
    near: bool
    seconds: float = 0.0
    posted: dict[int, float] = field(default_factory=dict)
    until: dict[int, int] = field(default_factory=dict)


@dataclass
class _RankTimes:
    """A rank on its way through its steps."""

    busy: list[float]
    posts: list[list[_MessageTimes]]
    begun: float = 0.0
    step: int = 0
    #: By step: how many messages it waits for have not ended, and when the last of the others did.
    open: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    ended: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    done: float | None = None


def events(
    rates: Rates,
    faults: Faults,
    why: str = "every step of every rank",
    noise: np.random.Generator | None = None,
    seen: Callable[[int, int, float, float], None] | None = None,
) -> tuple[Solved, Loads, Traffic]:
    """Simulate a plan step by step; with `noise`, visits vary by the machine's jitter; `seen` hears (rank, step, when it
    begins, how long it is busy), and when the rank has finished. Raises Unsupported where it has too many steps,
    InvalidInput where a stall is at a step that its rank has not.
    """
    _check(rates, why)
    machine = rates.machine
    ranks, loads, traffic = _prepare(rates, faults, noise)
    heap: list[tuple[float, int, int]] = []
    serial = 0
    out: defaultdict[int, float] = defaultdict(float)
    into: defaultdict[int, float] = defaultdict(float)

    def begin(index: int, at: float) -> None:
        nonlocal serial
        serial += 1
        heappush(heap, (at, serial, index))

    def advance(index: int) -> None:
        """Begin the next step of a rank whose step is done, if all that it waits for has ended."""
        rank = ranks[index]
        if rank.done is None or rank.open[rank.step]:
            return
        at = max(rank.done, rank.ended[rank.step])
        rank.step, rank.done = rank.step + 1, None
        begin(index, at)

    for index in range(len(ranks)):
        begin(index, 0.0)
    while heap:
        now, _, index = heappop(heap)
        rank = ranks[index]
        rank.begun = now
        ended = rank.step == len(rank.busy)
        if seen is not None:
            seen(index, rank.step, now, 0.0 if ended else rank.busy[rank.step])
        if ended:
            continue
        rank.done = now + rank.busy[rank.step]
        changed = {index: None}
        for message in rank.posts[rank.step]:
            message.posted[index] = now
            if len(message.posted) < 2:
                continue
            start = now
            if machine.shared_nic and not message.near:
                ports = (
                    (out, message.source // machine.ranks_per_node),
                    (into, message.target // machine.ranks_per_node),
                )
                start = max(now, *(free[node] for free, node in ports))
                for free, node in ports:
                    free[node] = start + message.seconds
            for side, until in message.until.items():
                ranks[side].open[until] -= 1
                ranks[side].ended[until] = max(ranks[side].ended[until], start + message.seconds)
                changed[side] = None
        for side in changed:
            advance(side)
    stuck = [i for i, rank in enumerate(ranks) if rank.step < len(rank.busy)]
    assert not stuck, f"ranks {stuck[:5]} wait for messages that nobody sends"
    finish = np.array([rank.begun for rank in ranks])
    return Solved("events", float(finish.max(initial=0.0)), finish, why), loads, traffic


def _check(rates: Rates, why: str) -> None:
    plan = rates.plan
    if rates.buffers > 1:
        raise Unsupported(
            f"buffers={rates.buffers}: plans that are simulated step by step have one receive slot, as the executor; leave "
            "machine.buffers out"
        )
    if plan.ranks > RANKS:
        raise Unsupported(
            f"{plan.ranks:,} ranks are more than the {RANKS:,} that are simulated step by step, as this plan must be: {why}. "
            "Try schedule=ring with Full, Causal or Window on contiguous or zigzag ranks of equal size, their backward without "
            "machine.shared_nic, or a mask that repeats on contiguous ranks of equal size"
        )
    looked = sorted({plan.ranks * i // LOOKED_AT for i in range(LOOKED_AT)})
    size = [sum(1 + len(s.sends) for s in _steps(rates, rank)) for rank in looked]
    if sum(size) * plan.ranks > 2 * EVENTS * len(looked):  # not worth the making of them all
        raise Unsupported(_too_many(f"about {sum(size) * plan.ranks // len(looked):,}"))


def _too_many(count: str) -> str:
    return f"{count} steps and messages are more than the {EVENTS:,} that are simulated; try fewer ranks, or a narrower mask"


def _steps(rates: Rates, rank: int) -> tuple[Step, ...]:
    found = rates.plan.for_rank(rank)
    return found.backward if rates.backward else found.forward


def _prepare(
    rates: Rates, faults: Faults, noise: np.random.Generator | None
) -> tuple[list[_RankTimes], Loads, Traffic]:
    plan = rates.plan
    known: dict[tuple[int, int, int], _MessageTimes] = {}
    links: defaultdict[tuple[int, int], int] = defaultdict(int)
    loads = Loads.none(plan.ranks)
    ranks: list[_RankTimes] = []
    count = 0
    visits_of: list[list[float]] = [[] for _ in range(plan.ranks)]
    for index in track(range(plan.ranks), plan.ranks, "ranks"):
        steps, rank = _steps(rates, index), _RankTimes([], [])
        count += sum(1 + len(step.sends) for step in steps)
        if count > EVENTS:
            raise Unsupported(_too_many(f"more than {EVENTS:,}"))
        for stall in (stall for stall in faults.stalls if stall.rank == index):
            if stall.step >= len(steps):
                raise InvalidInput(
                    f"{stall}: rank {index} has the steps 0 .. {len(steps) - 1}, as it is simulated by steps"
                )
        for number, step in enumerate(steps):
            seconds = (*_work(rates, faults, index, step, noise), _late(faults, index, number))
            for load, more in zip((loads.compute, loads.merge, loads.stalls), seconds, strict=True):
                load[index] += more
            visits_of[index].append(seconds[0])
            rank.busy.append(sum(seconds))
            rank.posts.append(_posts(rates, faults, index, step, known, links))
            for message in rank.posts[-1]:
                rank.open[message.until[index]] += 1
        ranks.append(rank)
    for index, rank in enumerate(ranks):  # by now, both sides of every message have said how long it takes
        for number, (visit, posts) in enumerate(zip(visits_of[index], rank.posts, strict=True)):
            taken = rates.gamma * min(visit, max((message.seconds for message in posts), default=0.0))
            loads.interference[index] += taken
            rank.busy[number] += taken
    sizes = [size for size in links.values() if size]
    messages = sum(len(step.sends) for index in range(plan.ranks) for step in _steps(rates, index))
    return ranks, loads, Traffic(sum(sizes), max(sizes, default=0), len(sizes), messages)


def _work(
    rates: Rates, faults: Faults, index: int, step: Step, noise: np.random.Generator | None
) -> tuple[float, float]:
    """Seconds of the visits of a step, and of merging them."""
    inner, met = visits(rates.plan, index, step, rates.backward)
    slow = faults.factor(index)
    compute = slow * rates.pair * sum(inner.demand.pairs(*visit) for visit in met)
    if noise is not None and rates.machine.jitter:
        compute *= float(factor(rates.machine.jitter, noise, 1)[0])
    rows = sum(
        inner.query_demand.count_needed((range(keys, keys + 1),), queries)
        for queries, keys in met
        if rates.machine.merge is not None and rates.merges(queries == keys)
    )
    return compute, slow * rates.merge(rows)


def _late(faults: Faults, index: int, number: int) -> float:
    return sum(stall.seconds for stall in faults.stalls if (stall.rank, stall.step) == (index, number))


def _posts(
    rates: Rates, faults: Faults, index: int, step: Step, known: dict[tuple[int, int, int], _MessageTimes],
    links: defaultdict[tuple[int, int], int],
) -> list[_MessageTimes]:  # fmt: skip
    """The messages that a rank posts in a step; each takes as long as all of its kind, at the side where that is longer."""
    found = []
    for hops, sends in ((step.sends, True), (step.recvs, False)):
        alone: list[tuple[Hop, _MessageTimes, float]] = []
        for hop in hops:
            source, target = (index, hop.peer) if sends else (hop.peer, index)
            near, latency, bandwidth = rates.machine.link(source, target)
            size = sum(map(rates.plan.part_bytes, hop.parts))
            if sends:
                links[source, target] += size
            message = known.setdefault((source, target, hop.tag), _MessageTimes(source, target, near))
            alone.append((hop, message, faults.link_factor(source) * (latency + size / bandwidth)))
        whole = {near: sum(seconds for _, m, seconds in alone if m.near == near) for near in (True, False)}
        for hop, message, seconds in alone:
            queued = rates.machine.shared_nic and not message.near  # one after another on the node's way
            message.seconds = max(message.seconds, seconds if queued else whole[message.near])
            message.until[index] = hop.until
            found.append(message)
    return found
