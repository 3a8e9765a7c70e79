"""Simulates all steps of all ranks, message by message: for any schedule, and for nodes whose ranks share a card.

A message begins when both ends have begun the step at which they post it. Messages that a rank posts in one step over
one link type are sequential and count as ending together. So the seconds of a message follow from the plan, and a rank
begins its next step when its visits are done and the messages that are due have ended: a maximum of sums of seconds,
which never decreases if one of them grows.

If a card served messages in order of arrival, or shared its bandwidth among those present, then a message that arrives
earlier could slow down another, and a faster machine could take longer. Therefore the plan alone decides which messages
share a card: those whose steps overlap, as if all began together and were served evenly. Visits share cores if they
belong to one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ....errors import InvalidInput, Unsupported
from ....plan.steps import Step
from ...progress import track
from ..rates import Faults, Rates
from .base import Loads, Solved, Traffic

#: The most ranks, and roughly the most steps and messages of all ranks: each is a Python object.
MOST_RANKS, MOST_EVENTS = 4096, 1_000_000
#: Ranks whose steps are counted before the steps of all ranks are planned.
RANKS_COUNTED_FIRST = 8
#: One end of a message: the number of the `message`, the `rank`, whether it `sends` or receives, the `step` of the pass
#: at which it posts the message, and the step `until` whose end it waits at. `near`: both ends are in one node.
#: `latency` are the seconds before the first byte, `gap` those of all `bytes`.
POST = np.dtype(
    [
        *((name, np.int64) for name in ("message", "rank", "step", "until", "bytes")),
        *((name, np.bool_) for name in ("sends", "near")),
        *((name, np.float64) for name in ("latency", "gap")),
    ]
)


@dataclass(frozen=True)
class EventPass:
    """Every step and every message of one pass.

    `busy` are the seconds of each rank at each step of the pass, float64 [steps, ranks]; 0 if it does nothing. Messages
    are ordered by `step`, at which both `ends` post them; each end waits for a message at the end of its step `until`.
    `ends` and `until` are int64 [2, messages], for sender and receiver; `seconds` and `bytes` are [messages].
    """

    busy: np.ndarray
    step: np.ndarray
    ends: np.ndarray
    until: np.ndarray
    seconds: np.ndarray
    bytes: np.ndarray
    loads: Loads

    def begun(self, *, instant: bool = False) -> np.ndarray:
        """The time at which each rank begins each step, float64 [steps + 1, ranks]; the last row is when it finishes.

        `instant`: as if messages took no time.
        """
        steps, ranks = self.busy.shape
        seconds = np.zeros_like(self.seconds) if instant else self.seconds
        first = np.searchsorted(self.step, np.arange(steps + 1))
        begun = np.zeros((steps + 1, ranks))  # later rows collect the ends of messages that the step waits for
        for step in range(steps):
            np.maximum(begun[step + 1], begun[step] + self.busy[step], out=begun[step + 1])
            part = slice(first[step], first[step + 1])
            ended = begun[step][self.ends[:, part]].max(axis=0) + seconds[part]
            for rank, until in zip(self.ends[:, part], self.until[:, part], strict=True):
                np.maximum.at(begun, (until + 1, rank), ended)
        return begun

    def traffic(self, senders: range) -> Traffic:
        """How many bytes and messages the ranks `senders` send."""
        mine = np.isin(self.ends[0], senders)
        links, link = np.unique(self.ends[0, mine] * self.busy.shape[1] + self.ends[1, mine], return_inverse=True)
        carried = np.zeros(len(links), dtype=np.int64)
        np.add.at(carried, link, self.bytes[mine])
        return Traffic.of(carried, len(link))

    def solve(self, why: str = "every step of every rank") -> Solved:
        """Compute when ranks finish; `why` is the reason, for reports, why every step was simulated."""
        finish = self.begun()[-1]
        peers = float(self.begun(instant=True)[-1].max())
        traffic = self.traffic(range(len(finish)))
        return Solved("events", finish, why, self.loads, traffic, peers=peers)


def list_events(rates: Rates, faults: Faults, why: str = "every step of every rank") -> EventPass:
    """List all steps and messages of all ranks; `why` is the reason, for errors, why every step is simulated.

    Raises Unsupported for plans with too many ranks or steps, InvalidInput for stalls after the last step of the pass.
    """
    _check_size(rates, why)
    plan, machine = rates.plan, rates.machine
    steps_of_ranks = [rank_steps(rates, rank) for rank in track(range(plan.ranks), plan.ranks, "ranks")]
    every_clock = sorted({step.clock for steps in steps_of_ranks for step in steps})
    clocks = {clock: number for number, clock in enumerate(every_clock)}
    for stall in faults.stalls:
        if stall.step >= len(clocks):
            raise InvalidInput(f"{stall}: the pass has steps 0 .. {len(clocks) - 1}; try one of these")
    loads = Loads.of_stalls(plan.ranks, faults.stalls)
    visits, busy = np.zeros((2, len(clocks), plan.ranks))
    messages: dict[tuple[int, int, int], int] = {}
    posted = []
    for rank, steps in enumerate(steps_of_ranks):
        numbers = [clocks[step.clock] for step in steps]
        for number, step in zip(numbers, steps, strict=True):
            visits[number, rank], merge = _busy_seconds(rates, faults, rank, step)
            busy[number, rank] = visits[number, rank] + merge
            loads.merge[rank] += merge
        posted.append(_list_posts(rates, faults, rank, steps, numbers, messages))
    posts = np.concatenate(posted)
    seconds = _message_seconds(rates, posts, len(messages))
    loads.compute[:] = visits.sum(axis=0)
    if rates.gamma:
        longest = np.zeros((2, *visits.shape))  # received and sent
        np.maximum.at(longest, (posts["sends"].astype(int), posts["step"], posts["rank"]), seconds[posts["message"]])
        interference = rates.gamma * np.minimum(visits, (longest[0] + longest[1]) / 2)
        loads.interference[:] = interference.sum(axis=0)
        busy += interference
    if rates.cores is not None:
        for step in busy:
            for first in range(0, plan.ranks, machine.ranks_per_node):
                node = slice(first, first + machine.ranks_per_node)
                shared = share_cores(step[node].tolist(), rates.cores)
                loads.compute[node] += shared - step[node]  # waiting for a core counts as visits
                step[node] = shared
    for stall in faults.stalls:
        busy[stall.step, stall.rank] += stall.seconds
    posts = posts[np.lexsort((posts["message"], posts["step"]))]
    sent, received = (posts[posts["sends"] == sends] for sends in (True, False))
    assert np.array_equal(sent["message"], received["message"]), "both ends post a message at one step"
    ends, until = (np.stack([sent[name], received[name]]) for name in ("rank", "until"))
    return EventPass(busy, sent["step"], ends, until, seconds[sent["message"]], sent["bytes"], loads)


def _check_size(rates: Rates, why: str) -> None:
    plan = rates.plan
    if plan.ranks > MOST_RANKS:
        raise Unsupported(
            f"{plan.ranks:,} ranks are more than the {MOST_RANKS:,} that can be simulated step by step, which this "
            f"plan needs: {why}. Try schedule=ring with Full, Causal or Window on contiguous or zigzag ranks of equal "
            "size, the backward of such a plan without machine.shared_nic, or a mask that repeats on contiguous ranks "
            "of equal size"
        )
    counted = sorted({plan.ranks * i // RANKS_COUNTED_FIRST for i in range(RANKS_COUNTED_FIRST)})
    sizes = [sum(1 + len(step.sends) for step in rank_steps(rates, rank)) for rank in counted]
    events = sum(sizes) * plan.ranks // len(counted)
    if events > MOST_EVENTS:
        raise Unsupported(
            f"about {events:,} steps and messages are more than the {MOST_EVENTS:,} that can be simulated; try fewer "
            "ranks, or a narrower mask"
        )


def _busy_seconds(rates: Rates, faults: Faults, rank: int, step: Step) -> tuple[float, float]:
    """(seconds of the visits of a step, seconds of merging their results)."""
    ring_plan, place = rates.plan.ring_plan(rank)
    # Visits to several parts of one owner's block count as one. With pass-Q, the queries are the owner's.
    owners = sorted({part.owner for part in step.visits})
    step_visits = [(owner, place) if rates.passes_q else (place, owner) for owner in owners]
    slow = 1.0 if faults.slow is None else float(faults.slow[rank])
    compute = slow * rates.visits(ring_plan, step_visits)
    rows = sum(rates.merged_rows(ring_plan, *visit) for visit in step_visits)
    return compute, slow * rates.merge(rows)


def _list_posts(
    rates: Rates,
    faults: Faults,
    rank: int,
    steps: Sequence[Step],
    numbers: Sequence[int],
    messages: dict[tuple[int, int, int], int],
) -> np.ndarray:
    """What a rank posts in its steps, as POST [posts]; `numbers` are the steps' numbers in the pass.

    `messages` maps (source, target, tag) to the number of a message, for all ranks.
    """
    rows, node = [], rates.machine.node(rank, rates.plan.ranks)
    for number, step in zip(numbers, steps, strict=True):
        for hops, sends in ((step.sends, True), (step.recvs, False)):
            inside = sum(hop.peer in node for hop in hops)
            for hop in hops:
                source, target = (rank, hop.peer) if sends else (hop.peer, rank)
                near, latency, bandwidth = rates.machine.link(source, target)
                start, share = rates.gather_factors(near, inside if near else len(hops) - inside, len(node))
                slow = 1.0 if faults.slow_links is None else float(faults.slow_links[source])
                crowd = rates.crowd(source, target) if near else 1
                size = sum(map(rates.plan.part_bytes, hop.parts))
                message = messages.setdefault((source, target, hop.tag), len(messages))
                link = sends, near, slow * start * latency, slow * share * crowd * size / bandwidth
                rows.append((message, rank, number, numbers[hop.until], size, *link))
    return np.array(rows, POST)


def _message_seconds(rates: Rates, posts: np.ndarray, count: int) -> np.ndarray:
    """Seconds of each of `count` messages, float64 [messages].

    A message takes as long as all that a rank posts with it over its link type, at the slower of its two ends.
    """
    at_end = (posts["step"] * rates.plan.ranks + posts["rank"]) * 4 + 2 * posts["sends"] + posts["near"]
    _, group = np.unique(at_end, return_inverse=True)
    latency, gap = (np.bincount(group, posts[name])[group] for name in ("latency", "gap"))
    seconds = latency + gap
    if rates.machine.shared_nic:
        cards = np.where(posts["near"], -1, posts["rank"] // rates.machine.ranks_per_node * 2 + posts["sends"])
        for card in np.unique(cards[cards >= 0]):
            uses = np.flatnonzero(cards == card)
            shared = share_evenly(*(posts[name][uses] for name in ("step", "until", "gap")))
            seconds[uses] = np.maximum(seconds[uses], latency[uses] + shared)
    longest = np.zeros(count)
    np.maximum.at(longest, posts["message"], seconds)
    return longest


def share_evenly(first: np.ndarray, last: np.ndarray, gap: np.ndarray) -> np.ndarray:
    """Seconds that each message takes on a network card that messages share evenly while they are in flight.

    A message uses the card from step `first` to the end of step `last`, and would take `gap` seconds alone. A message
    that takes g seconds alone, among others that take h seconds each, takes the sum of min(g, h) over all messages on
    the card, with h = g for itself: until it ends, every other message gets an equal share of the card, or has ended.
    All arrays are [messages].
    """
    seconds = np.zeros(len(gap))
    for begin, end in np.unique(np.stack([first, last]), axis=1).T:
        alike = (first == begin) & (last == end)
        ascending = np.sort(gap[(first <= end) & (last >= begin)])
        shorter = np.searchsorted(ascending, gap[alike])
        served = np.concatenate([[0.0], np.cumsum(ascending)])[shorter]
        seconds[alike] = served + gap[alike] * (len(ascending) - shorter)
    return seconds


def share_cores(seconds: Sequence[float], cores: int) -> list[float]:
    """When each of several computations ends if all begin at 0 and share `cores` cores.

    `seconds` are their times on cores of their own. While n of them are running, each runs at min(1, cores / n) of its
    speed.
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
    """The steps of a rank in the pass; after a collective gather, the rank computes with all blocks in one call."""
    steps = rates.plan.for_rank(rank).backward if rates.backward else rates.plan.forward_steps(rank)
    if not (rates.one_gather and steps):
        return steps
    gather, call, *home = steps if len(steps) > 1 else (*steps, Step(clock=steps[0].clock + 1))
    return (replace(gather, visits=()), replace(call, visits=(*gather.visits, *call.visits)), *home)
