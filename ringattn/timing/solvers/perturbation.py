"""Solver perturbation: a uniform ring with a few slow ranks or stalls, whose delays spread as light cones.

In a uniform ring with step time a = max(c + mu, l), a delay moves to a neighbor within one step at the cost of the
slack a - l, and stays on its rank at no cost. The delay of rank r is the maximum over paths that end at r: what slow
ranks add per step while the path stays on them, plus the stalls that the path passes, less the slack of its moves.
Between two stalls the best path stays on one slow rank only, as its gain is linear in the steps that it stays on either
of two. So the best path is found from stall to stall, and cones that overlap need no approximation. A first step
without merging leaves each rank with a delay of its own, as a stall does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..problem import RingProblem
from .base import RingSolver, RingTimes
from .recurrence import Phase, Ring, Value

#: Rings with more slow ranks and stalls are left to solver stencil.
MOST = 64


class PerturbationSolver(RingSolver):
    """Solves uniform rings with a few slow ranks and stalls, in O(ranks x (slow ranks + stalls)^2)."""

    name = "perturbation"
    needs = "few slow ranks or stalls in a uniform ring with one receive slot"

    def solve_ring(self, problem: RingProblem) -> RingTimes | None:
        return solve_perturbation(problem.all_ranks())


@dataclass(frozen=True)
class _Parts:
    """A ring's phases: a first step of its own, the phase with messages, and a phase after it without messages."""

    first: Phase | None
    moving: Phase
    last: Phase | None

    @property
    def begin(self) -> int:
        """The step at which `moving` begins."""
        return 0 if self.first is None else 1


@dataclass(frozen=True)
class _UniformRing:
    """The ring without perturbations: `steps` steps of `step` seconds each, and how delays move from rank to rank.

    A delay moves by one rank per step in a direction of `signs`, and loses `slack` seconds on each move. A slow rank
    adds its `gains` to a delay at each step for which the delay stays on the rank.
    """

    ranks: int
    steps: int
    step: float
    slack: float
    signs: tuple[int, ...]
    gains: dict[int, float]

    def distance(self, source: int, target: int | np.ndarray) -> np.ndarray:
        """Moves from rank `source` to `target`."""
        ways = [(np.asarray(target) - source) * sign % self.ranks for sign in self.signs]
        return np.min(ways, axis=0)


@dataclass(frozen=True)
class _Delay:
    """`seconds` of delay of `rank` at the beginning of `step`."""

    step: int
    rank: int
    seconds: float


def solve_perturbation(ring: Ring) -> RingTimes | None:
    """The exact times of a uniform ring with one receive slot and at most MOST slow ranks and stalls; else None."""
    if callable(ring.phases) or ring.buffers > 1:
        return None
    parts = _split_phases(ring.phases)
    if parts is None or not _equal_links(ring, parts):
        return None
    usual, slow = _find_slow_ranks(ring.busy(parts.moving))
    if slow is None or len(slow) + len(ring.stalls) > MOST:
        return None
    message = max(float(sent.seconds) for sent in parts.moving.messages)
    step = max(usual, message)
    signs = (1, -1) if ring.waits else tuple({sent.sign for sent in parts.moving.messages})
    gains = {rank: max(busy, message) - step for rank, busy in slow.items()}
    if any(gain < 0 for gain in gains.values()):
        return None
    uniform = _UniformRing(ring.ranks, parts.moving.steps, step, step - message, signs, gains)
    stall_seconds = _sum_stalls(ring)
    before_seconds, delays = 0.0, list[_Delay]()
    if parts.first is not None:
        first_step = _solve_first_step(ring.busy(parts.first), stall_seconds, message)
        if first_step is None:
            return None
        before_seconds, delays = first_step
    stall_gains = [
        _Delay(at - parts.begin, rank, max(slow.get(rank, usual) + seconds, message) - step)
        for (at, rank), seconds in sorted(stall_seconds.items())
        if parts.begin <= at < parts.begin + uniform.steps
    ]
    finish = before_seconds + uniform.steps * step + _final_delays(uniform, stall_gains, delays)
    if parts.last is not None:
        after = parts.begin + uniform.steps
        stalls = tuple(replace(stall, step=stall.step - after) for stall in ring.stalls if stall.step >= after)
        for phase in replace(ring, stalls=stalls, phases=(parts.last,)).each_phase():
            finish = finish + phase.steps * ring.busy(phase)
    why = f"{len(gains)} slow ranks and {len(ring.stalls)} stalls in a uniform ring"
    return RingTimes(float(finish.max()), finish, why)


def _split_phases(phases: tuple[Phase, ...]) -> _Parts | None:
    """The parts of a ring that has one phase with messages, beside at most one step before it; None for other rings."""
    first = None
    if len(phases) > 1 and phases[0].steps == 1 and phases[1].messages:
        first, *others = phases
        phases = tuple(others)
    if not 1 <= len(phases) <= 2 or not phases[0].messages or (len(phases) == 2 and phases[1].messages):
        return None
    return _Parts(first, phases[0], phases[1] if len(phases) == 2 else None)


def _equal_links(ring: Ring, parts: _Parts) -> bool:
    """Whether messages take equally long on all links and in all steps, so that a delay costs the same everywhere."""
    links = [
        [(sent.sign, sent.seconds, sent.gap) for sent in phase.messages]
        for phase in (parts.first, parts.moving)
        if phase is not None
    ]
    if any(isinstance(value, np.ndarray) for phase_links in links for link in phase_links for value in link):
        return False
    if links[0] != links[-1]:
        return False
    # Where ranks wait for their sends, the longer direction sets the pace of both.
    return ring.waits or len({float(sent.seconds) for sent in parts.moving.messages}) == 1


def _find_slow_ranks(busy: Value) -> tuple[float, dict[int, float] | None]:
    """The seconds of most ranks, and the seconds of the other ranks by rank, None where these are more than MOST."""
    if not isinstance(busy, np.ndarray):
        return float(busy), {}
    seconds, counts = np.unique(busy, return_counts=True)
    usual = float(seconds[counts.argmax()])
    others = np.flatnonzero(busy != usual)
    return usual, {int(rank): float(busy[rank]) for rank in others} if len(others) <= MOST else None


def _sum_stalls(ring: Ring) -> dict[tuple[int, int], float]:
    """Seconds of stalls by (step, rank)."""
    sums: dict[tuple[int, int], float] = {}
    for stall in ring.stalls:
        sums[stall.step, stall.rank] = sums.get((stall.step, stall.rank), 0.0) + stall.seconds
    return sums


def _solve_first_step(
    busy: Value, stall_seconds: dict[tuple[int, int], float], message: float
) -> tuple[float, list[_Delay]] | None:
    """Seconds of the first step, and the delays with which ranks leave it; None where more than MOST ranks differ."""
    usual, slow = _find_slow_ranks(busy)
    if slow is None:
        return None
    seconds = max(usual, message)
    late_ranks = sorted({*slow, *(rank for step, rank in stall_seconds if step == 0)})
    delays = [
        _Delay(0, rank, max(slow.get(rank, usual) + stall_seconds.get((0, rank), 0.0), message) - seconds)
        for rank in late_ranks
    ]
    return None if any(delay.seconds < 0 for delay in delays) else (seconds, delays)


def _final_delays(ring: _UniformRing, stall_gains: list[_Delay], delays: list[_Delay]) -> np.ndarray:
    """Delay of every rank after all steps, float64 [ranks].

    `delays` are known at the beginning; `stall_gains` are what stalls add at their steps, in ascending order.
    """
    delays = [*delays]
    for gain in stall_gains:
        before = float(_largest_delays(ring, delays, gain.step, np.array([gain.rank]))[0])
        delays.append(_Delay(gain.step + 1, gain.rank, before + gain.seconds))
    return _largest_delays(ring, delays, ring.steps, np.arange(ring.ranks))


def _largest_delays(ring: _UniformRing, delays: list[_Delay], step: int, ranks: np.ndarray) -> np.ndarray:
    """The largest delay of `ranks` at a step, over paths from any rank at step 0 and from each of `delays`."""
    largest = np.zeros(len(ranks))
    for slow, gain in ring.gains.items():
        moves = ring.distance(slow, ranks)
        stay = step - moves
        largest = np.where(stay >= 0, np.maximum(largest, stay * gain - moves * ring.slack), largest)
    for delay in delays:
        if delay.step > step:
            continue
        moves = ring.distance(delay.rank, ranks)
        reached = moves <= step - delay.step
        largest = np.where(reached, np.maximum(largest, delay.seconds - moves * ring.slack), largest)
        for slow, gain in ring.gains.items():
            moves = int(ring.distance(delay.rank, slow)) + ring.distance(slow, ranks)
            stay = step - delay.step - moves
            largest = np.where(
                stay >= 0, np.maximum(largest, delay.seconds + stay * gain - moves * ring.slack), largest
            )
    return largest
