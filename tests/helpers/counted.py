"""A pattern that counts how often a planner looks at its tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import ringattn as ra
from ringattn.pattern.base import And


@dataclasses.dataclass(frozen=True)
class Counted(And):
    """A pattern that counts how often its tiles are asked for."""

    def tiles(self, q: range, k: range, heads: range = range(1)) -> Iterator[ra.pattern.Tile]:  # type: ignore[name-defined]
        CALLS.append(1)
        return super().tiles(q, k, heads)


CALLS: list[int] = []
