"""solver events of many ranks by few: where a mask repeats and sees only so far, a smaller plan has the same times.

Ranks own equal runs of tokens, and the mask and the nodes repeat every `period` of them. A rank's finish depends on others
through messages alone. Those that can delay it, one after another, were posted at steps ever earlier: it depends on no
rank farther away than the sum over steps of the longest distance of a message. So first ranks, last ranks and one period
between them, each with as many ranks around as that, have the times of the same ranks among any number more.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, Any

import numpy as np

from ...layout.regular import Contiguous
from ..rates import Faults, Rates
from ..resources import Loads, Traffic
from .events import RANKS, events
from .recurrence import Solved

if TYPE_CHECKING:
    from ...plan.plan import Plan
    from ...plan.steps import Step

#: Plans of up to this many ranks are simulated as they are.
LEAST = 64
#: Ranks of a period, beyond which the steps of one are too many to look at, and ranks whose steps are compared.
LONGEST, COMPARED = 32, 96
#: Largest difference of times that are equal but for the order of their sums, relative to the longest.
CLOSE = 1e-12


@dataclass(frozen=True)
class Fold:
    """The smaller plan. Its ranks `first` .. `first` + `period` - 1 stand for `times` periods of the whole plan."""

    plan: Plan
    first: int
    period: int
    times: int

    def unfolded(self, values: np.ndarray) -> np.ndarray:
        """What all ranks have, by what those of the smaller plan have."""
        middle = slice(self.first, self.first + self.period)
        parts = values[: self.first], np.tile(values[middle], self.times), values[middle.stop :]
        return np.concatenate(parts)


def folded(rates: Rates, why: str) -> tuple[Solved, Loads, Traffic, str] | str:
    """What `events` finds of a plan without faults, by a smaller one, and what was compared; or why that is not possible."""
    fold = found(rates)
    if isinstance(fold, str):
        return fold
    small = replace(rates, plan=fold.plan)
    solved, loads, traffic = events(small, Faults(), why)
    assert solved.finish is not None
    first, size = fold.first, fold.period
    spread = np.abs(solved.finish[first : first + size] - solved.finish[first + size : first + 2 * size]).max()
    assert spread <= CLOSE * solved.seconds, f"two periods of ranks finish {spread} s apart"
    compared = _compared(rates, fold)
    apart = f"depend on fewer than {first:,} to either side" if first else "depend on nobody beyond those"
    words = f"{fold.plan.ranks:,} of {rates.plan.ranks:,} ranks, step by step; they repeat every {size:,}, and {apart} ({why})"
    whole = Loads(*(fold.unfolded(x) for x in (loads.compute, loads.merge, loads.interference, loads.stalls)))
    return (
        Solved("events, folded", solved.seconds, fold.unfolded(solved.finish), words),
        whole,
        _traffic(rates, fold, traffic),
        f"steps and pairs of {compared:,} ranks of the whole plan with those of the smaller one; the finish of two periods",
    )


def found(rates: Rates) -> Fold | str:
    """The smaller plan, or why there is none."""
    plan, machine = rates.plan, rates.machine
    repeats = plan.pattern.period
    if plan.schedule not in ("ring", "direct"):
        return f"the schedule {plan.schedule} is neither ring nor direct"
    if not isinstance(plan.layout, Contiguous) or plan.tokens % plan.ranks or plan.tokens == 0:
        return "the layout is not contiguous with as many tokens on every rank"
    if repeats is None:
        return "the mask does not repeat, or not for all lengths"
    rows = plan.tokens // plan.ranks
    size = lcm(lcm(repeats, rows) // rows, machine.ranks_per_node)
    if size > LONGEST or 4 * size > plan.ranks:
        return f"the mask and the nodes repeat every {size:,} ranks, and {LONGEST} are looked at, or a fourth"
    around = 0 if _apart(plan, size) else _around(rates, size)
    if around is None:
        return "ranks that share a way out of their node depend on each other without end"
    first = -(-around // size) * size
    # Four groups at least: a visit at one distance must not share its step, nor a step beside it, with one around the ring.
    least = 2 * first + 4 * size
    if least + size > min(plan.ranks, RANKS):
        return f"a rank depends on others up to {around:,} away"
    times = (plan.ranks - least) // size
    small = plan.ranks - times * size
    layout = Contiguous(small * rows, small)
    return Fold(replace(plan, layout=layout, rotate=plan.rotates, choice=None), first, size, times + 1)


def _apart(plan: Plan, size: int) -> bool:
    """Whether no rank sees another's keys beyond its own group of `size` ranks. One group stands for all, as they repeat."""
    one, next_one, rest = range(size), range(size, 2 * size), range(2 * size, plan.ranks)
    meetings = ((one, next_one), (next_one, one), (next_one, rest), (rest, next_one))
    return not any(plan.demand.needs(queriers, owners) for queriers, owners in meetings)


def _around(rates: Rates, size: int) -> int | None:
    """Ranks on either side that the finish of one may depend on; None where that cannot be said.

    Beside the chains of messages: their time depends on what both sides post with them, that on what ranks see, and
    whether these do as others do on whether the sequence ends where they look.
    """
    if rates.machine.shared_nic and rates.machine.ranks_per_node > 1:
        return None
    start = rates.plan.ranks // 2 // size * size
    farthest: defaultdict[int, int] = defaultdict(int)
    reach = 0
    for rank in range(start, start + size):
        for step in _steps(rates.plan, rank, rates.backward):
            for hop in (*step.sends, *step.recvs):
                away = abs(hop.peer - rank)
                # Both sides post a message at the step that its tag holds.
                farthest[hop.tag // 2] = max(farthest[hop.tag // 2], away)
                reach = max(reach, away, *(abs(part.owner - rank) for part in hop.parts))
    return sum(farthest.values()) + 4 * reach + size


def _compared(rates: Rates, fold: Fold) -> int:
    """Check that ranks of the whole plan do what those of the smaller one do; how many were looked at."""
    small, more = fold.plan.ranks, rates.plan.ranks - fold.plan.ranks
    half = fold.first + fold.period
    looked = sorted({small * i // COMPARED for i in range(COMPARED)} | {0, fold.first, half, small - 1})
    # Those before the middle count from the first rank, those after it from the last; one is repeated in between.
    pairs = [(rank, rank if rank < half else rank + more) for rank in looked]
    pairs.append((fold.first, fold.first + fold.times // 2 * fold.period))
    for rank, other in pairs:
        mine, whole = (_relative(plan, one, rates.backward) for plan, one in ((fold.plan, rank), (rates.plan, other)))
        assert mine == whole, f"rank {other} of {rates.plan.ranks} does not do what rank {rank} of {small} does"
    return len(pairs)


def _relative(plan: Plan, rank: int, backward: bool) -> list[Any]:
    """The steps of a rank and the pairs of its visits, with ranks counted from itself."""

    def parts(given: Any) -> list[Any]:
        return [(part.kind, part.owner - rank, part.row_set) for part in given]

    turned = backward and plan.rotates == "queries"
    return [
        (
            [[(hop.peer - rank, parts(hop.parts), hop.until) for hop in hops] for hops in (step.sends, step.recvs)],
            parts(step.visits),
            [plan.demand.pairs(*((p.owner, rank) if turned else (rank, p.owner))) for p in step.visits],
        )
        for step in _steps(plan, rank, backward)
    ]


def _traffic(rates: Rates, fold: Fold, traffic: Traffic) -> Traffic:
    """Bytes, links and messages of the whole plan: those of the smaller one, and of the periods that it leaves out."""
    total = links = messages = 0
    for rank in range(fold.first, fold.first + fold.period):
        total += fold.plan.bytes_sent(rank, backward=rates.backward)
        messages += fold.plan.messages(rank, backward=rates.backward)
        sends = [hop for step in _steps(fold.plan, rank, rates.backward) for hop in step.sends]
        links += len({hop.peer for hop in sends if sum(map(fold.plan.part_bytes, hop.parts))})
    more = fold.times - 1
    return Traffic(
        traffic.total + more * total, traffic.busiest, traffic.links + more * links, traffic.messages + more * messages
    )


def _steps(plan: Plan, rank: int, backward: bool) -> tuple[Step, ...]:
    return plan.for_rank(rank).backward if backward else plan.for_rank(rank).forward
