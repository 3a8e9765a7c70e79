"""Solver events for many ranks: where a mask repeats and sees only so far, a smaller plan has the same times.

Ranks own equal runs of tokens, and the mask and the nodes repeat every `period` ranks. A rank's finish depends on other
ranks through messages alone. The messages that can delay it, one after another, were posted at ever earlier steps: so
the finish depends on no rank farther away than the sum over steps of the longest distance of a message. Hence the first
ranks, the last ranks and one period between them, each with as many ranks around as that distance, have the times of
the same ranks in any longer plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING

import numpy as np

from ....layout.regular import Contiguous
from ..rates import Faults, Rates
from ..resources import Loads, Traffic
from .base import Solved
from .event_loop import MOST_RANKS, rank_steps, simulate_events

if TYPE_CHECKING:
    from ....plan.plan import Plan
    from ....plan.steps import Part

#: The longest period, in ranks, whose steps are looked at, and the number of ranks whose steps are compared.
LONGEST_PERIOD, COMPARED = 32, 96
#: The largest difference of times that are equal but for the order of their sums, relative to the longest time.
CLOSE = 1e-12


@dataclass(frozen=True)
class Fold:
    """A smaller plan whose ranks `first` .. `first` + `period` - 1 stand for `times` periods of the whole plan."""

    plan: Plan
    first: int
    period: int
    times: int

    def unfold(self, values: np.ndarray) -> np.ndarray:
        """The values of all ranks of the whole plan, from the values of the smaller plan's ranks."""
        middle = slice(self.first, self.first + self.period)
        parts = values[: self.first], np.tile(values[middle], self.times), values[middle.stop :]
        return np.concatenate(parts)


def simulate_folded(rates: Rates, why: str) -> Solved | str:
    """The solved plan without faults, by the events of a smaller plan; or why there is no such smaller plan.

    `why` says why the plan is simulated step by step.
    """
    fold = find_fold(rates)
    if isinstance(fold, str):
        return fold
    solved = simulate_events(replace(rates, plan=fold.plan), Faults(), why)
    first, size = fold.first, fold.period
    spread = np.abs(solved.finish[first : first + size] - solved.finish[first + size : first + 2 * size]).max()
    assert spread <= CLOSE * solved.seconds, f"two periods of ranks finish {spread} s apart"
    compared = _compare_steps(rates, fold)
    if first:
        reach = f"depend on fewer than {first:,} ranks to either side"
    else:
        reach = "depend on no rank of another period"
    small = solved.loads
    return Solved(
        solver="events, folded",
        seconds=solved.seconds,
        finish=fold.unfold(solved.finish),
        why=(
            f"{fold.plan.ranks:,} of {rates.plan.ranks:,} ranks, step by step; ranks repeat every {size:,}, and "
            f"{reach} ({why})"
        ),
        loads=Loads(*(fold.unfold(x) for x in (small.compute, small.merge, small.interference, small.stalls))),
        traffic=_unfold_traffic(rates, fold, solved.traffic),
        compared=(
            f"steps and pairs of {compared:,} ranks of the whole plan with those of the smaller plan; the finish of "
            "two periods"
        ),
        peers=solved.peers,
    )


def find_fold(rates: Rates) -> Fold | str:
    """The smaller plan, or why there is no such plan."""
    plan, machine = rates.plan, rates.machine
    mask_period = plan.pattern.period
    if plan.schedule not in ("ring", "direct"):
        return f"the schedule {plan.schedule} is neither ring nor direct"
    if not isinstance(plan.layout, Contiguous) or plan.tokens % plan.ranks or plan.tokens == 0:
        return "the layout is not contiguous with as many tokens on every rank"
    if mask_period is None:
        return "the mask does not repeat, or not for all lengths"
    rows = plan.tokens // plan.ranks
    size = lcm(lcm(mask_period, rows) // rows, machine.ranks_per_node)
    if size > LONGEST_PERIOD or 4 * size > plan.ranks:
        most = min(LONGEST_PERIOD, plan.ranks // 4)
        return f"the mask and the nodes repeat every {size:,} ranks, and at most {most:,} are folded"
    around = 0 if _periods_are_apart(plan, size) else _find_dependence(rates, size)
    first = -(-around // size) * size
    # Four periods at least: a visit at one distance must not share its step, nor a neighboring step, with a visit that
    # reaches as far the other way around the ring.
    least = 2 * first + 4 * size
    if least + size > min(plan.ranks, MOST_RANKS):
        return f"a rank depends on others up to {around:,} away"
    times = (plan.ranks - least) // size
    ranks = plan.ranks - times * size
    layout = Contiguous(ranks * rows, ranks)
    return Fold(replace(plan, layout=layout, rotate=plan.rotates, choice=None), first, size, times + 1)


def _periods_are_apart(plan: Plan, size: int) -> bool:
    """Whether no rank sees keys of another period of `size` ranks. One period stands for all, as they repeat."""
    one, following, others = range(size), range(size, 2 * size), range(2 * size, plan.ranks)
    meetings = ((one, following), (following, one), (following, others), (others, following))
    return not any(plan.demand.needs(queriers, owners) for queriers, owners in meetings)


def _find_dependence(rates: Rates, size: int) -> int:
    """The distance in ranks up to which a finish may depend on other ranks.

    To the distance that chains of messages reach is added: a message's time depends on what both ends, and with a
    shared card the nodes of both ends, post with it, and a visit on shared cores on the visits of its node; the posts
    on what ranks see, and whether ranks see as much as others do on whether the sequence ends where they look.
    """
    nodes = 2 * size if rates.machine.shared_nic or rates.cores else 0  # a period is made of whole nodes
    start = rates.plan.ranks // 2 // size * size
    farthest: defaultdict[int, int] = defaultdict(int)
    reach = 0
    for rank in range(start, start + size):
        for step in rank_steps(rates.plan, rank, rates.backward):
            for hop in (*step.sends, *step.recvs):
                distance = abs(hop.peer - rank)
                # The tag holds the step at which both ends post the message.
                farthest[hop.tag // 2] = max(farthest[hop.tag // 2], distance)
                reach = max(reach, distance, *(abs(part.owner - rank) for part in hop.parts))
    return sum(farthest.values()) + 4 * reach + size + nodes


def _compare_steps(rates: Rates, fold: Fold) -> int:
    """Check that ranks of the whole plan have the steps of the smaller plan's ranks; return how many were compared."""
    small, left_out = fold.plan.ranks, rates.plan.ranks - fold.plan.ranks
    middle_end = fold.first + fold.period
    chosen = sorted({small * i // COMPARED for i in range(COMPARED)} | {0, fold.first, middle_end, small - 1})
    # Ranks before the middle's end count from the first rank, ranks after it from the last rank.
    pairs = [(rank, rank if rank < middle_end else rank + left_out) for rank in chosen]
    pairs.append((fold.first, fold.first + fold.times // 2 * fold.period))
    for rank, other in pairs:
        small_steps = _relative_steps(fold.plan, rank, rates.backward)
        whole_steps = _relative_steps(rates.plan, other, rates.backward)
        assert small_steps == whole_steps, (
            f"rank {other} of {rates.plan.ranks} has other steps than rank {rank} of {small}"
        )
    return len(pairs)


def _relative_steps(plan: Plan, rank: int, backward: bool) -> list[object]:
    """The steps of a rank and the pairs of its visits, with ranks counted from the rank itself, to be compared."""

    def relative_parts(parts: Iterable[Part]) -> list[object]:
        return [(part.kind, part.owner - rank, part.row_set) for part in parts]

    turned = backward and plan.rotates == "queries"
    return [
        (
            [
                [(hop.peer - rank, relative_parts(hop.parts), hop.until) for hop in hops]
                for hops in (step.sends, step.recvs)
            ],
            relative_parts(step.visits),
            [plan.demand.pairs(*((part.owner, rank) if turned else (rank, part.owner))) for part in step.visits],
        )
        for step in rank_steps(plan, rank, backward)
    ]


def _unfold_traffic(rates: Rates, fold: Fold, traffic: Traffic) -> Traffic:
    """Bytes, links and messages of the whole plan: the smaller plan's, and those of the periods that were left out."""
    period_bytes = period_links = period_messages = 0
    for rank in range(fold.first, fold.first + fold.period):
        period_bytes += fold.plan.bytes_sent(rank, backward=rates.backward)
        period_messages += fold.plan.messages(rank, backward=rates.backward)
        sends = [hop for step in rank_steps(fold.plan, rank, rates.backward) for hop in step.sends]
        period_links += len({hop.peer for hop in sends if sum(map(fold.plan.part_bytes, hop.parts))})
    left_out = fold.times - 1
    return Traffic(
        total=traffic.total + left_out * period_bytes,
        busiest=traffic.busiest,
        links=traffic.links + left_out * period_links,
        messages=traffic.messages + left_out * period_messages,
    )
