"""`auto`: the layout and the schedule with the least predicted time, and the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from .demand import Demand
from .layout import MAX_RANGES, Layout
from .pattern import Pattern, Tile
from .timing import Machine, Prediction, predict

if TYPE_CHECKING:
    from .plan import Plan

#: Layouts that `auto` compares; the first of equals is taken.
LAYOUTS = ("contiguous", "zigzag", "striped(64)", "balanced")
#: Above this many ranks neither all-gather, which needs P - 1 messages, nor balanced, which counts 8 P chunks, is tried.
MANY = 256
#: A candidate whose sampled ranks take more lookups of tiles to plan is left out: many small or far pieces move. Above
#: MANY ranks, where only local patterns can be planned at all, less is spent on finding out.
LOOKUPS, FEWER = 20_000, 5_000
#: What `within_reach` spends: about a second.
REACH = 60_000
#: A lookup between rows with steps costs as much as this many others.
STRIDED = 10
#: So does an answer that a pattern gives of a whole rectangle, without tiles.
SUMMED = 10
#: Predicted times this near to each other are equal.
EQUAL = 1 + 1e-9


@dataclass(frozen=True)
class Candidate:
    """A layout and a schedule, and the predicted forward, or why there is none."""

    layout: str
    schedule: str
    prediction: Prediction | None
    left_out: str = ""

    def __str__(self) -> str:
        return f"{self.schedule} on {self.layout}"


@dataclass(frozen=True)
class Choice:
    """What `auto` compared, what it took, and why in one sentence."""

    candidates: tuple[Candidate, ...]
    picked: Candidate
    reason: str
    machine: Machine


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


def schedules(ranks: int, machine: Machine) -> tuple[str, ...]:
    """Schedules that `auto` compares; the first of equals is taken."""
    nodes = (f"double_ring({machine.inner})",) if 1 < machine.inner < ranks and ranks % machine.inner == 0 else ()
    return ("ring", "direct", *(("allgather",) if ranks <= MANY else ()), *nodes)


def layouts(ranks: int) -> tuple[str, ...]:
    """Layouts that `auto` compares."""
    return LAYOUTS if ranks <= MANY else LAYOUTS[:-1]


def choose(
    plan: Callable[[Layout, str], Plan], layouts: Sequence[Layout], names: Sequence[str] | None, machine: Machine
) -> tuple[Plan, Choice]:
    """The plan of the best of all `layouts` with the schedules `names` (None: those of `auto`). Pure.

    It does not look at the clock: all ranks choose alike.
    """
    first = plan(layouts[0], names[0] if names else "ring")
    idle = _idle(first)
    if idle:
        return first, _by_rule(first, (), f"{idle}: nothing was compared", machine)
    found: list[Candidate] = []
    plans: dict[Candidate, Plan] = {}
    for layout in layouts:
        # One layout's schedules ask the same questions, and the plan that is taken asks them again.
        budget = LOOKUPS if layout.ranks <= MANY else FEWER
        metered = Metered(first.pattern, budget)
        asked = replace(first.demand, pattern=cast(Pattern, metered), layout=layout)
        if len(layouts) > 1 and len(layout.shard(0)) > MAX_RANGES:
            found.append(Candidate(layout.name, "any schedule", None, f"shards of more than {MAX_RANGES} ranges"))
            continue
        for name in names or schedules(layout.ranks, machine):
            made, metered.left = plan(layout, name), budget
            try:
                prediction = predict(made.asking(asked), machine)
            except TooMany:
                candidate = Candidate(layout.name, made.schedule, None, f"more than {budget:,} lookups to plan")
            else:
                candidate = Candidate(layout.name, made.schedule, prediction)
                plans[candidate] = made.asking(_sharing(made.demand, asked))
            found.append(candidate)
    if not plans:
        why = "every candidate takes too many lookups to plan: the first was taken without a comparison"
        return first, _by_rule(first, tuple(found), why, machine)
    order = sorted(plans, key=_seconds)  # stable
    best = next(candidate for candidate in plans if _seconds(candidate) <= _seconds(order[0]) * EQUAL)
    rest = [candidate for candidate in order if candidate is not best]
    return plans[best], Choice(tuple(found), best, _reason(best, rest), machine)


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


def _seconds(candidate: Candidate) -> float:
    assert candidate.prediction is not None
    return candidate.prediction.seconds


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
    ratio = _seconds(other) / found.seconds if found.seconds else 1.0
    compared = "no less" if ratio <= EQUAL else f"{ratio:.2f} times as long"
    return f"{text}; the next, {other}, {compared}"


def duration(seconds: float) -> str:
    """Seconds for people: 0.00123 -> 1.23 ms."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError
