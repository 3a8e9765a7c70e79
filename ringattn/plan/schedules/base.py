"""What every schedule gives: the steps of one rank in each pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from ..block_demand import BlockDemand
from ..steps import Part, Step


class Schedule(ABC):
    """When each block of rows goes from which rank to which, for the blocks that `demand` describes."""

    #: Whether a number follows the name of the schedule, as in "double_ring(8)", and is passed after the demand.
    numbered: ClassVar[bool] = False
    #: Ranks of a node, where the schedule knows of nodes.
    inner = 1

    def __init__(self, demand: BlockDemand) -> None:
        self.demand = demand

    @abstractmethod
    def forward(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank's forward."""

    @abstractmethod
    def backward(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank's backward in which keys, values and their gradients travel."""

    @abstractmethod
    def queries(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank's backward in which queries and their gradients travel. The demand is one for queries."""

    @abstractmethod
    def held(self, rank: int) -> tuple[Part, ...]:
        """What a rank keeps after the forward for a backward in which keys travel."""
