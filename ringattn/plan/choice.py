"""What `auto` compared and took, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from ..machine.machine import Machine
from .schedules import split_ulysses


@dataclass(frozen=True)
class Prediction:
    """Modelled time of one pass of a plan: of the slowest rank that was looked at."""

    seconds: float
    #: Seconds of this rank's visits alone, and seconds in which it only waits for messages.
    compute: float
    exposed: float
    #: The most that a rank sends, of the ranks that were looked at.
    bytes: int
    messages: int


@dataclass(frozen=True)
class Candidate:
    """A layout and a schedule with the predicted forward, or with the reason why there is no prediction."""

    layout: str
    schedule: str
    prediction: Prediction | None
    left_out: str = ""
    #: How many ranks and steps the prediction was made from.
    basis: str = ""
    #: What travels in the forward, where both forms were compared.
    rotate: str = ""

    def __str__(self) -> str:
        return f"{self.schedule} on {self.layout}{self.rotate and f', pass-{self.rotate.upper()}'}"

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
    #: What the seconds are: nothing was measured.
    kind: str = "modelled"

    @property
    def nbytes(self) -> int:
        """About how many bytes the choice takes, for `cache.estimate_bytes`: every fresh plan is measured."""
        return 2048 + 1024 * len(self.candidates)

    def fastest_without_ulysses(self) -> Candidate:
        """The fastest compared candidate without Ulysses groups; where none was compared, the first: the ring."""
        without = [candidate for candidate in self.candidates if split_ulysses(candidate.schedule)[0] == 1]
        return min((c for c in without if c.prediction is not None), key=lambda c: c.seconds, default=without[0])
