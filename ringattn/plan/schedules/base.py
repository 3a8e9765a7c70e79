"""The interface of a schedule: the steps of one rank in each pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import lcm
from typing import ClassVar

from ...layout.regular import Contiguous
from ..demand import BlockDemand
from ..steps import Part, Step

#: Of up to EXACT ranks the bytes of all blocks are counted, of more the bytes of SAMPLED blocks.
EXACT, SAMPLED = 64, 16


class Schedule(ABC):
    """When each block of rows goes from which rank to which rank, for the blocks that `demand` describes."""

    #: Whether a number follows the name of the schedule, as in "double_ring(8)"; it is passed after the demand.
    numbered: ClassVar[bool] = False
    #: Ranks of a node, where the schedule distinguishes nodes.
    ranks_per_node = 1

    def __init__(self, demand: BlockDemand) -> None:
        self.demand = demand

    @abstractmethod
    def forward(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank's forward."""

    @abstractmethod
    def backward(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank's backward in which keys, values and their gradients travel."""

    @abstractmethod
    def backward_of_queries(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank's backward in which queries and their gradients travel; `demand` is a `QueryDemand`."""

    @abstractmethod
    def kept_parts(self, rank: int) -> tuple[Part, ...]:
        """The parts that a rank keeps after the forward for a backward in which keys travel."""

    def count_backward_bytes(self, block: int, sums: int, *, queries: bool) -> tuple[int, int] | None:
        """(bytes between nodes, all bytes) of a backward, without making its steps; None where only the steps tell.

        `block` and `sums` are the bytes of one row of one head: of the block that travels, and of its gradients.
        `queries`: blocks of queries travel. Of more than EXACT ranks, the bytes of the blocks of `representatives`.
        """
        return None


def representatives(demand: BlockDemand) -> list[int]:
    """Ranks whose blocks stand for the blocks of all ranks: all of up to EXACT ranks.

    Of more ranks, one period in the middle where the ranks repeat, else SAMPLED evenly spaced ranks.
    """
    layout, ranks = demand.layout, demand.layout.ranks
    if ranks <= EXACT:
        return list(range(ranks))
    period = demand.pattern.period if isinstance(layout, Contiguous) and layout.tokens % ranks == 0 else None
    if period is not None and layout.tokens:
        rows = layout.tokens // ranks
        size = lcm(period, rows) // rows
        if size <= SAMPLED:
            return list(range(ranks // 2, ranks // 2 + size))
    return [ranks * (2 * i + 1) // (2 * SAMPLED) for i in range(SAMPLED)]
