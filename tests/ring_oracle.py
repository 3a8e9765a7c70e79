"""The recurrence of a ring in plain Python, rank by rank and clock by clock: what every tier must equal."""

from __future__ import annotations

from dataclasses import dataclass, field

NEVER = float("-inf")


@dataclass
class Clock:
    """One clock: busy seconds by rank, and by direction (seconds, gap) of the message of each rank, or None."""

    busy: list[float]
    messages: dict[int, list[tuple[float, float] | None]] = field(default_factory=dict)


def starts(ranks: int, clocks: list[Clock], buffers: int = 1, waits: bool = True) -> list[list[float]]:
    """S[k][r], when rank r begins clock k; the last row is when it has finished."""
    begun = [[0.0] * ranks]
    arrivals: list[dict[tuple[int, int], float]] = []
    last: dict[tuple[int, int], float] = {}
    for k, clock in enumerate(clocks):
        now, here = begun[-1], {}
        for sign, row in clock.messages.items():
            for rank, message in enumerate(row):
                if message is not None:
                    ready = now[rank]
                    if k - buffers + 1 >= 0:
                        ready = max(ready, begun[k - buffers + 1][(rank + sign) % ranks])
                    here[sign, rank] = max(ready + message[0], last.get((sign, rank), NEVER) + message[1])
        last.update(here)
        arrivals.append(here)
        then = []
        for rank in range(ranks):
            ready = now[rank] + clock.busy[rank]
            for sign in (1, -1):
                ready = max(ready, here.get((sign, (rank - sign) % ranks), NEVER))
                if waits and k - buffers + 1 >= 0:
                    ready = max(ready, arrivals[k - buffers + 1].get((sign, rank), NEVER))
            then.append(ready)
        begun.append(then)
    return begun
