"""When a window of ranks begins a window of steps, for heat maps and traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...errors import InvalidInput, Unsupported
from ...machine.machine import Machine
from .problem import RingProblem, make_ring_problem
from .rates import Factors, Faults, Rates, parse_factors
from .solvers.delay import DelayState
from .solvers.event_loop import list_events
from .solvers.recurrence import NEVER, Phase, Ring, Stall

if TYPE_CHECKING:
    from ...plan.plan import Plan

#: The most ranks x steps that are computed to reach the end of a window.
REACHED = 1 << 31


@dataclass(frozen=True)
class TimedMessage:
    """A message of a window: its start (when both ends have begun the step) and its duration, in seconds."""

    step: int
    source: int
    target: int
    begun: float
    seconds: float


@dataclass(frozen=True)
class StepWindow:
    """When `ranks` begin `steps`, in seconds. A rank takes no time in steps in which it does nothing.

    All arrays are float64. `messages` is None if the solver does not know when messages begin.
    """

    ranks: range
    steps: range
    #: When each rank begins each step, and the step after the last: [steps + 1, ranks].
    begun: np.ndarray
    #: How long each rank is busy in each step: [steps, ranks].
    busy: np.ndarray
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
    """The window of a pass; other arguments as in `simulate`.

    Raises InvalidInput if the pass has no such ranks or steps, Unsupported if no solver can compute their times.
    """
    if not ranks or ranks.start < 0 or ranks.stop > plan.ranks or not steps or steps.start < 0:
        raise InvalidInput(
            f"a window of ranks {ranks.start} .. {ranks.stop - 1} and steps {steps.start} .. {steps.stop - 1}: the "
            f"pass has ranks 0 .. {plan.ranks - 1} and steps from 0 on; try a window inside them"
        )
    rates = Rates(plan, machine, backward)
    faults = Faults(
        parse_factors("slow", slow, plan.ranks), parse_factors("slow_links", slow_links, plan.ranks), tuple(stalls)
    )
    problem = make_ring_problem(rates, faults)
    if not isinstance(problem, str):
        return _solve_window(problem, ranks, _clip(steps, problem.steps))
    events = list_events(rates, faults, problem)
    steps = _clip(steps, len(events.busy))
    rows, columns = slice(steps.start, steps.stop), slice(ranks.start, ranks.stop)
    begun = events.begun()[steps.start : steps.stop + 1, columns]
    return StepWindow(ranks, steps, begun, events.busy[rows, columns], None)


def _clip(steps: range, count: int) -> range:
    """The part of `steps` within a pass of `count` steps. Raises InvalidInput if it is empty."""
    if steps.start >= count:
        raise InvalidInput(f"the window begins at step {steps.start}, but the pass has steps 0 .. {count - 1}")
    return range(steps.start, min(steps.stop, count))


def _solve_window(problem: RingProblem, ranks: range, steps: range) -> StepWindow:
    """The window of a ring, computed by the stencil."""
    ring = problem.ring
    if ring.ranks * steps.stop > REACHED:
        raise Unsupported(
            f"the window ends after {ring.ranks:,} ranks x {steps.stop:,} steps, and at most {REACHED:,} are computed; "
            "try an earlier window"
        )
    state, done, shown = DelayState(ring), 0, slice(ranks.start, ranks.stop)
    begun, busy = [], []
    messages: list[TimedMessage] = []
    for phase in ring.split(ring.phases if problem.counts is None else problem.counts.each_phase()):
        skipped = max(0, min(phase.steps, steps.start - done))
        if skipped:
            state.advance(phase, skipped)
        for step in range(done + skipped, min(done + phase.steps, steps.stop)):
            now = state.finish()
            begun.append(now[shown])
            busy.append(np.broadcast_to(ring.busy(phase), (ring.ranks,))[shown])
            messages += _list_messages(ring, phase, step, now, ranks)
            state.advance(phase, 1)
        done += phase.steps
        if done >= steps.stop:
            break
    begun.append(state.finish()[shown])
    return StepWindow(ranks, steps, np.array(begun), np.array(busy), tuple(messages))


def _list_messages(ring: Ring, phase: Phase, step: int, now: np.ndarray, ranks: range) -> list[TimedMessage]:
    """The messages that `ranks` send at a step; each begins when both ends have begun the step."""
    direct = phase.direct
    sent = [*zip(direct.source.tolist(), direct.target.tolist(), direct.seconds.tolist(), strict=True)]
    for lane in phase.messages:
        seconds = np.broadcast_to(lane.seconds, (ring.ranks,))
        sent += [(source, (source + lane.sign) % ring.ranks, float(seconds[source])) for source in ranks]
    return [
        TimedMessage(step, source, target, float(max(now[source], now[target])), seconds)
        for source, target, seconds in sent
        if source in ranks and seconds > NEVER
    ]
