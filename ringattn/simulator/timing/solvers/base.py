"""The result of every solver: the times, loads and traffic of one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..problem import TimingProblem
from .recurrence import Ring, Stall

#: The relative difference up to which two sums of the same numbers, in different orders, count as equal.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Loads:
    """Seconds of a pass in which each rank is busy, by cause: float64 [ranks], or [1] if all ranks are alike."""

    #: Visits.
    compute: np.ndarray
    merge: np.ndarray
    #: Seconds that messages add to visits.
    interference: np.ndarray
    stalls: np.ndarray

    @classmethod
    def of_stalls(cls, ranks: int, stalls: Sequence[Stall]) -> Loads:
        """The loads of stalls alone, to add others to."""
        loads = cls(*(np.zeros(ranks) for _ in range(4)))
        for stall in stalls:
            loads.stalls[stall.rank] += stall.seconds
        return loads

    @property
    def busiest(self) -> float:
        """Seconds in which the busiest rank is busy, over all causes."""
        return float((self.compute + self.merge + self.interference + self.stalls).max())

    def waits(self, seconds: float) -> bool:
        """Whether even the busiest rank waits in a pass of `seconds`."""
        return seconds - self.busiest > ROUNDING * seconds

    def causes(self, seconds: float, peers: float | None) -> tuple[float, dict[str, float]]:
        """(mean seconds of computing, further seconds of the pass by cause); all together they sum to `seconds`.

        Causes are added one after another; each counts the seconds by which it lengthens the busy time of the busiest
        rank. The rest is waiting: `peers` is the time of the pass if messages took none, so waiting up to `peers` is
        for slow peers, and waiting beyond it is for messages.
        """
        busy = self.compute.copy()
        mean = float(busy.mean())
        longest = float(busy.max())
        exposed = {"imbalance": longest - mean if longest - mean > ROUNDING * longest else 0.0}
        for name, added in (("merge", self.merge), ("interference", self.interference), ("stalls", self.stalls)):
            busy += added
            exposed[name], longest = float(busy.max()) - longest, float(busy.max())
        wait = seconds - longest if seconds - longest > ROUNDING * seconds else 0.0
        for_peers = 0.0 if peers is None or peers - longest <= ROUNDING * seconds else min(peers - longest, wait)
        return mean, exposed | {"wait for peers": for_peers, "wait for messages": wait - for_peers}


@dataclass(frozen=True)
class Traffic:
    """How many bytes and messages ranks send in one pass; a link leads from one rank to another."""

    #: Bytes on all links.
    total: int
    #: Bytes on the busiest link.
    busiest: int
    #: Links that carry bytes.
    links: int
    messages: int

    @classmethod
    def of(cls, carried: np.ndarray, messages: int) -> Traffic:
        """Sum up the bytes on each link, `carried` (int64 [links]), of this many messages."""
        total = sum(carried.tolist())  # Python integers: the sum over all ranks may exceed int64
        return cls(total, int(carried.max(initial=0)), int(np.count_nonzero(carried)), messages)


def survey(ring: Ring, copies: int = 1) -> tuple[Loads, Traffic]:
    """(loads, traffic) of a ring, in one pass; traffic is that of `copies` such rings.

    Loads are for each rank, or for a single rank if all are alike.
    """
    alike = not ring.stalls and not any(phase.arrays for phase in ring.phases)
    loads = Loads.of_stalls(1 if alike else ring.ranks, ring.stalls)
    carried: dict[int, np.ndarray] = {}
    messages = 0
    for phase in ring.phases:
        loads.compute[:] += phase.steps * phase.compute
        loads.merge[:] += phase.steps * phase.merge
        loads.interference[:] += phase.steps * (ring.busy(phase) - phase.merge - phase.compute)
        for lane in phase.messages:
            sent = np.broadcast_to(np.asarray(lane.bytes, dtype=np.int64) * np.isfinite(lane.seconds), (ring.ranks,))
            messages += copies * phase.steps * int(np.count_nonzero(sent))
            carried[lane.sign] = carried.get(lane.sign, 0) + phase.steps * sent
    traffic = Traffic.of(np.concatenate([*carried.values(), np.zeros(0, dtype=np.int64)]), messages)
    return loads, replace(traffic, total=copies * traffic.total, links=copies * traffic.links)


class RingTimes(NamedTuple):
    """When each rank of a ring finishes, float64 [ranks].

    `why` is the reason, for the report, why the times are exact. `ring` is the ring itself or, if ranks repeat, a ring
    of the ranks in one period.
    """

    finish: np.ndarray
    why: str
    ring: Ring


@dataclass(frozen=True)
class Solved:
    """The solution of a timing problem: when ranks finish one pass, and their loads and traffic.

    `finish` is when each rank has finished, float64 [ranks]. `why` says why the solver could be used.
    """

    solver: str
    finish: np.ndarray
    why: str
    loads: Loads
    traffic: Traffic
    #: Seconds of the pass if messages took no time but ranks still waited for each other. None: unknown, and all
    #: waiting counts as waiting for messages.
    peers: float | None = None

    @property
    def seconds(self) -> float:
        """When the last rank has finished."""
        return float(self.finish.max())


def solve_ring(name: str, problem: TimingProblem, solve: Callable[[Ring, bool], RingTimes | None]) -> Solved | None:
    """Solve the ring of a problem with the function `solve` of the solver `name`.

    `solve(ring, instant)` returns the times; with `instant`, messages take no time. None if the plan has no ring, if
    its steps are too many to store, or if `solve` returns None because the ring lacks what it needs.
    """
    if isinstance(problem.ring, str) or problem.ring.counts is not None:
        return None
    ring = problem.ring.ring
    times = solve(ring, False)
    if times is None:
        return None
    loads, traffic = survey(times.ring, ring.ranks // times.ring.ranks)
    solved = Solved(name, times.finish, times.why, loads, traffic, loads.busiest)
    if loads.waits(solved.seconds):
        instant = solve(ring, True)
        assert instant is not None, "the same ranks repeat"
        solved = replace(solved, peers=float(instant.finish.max()))
    return solved
