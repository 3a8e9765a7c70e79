"""What travels in the backward: keys and values with their gradients, or queries with theirs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from .row_sets import ONE_ROW
from .schedules.base import Schedule, representatives
from .steps import Part, RankPlan, Step


class Rotation:
    """The steps of ranks by a schedule without Ulysses groups, in one of the two forms of the backward.

    `keys` is the schedule of blocks of keys, `queries` the schedule of blocks of queries, and `size` gives the bytes of
    a part of a message. `rotate="auto"` takes the form that sends fewer bytes, and keys where both send as many; for a
    double ring, which is there to spare the links between nodes, it compares the bytes on these links first.
    """

    def __init__(self, keys: Schedule, queries: Schedule, rotate: str, size: Callable[[Part], int]) -> None:
        self.keys, self.queries, self.rotate, self.size = keys, queries, rotate, size

    @cached_property
    def chosen(self) -> str:
        """What travels: "keys" or "queries"."""
        if self.rotate != "auto":
            return self.rotate
        if self.keys.demand.layout.ranks == 1:
            return "keys"
        keys, queries = self.count_bytes()
        return "queries" if queries < keys else "keys"

    def count_bytes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(between nodes, all) bytes of a backward in which keys travel, and of a backward in which queries travel.

        Up to `schedules.base.EXACT` ranks, the bytes of all blocks; above, the bytes of the same few blocks in both
        forms, which tell the form that sends fewer.
        """
        kv, grad, q, row, dq = (self.size(Part(kind, 0, ONE_ROW)) for kind in ("kv", "grad", "q", "row", "dq"))
        keys = self.keys.count_backward_bytes(kv, grad, queries=False)
        queries = self.queries.count_backward_bytes(q + row, dq, queries=True)
        if keys is None or queries is None:
            return self._count_steps(self.keys.backward), self._count_steps(self.queries.backward_of_queries)
        return keys, queries

    def steps(self, rank: int) -> RankPlan:
        """The steps of a rank."""
        if self.chosen == "keys":
            backward, kept = self.keys.backward(rank), self.keys.kept_parts(rank)
        else:
            backward, kept = self.queries.backward_of_queries(rank), ()
        return RankPlan(rank, self.keys.forward(rank), backward, kept)

    def _count_steps(self, steps: Callable[[int], tuple[Step, ...]]) -> tuple[int, int]:
        """The bytes that some ranks send in their steps."""
        ranks = representatives(self.keys.demand)
        sent = sum(self.size(part) for r in ranks for step in steps(r) for hop in step.sends for part in hop.parts)
        return sent, sent
