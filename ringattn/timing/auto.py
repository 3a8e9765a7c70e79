"""`auto`: the layout and the schedule with the least predicted time, and the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd
from typing import cast

from ..errors import Unsupported
from ..layout.regular import MAX_RANGES, Layout
from ..machine.machine import Machine
from ..pattern import Pattern
from ..pattern.head_slice import HeadSlice
from ..plan.choice import Candidate, Choice
from ..plan.key_demand import KeyDemand
from ..plan.plan import Plan
from ..text import duration
from .costs import bound_memory
from .estimate import SAMPLED_STEPS, Estimate, estimate, mean_pairs
from .forecast import pair_seconds
from .metered import Metered, TooMany, sharing

#: Layouts that `auto` compares; the first of equals is taken.
LAYOUTS = ("contiguous", "zigzag", "striped(64)", "balanced")
#: Above this many ranks neither all-gather, which needs P - 1 messages, nor balanced, which counts 8 P chunks, is tried.
MANY = 256
#: An estimate that takes more lookups of tiles is made again from FEWER steps; where that takes as many, there is none.
LOOKUPS, FEWER = 20_000, 4
#: Plans for up to this many ranks are compared even where the ring is seen to be as fast as a schedule can be.
CHEAP = 8
#: Predicted times this near to each other are equal: the first in the order of the candidates, the simplest, is taken.
EQUAL = 1.02


def schedules(plan: Plan, machine: Machine) -> tuple[str, ...]:
    """Schedules that `auto` compares for the sizes of a plan, the ring first; the first of equals is taken."""
    ranks, inner = plan.ranks, machine.ranks_per_node
    nodes = (f"double_ring({inner})",) if 1 < inner < ranks and ranks % inner == 0 else ()
    split_ulysses = tuple(f"ulysses({size}, ring)" for size in team_sizes(plan, machine))
    return ("ring", "direct", *(("allgather",) if ranks <= MANY else ()), *nodes, *split_ulysses)


def team_sizes(plan: Plan, machine: Machine) -> list[int]:
    """Sizes of Ulysses teams that divide ranks and heads, and whose ranks are of one node; any where all links are alike."""
    node = min(machine.ranks_per_node, plan.ranks) if machine.ranks_per_node > 1 else plan.ranks
    most = gcd(plan.ranks, plan.heads, plan.kv_heads, node)
    return [size for size in range(2, most + 1) if most % size == 0]


def _no_teams(plan: Plan, machine: Machine) -> str:
    """Why no Ulysses teams are compared."""
    heads = f"{plan.ranks:,} ranks, {plan.heads} query heads"
    if machine.ranks_per_node == 1:
        return f"no size of a team divides {heads} and {plan.kv_heads} key/value heads"
    return f"no size of a team divides {heads}, {plan.kv_heads} key/value heads and nodes of {machine.ranks_per_node}"


def layouts(ranks: int) -> tuple[str, ...]:
    """Layouts that `auto` compares."""
    return LAYOUTS if ranks <= MANY else LAYOUTS[:-1]


def choose(
    plan: Callable[[Layout, str], Plan], layouts: Sequence[Layout], names: Sequence[str] | None, machine: Machine
) -> tuple[Plan, Choice]:
    """The plan of the best of all `layouts` with the schedules `names` (None: those of `auto`). Pure.

    It does not look at the step: all ranks choose alike. A schedule is taken only where the ring on the same layout was
    estimated, too, or where it was named.
    """
    first = plan(layouts[0], names[0] if names else "ring")
    idle = _idle(first)
    if idle:
        return first, _by_rule(first, (), f"{idle}: nothing was compared", machine)
    compared = _Comparison(plan, machine)
    for layout in layouts:
        if len(layouts) > 1 and len(layout.shard(0)) > MAX_RANGES:
            compared.leave(layout, "any schedule", f"shards of more than {MAX_RANGES} ranges")
        elif names:
            for name in names:
                compared.add(layout, name)
        else:
            compared.add_all(layout, schedules(first, machine))
            if not team_sizes(first, machine):
                compared.leave(layout, "ulysses", _no_teams(first, machine))
            if layout.ranks > MANY:
                compared.leave(layout, "allgather", f"a message to each of more than {MANY} ranks")
    if not compared.plans:
        why = f"an estimate takes more than {LOOKUPS:,} lookups of tiles: it was taken without a comparison"
        return first, _by_rule(first, tuple(compared.found), why, machine)
    plans = compared.plans
    order = sorted(plans, key=lambda one: one.seconds)  # stable
    best = next(candidate for candidate in plans if candidate.seconds <= order[0].seconds * EQUAL)
    rest = [candidate for candidate in order if candidate is not best]
    return plans[best], Choice(tuple(compared.found), best, _reason(best, rest), machine)


class _Comparison:
    """Candidates in the order in which they were looked at, and the plans of those with an estimate."""

    def __init__(self, plan: Callable[[Layout, str], Plan], machine: Machine) -> None:
        self.plan, self.machine = plan, machine
        self.found: list[Candidate] = []
        self.plans: dict[Candidate, Plan] = {}
        #: By layout and team. Schedules without teams ask the same questions, and the plan that is taken asks them again.
        self._asked: dict[tuple[Layout, int], tuple[KeyDemand, Metered]] = {}

    def leave(self, layout: Layout, name: str, why: str) -> None:
        """Note a candidate that is not compared."""
        self.found.append(Candidate(layout.name, name, None, why))

    def add_all(self, layout: Layout, names: Sequence[str]) -> None:
        """Compare the ring, and the other schedules where the ring is known and leaves something to gain."""
        ring, *others = names
        if not self.add(layout, ring):
            for name in others:
                self.leave(layout, name, "the ring, which it would be compared with, has no estimate on this layout")
            return
        made = self.plan(layout, ring)
        demand = self._asking(made, LOOKUPS)
        least = pair_seconds(made, self.machine, backward=False) * mean_pairs(demand)
        for name in others:
            fastest = min(one.seconds for one in self.plans)
            if layout.ranks > CHEAP and fastest <= least * EQUAL:
                self.leave(
                    layout,
                    name,
                    f"visits alone take {duration(least)}, so that nothing is much faster than the best above",
                )
            elif not self._fits(layout, name):
                self.leave(layout, name, "it does not fit into the memory of a rank")
            else:
                self.add(layout, name)

    def add(self, layout: Layout, name: str) -> bool:
        """Compare a schedule on a layout; whether there is an estimate of it."""
        made = self.plan(layout, name)
        for steps in (SAMPLED_STEPS, FEWER):
            demand = self._asking(made, LOOKUPS)
            try:
                estimated = estimate(made, self.machine, demand, steps)
            except TooMany:
                continue
            except Unsupported as error:  # the kernel times of the machine end before the tiles of larger shards
                if not self.plans:
                    raise
                self.leave(layout, made.schedule, str(error))
                return False
            candidate = Candidate(layout.name, made.schedule, estimated.prediction, basis=_basis(estimated))
            self.found.append(candidate)
            self.plans[candidate] = made if made.ulysses_size > 1 else made.asking(sharing(made.demand, demand))
            return True
        self.leave(layout, made.schedule, f"an estimate takes more than {LOOKUPS:,} lookups of tiles")
        return False

    def _asking(self, plan: Plan, budget: int) -> KeyDemand:
        """A demand of a plan that stops answering after so many lookups, and knows what was asked on the layout before."""
        key = plan.layout, plan.ulysses_size
        if key not in self._asked:
            metered = Metered(plan.pattern, budget)
            counting = cast(Pattern, metered)
            inner = plan.ring_plan(0)[0]
            pattern = HeadSlice(counting, 0) if plan.ulysses_size > 1 else counting
            self._asked[key] = replace(inner.demand, pattern=pattern), metered
        demand, metered = self._asked[key]
        metered.left = budget
        return demand

    def _fits(self, layout: Layout, name: str) -> bool:
        most = self.machine.memory
        return most is None or bound_memory(self.plan(layout, name)) <= most


def _basis(found: Estimate) -> str:
    ranks, steps = (
        f"{some:,} of {every:,}" if some < every else f"all {every:,}" for some, every in (found.ranks, found.steps)
    )
    return f"{ranks} ranks, {steps} steps"


def _idle(plan: Plan) -> str:
    """Why a plan leaves nothing to choose."""
    if plan.ranks == 1:
        return "one rank sends nothing"
    if not plan.tokens or not plan.batch:
        return "an empty input moves nothing"
    if plan.pattern.transient:
        return "the pattern is another one in every call"
    return ""


def _by_rule(plan: Plan, found: tuple[Candidate, ...], why: str, machine: Machine) -> Choice:
    picked = Candidate(plan.layout.name, plan.schedule, None)
    return Choice(found, picked, f"{picked}: {why}", machine)


def _reason(best: Candidate, rest: list[Candidate]) -> str:
    found = best.prediction
    assert found is not None
    share = found.exposed / found.seconds if found.seconds else 0.0
    if not found.messages:
        waits = "no messages"
    elif share < 1e-6:
        waits = "its messages hide under the computation"
    else:
        waits = f"{share:.0%} of it waiting" if share >= 0.01 else "less than 1% of it waiting"
    text = f"{best} is predicted to take {duration(found.seconds)}, {waits}"
    if not rest:
        return text
    other = rest[0]
    ratio = other.seconds / found.seconds if found.seconds else 1.0
    if ratio < 1:
        return f"{text}; {other} takes {1 - ratio:.1%} less, too little to leave the simpler choice"
    if ratio <= EQUAL:
        return f"{text}; the next, {other}, takes as long to within {EQUAL - 1:.0%}"
    return f"{text}; the next, {other}, takes {ratio:.2f} times as long"
