"""What a simulation of time found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..machine.machine import Machine
from .costs import Failures
from .resources import Traffic

#: Fields of a machine that may be None, and what is not modelled then.
EFFECTS = {
    "merge": "merging of partial results",
    "gamma": "visits slowed down by messages",
    "jitter": "times that vary from visit to visit",
    "call": "what a call takes beside visits and messages",
    "memory": "whether the memory is enough",
    "watts": "energy",
    "price": "cost",
    "mtbf": "failures and checkpoints",
}
#: Causes of exposed time that a field of the machine must be given for.
CAUSES = {"merge": "merge", "interference": "gamma", "jitter": "jitter", "call": "call"}
#: What no machine here says anything of.
ALWAYS = ("contention inside the network beyond a node's shared way out", "start-up of kernels and of the program")


@dataclass(frozen=True)
class Timeline:
    """Modelled time of one pass of a plan on a machine. Seconds, bytes; float64.

    `exposed` says, by cause, what makes the pass longer than the mean time that a rank computes: imbalance (of the
    busiest rank), merge, interference, stalls, wait (for messages), jitter and call; with `compute` they sum to `seconds`.
    """

    direction: str
    ranks: int
    seconds: float
    #: The algorithm that found it: A .. F of the ladder, and why it could be used.
    solver: str
    why: str
    #: What of the plan was compared to see that it may be simplified; empty where every step was simulated.
    compared: str
    #: When each rank has finished, without jitter, float64 [ranks]; None where the solver finds only the last of them.
    finish: np.ndarray | None
    #: Mean seconds that a rank computes visits.
    compute: float
    exposed: dict[str, float]
    #: 95 % interval of the mean time with jitter, and whether it is extrapolated from smaller rings.
    interval: tuple[float, float] | None
    extrapolated: bool
    #: Bytes on links, counted; None where the solver does not count them.
    traffic: Traffic | None
    #: Bytes of one rank by category.
    memory: dict[str, int]
    #: How often the job makes the pass; None: no job is stated, and what follows is of one pass, without failures.
    passes: int | None
    #: Failures and checkpoints of the job; None: not modelled, or no job is stated.
    failures: Failures | None
    #: Of the job, or of one pass; None: not modelled.
    joules: float | None
    price: float | None
    machine: Machine
    #: What is assumed where the machine's speed is that of another dtype, head dim or number of heads.
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """Seconds of the job, with its failures and checkpoints where they are modelled; of one pass where there is none."""
        return (self.passes or 1) * self.seconds if self.failures is None else self.failures.expected

    @property
    def kind(self) -> str:
        """The word that belongs to `seconds`: modelled or extrapolated."""
        return "extrapolated" if self.extrapolated else "modelled"

    @property
    def fits(self) -> bool | None:
        """Whether a rank's memory is enough; None: not modelled."""
        return None if self.machine.memory is None else sum(self.memory.values()) <= self.machine.memory

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """Effects that are left out."""
        left = [f"{words} (machine.{name})" for name, words in EFFECTS.items() if getattr(self.machine, name) is None]
        if self.machine.mtbf is not None and self.passes is None:
            left.append("failures and checkpoints: a job has them; state one with passes")
        return (*left, *ALWAYS)
