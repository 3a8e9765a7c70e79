"""Which rows travel at which step of a ring's pass: one description for the forward and for both kinds of backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....plan.row_sets import RowSet
from ....plan.steps import Kind, Part

if TYPE_CHECKING:
    from ....plan.plan import Plan


@dataclass(frozen=True)
class MovingRows:
    """Rows of blocks that move by one rank at every step; a row of all heads has `row_bytes` bytes.

    Hop h of a block joins the ranks at distances h and h + 1 from its owner. The step of visits at distance t makes hop
    t - `lag`; the first hop made is hop `lag`.
    """

    lag: int
    row_bytes: int


@dataclass(frozen=True)
class BandTraffic:
    """What travels in a pass; rows with the same sender, receiver and step share one message.

    `homeward`: hops lead toward the owner, and steps go from the farthest distance down to 0. `direct_row_bytes` are
    the bytes of a row that travels directly between its owner and its last receiver, at the step after the last
    receiver's distance; 0 where no row does. With `homeward`, direct rows are those that the last receivers have not
    kept, sent by the owner; else they are the gradient sums of all rows, sent to the owner.
    """

    moving: tuple[MovingRows, ...]
    homeward: bool = False
    direct_row_bytes: int = 0

    @classmethod
    def of(cls, plan: Plan, backward: bool) -> BandTraffic:
        """The traffic of a ring plan, as `Route.forward`, `Route.backward` and `Route.queries` plan it."""

        def count_row_bytes(*kinds: Kind) -> int:
            one_row = RowSet((0,), ((range(1),),))
            return sum(plan.part_heads(kind) * plan.part_bytes(Part(kind, 0, one_row)) for kind in kinds)

        if not backward:
            return cls((MovingRows(0, count_row_bytes("kv")),))
        if plan.rotates == "keys":
            moving = MovingRows(1, count_row_bytes("kv")), MovingRows(0, count_row_bytes("grad"))
            return cls(moving, True, count_row_bytes("kv"))
        moving = MovingRows(0, count_row_bytes("q", "row")), MovingRows(1, count_row_bytes("dq"))
        return cls(moving, False, count_row_bytes("dq"))
