"""`make_plan`: the plan of its arguments; for `auto` the layout and schedule with the least predicted time, and the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Any, cast

from .cache import Cache
from .errors import Unsupported
from .layout.regular import DEFAULT_LAYOUT, MAX_RANGES, Layout, make_layout
from .machine.machine import Machine
from .machine.presets import get_machine
from .pattern import Pattern, Tile, as_pattern
from .pattern.head_slice import SomeHeads
from .plan.choice import Candidate, Choice
from .plan.key_demand import Demand
from .plan.plan import Plan, check_sizes
from .plan.schedules import resolve
from .text import duration
from .timing.costs import most_memory
from .timing.estimate import CLOCKS, Estimate, estimate, mean_pairs
from .timing.forecast import pair_seconds

if TYPE_CHECKING:
    import torch

#: Layouts that `auto` compares; the first of equals is taken.
LAYOUTS = ("contiguous", "zigzag", "striped(64)", "balanced")
#: Above this many ranks neither all-gather, which needs P - 1 messages, nor balanced, which counts 8 P chunks, is tried.
MANY = 256
#: An estimate that takes more lookups of tiles is made again from FEWER clocks; where that takes as many, there is none.
LOOKUPS, FEWER = 20_000, 4
#: Plans for up to this many ranks are compared even where the ring is seen to be as fast as a schedule can be.
CHEAP = 8
#: What `within_reach` spends: about a second.
REACH = 60_000
#: A lookup between rows with steps costs as much as this many others.
STRIDED = 10
#: So does an answer that a pattern gives of a whole rectangle, without tiles.
SUMMED = 10
#: Predicted times this near to each other are equal: the first in the order of the candidates, the simplest, is taken.
EQUAL = 1.02


#: Bytes of the plans that `make_plan` remembers.
PLANS = 1 << 25
#: Plans made lately, with what was worked out from them.
_plans = Cache(PLANS, lambda plan: int(plan.kept_bytes), grows=True)


def make_plan(
    pattern: Pattern | str,
    *,
    tokens: int,
    ranks: int,
    layout: str | Layout = DEFAULT_LAYOUT,
    schedule: str = "auto",
    heads: int = 1,
    kv_heads: int | None = None,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: str | torch.dtype = "float32",
    batch: int = 1,
    wire_dtype: str | torch.dtype | None = None,
    machine: Machine | str | None = None,
    rotate: str = "auto",
) -> Plan:
    """The (cached) plan of attention with `pattern` (or its text) over `tokens` positions on `ranks` ranks.

    `heads` query heads share `kv_heads` (default: as many) key/value heads; `head_dim` is that of q and k,
    `value_dim` that of v (default: the same). `dtype` names the dtype of q, k and v. `wire_dtype` is the dtype in which
    keys, values and their gradients travel between ranks: by default K/V as they are and gradients in fp32 (fp64 for
    fp64); a narrower one is rounded to, gradients in every hop. `rotate` says what goes around in the backward: "keys"
    (with values and their gradients), "queries" (with out's gradient, lse and their own gradient), or "auto", what
    sends fewer bytes; with a wire dtype that is keys, as rounded queries have not the weights of the forward.

    layout="auto" and schedule="auto" take what the timing model predicts to be fastest in the forward, on `machine` (a
    Machine, "cpu" or "cuda"; default "cpu"); `plan.choice` says what was compared and why. Raises InvalidInput.
    """
    pattern = as_pattern(pattern)
    sizes = check_sizes(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, dtype=dtype, batch=batch,
        wire_dtype=wire_dtype, rotate=rotate,
    )  # fmt: skip
    pattern.check(tokens, heads)
    chosen = isinstance(layout, str) and layout.strip() == "auto"
    tried = layouts(ranks) if chosen else (layout,)
    made = tuple(make_layout(one, tokens=tokens, ranks=ranks, pattern=pattern, heads=heads) for one in tried)
    name = resolve(schedule, ranks, heads, sizes.kv_heads)
    inputs = pattern.bind(heads, tokens), *sizes
    chosen_machine = get_machine(machine)
    key: tuple[Any, ...]
    make: Callable[..., Plan]
    if chosen or name == "auto":
        make, key = _choice, (made, None if name == "auto" else (name,), chosen_machine, *inputs)
    else:
        make, key = Plan, (inputs[0], made[0], name, *inputs[1:])
    return make(*key) if pattern.transient else _plans.answer((make, *key), lambda: make(*key))


def _choice(
    tried: tuple[Layout, ...], names: tuple[str, ...] | None, machine: Machine, pattern: Pattern, *inputs: Any
) -> Plan:
    plan, choice = choose(lambda layout, name: Plan(pattern, layout, name, *inputs), tried, names, machine)
    return plan.asking(plan.demand, choice)


class TooMany(Exception):
    """The budget of lookups is spent."""


class Metered:
    """A pattern that counts how often it is asked, and stops answering when its budget is spent."""

    def __init__(self, pattern: Pattern, budget: int) -> None:
        self.pattern, self.left = pattern, budget

    def _spend(self, lookups: int) -> None:
        self.left -= lookups
        if self.left < 0:
            raise TooMany

    def tiles(self, q: range, k: range, heads: range = range(1)) -> Iterator[Tile]:
        cost = STRIDED if q.step > 1 or k.step > 1 else 1
        self._spend(cost)
        for tile in self.pattern.tiles(q, k, heads):
            self._spend(cost)
            yield tile

    def key_run(self, first: int, last: int) -> tuple[int, int] | None:
        self._spend(1)
        return self.pattern.key_run(first, last)

    def query_run(self, first: int, last: int) -> tuple[int, int] | None:
        self._spend(1)
        return self.pattern.query_run(first, last)

    def count(self, q: range, k: range, heads: range = range(1)) -> int:
        if type(self.pattern).count is Pattern.count:
            return sum(len(tile.heads) * tile.pairs for tile in self.tiles(q, k, heads))
        self._spend(SUMMED)
        return self.pattern.count(q, k, heads)

    def keys(self, q: range, k: range, heads: range = range(1)) -> Iterator[tuple[range, range]]:
        yield from self._rows(Pattern.keys, q, k, heads)

    def queries(self, q: range, k: range, heads: range = range(1)) -> Iterator[tuple[range, range]]:
        yield from self._rows(Pattern.queries, q, k, heads)

    def _rows(self, find: Callable[..., Iterator[tuple[range, range]]], *asked: range) -> Iterator[tuple[range, range]]:
        own = getattr(self.pattern, find.__name__)
        if own.__func__ is find:
            yield from find(self, *asked)  # by tiles
        else:
            self._spend(SUMMED)
            yield from own(*asked)


def schedules(plan: Plan, machine: Machine) -> tuple[str, ...]:
    """Schedules that `auto` compares for the sizes of a plan, the ring first; the first of equals is taken."""
    ranks, inner = plan.ranks, machine.inner
    nodes = (f"double_ring({inner})",) if 1 < inner < ranks and ranks % inner == 0 else ()
    teams = tuple(f"ulysses({size}, ring)" for size in team_sizes(plan, machine))
    return ("ring", "direct", *(("allgather",) if ranks <= MANY else ()), *nodes, *teams)


def team_sizes(plan: Plan, machine: Machine) -> list[int]:
    """Sizes of Ulysses teams that divide ranks and heads, and whose ranks are of one node; any where all links are alike."""
    node = min(machine.inner, plan.ranks) if machine.inner > 1 else plan.ranks
    most = gcd(plan.ranks, plan.heads, plan.kv_heads, node)
    return [size for size in range(2, most + 1) if most % size == 0]


def _no_teams(plan: Plan, machine: Machine) -> str:
    """Why no Ulysses teams are compared."""
    heads = f"{plan.ranks:,} ranks, {plan.heads} query heads"
    if machine.inner == 1:
        return f"no size of a team divides {heads} and {plan.kv_heads} key/value heads"
    return f"no size of a team divides {heads}, {plan.kv_heads} key/value heads and nodes of {machine.inner}"


def layouts(ranks: int) -> tuple[str, ...]:
    """Layouts that `auto` compares."""
    return LAYOUTS if ranks <= MANY else LAYOUTS[:-1]


def choose(
    plan: Callable[[Layout, str], Plan], layouts: Sequence[Layout], names: Sequence[str] | None, machine: Machine
) -> tuple[Plan, Choice]:
    """The plan of the best of all `layouts` with the schedules `names` (None: those of `auto`). Pure.

    It does not look at the clock: all ranks choose alike. A schedule is taken only where the ring on the same layout was
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
        self._asked: dict[tuple[Layout, int], tuple[Demand, Metered]] = {}

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
        for clocks in (CLOCKS, FEWER):
            demand = self._asking(made, LOOKUPS)
            try:
                estimated = estimate(made, self.machine, demand, clocks)
            except TooMany:
                continue
            except Unsupported as error:  # the kernel times of the machine end before the tiles of larger shards
                if not self.plans:
                    raise
                self.leave(layout, made.schedule, str(error))
                return False
            candidate = Candidate(layout.name, made.schedule, estimated.prediction, basis=_basis(estimated))
            self.found.append(candidate)
            self.plans[candidate] = made if made.team > 1 else made.asking(_sharing(made.demand, demand))
            return True
        self.leave(layout, made.schedule, f"an estimate takes more than {LOOKUPS:,} lookups of tiles")
        return False

    def _asking(self, plan: Plan, budget: int) -> Demand:
        """A demand of a plan that stops answering after so many lookups, and knows what was asked on the layout before."""
        key = plan.layout, plan.team
        if key not in self._asked:
            metered = Metered(plan.pattern, budget)
            counting = cast(Pattern, metered)
            inner = plan.member(0)[0]
            pattern = SomeHeads(counting, 0) if plan.team > 1 else counting
            self._asked[key] = replace(inner.demand, pattern=pattern), metered
        demand, metered = self._asked[key]
        metered.left = budget
        return demand

    def _fits(self, layout: Layout, name: str) -> bool:
        most = self.machine.memory
        return most is None or most_memory(self.plan(layout, name)) <= most


def _basis(found: Estimate) -> str:
    ranks, clocks = (
        f"{some:,} of {every:,}" if some < every else f"all {every:,}" for some, every in (found.ranks, found.clocks)
    )
    return f"{ranks} ranks, {clocks} clocks"


def within_reach(plan: Plan, rank: int) -> tuple[Plan, int] | None:
    """The plan with the steps of a rank made, and the lookups of tiles that they took; None where they take too many."""
    metered = Metered(plan.pattern, REACH)
    asked = replace(plan.demand, pattern=cast(Pattern, metered))
    try:
        plan.asking(asked).for_rank(rank)
    except TooMany:
        return None
    return plan.asking(_sharing(plan.demand, asked)), REACH - metered.left


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


def _sharing(demand: Demand, other: Demand) -> Demand:
    """`demand`, knowing the answers that `other` has found."""
    same: Any = replace(demand)
    vars(same)["memory"] = other.memory
    return cast(Demand, same)


def _reason(best: Candidate, rest: list[Candidate]) -> str:
    found = best.prediction
    assert found is not None
    hidden = found.exposed <= 0.01 * found.seconds
    waits = (
        "its messages hide under the computation" if hidden else f"{found.exposed / found.seconds:.0%} of it waiting"
    )
    if not found.messages:
        waits = "no messages"
    text = f"{best} is predicted to take {duration(found.seconds)}, {waits}"
    if not rest:
        return text
    other = rest[0]
    ratio = other.seconds / found.seconds if found.seconds else 1.0
    compared = "no less" if ratio <= EQUAL else f"{ratio:.2f} times as long"
    return f"{text}; the next, {other}, {compared}"
