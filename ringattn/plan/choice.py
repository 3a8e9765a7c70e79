"""What `auto` compared and took, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from ..machine.machine import Machine
from .schedules import split_ulysses


@dataclass(frozen=True)
class Prediction:
    """Modelled time of one pass of a plan: of the sampled rank that takes longest."""

    seconds: float
    #: Of that rank: its visits alone, and the time in which it only waits for messages.
    compute: float
    exposed: float
    #: The most that a sampled rank sends.
    bytes: int
    messages: int


@dataclass(frozen=True)
class Candidate:
    """A layout and a schedule, and the predicted forward, or why there is none."""

    layout: str
    schedule: str
    prediction: Prediction | None
    left_out: str = ""
    #: What the prediction was made from.
    basis: str = ""

    def __str__(self) -> str:
        return f"{self.schedule} on {self.layout}"

    @property
    def seconds(self) -> float:
        """The predicted seconds of a candidate that was compared."""
        assert self.prediction is not None
        return self.prediction.seconds


@dataclass(frozen=True)
class Choice:
    """What `auto` compared, what it took, and why in one sentence."""

    candidates: tuple[Candidate, ...]
    picked: Candidate
    reason: str
    machine: Machine

    def without_teams(self) -> Candidate:
        """The fastest compared candidate whose ranks form no Ulysses teams."""
        alone = [one for one in self.candidates if one.prediction is not None and split_ulysses(one.schedule)[0] == 1]
        return min(alone, key=lambda one: one.seconds)
