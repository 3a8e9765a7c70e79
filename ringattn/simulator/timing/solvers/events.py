"""Solver events: simulates every step and message of a plan, or of a smaller plan with the same times.

A smaller plan has the same times if the mask repeats and has a limited reach: ranks own equal runs of tokens, and mask
and nodes repeat every `period` ranks. A rank's finish depends on other ranks only through messages. A chain of messages
that delays it was posted at ever earlier steps, so the finish depends on no rank farther away than the sum over steps
of the longest message distance. Hence the first ranks, the last ranks and one period between them, each with that many
ranks around, have the same times in any longer plan.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING

import numpy as np

from ....layout.regular import Contiguous
from ..problem import TimingProblem
from ..rates import Faults, Rates
from .base import Loads, Solved
from .event_loop import MOST_RANKS, list_events, rank_steps

if TYPE_CHECKING:
    from ....plan.plan import Plan

#: The longest period in ranks that is considered.
LONGEST_PERIOD = 32
#: The largest difference, relative to the longest time, between times that differ only in the order of summation.
CLOSE = 1e-12
#: Plans of up to this many ranks are always simulated whole.
SIMULATED_WHOLE = 64


def solve_by_events(problem: TimingProblem) -> Solved:
    """Solve a plan by simulating every step and message: up to a few thousand ranks, or more if the plan repeats."""
    rates, faults = problem.rates, problem.faults
    if not isinstance(problem.ring, str):
        why = "asked for"
    elif rates.plan.ranks <= SIMULATED_WHOLE:
        why = f"{problem.ring}; few ranks"
    elif faults:
        why = f"{problem.ring}; slow ranks and stalls rule out a smaller plan"
    else:
        folded = simulate_folded(rates, problem.ring)
        if isinstance(folded, Solved):
            return folded
        why = f"{problem.ring}; {folded}"
    return list_events(rates, faults, why).solve(why)


@dataclass(frozen=True)
class Fold:
    """A smaller plan that represents a larger one in which a group of ranks repeats.

    Ranks `first` .. `first` + `period` - 1 of the smaller plan occur `times` times in a row in the whole plan.
    """

    plan: Plan
    first: int
    period: int
    times: int

    def unfold(self, values: np.ndarray) -> np.ndarray:
        """Convert values for the ranks of the smaller plan to values for all ranks of the whole plan."""
        middle = slice(self.first, self.first + self.period)
        parts = values[: self.first], np.tile(values[middle], self.times), values[middle.stop :]
        return np.concatenate(parts)


def simulate_folded(rates: Rates, why: str) -> Solved | str:
    """Solve a plan without faults by simulating a smaller plan; if there is none, return the reason.

    `why` is the reason why the plan is simulated step by step.
    """
    fold = find_fold(rates)
    if isinstance(fold, str):
        return fold
    events = list_events(replace(rates, plan=fold.plan), Faults(), why)
    first, size = fold.first, fold.period
    solved, period, left_out = events.solve(why), events.traffic(range(first, first + size)), fold.times - 1
    spread = np.abs(solved.finish[first : first + size] - solved.finish[first + size : first + 2 * size]).max()
    assert spread <= CLOSE * solved.seconds, f"two periods of ranks finish {spread} s apart"
    return replace(
        solved,
        solver="events, folded",
        finish=fold.unfold(solved.finish),
        why=(
            f"{fold.plan.ranks:,} of {rates.plan.ranks:,} ranks, step by step; ranks repeat every {size:,}, and depend "
            f"on fewer than {first:,} ranks to either side ({why})"
        ),
        loads=Loads(*map(fold.unfold, vars(solved.loads).values())),
        traffic=replace(
            solved.traffic,
            total=solved.traffic.total + left_out * period.total,
            links=solved.traffic.links + left_out * period.links,
            messages=solved.traffic.messages + left_out * period.messages,
        ),
    )


def find_fold(rates: Rates) -> Fold | str:
    """A smaller plan that represents this one, or the reason why there is none."""
    plan, machine = rates.plan, rates.machine
    mask_period = plan.pattern.period
    if plan.reproducible is not None:
        return "trees of leaves do not repeat from rank to rank"
    if plan.schedule not in ("ring", "direct"):
        return f"the schedule {plan.schedule} is neither ring nor direct"
    if not plan.is_plain or not isinstance(plan.layout, Contiguous) or plan.tokens % plan.ranks or plan.tokens == 0:
        return "the layout is not contiguous with equal shards"
    if mask_period is None:
        return "the mask does not repeat at all lengths"
    rows = plan.tokens // plan.ranks
    size = lcm(lcm(mask_period, rows) // rows, machine.ranks_per_node)
    if size > LONGEST_PERIOD or 4 * size > plan.ranks:
        most = min(LONGEST_PERIOD, plan.ranks // 4)
        return f"the mask and the nodes repeat every {size:,} ranks, and at most {most:,} are folded"
    around = _find_dependence(rates, size)
    first = -(-around // size) * size
    # At least four periods: a visit at one distance must not share its step, or a neighboring step, with a visit that
    # reaches equally far in the other direction around the ring.
    least = 2 * first + 4 * size
    if least + size > min(plan.ranks, MOST_RANKS):
        return f"a rank depends on others up to {around:,} away"
    times = (plan.ranks - least) // size
    ranks = plan.ranks - times * size
    layout = Contiguous(ranks * rows, ranks)
    return Fold(replace(plan, layout=layout, rotate=plan.rotates, choice=None), first, size, times + 1)


def _find_dependence(rates: Rates, size: int) -> int:
    """The distance in ranks up to which a rank's finish may depend on other ranks.

    It is the reach of chains of messages, plus a margin: a message's time depends on the other posts of both ends (with
    a shared card, of their nodes), a visit on shared cores depends on the other visits of its node, the posts depend on
    what ranks see, and that depends on the ends of the sequence.
    """
    nodes = 2 * size if rates.machine.shared_nic or rates.cores else 0  # a period consists of whole nodes
    start = rates.plan.ranks // 2 // size * size
    farthest: defaultdict[int, int] = defaultdict(int)
    reach = 0
    for rank in range(start, start + size):
        for step in rank_steps(rates, rank):
            for hop in (*step.sends, *step.recvs):
                distance = abs(hop.peer - rank)
                # The tag encodes the step at which both ends post the message.
                farthest[hop.tag // 2] = max(farthest[hop.tag // 2], distance)
                reach = max(reach, distance, *(abs(part.owner - rank) for part in hop.parts))
    return sum(farthest.values()) + 4 * reach + size + nodes
