"""Faults on purpose: a plan, or what is delivered, is changed in one place, and the oracles and the ledger must notice.

A fault hits the visit of one rank to the block of one other. It wraps the plan (drop, duplicate, owner, band) or what
arrives (swap, stale, hop, lost, scaled); executor and kernels do not know of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import InvalidInput, did_you_mean
from ..plan.key_demand import KeyDemand
from ..plan.plan import Plan
from ..plan.row_sets import ALL_ROWS, WHOLE_BLOCK, AllRows, RowSet, RowSets
from ..plan.steps import Part, RankPlan, Step
from ..plan.work import Work
from .lockstep import Batched

#: What each fault does.
FAULTS = {
    "drop": "the visit is left out",
    "duplicate": "the visit is computed twice",
    "owner": "the rank visits its own block in place of the owner's",
    "band": "the band of the visit is off by one",
    "swap": "values of this block and of the next one beyond it are exchanged, keys are not",
    "stale": "the block of the hop before is still in the buffer",
    "hop": "the block of one hop further on arrives",
    "lost": "the gradients that arrive at the rank for the block of the owner are zeros",
    "scaled": "the gradients that arrive at the rank for the block of the owner are 1 % too large",
}
#: By how much the faults of gradients multiply what arrives.
GRADIENTS = {"lost": 0.0, "scaled": 1.01}
_PLANNED = ("drop", "duplicate", "owner", "band")


@dataclass(frozen=True)
class Mutation:
    """A fault of the visit of `rank` to the block of `owner`."""

    fault: str
    rank: int
    owner: int

    def check(self, plan: Plan, *, backward: bool) -> None:
        """Raise InvalidInput where there is no such visit to harm."""
        if self.fault not in FAULTS:
            raise InvalidInput(f"fault {self.fault!r}: {did_you_mean(self.fault, FAULTS)}expected {', '.join(FAULTS)}")
        if plan.ranks == 1:
            raise InvalidInput(
                f"fault {self.fault!r} harms what comes from another rank, and here is only one; try ranks=2 or more"
            )
        for number in (self.rank, self.owner):
            if not 0 <= number < plan.ranks:
                raise InvalidInput(f"the fault names rank {number}, the plan has ranks 0 .. {plan.ranks - 1}")
        if self.fault in GRADIENTS:
            if not backward:
                raise InvalidInput(f"fault {self.fault!r} is one of gradients; try backward=True")
            return
        if self.rank == self.owner or not plan.demand.visits(self.rank, self.owner):
            raise InvalidInput(
                f"rank {self.rank} receives no block of rank {self.owner} that it visits: nothing to harm; try another owner"
            )
        near = (self.rank, self.owner, *(self._neighbour(way, plan.ranks) for way in (+1, -1)))
        replaced = self.fault in ("owner", "swap", "stale", "hop")
        if replaced and len({plan.layout.rows(owner) for owner in near}) > 1:
            raise InvalidInput(
                f"fault {self.fault!r} puts a block in place of another: shards must be equally long here"
            )

    def delivered(self, rank: int, owner: int, ranks: int) -> tuple[int, int]:
        """The owners whose keys and whose values arrive at `rank` for the block of `owner`."""
        if rank != self.rank or self.fault in (*_PLANNED, *GRADIENTS):
            return owner, owner
        other = self._neighbour(+1 if self.fault == "stale" else -1, ranks)
        if self.fault == "swap":
            return owner, {self.owner: other, other: self.owner}.get(owner, owner)
        return (other, other) if owner == self.owner else (owner, owner)

    def _neighbour(self, way: int, ranks: int) -> int:
        """The owner one hop nearer to the rank (+1) or further from it (-1), by the shorter arc."""
        nearer = 1 if (self.rank - self.owner) % ranks <= ranks // 2 else -1
        return (self.owner + way * nearer) % ranks

    def visits(self, found: Iterator[tuple[int, RowSets]]) -> Iterator[tuple[int, RowSets]]:
        """The (owner, row sets) that the rank visits, with the fault."""
        for owner, row_sets in found:
            if owner != self.owner or self.fault not in ("drop", "duplicate", "owner"):
                yield owner, row_sets
            elif self.fault == "duplicate":
                yield owner, row_sets
                yield owner, row_sets
            elif self.fault == "owner":
                yield self.rank, WHOLE_BLOCK


class _Skewed(KeyDemand):
    """A demand in which the works of one visit have a wrong band."""

    def __init__(self, demand: KeyDemand, mutation: Mutation) -> None:
        super().__init__(demand.pattern, demand.layout, demand.heads, demand.kv_heads)
        self.mutation = mutation

    def works(self, rank: int, owner: int, row_set: RowSet | AllRows = ALL_ROWS) -> tuple[Work, ...]:
        works = super().works(rank, owner, row_set)
        if isinstance(row_set, RowSet) or (rank, owner) != (self.mutation.rank, self.mutation.owner):
            return works  # the works of a row set are made from the works of the whole block
        return tuple(map(_off_by_one, works))


def _off_by_one(work: Work) -> Work:
    """One key more for every row of a band that is bounded; one key less for all rows where it is not."""
    if work.hi is not None:
        return replace(work, hi=work.hi + 1)
    if work.lo is not None:
        return replace(work, lo=work.lo - 1)
    if work.keys == 1:
        return work
    return replace(work, k=(*work.k[:-1], work.k[-1][:-1])) if len(work.k[-1]) > 1 else replace(work, k=work.k[:-1])


@dataclass(frozen=True)
class Tampered(Batched):
    """A plan with a fault."""

    mutation: Mutation | None = None

    @cached_property
    def demand(self) -> KeyDemand:
        demand = super().demand
        return _Skewed(demand, self.mutation) if self.mutation is not None and self.mutation.fault == "band" else demand

    def for_rank(self, rank: int) -> RankPlan:
        found = super().for_rank(rank)
        m = self.mutation
        if m is None or rank != m.rank or m.fault not in ("drop", "duplicate", "owner"):
            return found
        return replace(found, forward=tuple(map(self._harmed, found.forward)))

    def _harmed(self, step: Step) -> Step:
        m, visits = self.mutation, []
        assert m is not None
        for part in step.visits:
            if part.owner != m.owner:
                visits.append(part)
            elif m.fault == "duplicate":
                visits += [part, part]
            elif m.fault == "owner":
                visits.append(Part(part.kind, m.rank))
        return replace(step, visits=tuple(visits))


def tampered(plan: Plan, mutation: Mutation) -> Plan:
    """The plan with a fault; the plan itself where the fault is one of what arrives."""
    if mutation.fault not in _PLANNED:
        return plan
    return Tampered.of(plan, mutation=mutation)
