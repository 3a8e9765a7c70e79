"""What a route has to know of blocks of rows: who needs which. And answers that are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

from ..cache import Cache
from ..layout.regular import Layout
from .row_sets import RowSets

#: Bytes of the answers that a demand keeps.
ANSWERS = 1 << 27

F = TypeVar("F", bound=Callable[..., Any])


class BlockDemand(Protocol):
    """Blocks of rows that ranks own and others need: all that a route has to know of them.

    `Demand` is that of blocks of keys and values, `Transposed` that of blocks of queries.
    """

    @property
    def layout(self) -> Layout: ...

    @property
    def block_heads(self) -> int:
        """Heads of a block."""

    @property
    def memory(self) -> Cache:
        """Answers of the functions that are `remembered`, which live as long as this object."""

    def needs(self, ranks: range, owners: range) -> bool:
        """Whether some rank of `ranks` needs a row of some rank of `owners` (runs of consecutive ranks)."""

    def all_needed(self, rank: int, owners: range) -> bool:
        """Whether `rank` is seen at once to need a row of every one of `owners`; False says nothing."""

    def run(self, first: int, last: int) -> tuple[int, int] | None:
        """The first and the last position of the rows that rows first .. last need: a run with first and last in it, no
        end of which ever moves left where first and last move right. None where that is not known of them."""

    def visits(self, rank: int, owner: int) -> bool:
        """Whether `rank` needs a row of `owner`."""

    def cuts(self, ranks: tuple[range, ...], owner: int) -> RowSets:
        """The rows of the block of `owner` that some rank of `ranks` (runs of ranks) needs."""

    def size(self, ranks: tuple[range, ...], owner: int) -> int:
        """How many rows of all heads those are."""


def remembered(find: F) -> F:
    """A function of a demand and more, whose answers are kept with the demand."""

    @wraps(find)
    def answer(demand: BlockDemand, *key: Any) -> Any:
        return demand.memory.answer((find, *key), lambda: find(demand, *key))

    return cast(F, answer)
