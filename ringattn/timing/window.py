"""When some ranks begin some steps, for heat maps and traces: a window, never all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidInput, Unsupported
from ..machine.machine import Machine
from .problem import RingProblem, make_ring_problem
from .rates import Factors, Faults, Rates, factors
from .solvers.delay import DelayState
from .solvers.event_loop import simulate_events
from .solvers.recurrence import Phase, Ring, Stall

if TYPE_CHECKING:
    from ..plan.plan import Plan

#: Ranks x steps that are gone through to reach the end of a window, and those whose counts differ one by one.
REACHED, COUNTED = 1 << 31, 1 << 26


@dataclass(frozen=True)
class TimedMessage:
    """A message of the window: seconds at which it begins, once both ends are ready, and that it takes."""

    step: int
    source: int
    target: int
    begun: float
    seconds: float


@dataclass(frozen=True)
class StepWindow:
    """Seconds at which `ranks` begin `steps`, and the step after them: float64 [steps + 1, ranks]; for how long they are
    busy, [steps, ranks]; how much later they begin than without slow ranks, slow links and stalls, [steps + 1, ranks].

    NaN where a rank has no such step. Without jitter. `messages` of the solvers that know when they begin, else None.
    """

    solver: str
    ranks: range
    steps: range
    begun: np.ndarray
    busy: np.ndarray
    late: np.ndarray
    messages: tuple[TimedMessage, ...] | None


def window(
    plan: Plan,
    machine: Machine,
    *,
    ranks: range,
    steps: range,
    backward: bool = False,
    slow: Factors | None = None,
    slow_links: Factors | None = None,
    stalls: Sequence[Stall] = (),
) -> StepWindow:
    """The window of a pass; arguments as in `simulate`. Raises InvalidInput where the pass has no such ranks or steps,
    Unsupported where no solver knows them.
    """
    if not ranks or ranks.start < 0 or ranks.stop > plan.ranks or not steps or steps.start < 0:
        raise InvalidInput(
            f"a window of ranks {ranks.start} .. {ranks.stop - 1} and steps {steps.start} .. {steps.stop - 1}: the pass "
            f"has ranks 0 .. {plan.ranks - 1} and steps from 0 on"
        )
    rates = Rates(plan, machine, backward)
    faults = Faults(factors("slow", slow, plan.ranks), factors("slow_links", slow_links, plan.ranks), tuple(stalls))
    found = make_ring_problem(rates, faults)
    if isinstance(found, str):
        return _stepped(rates, faults, ranks, steps, found)
    if found.bounding:
        raise Unsupported(
            f"{plan.ranks:,} ranks hide their messages under a busiest one, whose time alone is known; try fewer ranks"
        )
    steps = range(steps.start, min(steps.stop, found.steps))
    if not steps:
        raise InvalidInput(f"the window begins at step {steps.start}, the pass has the steps 0 .. {found.steps - 1}")
    begun, busy, messages = _run(found, ranks, steps)
    plain = begun
    if faults:
        other = make_ring_problem(rates, Faults())
        assert isinstance(other, RingProblem) and not other.bounding
        plain = _run(other, ranks, steps)[0]
    return StepWindow("stencil", ranks, steps, begun, busy, begun - plain, messages)


def _run(
    found: RingProblem, ranks: range, steps: range
) -> tuple[np.ndarray, np.ndarray, tuple[TimedMessage, ...] | None]:
    ring = found.all_ranks()
    if ring.ranks * steps.stop > REACHED:
        raise Unsupported(
            f"{ring.ranks:,} ranks x {steps.stop:,} steps are gone through to reach the end of the window, of which at "
            f"most {REACHED:,} are; try an earlier one"
        )
    state, done = DelayState(ring), 0
    begun, busy = [], []
    messages: list[TimedMessage] | None = [] if ring.buffers == 1 else None
    for phase in ring.each_phase():
        skipped = max(0, min(phase.steps, steps.start - done))
        if skipped:
            state.advance(phase, skipped)
        for step in range(done + skipped, min(done + phase.steps, steps.stop)):
            now = state.finish()
            begun.append(_part(now, ranks))
            busy.append(_part(np.broadcast_to(ring.busy(phase), (ring.ranks,)), ranks))
            if messages is not None:
                messages += _messages(ring, phase, step, now, ranks)
            state.advance(phase, 1)
        done += phase.steps
        if done >= steps.stop:
            break
    begun.append(_part(state.finish(), ranks))
    return np.array(begun), np.array(busy), None if messages is None else tuple(messages)


def _part(values: np.ndarray, ranks: range) -> np.ndarray:
    return np.array(values[ranks.start : ranks.stop])


def _messages(ring: Ring, phase: Phase, step: int, now: np.ndarray, ranks: range) -> list[TimedMessage]:
    """With one slot a message begins when both its ends have begun the step."""
    found = []
    for lane in phase.messages:
        seconds = np.broadcast_to(lane.seconds, (ring.ranks,))
        for source in ranks:
            if np.isfinite(seconds[source]):
                target = (source + lane.sign) % ring.ranks
                found.append(
                    TimedMessage(step, source, target, float(max(now[source], now[target])), float(seconds[source]))
                )
    if phase.direct is not None:
        chords = phase.direct
        for source, target, seconds in zip(
            *(x.tolist() for x in (chords.source, chords.target, chords.seconds)), strict=True
        ):
            if source in ranks:
                found.append(TimedMessage(step, source, target, float(max(now[source], now[target])), seconds))
    return found


def _stepped(rates: Rates, faults: Faults, ranks: range, steps: range, why: str) -> StepWindow:
    """Step by step; the steps of a rank are its steps."""

    def run(given: Faults) -> tuple[np.ndarray, np.ndarray]:
        begun = np.full((len(steps) + 1, len(ranks)), np.nan)
        busy = np.full((len(steps), len(ranks)), np.nan)
        last = np.zeros(len(ranks), dtype=int)

        def seen(rank: int, step: int, at: float, seconds: float) -> None:
            if rank in ranks and steps.start <= step <= steps.stop:
                begun[step - steps.start, rank - ranks.start] = at
                if step < steps.stop:
                    busy[step - steps.start, rank - ranks.start] = seconds
                last[rank - ranks.start] = step

        simulate_events(rates, given, why, observe=seen)
        for place, step in enumerate(last):
            if steps.start <= step < steps.stop:
                busy[step - steps.start, place] = np.nan  # that is the end of the rank
        return begun, busy

    begun, busy = run(faults)
    return StepWindow("events", ranks, steps, begun, busy, begun - run(Faults())[0] if faults else 0 * begun, None)
