"""When the first ranks of a pass begin its first steps, for traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from ...machine.machine import Machine
from .problem import RingProblem, make_ring_problem
from .rates import Factors, Faults, Rates, parse_factors
from .solvers.delay import DelayState
from .solvers.event_loop import list_events
from .solvers.recurrence import NEVER, Phase, Stall

if TYPE_CHECKING:
    from ...plan.plan import Plan


@dataclass(frozen=True)
class TimedMessage:
    """A message in a trace: its start (when both ends have begun the step) and its duration, in seconds."""

    step: int
    source: int
    target: int
    begun: float
    seconds: float


@dataclass(frozen=True)
class StepWindow:
    """When the first ranks of a pass begin its first steps, in seconds; ranks with nothing to do take no time.

    All arrays are float64. `messages` is None if the solver does not know when messages begin.
    """

    #: When each rank begins each step, and the step after the last: [steps + 1, ranks].
    begun: np.ndarray
    #: How long each rank is busy in each step: [steps, ranks].
    busy: np.ndarray
    messages: tuple[TimedMessage, ...] | None


def window(
    plan: Plan,
    machine: Machine,
    *,
    ranks: int,
    steps: int,
    backward: bool = False,
    slow: Factors | None = None,
    slow_links: Factors | None = None,
    stalls: Sequence[Stall] = (),
) -> StepWindow:
    """Simulate when the first `ranks` ranks begin the first `steps` steps of a pass.

    All ranks or steps are included if there are fewer. The other arguments are those of `simulate`. Raises Unsupported
    if no solver can compute the times.
    """
    rates = Rates(plan, machine, backward)
    faults = Faults(
        parse_factors("slow", slow, plan.ranks), parse_factors("slow_links", slow_links, plan.ranks), tuple(stalls)
    )
    problem = make_ring_problem(rates, faults)
    if not isinstance(problem, str):
        return _solve_window(problem, ranks, steps)
    events = list_events(rates, faults, problem)
    return StepWindow(events.begun()[: steps + 1, :ranks], events.busy[:steps, :ranks], None)


def _solve_window(problem: RingProblem, ranks: int, steps: int) -> StepWindow:
    """The window of a ring, computed by the stencil."""
    ring = problem.ring
    state = DelayState(ring)
    now = state.finish()
    begun, busy = [now[:ranks]], []
    messages: list[TimedMessage] = []
    phases = ring.split(ring.phases if problem.counts is None else problem.counts.each_phase())
    each_step = (phase for phase in phases for _ in range(phase.steps))
    for step, phase in enumerate(islice(each_step, steps)):
        busy.append(np.broadcast_to(ring.busy(phase), (ring.ranks,))[:ranks])
        messages += _list_messages(phase, step, now, ranks)
        state.advance(phase, 1)
        now = state.finish()
        begun.append(now[:ranks])
    return StepWindow(np.array(begun), np.array(busy), tuple(messages))


def _list_messages(phase: Phase, step: int, now: np.ndarray, ranks: int) -> list[TimedMessage]:
    """The messages that the first `ranks` ranks send at a step; each begins when both ends have begun the step."""
    direct = phase.direct
    sent = [*zip(direct.source.tolist(), direct.target.tolist(), direct.seconds.tolist(), strict=True)]
    for lane in phase.messages:
        seconds = np.broadcast_to(lane.seconds, now.shape)[:ranks].tolist()
        sent += [(source, (source + lane.sign) % len(now), each) for source, each in enumerate(seconds)]
    return [
        TimedMessage(step, source, target, float(max(now[source], now[target])), seconds)
        for source, target, seconds in sent
        if source < ranks and seconds > NEVER
    ]
