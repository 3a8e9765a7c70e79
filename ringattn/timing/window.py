"""When some ranks begin some clocks, for heat maps and traces: a window, never all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidInput, Unsupported
from ..machine.machine import Machine
from .problem import Problem, problem
from .rates import Factors, Faults, Rates, factors
from .solvers.events import events
from .solvers.recurrence import Phase, Ring, Stall
from .solvers.stencil import Delay

if TYPE_CHECKING:
    from ..plan.plan import Plan

#: Ranks x clocks that are gone through to reach the end of a window, and those whose counts differ one by one.
REACHED, COUNTED = 1 << 31, 1 << 26


@dataclass(frozen=True)
class Message:
    """A message of the window: seconds at which it begins, once both ends are ready, and that it takes."""

    clock: int
    source: int
    target: int
    begun: float
    seconds: float


@dataclass(frozen=True)
class Window:
    """Seconds at which `ranks` begin `clocks`, and the clock after them: float64 [clocks + 1, ranks]; for how long they are
    busy, [clocks, ranks]; how much later they begin than without slow ranks, slow links and stalls, [clocks + 1, ranks].

    NaN where a rank has no such step. Without jitter. `messages` of the tiers that know when they begin, else None.
    """

    tier: str
    ranks: range
    clocks: range
    begun: np.ndarray
    busy: np.ndarray
    late: np.ndarray
    messages: tuple[Message, ...] | None


def window(
    plan: Plan,
    machine: Machine,
    *,
    ranks: range,
    clocks: range,
    backward: bool = False,
    slow: Factors | None = None,
    slow_links: Factors | None = None,
    stalls: Sequence[Stall] = (),
) -> Window:
    """The window of a pass; arguments as in `simulate`. Raises InvalidInput where the pass has no such ranks or clocks,
    Unsupported where no tier knows them.
    """
    if not ranks or ranks.start < 0 or ranks.stop > plan.ranks or not clocks or clocks.start < 0:
        raise InvalidInput(
            f"a window of ranks {ranks.start} .. {ranks.stop - 1} and clocks {clocks.start} .. {clocks.stop - 1}: the pass "
            f"has ranks 0 .. {plan.ranks - 1} and clocks from 0 on"
        )
    rates = Rates(plan, machine, backward)
    faults = Faults(factors("slow", slow, plan.ranks), factors("slow_links", slow_links, plan.ranks), tuple(stalls))
    found = problem(rates, faults)
    if isinstance(found, str):
        return _stepped(rates, faults, ranks, clocks, found)
    if found.bound:
        raise Unsupported(
            f"{plan.ranks:,} ranks hide their messages under a busiest one, whose time alone is known; try fewer ranks"
        )
    clocks = range(clocks.start, min(clocks.stop, found.clocks))
    if not clocks:
        raise InvalidInput(
            f"the window begins at clock {clocks.start}, the pass has the clocks 0 .. {found.clocks - 1}"
        )
    begun, busy, messages = _run(found, ranks, clocks)
    plain = begun
    if faults:
        other = problem(rates, Faults())
        assert isinstance(other, Problem) and not other.bound
        plain = _run(other, ranks, clocks)[0]
    return Window("D", ranks, clocks, begun, busy, begun - plain, messages)


def _run(found: Problem, ranks: range, clocks: range) -> tuple[np.ndarray, np.ndarray, tuple[Message, ...] | None]:
    ring = found.whole()
    if ring.ranks * clocks.stop > REACHED:
        raise Unsupported(
            f"{ring.ranks:,} ranks x {clocks.stop:,} clocks are gone through to reach the end of the window, of which at "
            f"most {REACHED:,} are; try an earlier one"
        )
    state, done = Delay(ring), 0
    begun, busy = [], []
    messages: list[Message] | None = [] if ring.buffers == 1 else None
    for phase in ring.each():
        skipped = max(0, min(phase.clocks, clocks.start - done))
        if skipped:
            state.advance(phase, skipped)
        for clock in range(done + skipped, min(done + phase.clocks, clocks.stop)):
            now = state.finish()
            begun.append(_part(now, ranks))
            busy.append(_part(np.broadcast_to(ring.busy(phase), (ring.ranks,)), ranks))
            if messages is not None:
                messages += _messages(ring, phase, clock, now, ranks)
            state.advance(phase, 1)
        done += phase.clocks
        if done >= clocks.stop:
            break
    begun.append(_part(state.finish(), ranks))
    return np.array(begun), np.array(busy), None if messages is None else tuple(messages)


def _part(values: np.ndarray, ranks: range) -> np.ndarray:
    return np.array(values[ranks.start : ranks.stop])


def _messages(ring: Ring, phase: Phase, clock: int, now: np.ndarray, ranks: range) -> list[Message]:
    """With one slot a message begins when both its ends have begun the clock."""
    found = []
    for lane in phase.lanes:
        seconds = np.broadcast_to(lane.seconds, (ring.ranks,))
        for source in ranks:
            if np.isfinite(seconds[source]):
                target = (source + lane.sign) % ring.ranks
                found.append(
                    Message(clock, source, target, float(max(now[source], now[target])), float(seconds[source]))
                )
    if phase.chords is not None:
        chords = phase.chords
        for source, target, seconds in zip(
            *(x.tolist() for x in (chords.source, chords.target, chords.seconds)), strict=True
        ):
            if source in ranks:
                found.append(Message(clock, source, target, float(max(now[source], now[target])), seconds))
    return found


def _stepped(rates: Rates, faults: Faults, ranks: range, clocks: range, why: str) -> Window:
    """Step by step; the steps of a rank are its clocks."""

    def run(given: Faults) -> tuple[np.ndarray, np.ndarray]:
        begun = np.full((len(clocks) + 1, len(ranks)), np.nan)
        busy = np.full((len(clocks), len(ranks)), np.nan)
        last = np.zeros(len(ranks), dtype=int)

        def seen(rank: int, step: int, at: float, seconds: float) -> None:
            if rank in ranks and clocks.start <= step <= clocks.stop:
                begun[step - clocks.start, rank - ranks.start] = at
                if step < clocks.stop:
                    busy[step - clocks.start, rank - ranks.start] = seconds
                last[rank - ranks.start] = step

        events(rates, given, why, seen=seen)
        for place, step in enumerate(last):
            if clocks.start <= step < clocks.stop:
                busy[step - clocks.start, place] = np.nan  # that is the end of the rank
        return begun, busy

    begun, busy = run(faults)
    return Window("F", ranks, clocks, begun, busy, begun - run(Faults())[0] if faults else 0 * begun, None)
