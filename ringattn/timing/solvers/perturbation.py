"""solver perturbation: a uniform ring in which a few ranks are slower or stall once: their delays spread as light cones.

In a uniform ring with step time a = max(c + mu, l) a delay moves to a neighbour at the cost of the slack a - l, one
rank per step, and stays where it is for nothing. The delay of rank r is the largest sum over paths that end there:
of what slow ranks add per step while the path stays on them, and of stalls that it passes, less the slack of its moves.
Of two slow ranks between the same stalls a path uses one: what it gains is linear in how long it stays on either. So
the best path is found from stall to stall, and cones that overlap need no approximation. A first step of its own, in which
nothing is merged, leaves each rank with a delay of its own, as a stall does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .recurrence import Phase, Ring, Solved, Value

#: More slow ranks or stalls than this are left to solver stencil.
MOST = 64


@dataclass(frozen=True)
class _Base:
    """The uniform ring under the perturbations, and how far delays move in it."""

    ranks: int
    steps: int
    step: float
    slack: float
    #: Directions in which delays spread.
    signs: tuple[int, ...]

    def distance(self, source: int, target: int | np.ndarray) -> np.ndarray:
        ways = [(np.asarray(target) - source) * sign % self.ranks for sign in self.signs]
        return np.min(ways, axis=0)


def cones(ring: Ring, why: str = "") -> Solved | None:
    """Solve a uniform ring with one slot and at most MOST slow ranks and stalls, exactly; None where it is another."""
    if callable(ring.phases) or ring.buffers > 1:
        return None
    first, moving, last = _parts(ring.phases)
    links = [[(x.sign, x.seconds, x.gap) for x in phase.lanes] for phase in (first, moving) if phase is not None]
    if moving is None or any(isinstance(value, np.ndarray) for link in links for values in link for value in values):
        return None
    if links[0] != links[-1]:
        return None
    if not ring.waits and len({float(lane.seconds) for lane in moving.lanes}) > 1:
        return None
    usual, slow = _unusual(ring.busy(moving))
    if slow is None or len(slow) + len(ring.stalls) > MOST:
        return None
    message = max(float(lane.seconds) for lane in moving.lanes)
    step = max(usual, message)
    signs = (1, -1) if ring.waits else tuple({lane.sign for lane in moving.lanes})
    begun = 0 if first is None else 1
    base = _Base(ring.ranks, moving.steps, step, step - message, signs)
    gains = {rank: max(busy, message) - step for rank, busy in slow.items()}
    if any(gain < 0 for gain in gains.values()):
        return None
    stalls: dict[tuple[int, int], float] = {}
    for stall in ring.stalls:
        stalls[stall.step, stall.rank] = stalls.get((stall.step, stall.rank), 0.0) + stall.seconds
    busy = {rank: slow.get(rank, usual) for _, rank in stalls}
    events = [
        (time - begun, rank, max(busy[rank] + late, message) - step)
        for (time, rank), late in sorted(stalls.items())
        if begun <= time < begun + moving.steps
    ]
    before: float = 0.0
    known: list[tuple[int, int, float]] = []
    if first is not None:
        usual, slow = _unusual(ring.busy(first))
        if slow is None:
            return None
        before = max(usual, message)
        ranks = {*slow, *(rank for time, rank in stalls if time == 0)}
        done = {rank: slow.get(rank, usual) + stalls.get((0, rank), 0.0) for rank in sorted(ranks)}
        known = [(0, rank, max(seconds, message) - before) for rank, seconds in done.items()]
        if any(delay < 0 for _, _, delay in known):
            return None
    finish = before + moving.steps * step + _delays(base, gains, events, known)
    if last is not None:
        after = begun + base.steps
        late = [replace(s, step=s.step - after) for s in ring.stalls if s.step >= after]
        alone = replace(ring, stalls=tuple(late), phases=(last,))
        for phase in alone.each():
            finish = finish + phase.steps * ring.busy(phase)
    why = why or f"{len(gains)} slow ranks and {len(ring.stalls)} stalls in a uniform ring"
    return Solved("perturbation", float(finish.max()), finish, why)


def _parts(phases: tuple[Phase, ...]) -> tuple[Phase | None, Phase | None, Phase | None]:
    """A first step of its own, the one phase with messages, and the one after it without, where a ring is just these; the
    first and the last may be missing."""
    first = None
    if len(phases) > 1 and phases[0].steps == 1 and phases[1].lanes:
        first, *rest = phases
        phases = tuple(rest)
    if not 1 <= len(phases) <= 2 or not phases[0].lanes or (len(phases) == 2 and phases[1].lanes):
        return None, None, None
    return first, phases[0], phases[1] if len(phases) == 2 else None


def _unusual(busy: Value) -> tuple[float, dict[int, float] | None]:
    """What most ranks have, and the others by rank; None where too many differ."""
    if not isinstance(busy, np.ndarray):
        return float(busy), {}
    kinds, counts = np.unique(busy, return_counts=True)
    usual = float(kinds[counts.argmax()])
    others = np.flatnonzero(busy != usual)
    return usual, {int(rank): float(busy[rank]) for rank in others} if len(others) <= MOST else None


def _delays(
    base: _Base, gains: dict[int, float], events: list[tuple[int, int, float]], known: list[tuple[int, int, float]]
) -> np.ndarray:
    """Delay of every rank after `base.steps` steps, float64 [ranks]; events are (step, rank, gain) in order, `known`
    (0, rank, delay) at the start."""
    known = [*known]
    for step, rank, gain in events:
        before = float(_arriving(base, gains, known, step, np.array([rank]))[0])
        known.append((step + 1, rank, before + gain))
    return _arriving(base, gains, known, base.steps, np.arange(base.ranks))


def _arriving(
    base: _Base, gains: dict[int, float], known: list[tuple[int, int, float]], step: int, ranks: np.ndarray
) -> np.ndarray:
    """The largest delay of `ranks` at a step, by paths that begin anywhere at step 0 or at (step, rank, delay)."""
    found = np.zeros(len(ranks))
    for slow, gain in gains.items():
        away = base.distance(slow, ranks)
        stay = step - away
        found = np.where(stay >= 0, np.maximum(found, stay * gain - away * base.slack), found)
    for begun, source, delay in known:
        if begun > step:
            continue
        away = base.distance(source, ranks)
        found = np.where(away <= step - begun, np.maximum(found, delay - away * base.slack), found)
        for slow, gain in gains.items():
            there = int(base.distance(source, slow))
            hops = there + base.distance(slow, ranks)
            stay = step - begun - hops
            found = np.where(stay >= 0, np.maximum(found, delay + stay * gain - hops * base.slack), found)
    return found
