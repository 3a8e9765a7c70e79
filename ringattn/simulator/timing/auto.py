"""`auto`: chooses the layout and schedule with the least predicted time, and explains the choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import gcd, inf
from typing import Any

import numpy as np

from ...dtypes import ITEM_BYTES, check_type
from ...errors import Unsupported
from ...layout.regular import MAX_RANGES, Layout
from ...machine.machine import Machine
from ...machine.presets import get_machine
from ...pattern import Pattern, Tile
from ...pattern.base import ONE_HEAD, Position, Run, Side
from ...pattern.views import HeadSlice, PatternView
from ...plan.choice import Candidate, Choice, Prediction
from ...plan.demand import KeyDemand, sampled_ranks
from ...plan.plan import Plan
from ...plan.steps import Kind
from ...text import duration, durations, plural
from .costs import bound_memory
from .forecast import COUNTED, SAMPLED_STEPS, count_exchanges, count_pairs, estimate, host_seconds
from .kernel_seconds import expand_seconds, pair_seconds
from .rates import Rates

#: Layouts that `auto` compares; of equally fast ones it takes the first.
LAYOUTS = ("contiguous", "zigzag", "striped(64)", "balanced")
#: Above this many ranks `auto` tries neither allgather (P - 1 messages) nor balanced (counts 8 P chunks).
MANY = 256
#: With queries that differ from the keys on more ranks, nothing is simulated: bytes decide between pass-KV and pass-Q.
WHOLE = 16
#: The parts sent in a pass-Q forward.
_WITH_QUERIES: tuple[Kind, ...] = ("query", "part")
#: An estimate that needs more than LOOKUPS tile lookups is repeated with FEWER steps; if that needs too many as well,
#: there is no estimate.
LOOKUPS, FEWER = 20_000, 4
#: Enough thread blocks to fill any GPU.
FULL = 1e12
#: Predicted times within this factor count as equal: the first candidate, which is the simplest, is taken.
EQUAL = 1.02
#: The budget of `count_lookups`: about a second.
BUDGET = 72_000
#: A lookup for rows with a step > 1 costs as much as this many lookups for adjacent rows.
STRIDED = 10
#: A pattern's own answer for a whole rectangle, without tiles, costs as much as this many lookups.
WHOLE_RECTANGLE = 10


def list_schedules(plan: Plan, machine: Machine) -> tuple[str, ...]:
    """Schedules that `auto` compares for a plan's sizes, in order of preference among equally fast ones."""
    rings = _list_between(plan.ranks, machine.ranks_per_node)
    sizes = list_ulysses_sizes(plan)
    groups = {size: _list_between(plan.ranks // size, machine.ranks_per_node // size) for size in sizes}
    # Rings first: they bound what another schedule between the same groups may gain.
    ulysses = [f"ulysses({size}, ring)" for size in sizes]
    others = [f"ulysses({size}, {name})" for size, names in groups.items() for name in names[1:]]
    return (*rings, *ulysses, *others)


def _list_between(ranks: int, inner: int) -> list[str]:
    """Schedules between `ranks` ranks or groups, `inner` of them per node."""
    if ranks <= 2:
        return ["ring"] if ranks == 1 else ["ring", "direct", "allgather"]
    double_ring = [f"double_ring({inner})"] if 1 < inner < ranks and ranks % inner == 0 else []
    return ["ring", "direct", *(["allgather"] if ranks <= MANY else []), *double_ring]


def list_ulysses_sizes(plan: Plan) -> list[int]:
    """The Ulysses group sizes that fit a plan.

    Each divides the number of ranks and of query heads, and divides or is a multiple of the number of K/V heads.
    """
    most = gcd(plan.ranks, plan.heads)
    sizes = [size for size in range(2, most + 1) if most % size == 0]
    return [size for size in sizes if plan.kv_heads % size == 0 or size % plan.kv_heads == 0]


def list_layouts(ranks: int) -> tuple[str, ...]:
    """Layouts that `auto` compares."""
    return LAYOUTS if ranks <= MANY else LAYOUTS[:-1]


def choose(
    make: Callable[[Layout, str], Plan], layouts: Sequence[Layout], schedule: str | None, machine: Machine
) -> Plan:
    """The fastest plan, by modelled time, over all `layouts` and one or all schedules; `choice` says what was compared.

    `make` makes the plan for a layout and a schedule; with schedule=None, all schedules of `auto` are tried. Reads no
    clock, so that all ranks choose the same plan. Schedules other than the ring are compared only if the ring on the
    same layout has an estimate, or was skipped because its lower bound was already slower than the best plan.
    """
    first = make(layouts[0], schedule or "ring")
    reason = _explain_idle(first)
    if reason:
        return _take_first(first, (), f"{reason}: nothing was compared", machine)
    compared = _Comparison(make, machine, first)
    for layout in layouts:
        if len(layouts) > 1 and len(layout.shard(0)) > MAX_RANGES:
            compared.leave_out(layout, "any schedule", f"shards of more than {MAX_RANGES} ranges")
        elif schedule:
            compared.add(layout, schedule)
        else:
            compared.add_all(layout, list_schedules(first, machine))
            if not list_ulysses_sizes(first):
                heads = f"{first.heads} query heads and fits {first.kv_heads} key/value heads"
                why = f"no size of a Ulysses group divides {first.ranks:,} ranks and {heads}"
                compared.leave_out(layout, "ulysses", why)
            if layout.ranks > MANY:
                compared.leave_out(layout, "allgather", f"a message to each of more than {MANY} ranks")
    candidates, plans = tuple(compared.candidates), compared.plans
    if not plans:
        why = f"an estimate needs more than {LOOKUPS:,} tile lookups: taken without a comparison"
        return _take_first(first, candidates, why, machine)
    return _take_best(candidates, plans, machine)


def simulate_seconds(plan: Plan, machine: Machine) -> float:
    """The modelled seconds of a forward, from a simulation of every step of every rank, see `simulate`."""
    from .simulation import simulate  # rarely needed

    return simulate(plan, machine).seconds


def choose_form(rows: Plan, heads: Plan, machine: Machine) -> Plan:
    """The plan with the faster forward: one whose rows travel, or one whose ranks expand their own rows before it.

    Raises Unsupported where `predict` does.
    """
    at_home = expand_seconds(rows.ring_plan(0)[0], machine, False, 0, 0)
    return heads if predict(heads, machine).seconds + at_home < predict(rows, machine).seconds else rows


def predict(plan: Plan, machine: Machine) -> Prediction:
    """Estimate the time of a forward, as `auto` does: in each step, whatever takes longer, computing or messages.

    The time is that of the slowest rank examined; bytes and messages are the maximum over these ranks. Except on few
    ranks, all ranks are assumed to begin each step together, so that they wait only for messages. Messages of a step
    are sequential, but those within a node overlap those between nodes. A network card that a node's ranks share
    carries the bytes of all of them. A message that may last several steps is divided equally among them. Ranks that
    share cores compute longer. Rectangles (different queries and keys) and pass-Q in the forward are simulated, every
    step of every rank. Raises Unsupported if the schedule has no routes.
    """
    check_type("plan", plan, "Plan")
    check_type("machine", machine, "Machine")
    if plan.is_plain:
        return estimate(plan, machine, plan.ring_plan(0)[0].demand)[0]
    from .simulation import simulate  # as above

    found = simulate(plan, machine, solver="events")
    sent, messages = (max(map(count, range(plan.ranks))) for count in (plan.bytes_sent, plan.messages))
    return Prediction(found.seconds, found.compute, found.seconds - found.compute, sent, messages)


def choose_layout(
    plans: Sequence[Sequence[Plan]], weights: Sequence[int], machine: Machine | str | None
) -> tuple[Plan, ...]:
    """Choose the layout that is fastest for a whole model, and return the plans of all its masks on this layout.

    `plans[i]` are the plans of all masks on layout i; the forward of mask j counts `weights[j]` times. A layout is left
    out if some mask has no estimate on it. If that leaves none, the first layout is taken. Reads no clock.
    """
    on = get_machine(machine)
    alone = [
        [choose(lambda *_, p=p: p, [p.layout], p.schedule, on) if not p.choice else p for p in masks] for masks in plans
    ]
    choices = [[plan.choice for plan in masks if plan.choice] for masks in alone]
    seconds = [
        sum(choice.picked.seconds * weight if choice.picked.prediction else inf for choice, weight in pairs if weight)
        for pairs in (zip(masks, weights, strict=True) for masks in choices)
    ]
    best = next(i for i, total in enumerate(seconds) if total <= min(seconds) * EQUAL)
    shown = [f"{masks[0].layout.name} {duration(x)}" for masks, x in zip(plans, seconds, strict=True) if x < inf]
    layers = f"; all {plural(sum(weights), 'layer')}: {', '.join(shown) or 'no estimate'}"
    taken = zip(plans[best], choices[best], strict=True)
    return tuple(plan.with_choice(replace(choice, reason=choice.reason + layers)) for plan, choice in taken)


def choose_rectangle(
    make: Callable[[Layout, str, str], Plan],
    layouts: Sequence[Layout],
    schedule: str | None,
    rotates: Sequence[str],
    machine: Machine,
) -> Plan:
    """The fastest plan for queries that differ from the keys, by simulating every step of every rank.

    `make` makes the plan for a layout of the keys, a schedule and a `rotate`; `schedule` is as in `choose`. The layout
    and `rotate` that are fastest in the ring are used for the other schedules. With more than `WHOLE` ranks nothing is
    simulated: the first layout and schedule are taken, and the `rotate` that sends fewer bytes. The plan's `choice`
    says what was compared. Reads no clock.
    """
    name = schedule or "ring"
    first = make(layouts[0], name, rotates[0])
    reason = _explain_idle(first)
    if not reason and first.ranks > WHOLE:
        reason = f"{first.ranks:,} ranks are more than the {WHOLE} up to which all steps are simulated for a choice"
        keys = first.block_bytes("kv", first.block_heads * first.tokens)
        queries = sum(first.block_bytes(kind, first.heads * first.q_tokens) for kind in _WITH_QUERIES)
        first = make(layouts[0], name, rotates[-1 if queries < keys else 0])
    if reason:
        return _take_first(first, (), f"{reason}: nothing was compared", machine)
    candidates: list[Candidate] = []
    plans: dict[Candidate, Plan] = {}

    def add(layout: Layout, name: str, rotate: str) -> None:
        plan = make(layout, name, rotate)
        prediction = predict(plan, machine)
        basis, travels = "every step of every rank", plan.forward_rotates if len(rotates) > 1 else ""
        candidates.append(Candidate(plan.layout.name, plan.schedule, prediction, basis=basis, rotate=travels))
        plans[candidates[-1]] = plan

    for layout in layouts:
        if layout != layouts[0] and len(layout.shard(0)) > MAX_RANGES:
            candidates.append(Candidate(layout.name, "any schedule", None, f"shards of more than {MAX_RANGES} ranges"))
            continue
        for rotate in rotates:
            add(layout, name, rotate)
    best = _take_best(tuple(candidates), plans, machine)
    for name in () if schedule else list_schedules(first, machine)[1:]:
        fastest = min(candidate.seconds for candidate in plans)
        if fastest <= min(candidate.prediction.compute for candidate in plans if candidate.prediction) * EQUAL:
            why = f"visits alone take the {duration(fastest)} of the best so far, within {EQUAL - 1:.0%}"
        elif machine.memory is not None and bound_memory(make(best.layout.base, name, best.rotate)) > machine.memory:
            why = "it does not fit into the memory of a rank"
        else:
            add(best.layout.base, name, best.rotate)
            continue
        candidates.append(Candidate(best.layout.name, name, None, why))
    return _take_best(tuple(candidates), plans, machine)


def _take_best(candidates: tuple[Candidate, ...], plans: dict[Candidate, Plan], machine: Machine) -> Plan:
    """The plan of the first candidate whose time equals the least one (within EQUAL)."""
    by_time = sorted(plans, key=lambda candidate: candidate.seconds)  # stable
    best = next(
        candidate for candidate in candidates if candidate in plans and candidate.seconds <= by_time[0].seconds * EQUAL
    )
    others = [candidate for candidate in by_time if candidate is not best]
    reason = _explain(best, others, Rates(plans[best], machine, backward=False))
    return plans[best].with_choice(Choice(candidates, best, reason, machine))


class _Comparison:
    """Collects candidates, in the order of adding, and the plans of those with an estimate."""

    def __init__(self, make: Callable[[Layout, str], Plan], machine: Machine, first: Plan) -> None:
        self.make, self.machine = make, machine
        self._pattern = Metered(first.pattern, LOOKUPS)
        self.candidates: list[Candidate] = []
        self.plans: dict[Candidate, Plan] = {}
        #: Demands by (layout, Ulysses group size), shared by all their schedules and by the chosen plan.
        self._demands: dict[tuple[Layout, int], KeyDemand] = {}
        #: Lower bounds in seconds by (layout, Ulysses group size): all their schedules have the same visits.
        self._least: dict[tuple[Layout, int], float] = {}

    def leave_out(self, layout: Layout, name: str, why: str) -> None:
        """Record a candidate that is not compared."""
        self.candidates.append(Candidate(layout.name, name, None, why))

    def add_all(self, layout: Layout, names: Sequence[str]) -> None:
        """Estimate several schedules on a layout, the ring first; skip those that a lower bound shows to be slower."""
        for name in names:
            plan = self.make(layout, name)
            fastest = min((candidate.seconds for candidate in self.plans), default=inf)
            least = self._bound(plan) if self.plans else 0.0
            if fastest <= least * EQUAL:
                slow, fast = durations((least, fastest))
                why = f"pruned: its steps take at least {slow}, the best so far {fast}"
                self.leave_out(layout, name, why)
            elif name != names[0] and self.machine.memory is not None and bound_memory(plan) > self.machine.memory:
                self.leave_out(layout, name, "it does not fit into the memory of a rank")
            elif not self.add(layout, name) and name == names[0]:
                for other in names[1:]:
                    why = "the ring, its reference, has no estimate on this layout"
                    self.leave_out(layout, other, why)
                return

    def add(self, layout: Layout, name: str) -> bool:
        """Estimate a schedule on a layout and record it as a candidate; returns False if it has no estimate."""
        plan = self.make(layout, name)
        for steps in (SAMPLED_STEPS, FEWER):
            demand = self._metered_demand(plan)
            plan.ring_plan(0)[0].demand.share_answers(demand)
            try:
                prediction, basis = estimate(plan, self.machine, demand, steps)
            except TooMany:
                continue
            except Unsupported as error:  # the tiles of large shards exceed the machine's kernel times
                if not self.plans:
                    raise
                self.leave_out(layout, plan.schedule, str(error))
                return False
            candidate = Candidate(layout.name, plan.schedule, prediction, basis=basis)
            self.candidates.append(candidate)
            self.plans[candidate] = plan
            steps = 2 if prediction.messages > 2 * (plan.ulysses_size - 1) else 1
            # With shared cores, the waiting for them differs between schedules.
            if Rates(plan, self.machine, backward=False).cores is None:
                self._least.setdefault((layout, plan.ulysses_size), self._add_calls(plan, prediction.compute, steps))
            return True
        self.leave_out(layout, plan.schedule, f"an estimate needs more than {LOOKUPS:,} tile lookups")
        return False

    def _bound(self, plan: Plan) -> float:
        """A lower bound in seconds: from the visits of another schedule between the same groups, or the mean visits."""
        known = self._least.get((plan.layout, plan.ulysses_size))
        if known is not None:
            return known
        rates = self.machine.kernel_rates
        if rates is None or self.machine.kernel is not None:
            seconds = pair_seconds(plan, self.machine, backward=False)
        else:  # the highest rate of the kernel
            dims, item = plan.head_dim + plan.value_dim, ITEM_BYTES[plan.dtype]
            seconds = plan.batch * rates.pair_seconds(FULL, dense=True, dims=dims, backward=False, item=item)
        return self._add_calls(plan, seconds * self._mean_pairs)

    def _add_calls(self, plan: Plan, visits: float, steps: int = 1) -> float:
        """A lower bound in seconds for a plan whose visits take `visits` seconds in at least `steps` steps."""
        exchange, _, exchanges = count_exchanges(plan, self.machine)
        least = max(visits + exchange, host_seconds(plan.ranks, self.machine, steps + exchanges))
        return least + Rates(plan, self.machine, backward=False).call

    @cached_property
    def _mean_pairs(self) -> float:
        """The mean number of pairs of sampled ranks on the first layout with an estimate."""
        demand = self._metered_demand(next(plan for plan in self.plans.values() if plan.ulysses_size == 1))
        spaced = sampled_ranks(demand.layout.ranks, COUNTED, ends=True)
        return sum(count_pairs(demand, rank) for rank in spaced) / len(spaced)

    def _metered_demand(self, plan: Plan) -> KeyDemand:
        """The demand of a plan (of its first ring plan) with a full budget of lookups and the answers cached so far."""
        key = plan.layout, plan.ulysses_size
        if key not in self._demands:
            ring_plan = plan.ring_plan(0)[0]
            pattern = HeadSlice(self._pattern, 0) if plan.ulysses_size > 1 else self._pattern
            self._demands[key] = ring_plan.demand_of(pattern)
        self._pattern.left = LOOKUPS
        return self._demands[key]


def _explain_idle(plan: Plan) -> str:
    """Why there is nothing to choose for a plan; "" if there is."""
    if plan.ranks == 1:
        return "one rank sends nothing"
    if not plan.tokens or not plan.q_tokens or not plan.batch:
        return "an empty input moves nothing"
    if plan.pattern.transient:
        return "the pattern changes in every call"
    return ""


def _take_first(plan: Plan, candidates: tuple[Candidate, ...], why: str, machine: Machine) -> Plan:
    """The plan with a choice that says `why` nothing was compared."""
    picked = Candidate(plan.layout.name, plan.schedule, None)
    return plan.with_choice(Choice(candidates, picked, f"{picked}: {why}", machine))


def _explain(best: Candidate, others: list[Candidate], rates: Rates) -> str:
    """One sentence on why `best` is taken; `others` are ordered by time."""
    prediction = best.prediction
    assert prediction is not None
    share = prediction.exposed / prediction.seconds if prediction.seconds else 0.0
    waits = "no messages"
    if prediction.messages:
        waits = f"{'less than 1%' if share < 0.01 else f'{share:.0%}'} of it waiting"
    text = f"{best} is predicted to take {duration(prediction.seconds)}, {waits}"
    if rates.cores is not None:
        ranks = min(rates.machine.ranks_per_node, rates.plan.ranks)
        text += f", as {plural(ranks, 'rank')} share {plural(rates.cores, 'core')}"
    if not others:
        return text
    other = others[0]
    ratio = other.seconds / prediction.seconds if prediction.seconds else 1.0
    if ratio <= EQUAL:
        return f"{text}; {other} takes the same time within {EQUAL - 1:.0%}, and the simpler of the two is chosen"
    return f"{text}; the next, {other}, takes {ratio:.2f} times as long"


class TooMany(Exception):
    """Raised when a `Metered` pattern was asked for tiles too often."""


def _ask(name: str) -> Any:
    """A method of Metered that uses the pattern's own method `name` if it overrides it, else the metered tiles."""

    def ask(self: Metered, *arguments: Any) -> Any:
        if getattr(type(self.pattern), name) is getattr(Pattern, name):
            return getattr(Pattern, name)(self, *arguments)
        self._spend(WHOLE_RECTANGLE)
        return getattr(self.pattern, name)(*arguments)

    return ask


class Metered(PatternView):
    """A pattern that counts how often it is asked for tiles, and raises TooMany when `left` is used up."""

    def __init__(self, pattern: Pattern, budget: int) -> None:
        self.pattern, self.left = pattern, budget

    @property
    def period(self) -> int | None:
        return self.pattern.period

    def _spend(self, lookups: int) -> None:
        self.left -= lookups
        if self.left < 0:
            raise TooMany

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        cost = STRIDED if q.step > 1 or k.step > 1 else 1
        self._spend(cost)
        for tile in self.pattern.tiles(q, k, heads):
            self._spend(cost)
            yield tile

    count, paired = _ask("count"), _ask("paired")

    def run(self, side: Side, first: Position, last: Position) -> Run | None:
        self._spend(WHOLE_RECTANGLE if isinstance(first, np.ndarray) else 1)
        return super().run(side, first, last)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return self.pattern.visible(q, k, head, tokens)


def count_lookups(plan: Plan, rank: int) -> int | None:
    """How often planning a rank's steps asks the pattern for tiles; None if that exceeds BUDGET.

    The plan caches the answers, so planning these steps later does not search again.
    """
    ring_plan, place = plan.ring_plan(rank)  # with Ulysses groups, the plan between the groups
    if not plan.batch:
        return 0
    metered = Metered(ring_plan.pattern, BUDGET)
    demand = ring_plan.demand_of(metered)
    try:
        ring_plan.make_rotation(demand).steps(place)
    except TooMany:
        return None
    ring_plan.demand.share_answers(demand)
    return BUDGET - metered.left
