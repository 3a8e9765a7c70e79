"""Faults on purpose: one visit or one message is changed, and the oracles and the ledger must notice.

A fault hits the visit of one rank to the block of another rank. It changes the plan (drop, duplicate, owner, band) or
what arrives (swap, stale, hop, lost, scaled). The executor and the kernels do not know about faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TypeVar

from ...errors import InvalidInput
from ...plan.demand import KeyDemand
from ...plan.plan import Plan
from ...plan.row_sets import ALL_ROWS, WHOLE_BLOCK, AllRows, RowSet, RowSets
from ...plan.steps import Part, RankPlan, Step
from ...plan.work import Work
from ...text import did_you_mean
from .lockstep import Batched

T = TypeVar("T")
#: What each kind of fault does.
FAULT_KINDS = {
    "drop": "the visit is left out",
    "duplicate": "the visit is computed twice",
    "owner": "the rank visits its own block in place of the owner's",
    "band": "the band of the visit is off by one",
    "swap": "the values, but not the keys, of this block and the next block are exchanged",
    "stale": "the block of the previous message is still in the buffer",
    "hop": "the block of the next message arrives",
    "lost": "the gradients that arrive at the rank for the block of the owner are zeros",
    "scaled": "the gradients that arrive at the rank for the block of the owner are 1 % too large",
}
#: The factor by which a fault multiplies arriving gradients.
GRADIENT_FAULTS = {"lost": 0.0, "scaled": 1.01}
_PLANNED = ("drop", "duplicate", "owner", "band")


@dataclass(frozen=True)
class Fault:
    """A fault in the visit of `rank` to the block of `owner`."""

    kind: str
    rank: int
    owner: int

    def check(self, plan: Plan, *, backward: bool) -> None:
        """Raise InvalidInput where the plan has no such visit."""
        if self.kind not in FAULT_KINDS:
            raise InvalidInput(
                f"fault {self.kind!r}: {did_you_mean(self.kind, FAULT_KINDS)}expected {', '.join(FAULT_KINDS)}"
            )
        if plan.ranks == 1:
            raise InvalidInput(
                f"fault {self.kind!r} harms what comes from another rank, and here is only one; try ranks=2 or more"
            )
        for number in (self.rank, self.owner):
            if not 0 <= number < plan.ranks:
                raise InvalidInput(f"the fault names rank {number}, the plan has ranks 0 .. {plan.ranks - 1}")
        if self.kind in GRADIENT_FAULTS:
            if not backward:
                raise InvalidInput(f"fault {self.kind!r} harms gradients, so it needs a backward; try backward=True")
            return
        if self.rank == self.owner or not plan.demand.visits(self.rank, self.owner):
            raise InvalidInput(
                f"rank {self.rank} receives no block of rank {self.owner} that it visits: nothing to harm; try another "
                "owner"
            )
        near = (self.rank, self.owner, *(self._neighbour(way, plan.ranks) for way in (+1, -1)))
        replaced = self.kind in ("owner", "swap", "stale", "hop")
        if replaced and len({plan.layout.rows(owner) for owner in near}) > 1:
            raise InvalidInput(
                f"fault {self.kind!r} puts a block in place of another: shards must be equally long here"
            )

    def delivered(self, rank: int, owner: int, ranks: int) -> tuple[int, int]:
        """(owner of the keys, owner of the values) that arrive at `rank` in place of the block of `owner`."""
        if rank != self.rank or self.kind in (*_PLANNED, *GRADIENT_FAULTS):
            return owner, owner
        other = self._neighbour(+1 if self.kind == "stale" else -1, ranks)
        if self.kind == "swap":
            return owner, {self.owner: other, other: self.owner}.get(owner, owner)
        return (other, other) if owner == self.owner else (owner, owner)

    def _neighbour(self, way: int, ranks: int) -> int:
        """The owner one rank nearer to `rank` (+1) or further from it (-1), along the shorter arc."""
        nearer = 1 if (self.rank - self.owner) % ranks <= ranks // 2 else -1
        return (self.owner + way * nearer) % ranks

    def visits(self, found: Iterator[tuple[int, RowSets]]) -> Iterator[tuple[int, RowSets]]:
        """The (owner, row sets) that the rank visits, with the fault applied."""
        for owner, row_sets in found:
            yield from self.harmed(owner, (owner, row_sets), (self.rank, WHOLE_BLOCK))

    def harmed(self, owner: int, visit: T, own: T) -> list[T]:
        """What takes the place of a visit to the block of `owner`; `own` is the visit to the rank's own block."""
        if owner != self.owner:
            return [visit]
        return {"drop": [], "duplicate": [visit, visit], "owner": [own]}.get(self.kind, [visit])


class _FaultyDemand(KeyDemand):
    """Key demand in which the band of one visit is off by one."""

    def __init__(self, demand: KeyDemand, fault: Fault) -> None:
        super().__init__(demand.pattern, demand.layout, demand.heads, demand.kv_heads)
        self.fault = fault

    def works(self, rank: int, owner: int, row_set: RowSet | AllRows = ALL_ROWS) -> tuple[Work, ...]:
        works = super().works(rank, owner, row_set)
        if isinstance(row_set, RowSet) or (rank, owner) != (self.fault.rank, self.fault.owner):
            return works  # works of a row set are narrowed from works of the whole block, which are wrong already
        return tuple(map(_off_by_one, works))


def _off_by_one(work: Work) -> Work:
    """One key more for every row where the band is bounded; one key less for all rows where it is not."""
    if work.hi is not None:
        return replace(work, hi=work.hi + 1)
    if work.lo is not None:
        return replace(work, lo=work.lo - 1)
    if work.keys == 1:
        return work
    return replace(work, k=(*work.k[:-1], work.k[-1][:-1])) if len(work.k[-1]) > 1 else replace(work, k=work.k[:-1])


@dataclass(frozen=True)
class FaultyPlan(Batched):
    """A plan whose steps have a fault."""

    fault: Fault | None = None

    @cached_property
    def demand(self) -> KeyDemand:
        demand = super().demand
        return _FaultyDemand(demand, self.fault) if self.fault is not None and self.fault.kind == "band" else demand

    def for_rank(self, rank: int) -> RankPlan:
        found = super().for_rank(rank)
        m = self.fault
        if m is None or rank != m.rank or m.kind not in ("drop", "duplicate", "owner"):
            return found
        return replace(found, forward=tuple(map(self._harmed, found.forward)))

    def _harmed(self, step: Step) -> Step:
        fault = self.fault
        assert fault is not None
        harmed = (fault.harmed(part.owner, part, Part(part.kind, fault.rank)) for part in step.visits)
        return replace(step, visits=tuple(chain.from_iterable(harmed)))


def with_fault(plan: Plan, fault: Fault) -> Plan:
    """The plan with a fault in its steps; the same plan where the fault is in what arrives."""
    if fault.kind not in _PLANNED:
        return plan
    return FaultyPlan.of(plan, fault=fault)
