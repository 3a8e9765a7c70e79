"""The recurrence of a ring in plain Python, rank by rank and step by step: what every solver must equal."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ringattn.simulator.timing.solvers.recurrence import Ring

NEVER = float("-inf")


@dataclass
class Step:
    """One step: busy seconds by rank, and by direction the seconds of the message of each rank, or None."""

    busy: list[float]
    messages: dict[int, list[float | None]] = field(default_factory=dict)


def starts(ranks: int, steps: list[Step]) -> list[list[float]]:
    """S[k][r], when rank r begins step k; the last row is when it has finished."""
    begun = [[0.0] * ranks]
    for step in steps:
        now, here = begun[-1], {}
        for sign, row in step.messages.items():
            for rank, message in enumerate(row):
                if message is not None:
                    here[sign, rank] = max(now[rank], now[(rank + sign) % ranks]) + message
        then = []
        for rank in range(ranks):
            ready = now[rank] + step.busy[rank]
            for sign in (1, -1):
                ready = max(ready, here.get((sign, (rank - sign) % ranks), NEVER))
                ready = max(ready, here.get((sign, rank), NEVER))
            then.append(ready)
        begun.append(then)
    return begun


def steps_of(ring: Ring) -> list[Step]:
    found = []

    def at(value: float | np.ndarray, rank: int) -> float:
        return float(value[rank]) if isinstance(value, np.ndarray) else float(value)

    for phase in ring.phases:
        for _ in range(phase.steps):
            messages = {
                lane.sign: [at(lane.seconds, r) if at(lane.seconds, r) != NEVER else None for r in range(ring.ranks)]
                for lane in phase.messages
            }
            busy = []
            for r in range(ring.ranks):
                leaving = max((row[r] for row in messages.values() if row[r] is not None), default=0.0)
                arriving = [row[(r - sign) % ring.ranks] for sign, row in messages.items()]
                coming = max((message for message in arriving if message is not None), default=0.0)
                late = sum(s.seconds for s in ring.stalls if (s.rank, s.step) == (r, len(found)))
                visit = at(phase.compute, r)
                taken = ring.gamma * min(visit, (leaving + coming) / 2)
                busy.append(visit + taken + at(phase.merge, r) + late)
            found.append(Step(busy, messages))
    return found


def truth(ring: Ring) -> np.ndarray:
    return np.array(starts(ring.ranks, steps_of(ring))[-1])
