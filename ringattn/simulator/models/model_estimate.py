"""What a pass of a whole model takes on a machine: its seconds by part, and the bytes of a GPU by category."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...machine.machine import Machine


@dataclass(frozen=True, kw_only=True)
class ModelEstimate:
    """A step of training, a prefill, or a decoded token: seconds, and bytes of one GPU. All modelled."""

    #: Seconds that each part adds; they sum to `seconds`.
    parts: dict[str, float]
    #: Bytes of one GPU by category.
    memory: dict[str, int]
    gpus: int
    #: Tokens that the GPUs process in these seconds, of all sequences.
    tokens: int
    machine: Machine = field(repr=False)
    #: What was planned for attention, in words; "" in a decode.
    plan: str = ""
    #: Factors on the seconds of attention between which 90 % of measured passes lie; None: not known.
    band: tuple[float, float] | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a step without failures, to the first token of a prefill, or of a decoded token."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / self.gpus

    @property
    def fits(self) -> bool | None:
        """Whether the memory of a GPU is enough; None: the machine does not say how much it has."""
        return None if self.machine.memory is None else sum(self.memory.values()) <= self.machine.memory
