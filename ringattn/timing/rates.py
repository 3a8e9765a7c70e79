"""Seconds of what a plan's steps are made of, on a machine: the same for every solver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..dtypes import ITEM_BYTES
from ..errors import InvalidInput
from ..machine.machine import Machine
from .forecast import pair_seconds
from .solvers.recurrence import Stall

if TYPE_CHECKING:
    from ..plan.plan import Plan

#: How much longer than usual ranks take: one factor per rank, or those of a few by rank.
Factors = Mapping[int, float] | Sequence[float] | np.ndarray
#: A merge reads the partial (out, lse) of a visit, and reads and writes what was merged before.
MERGE_PASSES = 3


@dataclass(frozen=True)
class Faults:
    """What is not as the machine says: slow (or fast) ranks, slow links, single stalls."""

    #: Factor on the visits and merges of each rank, float64 [ranks]; None: 1.
    slow: np.ndarray | None = None
    #: Factor on the messages that each rank sends, float64 [ranks]; None: 1.
    slow_links: np.ndarray | None = None
    stalls: tuple[Stall, ...] = field(default=())

    def __bool__(self) -> bool:
        return self.slow is not None or self.slow_links is not None or bool(self.stalls)

    def factor(self, rank: int) -> float:
        """The factor on the visits of a rank."""
        return 1.0 if self.slow is None else float(self.slow[rank])

    def at(self, ranks: np.ndarray) -> Faults:
        """The factors of some ranks, of their shape; without stalls."""
        slow, links = (None if x is None else x[ranks] for x in (self.slow, self.slow_links))
        return Faults(slow, links)

    def link_factor(self, rank: int) -> float:
        """The factor on the messages that a rank sends."""
        return 1.0 if self.slow_links is None else float(self.slow_links[rank])


def factors(name: str, given: Factors | None, ranks: int) -> np.ndarray | None:
    """Factors as float64 [ranks], checked; None where all are 1. Raises InvalidInput."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        found = np.ones(ranks)
        for rank, factor in given.items():
            if isinstance(factor, bool) or not isinstance(factor, int | float):
                raise InvalidInput(f"{name}: the factor {factor!r} of rank {rank!r} is not a number")
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks:
                raise InvalidInput(f"{name}: rank {rank!r} is not one of 0 .. {ranks - 1}")
            found[rank] = factor
    elif not isinstance(given, list | tuple | np.ndarray):
        raise InvalidInput(f"{name}={given!r}: expected factors by rank such as {{0: 1.5}}, or one for each rank")
    else:
        try:
            found = np.asarray(given, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"{name}: a factor is not a number ({error}); try {{0: 1.5}}") from error
        if found.shape != (ranks,):
            raise InvalidInput(
                f"{name}: expected a factor for each of {ranks:,} ranks or a dict such as {{0: 1.5}}, "
                f"got shape {found.shape}"
            )
    if not (np.isfinite(found) & (found > 0)).all():
        raise InvalidInput(f"{name}: factors must be finite and > 0; 1.5 is half as long again")
    return None if (found == 1.0).all() else found


@dataclass(frozen=True)
class Rates:
    """A plan on a machine: seconds of pairs, merges and messages of one pass."""

    plan: Plan
    machine: Machine
    backward: bool

    @property
    def pair(self) -> float:
        """Seconds per pair."""
        return pair_seconds(self.plan, self.machine, self.backward)

    @property
    def turned(self) -> bool:
        """Whether blocks of queries come to the keys that they see, not keys to queries."""
        return self.backward and self.plan.rotates == "queries"

    @property
    def gamma(self) -> float:
        return self.machine.gamma or 0.0

    @property
    def buffers(self) -> int:
        return self.machine.buffers or 1

    def merge(self, rows: int) -> float:
        """Seconds of merging a visit into out and lse of `rows` (query row, head), or of adding its dQ, in the wider dtype."""
        if self.machine.merge is None:
            return 0.0
        plan = self.plan
        width = plan.head_dim if self.backward else plan.value_dim + 1
        size = plan.batch * rows * width * max(ITEM_BYTES[plan.dtype], 4)
        return MERGE_PASSES * size / self.machine.merge

    def merges(self, own: bool | np.ndarray) -> np.ndarray:
        """Whether a visit of a rank, to its own block or to another, is merged, in the rows that see a key of it.

        In a forward the own block comes first: there is nothing yet to be merged with. Where some rows see none of their
        own block, the first visit in which they see a key is still taken to be merged, though it is copied; where calls of the
        kernel for one visit share rows, these are taken to be merged once.
        """
        return np.logical_or(self.backward, np.logical_not(own))

    def near(self, sign: int, ranks: np.ndarray | None = None) -> np.ndarray:
        """Whether rank r and the one it sends to, r + sign, are of one node: bool of the shape of `ranks` (default: all);
        of no dimension where that is the same for all."""
        inner, count = self.machine.ranks_per_node, self.plan.ranks
        if inner == 1 or inner >= count:
            return np.asarray(inner >= count)
        if ranks is not None:
            return np.asarray(ranks // inner == (ranks + sign) % count // inner)

        def find() -> np.ndarray:
            every = np.arange(count)
            return np.asarray(every // inner == (every + sign) % count // inner)

        return self.plan.cache.answer((Rates.near, inner, sign), find)

    def message(self, size: np.ndarray | float, near: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(seconds, seconds of them that occupy the link) of messages of some bytes."""
        latency, bandwidth = (
            np.where(near, inside, outside)
            for inside, outside in zip(self.machine.rates(True), self.machine.rates(False), strict=True)
        )
        gap = size / bandwidth
        return latency + gap, gap
