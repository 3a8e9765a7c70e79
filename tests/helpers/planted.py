"""Faults for the numerics simulator: change one visit or one message; the oracles and the ledger must notice.

A fault affects the visit of one rank to the block of another. It changes what the plan computes (drop, duplicate,
band) or what arrives (owner, swap, stale, hop, lost, scaled). The package knows nothing about faults.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from numerics_cases import PERIOD

from ringattn.kernels.views import RowViews
from ringattn.plan.demand import KeyDemand
from ringattn.plan.plan import Plan
from ringattn.plan.row_sets import ALL_ROWS, AllRows, RowSet
from ringattn.plan.steps import SUMS, Part, RankPlan
from ringattn.plan.work import Work
from ringattn.simulator.numerics import numerics
from ringattn.simulator.numerics.lockstep import Lockstep, _parts
from ringattn.simulator.numerics.result import NumericsReport
from ringattn.simulator.numerics.sampled import Calls, Walk
from ringattn.simulator.numerics.source import BLOCK_NAMES, RowSource, make_source

#: What each kind of fault does.
FAULT_KINDS = {
    "drop": "the visit is left out",
    "duplicate": "the visit is computed twice",
    "owner": "the rank's own block arrives in place of the owner's",
    "band": "the band of the visit is off by one",
    "swap": "the values (or queries), but not the keys (or sums), of this block and the next block are exchanged",
    "stale": "the block of the previous message is still in the buffer",
    "hop": "the block of the next message arrives",
    "lost": "the sums that arrive at the rank for the block of the owner are zeros",
    "scaled": "the sums that arrive at the rank for the block of the owner are 1 % too large",
}
#: The factor by which a fault multiplies arriving sums: gradients and, with pass-Q, (out, lse).
GRADIENT_FAULTS = {"lost": 0.0, "scaled": 1.01}
_PLANNED, _REPLACED = ("drop", "duplicate", "band"), ("owner", "swap", "stale", "hop")


@dataclass(frozen=True)
class Fault:
    """A deliberate error in what rank `rank` computes with, or receives as, the block of rank `owner`.

    The block holds keys and values or, with pass-Q in the forward, queries. `FAULT_KINDS` explains each `kind`.
    """

    kind: str
    rank: int
    owner: int

    def sides(self, plan: Plan) -> tuple[int, int]:
        """(rank that owns the queries, rank that owns the keys) in the computation with the fault."""
        return (self.rank, self.owner) if plan.forward_rotates == "kv" else (self.owner, self.rank)

    def harm(self, source: RowSource, plan: Plan, rank: int, part: Part, tensors: Sequence[torch.Tensor]) -> None:
        """Apply the fault, in place, to a received part if it concerns this part.

        `tensors` are the tensors of the part, [heads, rows, width] each.
        """
        if part.kind in SUMS and (rank, part.owner) == (self.rank, self.owner):
            for x in tensors:
                x.mul_(GRADIENT_FAULTS.get(self.kind, 1.0))
        if part.kind in BLOCK_NAMES:
            homes = self.delivered(rank, part.owner, plan.ranks)[-len(tensors) :]
            for i, home in enumerate(homes):
                if home != part.owner:
                    tensors[i].copy_(source.block(plan, part._replace(owner=home))[i][0])

    def delivered(self, rank: int, owner: int, ranks: int) -> tuple[int, int]:
        """(owner of the keys, owner of the values or queries) of what `rank` really receives as `owner`'s block."""
        if rank != self.rank or self.kind not in _REPLACED:
            return owner, owner
        other = self._neighbour(+1 if self.kind == "stale" else -1, ranks)
        if self.kind == "swap":
            return owner, {self.owner: other, other: self.owner}.get(owner, owner)
        other = rank if self.kind == "owner" else other
        return (other, other) if owner == self.owner else (owner, owner)

    def _neighbour(self, sign: int, ranks: int) -> int:
        """The owner one rank nearer to `rank` (+1) or further from it (-1), along the shorter arc."""
        nearer = 1 if (self.rank - self.owner) % ranks <= ranks // 2 else -1
        return (self.owner + sign * nearer) % ranks


class _FaultyDemand(KeyDemand):
    """Key demand with one visit left out, computed twice, or with a wrong band."""

    def __init__(self, demand: KeyDemand, fault: Fault, sides: tuple[int, int]) -> None:
        super().__init__(demand.pattern, demand.layout, demand.heads, demand.kv_heads, demand.readers)
        self.fault, self.sides = fault, sides

    def works(self, rank: int, owner: int, row_set: RowSet | AllRows = ALL_ROWS) -> tuple[Work, ...]:
        works = super().works(rank, owner, row_set)
        if isinstance(row_set, RowSet) or (rank, owner) != self.sides:
            return works  # works of a row set are narrowed from those of the whole block, which are already changed
        return {"drop": (), "duplicate": 2 * works}.get(self.fault.kind, tuple(map(_off_by_one, works)))


def _off_by_one(work: Work) -> Work:
    """The work with one key more for every row if its band is bounded; else with one key less for all rows."""
    if work.hi is not None:
        return replace(work, hi=work.hi + 1)
    if work.lo is not None:
        return replace(work, lo=work.lo - 1)
    if work.keys == 1:
        return work
    return replace(work, k=(*work.k[:-1], work.k[-1][:-1])) if len(work.k[-1]) > 1 else replace(work, k=work.k[:-1])


@dataclass(frozen=True, kw_only=True)
class FaultyPlan(Plan):
    """A plan with the steps of `base`, in which one rank computes the wrong pairs with one block, as `fault` says."""

    base: Plan
    fault: Fault

    @cached_property
    def demand(self) -> KeyDemand:
        return _FaultyDemand(self.base.demand, self.fault, self.fault.sides(self.base))

    def for_rank(self, rank: int) -> RankPlan:
        return self.base.for_rank(rank)


def with_fault(plan: Plan, fault: Fault) -> Plan:
    """The plan with the fault in its computation; returned unchanged if the fault is in a message."""
    if fault.kind not in _PLANNED:
        return plan
    inputs = {entry.name: getattr(plan, entry.name) for entry in fields(Plan)}
    settled = f"{plan.forward_rotates}, {plan.rotates}"  # "auto" might choose otherwise
    return FaultyPlan(**{**inputs, "rotate": settled}, base=plan, fault=fault)


def numerics_with(fault: Fault, plan: Plan, **options: Any) -> NumericsReport:
    """The report of `numerics` on a plan whose execution has the fault."""
    source, arrive, visits, block = (
        make_source(plan, seed=0, period=PERIOD),
        Lockstep._arrive,
        Walk.visits,
        RowSource.block,
    )
    asked: list[Part] = []

    def arrive_harmed(self: Lockstep, recv: Any) -> bool:
        arrived = arrive(self, recv)
        batched = self.members[recv.batch]
        for i, rank in enumerate(batched.ranks) if arrived else ():
            for part, tensors in _parts(batched, recv, i):
                fault.harm(source, plan, rank, part, tensors)
        return arrived

    def block_noted(self: RowSource, whole: Plan, part: Part) -> tuple[torch.Tensor, ...]:
        asked.append(part)
        return block(self, whole, part)

    def visits_harmed(self: Walk, finished: int = 0) -> Iterator[tuple[RowViews, Calls]]:
        """The visits of the faulty rank get another block than those of the other ranks."""
        hurt = {one.first + i for one in self.streams if one.rank == fault.rank for i in range(len(one.local))}
        for views, calls in visits(self, finished):
            part = asked[-1]
            homes = fault.delivered(fault.rank, part.owner, plan.ranks)
            if homes == (part.owner, part.owner):
                yield views, calls
                continue
            k, v = (block(source, plan, part._replace(owner=home))[i] for i, home in enumerate(homes))
            for block_views, mine in ((views, False), (RowViews(k, v), True)):
                some = {key: [row for row in rows if (row in hurt) is mine] for key, rows in calls.items()}
                yield block_views, {key: rows for key, rows in some.items() if rows}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lockstep, "_arrive", arrive_harmed)
        patch.setattr(Walk, "visits", visits_harmed)
        patch.setattr(RowSource, "block", block_noted)
        return numerics(with_fault(plan, fault), period=PERIOD, **options)
