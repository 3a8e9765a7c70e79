"""Documents of random lengths that are packed into the sequences of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, log
from random import Random
from statistics import NormalDist


@dataclass(frozen=True)
class Lognormal:
    """Lengths whose logarithms are normal, with this deviation; half of them are shorter than `median` tokens."""

    median: int
    sigma: float
    seed: int = 0

    @property
    def name(self) -> str:
        """The distribution as it is written on the command line."""
        return f"lognormal({self.median}, {self.sigma:g}, {self.seed})"


@lru_cache(maxsize=256)
def draw(lengths: Lognormal, tokens: int, sequence: int = 0) -> tuple[int, ...]:
    """The tokens of each document in sequence number `sequence` of a step: the same ones on every machine.

    The last one is cut where the sequence ends.
    """
    random, normal = Random(f"{lengths.seed} {sequence}"), NormalDist(log(lengths.median), lengths.sigma)
    found, left = list[int](), tokens
    while left:
        found.append(min(max(round(exp(normal.inv_cdf(random.random() or 0.5))), 1), left))
        left -= found[-1]
    return tuple(found)
