"""A visit: a block, or part of one, that meets the rows of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .steps import Part
from .work import Work

if TYPE_CHECKING:
    from .leaves import LeafVisit


@dataclass(frozen=True)
class Visit:
    """A block that meets the rows that stay on a rank; one call of a kernel computes it.

    Keys visit queries if `part` is of kind "kv", queries visit keys if it is of kind "q" or "query". `works` are the
    pairs to compute, in rows of the part and of the rank; a plan with leaves has `leaves` in their place. `shape` is
    (heads, rows) of the part's tensors. `first` says that the sums that travel with the block are uninitialized: the
    visit writes all their rows, also those without a pair. `table` is what `VisitKernel.prepare` made of the visit.
    """

    part: Part
    works: Sequence[Work]
    shape: tuple[int, int]
    first: bool = False
    leaves: LeafVisit | None = None
    table: Any = None

    @property
    def keys_stay(self) -> bool:
        """Whether queries visit the keys of this rank (pass-Q), instead of keys its queries."""
        return self.part.kind != "kv"
