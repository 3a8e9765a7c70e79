"""What `auto` compared and chose, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..machine.machine import Machine
from .schedules import split_ulysses


@dataclass(frozen=True)
class Prediction:
    """Modelled time of one pass of a plan, for the slowest of the simulated ranks."""

    seconds: float
    #: Seconds that this rank spends on its visits, and seconds in which it only waits for messages.
    compute: float
    exposed: float
    #: The most bytes and messages that any of the simulated ranks sends.
    bytes: int
    messages: int


@dataclass(frozen=True)
class Candidate:
    """A layout and schedule that `auto` considered, with the predicted time of a forward or why there is none."""

    layout: str
    schedule: str
    prediction: Prediction | None
    left_out: str = ""
    #: How many ranks and steps the prediction is based on.
    basis: str = ""
    #: What travels in the forward, if pass-KV and pass-Q were compared; else "".
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
    """The result of `auto`: the candidates it compared, the one it picked, and the reason in one sentence."""

    candidates: tuple[Candidate, ...]
    picked: Candidate
    reason: str
    machine: Machine
    #: The kind of number that the seconds are; nothing was measured.
    kind: str = "modelled"

    @property
    def nbytes(self) -> int:
        """Approximate size of the choice in bytes, for `cache.estimate_bytes`, which sizes every fresh plan."""
        return 2048 + 1024 * len(self.candidates)

    def fastest_without_ulysses(self) -> Candidate:
        """The fastest candidate with a prediction and without Ulysses groups; if there is none, the ring."""
        without = [candidate for candidate in self.candidates if split_ulysses(candidate.schedule)[0] == 1]
        return min((c for c in without if c.prediction is not None), key=lambda c: c.seconds, default=without[0])


def choice_record(choice: Choice | None) -> dict[str, Any] | None:
    """What `auto` compared, what it picked and why, as plain data; None for no choice."""
    if choice is None:
        return None
    return {
        "picked": str(choice.picked),
        "kind": choice.kind,
        "reason": choice.reason,
        "candidates": [asdict(candidate) for candidate in choice.candidates],
    }
