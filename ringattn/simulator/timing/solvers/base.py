"""What every solver takes and returns. A new solver is one file with a subclass of Solver, and its entry in SOLVERS."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from ..problem import RingProblem, TimingProblem
from ..resources import Loads, Traffic, survey
from .recurrence import Ring


@dataclass(frozen=True)
class RingTimes:
    """Times of a ring: seconds until the last rank has finished, and the finish of each rank, float64 [ranks].

    `why` says why the times are exact, in words for the report. Where ranks repeat, `period` is a ring of the ranks of
    one period.
    """

    seconds: float
    finish: np.ndarray
    why: str
    period: Ring | None = None


@dataclass(frozen=True)
class Solved:
    """A solved timing problem: times, loads and traffic of one pass.

    `seconds` pass until the last rank has finished, and `finish` holds the seconds of each rank, float64 [ranks]. `why`
    says why the solver could be used, and `compared` which facts of the plan were compared before the problem was
    simplified; it is empty where every step was simulated.
    """

    solver: str
    seconds: float
    finish: np.ndarray
    why: str
    loads: Loads
    traffic: Traffic
    compared: str = ""
    #: Seconds until the last rank has finished where messages take no time and ranks still wait for each other. None:
    #: the solver does not know, and all waiting counts as waiting for messages.
    peers: float | None = None


class Solver(ABC):
    """An exact algorithm for one class of timing problems."""

    #: The value of `solver=` that selects the algorithm.
    name: str
    #: What a problem must have; completes the sentence "solver=NAME needs ...".
    needs: str

    @abstractmethod
    def solve(self, problem: TimingProblem) -> Solved | None:
        """Return the solved problem, or None where the problem lacks what the solver needs.

        Raises Unsupported where the problem has what the solver needs, but is too large for the solver.
        """


class RingSolver(Solver):
    """A solver of the ring recurrence. Subclasses find the times; loads and traffic are summed over the phases."""

    @abstractmethod
    def solve_ring(self, problem: RingProblem) -> RingTimes | None:
        """Return the times of all ranks of the problem, or None where the ring lacks what the solver needs."""

    def solve(self, problem: TimingProblem) -> Solved | None:
        if problem.ring is None:
            return None
        times = self.solve_ring(problem.ring)
        if times is None:
            return None
        whole = problem.ring.ring
        ring = whole if times.period is None else times.period
        loads, traffic = survey(ring, whole.ranks // ring.ranks)
        peers = loads.busiest
        if loads.waits(times.seconds):
            instant = self.solve_ring(replace(problem.ring, ring=whole.without_message_times()))
            assert instant is not None, "without the times of messages, ranks are no less alike"
            peers = instant.seconds
        return Solved(self.name, times.seconds, times.finish, times.why, loads, traffic, problem.ring.compared, peers)
