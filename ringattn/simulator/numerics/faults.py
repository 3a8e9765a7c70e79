"""Fault injection: change one visit or one message; the oracles and the ledger must notice.

A fault affects the visit of one rank to the block of another. It changes what the plan computes (drop, duplicate,
band) or what arrives (owner, swap, stale, hop, lost, scaled). The executor and the kernels know nothing about faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch

from ...errors import InvalidInput
from ...plan.demand import KeyDemand
from ...plan.plan import Plan
from ...plan.row_sets import ALL_ROWS, AllRows, RowSet
from ...plan.steps import SUMS, Part, RankPlan
from ...plan.work import Work
from ...text import did_you_mean
from .lockstep import settled
from .source import BLOCK_NAMES, RowSource

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

    def check(self, plan: Plan, *, backward: bool) -> None:
        """Raise InvalidInput if the plan has no such computation or message, so that the fault would change nothing."""
        if self.kind not in FAULT_KINDS:
            hint = did_you_mean(self.kind, FAULT_KINDS)
            raise InvalidInput(f"fault {self.kind!r}: {hint}expected {', '.join(FAULT_KINDS)}")
        if plan.ranks == 1:
            raise InvalidInput(f"fault {self.kind!r} changes data from another rank; try ranks=2 or more")
        for number in (self.rank, self.owner):
            if not 0 <= number < plan.ranks:
                raise InvalidInput(f"fault at rank {number}: the plan has ranks 0 .. {plan.ranks - 1}")
        if self.kind in GRADIENT_FAULTS:
            if not backward and plan.forward_rotates == "kv":
                raise InvalidInput(f"fault {self.kind!r} changes gradients and needs a backward; try backward=True")
            return
        if self.rank == self.owner or not plan.demand.visits(*self.sides(plan)):
            raise InvalidInput(f"rank {self.rank} visits no block received from rank {self.owner}; try another owner")
        near = (self.rank, self.owner, *(self._neighbour(sign, plan.ranks) for sign in (+1, -1)))
        layout = plan.layout_of("kv" if plan.forward_rotates == "kv" else "query")
        if self.kind in _REPLACED and len({layout.rows(owner) for owner in near}) > 1:
            raise InvalidInput(f"fault {self.kind!r} replaces a block by another: it needs shards of equal length")

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
    return FaultyPlan(**{**inputs, "rotate": settled(plan)}, base=plan, fault=fault)
