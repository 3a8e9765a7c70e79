"""The steps of all ranks of a plan, message by message: for any schedule, and for nodes whose ranks share a card.

A message begins when both of its ends have posted it. The messages that a rank posts in one step over one kind of link
follow each other, so that all of them end together. So the seconds of a message follow from the plan, and a rank begins
its next step when its visits are done and the messages that are due have ended at both ends: a largest sum of seconds,
which never shrinks where one of them grows.

A card that served its messages in the order of their arrival, or all that are on it at a time, would give some message
less where another one arrives earlier, so that a faster machine could take longer. Here the plan alone says which
messages share a card: those whose steps overlap, as if all of them began together and were served evenly. The visits
that share cores are those of one step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ....errors import InvalidInput, Unsupported
from ....plan.steps import Step
from ...progress import track
from ..rates import Faults, Rates
from .base import Loads, Solved, Traffic
from .jitter import draw_factors

if TYPE_CHECKING:
    from ....plan.steps import Hop

#: The most ranks, and about the most steps and messages of all ranks: each of them is an object of Python.
MOST_RANKS, MOST_EVENTS = 4096, 1_000_000
#: Ranks whose steps are counted, before the steps of all ranks are planned.
RANKS_COUNTED_FIRST = 8
#: The step of a rank that does nothing.
IDLE = Step()


@dataclass(frozen=True)
class CardUse:
    """A message on a card from step `first` to the end of step `last`, which would occupy the card alone for `gap`
    seconds."""

    first: int
    last: int
    gap: float


@dataclass
class _TimedHop:
    """One message: its ends, its seconds, when each end posted it, and the step of each end that waits for it.

    `near` says whether both ends are in one node.
    """

    source: int
    target: int
    near: bool
    seconds: float = 0.0
    posted: list[float] = field(default_factory=list)
    awaited: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Post:
    """A message at one of its ends, which `sends` or receives it, and waits for it until the end of its step `until`.

    `latency` are the seconds that the messages of the rank's step over this kind of link take beside their bytes, and
    `gap` the seconds of this message's bytes.
    """

    message: _TimedHop
    sends: bool
    until: int
    latency: float
    gap: float


@dataclass
class RankProgress:
    """A rank's steps, and when the rank begins each of them.

    By step of the rank: its `clock`, the step of the pass; `busy` seconds, and posted messages. `begun` holds the times
    of the steps that have begun, and at last when the rank has finished. By step, `open` counts the awaited messages
    that have not ended, and `ended` holds the end of the last of those that have.
    """

    clock: list[int] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    posts: list[list[_TimedHop]] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    open: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    ended: dict[int, float] = field(default_factory=dict)
    #: Whether the messages of the latest step are posted.
    posted: bool = False

    @property
    def step(self) -> int:
        """The latest step that has begun."""
        return len(self.begun) - 1

    def begin_next_step(self) -> bool:
        """Begin the next step once the latest has posted, and all messages that it waits for have ended."""
        if not self.posted or self.open[self.step]:
            return False
        done = self.begun[-1] + self.busy[self.step]
        self.begun.append(max(done, self.ended.get(self.step, 0.0)))
        self.posted = False
        return True


def simulate_events(
    rates: Rates,
    faults: Faults,
    why: str = "every step of every rank",
    noise: np.random.Generator | None = None,
) -> Solved:
    """Simulate every step and message of a plan; `why` says in reports and errors why that is done.

    With `noise`, visits vary by the machine's jitter. Raises Unsupported for plans with too many ranks or steps,
    InvalidInput for stalls after the last step of the pass.
    """
    _check_size(rates, why)
    ranks, loads, traffic = _prepare(rates, faults, noise)
    finish = _run(ranks, instant=False)
    peers = float(_run(ranks, instant=True).max(initial=0.0))
    return Solved("events", float(finish.max(initial=0.0)), finish, why, loads, traffic, peers=peers)


def run_events(rates: Rates, faults: Faults, why: str) -> list[RankProgress]:
    """All ranks, with the times at which they begin their steps; arguments and errors as of `simulate_events`."""
    _check_size(rates, why)
    ranks, _, _ = _prepare(rates, faults, None)
    _run(ranks, instant=False)
    return ranks


def _run(ranks: list[RankProgress], *, instant: bool) -> np.ndarray:
    """Run all ranks through their steps, and return when each has finished. `instant`: messages take no time.

    The order in which ranks are taken changes no time: each is a sum of seconds after the times of other ranks.
    """
    for index, rank in enumerate(ranks):
        rank.begun, rank.posted = [0.0], False
        rank.open.clear()
        rank.ended.clear()
        for message in (message for posts in rank.posts for message in posts):
            message.posted.clear()
            rank.open[message.awaited[index]] += 1
    ready = list(range(len(ranks)))
    while ready:
        index = ready.pop()
        rank = ranks[index]
        if rank.step == len(rank.busy):
            continue
        rank.posted = True
        changed = {index}
        for message in rank.posts[rank.step]:
            message.posted.append(rank.begun[-1])
            if len(message.posted) == 2:
                end = max(message.posted) + (0.0 if instant else message.seconds)
                for other, step in message.awaited.items():
                    ranks[other].open[step] -= 1
                    ranks[other].ended[step] = max(ranks[other].ended.get(step, 0.0), end)
                changed |= message.awaited.keys()
        ready += [other for other in changed if ranks[other].begin_next_step()]
    stuck = [index for index, rank in enumerate(ranks) if rank.step < len(rank.busy)]
    assert not stuck, f"ranks {stuck[:5]} wait for messages that nobody sends"
    return np.array([rank.begun[-1] for rank in ranks])


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
    sizes = [sum(1 + len(step.sends) for step in rank_steps(rates, rank)) for rank in counted]
    events = sum(sizes) * plan.ranks // len(counted)
    if events > MOST_EVENTS:
        raise Unsupported(
            f"about {events:,} steps and messages are more than the {MOST_EVENTS:,} that are simulated; try fewer "
            "ranks, or a narrower mask"
        )


def _prepare(
    rates: Rates, faults: Faults, noise: np.random.Generator | None
) -> tuple[list[RankProgress], Loads, Traffic]:
    """All ranks before their first step, with what they will do and send."""
    plan = rates.plan
    messages: dict[tuple[int, int, int], _TimedHop] = {}
    link_bytes: defaultdict[tuple[int, int], int] = defaultdict(int)
    cards: defaultdict[tuple[int, bool], list[tuple[CardUse, _Post]]] = defaultdict(list)
    loads = Loads.none(plan.ranks)
    ranks: list[RankProgress] = []
    message_count, steps_of_ranks, clocks = _list_steps(rates)
    stalls = _stalls_by_step(faults, len(clocks))
    visit_seconds: list[list[float]] = []
    for index, steps in enumerate(steps_of_ranks):
        late = {step: seconds for (rank, step), seconds in stalls.items() if rank == index}
        by_clock = {clocks[step.clock]: step for step in steps}
        rank = RankProgress(clock=sorted({*by_clock, *late}))
        # A rank counts its steps, and those in which it does nothing but stall.
        place = {clock: number for number, clock in enumerate(rank.clock)}
        own_number = [place[clocks[step.clock]] for step in steps]
        visit_seconds.append([])
        for clock in rank.clock:
            step = by_clock.get(clock, IDLE)
            compute, merge = _busy_seconds(rates, faults, index, step, noise)
            stalled = late.get(clock, 0.0)
            loads.compute[index] += compute
            loads.merge[index] += merge
            loads.stalls[index] += stalled
            visit_seconds[index].append(compute)
            rank.busy.append(sum((compute, merge, stalled)))
            posted = _post_messages(rates, faults, index, step, messages, link_bytes)
            for post in posted:
                post.message.awaited[index] = own_number[post.until]
                if rates.machine.shared_nic and not post.message.near:
                    use = CardUse(clock, rank.clock[own_number[post.until]], post.gap)
                    cards[index // rates.machine.ranks_per_node, post.sends].append((use, post))
            rank.posts.append([post.message for post in posted])
        ranks.append(rank)
    for uses in cards.values():
        for (_, post), seconds in zip(uses, share_evenly([use for use, _ in uses]).tolist(), strict=True):
            post.message.seconds = max(post.message.seconds, post.latency + seconds)
    for index, rank in enumerate(ranks):  # only now are the seconds of all messages known, which both ends decide
        for number, (visit, posts) in enumerate(zip(visit_seconds[index], rank.posts, strict=True)):
            sent, received = (
                max((message.seconds for message in posts if (message.source == index) == sends), default=0.0)
                for sends in (True, False)
            )
            interference = rates.gamma * min(visit, (sent + received) / 2)
            loads.interference[index] += interference
            rank.busy[number] += interference
    if rates.cores is not None:
        _share_cores(rates.cores, rates.machine.ranks_per_node, ranks, loads, stalls)
    sizes = [size for size in link_bytes.values() if size]
    return ranks, loads, Traffic(sum(sizes), max(sizes, default=0), len(sizes), message_count)


def _share_cores(
    cores: int, ranks_per_node: int, ranks: list[RankProgress], loads: Loads, stalls: dict[tuple[int, int], float]
) -> None:
    """Lengthen what the ranks of a node do at one step of the pass, but for stalls, as far as they share the cores.

    In the loads, all waiting for a core counts as visits.
    """
    at_step: defaultdict[tuple[int, int], list[tuple[int, int, float]]] = defaultdict(list)
    for index, rank in enumerate(ranks):
        for number, clock in enumerate(rank.clock):
            alone = rank.busy[number] - stalls.get((index, clock), 0.0)
            if alone > 0:
                at_step[index // ranks_per_node, clock].append((index, number, alone))
    for works in at_step.values():
        for (index, number, alone), shared in zip(works, share_cores([work[2] for work in works], cores), strict=True):
            ranks[index].busy[number] += shared - alone
            loads.compute[index] += shared - alone


def _list_steps(rates: Rates) -> tuple[int, list[tuple[Step, ...]], dict[int, int]]:
    """(messages, the steps of each rank, the step of the pass by clock): the clocks at which any rank has a step."""
    plan = rates.plan
    steps_of_ranks = [rank_steps(rates, index) for index in track(range(plan.ranks), plan.ranks, "ranks")]
    message_count = sum(len(step.sends) for steps in steps_of_ranks for step in steps)
    clocks = sorted({step.clock for steps in steps_of_ranks for step in steps})
    return message_count, steps_of_ranks, {clock: number for number, clock in enumerate(clocks)}


def _stalls_by_step(faults: Faults, steps: int) -> dict[tuple[int, int], float]:
    """Seconds of the stalls by (rank, step of the pass)."""
    seconds: defaultdict[tuple[int, int], float] = defaultdict(float)
    for stall in faults.stalls:
        if stall.step >= steps:
            raise InvalidInput(f"{stall}: the pass has the steps 0 .. {steps - 1}; try a step among these")
        seconds[stall.rank, stall.step] += stall.seconds
    return seconds


def _busy_seconds(
    rates: Rates, faults: Faults, index: int, step: Step, noise: np.random.Generator | None
) -> tuple[float, float]:
    """Seconds of the visits of a step, and of merging their results."""
    ring_plan, place = rates.plan.ring_plan(index)
    # Visits to several parts of one owner's block count as one visit. Where queries rotate, they come from the owner.
    owners = sorted({part.owner for part in step.visits})
    step_visits = [(owner, place) if rates.turned else (place, owner) for owner in owners]
    slow = 1.0 if faults.slow is None else float(faults.slow[index])
    compute = slow * rates.visits(ring_plan, step_visits)
    if noise is not None and rates.machine.jitter:
        compute *= float(draw_factors(rates.machine.jitter, noise, 1)[0])
    rows = sum(rates.merged_rows(ring_plan, *visit) for visit in step_visits)
    return compute, slow * rates.merge(rows)


def _post_messages(
    rates: Rates,
    faults: Faults,
    index: int,
    step: Step,
    messages: dict[tuple[int, int, int], _TimedHop],
    link_bytes: defaultdict[tuple[int, int], int],
) -> list[_Post]:
    """The messages that a rank posts in a step, shared with their other ends through `messages`.

    A message takes as long as all messages of its kind of link together, at the end where these take longer. Bytes that
    the rank sends are added to `link_bytes`.
    """
    posted = []
    node = rates.machine.node(index, rates.plan.ranks)
    for hops, sends in ((step.sends, True), (step.recvs, False)):
        inside = sum(hop.peer in node for hop in hops)
        alone: list[tuple[Hop, _TimedHop, float]] = []
        latencies, gaps = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
        for hop in hops:
            source, target = (index, hop.peer) if sends else (hop.peer, index)
            near, latency, bandwidth = rates.machine.link(source, target)
            size = sum(map(rates.plan.part_bytes, hop.parts))
            if sends:
                link_bytes[source, target] += size
            message = messages.setdefault((source, target, hop.tag), _TimedHop(source, target, near))
            start, share = rates.gather_factors(near, inside if near else len(hops) - inside, len(node))
            slow = 1.0 if faults.slow_links is None else float(faults.slow_links[source])
            crowd = rates.crowd(source, target) if near else 1
            gap = slow * share * crowd * size / bandwidth
            latencies[near] += slow * start * latency
            gaps[near] += gap
            alone.append((hop, message, gap))
        for hop, message, gap in alone:
            near = message.near
            message.seconds = max(message.seconds, latencies[near] + gaps[near])
            posted.append(_Post(message, sends, hop.until, latencies[near], gap))
    return posted


def share_evenly(uses: Sequence[CardUse]) -> np.ndarray:
    """Seconds for which each message occupies the card, float64 [uses].

    A message of g seconds among others of h seconds each takes the sum of min(g, h), its own g included: until it has
    ended, every other message has been served for as long, or has ended.
    """
    members: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    at_step: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    for index, use in enumerate(uses):
        members[use.first, use.last].append(index)
    for first, last in members:
        for step in range(first, last + 1):
            at_step[step].add((first, last))
    gaps = np.array([use.gap for use in uses])
    seconds = np.zeros(len(uses))
    for (first, last), indices in members.items():
        together = set().union(*(at_step[step] for step in range(first, last + 1)))
        ascending = np.sort(gaps[[index for span in together for index in members[span]]])
        shorter = np.searchsorted(ascending, gaps[indices])
        served = np.concatenate([[0.0], np.cumsum(ascending)])[shorter]
        seconds[indices] = served + gaps[indices] * (len(ascending) - shorter)
    return seconds


def share_cores(seconds: Sequence[float], cores: int) -> list[float]:
    """When each of several visits ends that begin at 0 and would take `seconds` on a core of their own.

    While n of them last, each runs at min(1, cores / n) of its speed.
    """
    if len(seconds) <= cores:
        return list(seconds)
    ends = [0.0] * len(seconds)
    now = served = 0.0
    ascending = sorted(range(len(seconds)), key=seconds.__getitem__)
    for ended, index in enumerate(ascending):
        now += (seconds[index] - served) * max(1.0, (len(seconds) - ended) / cores)
        ends[index], served = now, seconds[index]
    return ends


def rank_steps(rates: Rates, rank: int) -> tuple[Step, ...]:
    """The steps of a rank in the pass. Those of one collective gather have one call, which comes after the gather."""
    steps = rates.plan.for_rank(rank).backward if rates.backward else rates.plan.forward_steps(rank)
    if not (rates.one_gather and steps):
        return steps
    gather, call, *home = steps if len(steps) > 1 else (*steps, Step(clock=steps[0].clock + 1))
    return (replace(gather, visits=()), replace(call, visits=(*gather.visits, *call.visits)), *home)
