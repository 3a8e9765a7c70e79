"""Which rows travel at which step of a ring's pass: one description for the forward and for either backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...plan.row_sets import RowSet
from ...plan.steps import Kind, Part

if TYPE_CHECKING:
    from ...plan.plan import Plan


@dataclass(frozen=True)
class Cargo:
    """Rows of blocks that every step moves by one rank. Hop h of a block is that between the ranks at distances h and
    h + 1 of its owner; at the step of visits at distance t, hop t - `lag` is made, of hops from `lag` on. A row of all
    heads is `row_bytes` bytes.
    """

    lag: int
    row_bytes: int


@dataclass(frozen=True)
class BandTraffic:
    """What travels in a pass, beside each other in one message where sender, receiver and step are the same.

    `back`: hops are made toward the owner, and steps go from the farthest distance down to 0. `straight`: bytes of a row
    that goes between the owner and the rank where it stops at once, at the step of the distance after that at which it
    stops; 0 where none does. With `back` those are rows that ranks have not kept, from the owner; else sums for rows, all
    of them, to the owner.
    """

    cargo: tuple[Cargo, ...]
    back: bool = False
    straight: int = 0

    @classmethod
    def of(cls, plan: Plan, backward: bool) -> BandTraffic:
        """That of a ring plan: `Route.forward`, `Route.backward` and `Route.backward_of_queries`."""

        def row(*kinds: Kind) -> int:
            one = RowSet((0,), ((range(1),),))
            return sum(plan.part_heads(kind) * plan.part_bytes(Part(kind, 0, one)) for kind in kinds)

        if not backward:
            return cls((Cargo(0, row("kv")),))
        if plan.rotates == "keys":
            return cls((Cargo(1, row("kv")), Cargo(0, row("grad"))), True, row("kv"))
        return cls((Cargo(0, row("q", "row")), Cargo(1, row("dq"))), False, row("dq"))
