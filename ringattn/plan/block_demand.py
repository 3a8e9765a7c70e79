"""Which rank needs which rows of which block: what a schedule has to know of the blocks that it moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..cache import Cache, cached
from ..layout.regular import Layout
from ..pattern.base import Pattern, Run, Runs
from ..pattern.ranges import locate
from .row_sets import RowSets, count_union, union

if TYPE_CHECKING:
    from .row_reach import RowReach

#: Bytes of the answers that a demand keeps.
ANSWERS = 1 << 27
#: The blocks of up to ALL_BLOCKS ranks are looked at for a choice. Of more ranks, about ALL_BLOCKS**2 / ranks blocks
#: stand for all, at least FEWEST_BLOCKS.
ALL_BLOCKS, FEWEST_BLOCKS = 32, 2


def sampled(ranks: int) -> list[int]:
    """Ranks whose blocks stand for all blocks: all of up to ALL_BLOCKS ranks, of more ranks evenly spaced ones."""
    count = min(ranks, max(FEWEST_BLOCKS, ALL_BLOCKS**2 // ranks))
    return [ranks * (2 * i + 1) // (2 * count) for i in range(count)]


class BlockDemand(ABC):
    """Which rows of the blocks that ranks own are needed by which ranks.

    `KeyDemand` describes blocks of keys and values, `QueryDemand` blocks of queries. `ranks` and `owners` are runs of
    consecutive ranks. The functions marked `cached` keep their answers in `cache`.
    """

    def __init__(self, layout: Layout, block_heads: int) -> None:
        self.layout = layout
        #: Heads of a block.
        self.block_heads = block_heads
        self.cache = Cache(ANSWERS)

    @property
    @abstractmethod
    def pattern(self) -> Pattern:
        """The pattern that says which queries see which keys."""

    @abstractmethod
    def on_layout(self, layout: Layout) -> BlockDemand:
        """The demand of the same pattern and heads on another layout."""

    @abstractmethod
    def needs(self, ranks: range, owners: range) -> bool:
        """Whether some rank of `ranks` needs a row of some block of `owners`."""

    @abstractmethod
    def visits(self, rank: int, owner: int) -> bool:
        """Whether `rank` needs a row of the block of `owner`."""

    @abstractmethod
    def needed_run(self, first: int, last: int) -> Run | None:
        """(first, last) position of the block rows that a rank with the positions first .. last needs.

        The run contains both `first` and `last`. If `first` and `last` grow, both ends of the run stay or grow. None
        where the pattern does not know such a run.
        """

    @abstractmethod
    def needed_runs(self, first: np.ndarray, last: np.ndarray) -> Runs | None:
        """The answers of `needed_run` for ascending positions, int64 [runs] each."""

    @abstractmethod
    def reader_runs(self, positions: np.ndarray) -> Runs | None:
        """The first and last position that needs each of these ascending block rows, as in `needed_run`."""

    @cached_property
    def sampled_reach(self) -> RowReach | None:
        """What ranks need of all blocks, or of the `sampled` blocks, where this follows without tiles; else None."""
        return self._find_reach()

    @cached_property
    def row_reach(self) -> RowReach | None:
        """What ranks need of all blocks, where this follows without tiles; else None."""
        reach = self.sampled_reach
        return reach if reach is not None and len(reach.blocks) == self.layout.ranks else None

    @cached
    def _find_reach(self) -> RowReach | None:
        from .row_reach import find_row_reach  # only plans load it

        blocks = sampled(self.layout.ranks)
        return find_row_reach(self.layout, blocks, self.block_heads, self.needed_runs, self.reader_runs)

    @abstractmethod
    def sees_all(self, mine: range, block: range) -> bool:
        """Whether all pairs of the positions `mine` of a rank and `block` of an owner are seen, in all heads."""

    @abstractmethod
    def _needed_pieces(self, mine: range, block: range) -> Iterator[tuple[range, range]]:
        """(heads of the block, positions): all positions of `block` that `mine` needs; pieces may overlap."""

    def all_needed(self, rank: int, owners: range) -> bool:
        """A cheap sufficient test that `rank` needs a row of every block of `owners`; False means unknown."""
        layout = self.layout
        return layout.regular and any(
            self._surely_needs_all(mine, block) for mine in layout.shard(rank) for block in layout.span(owners)[0]
        )

    def _surely_needs_all(self, mine: range, block: range) -> bool:
        """A cheap sufficient test that `mine` needs every position of `block`; False means unknown."""
        run = self.needed_run(mine[0], mine[-1]) if mine.step == block.step == 1 else None
        return self.sees_all(mine, block) if run is None else run[0] <= block.start and block.stop - 1 <= run[1]

    @cached
    def needed_rows(self, ranks: tuple[range, ...], owner: int) -> RowSets:
        """The rows of the block of `owner` that some rank of `ranks` needs."""
        reach = self.row_reach
        return self._union(ranks, owner) if reach is None else reach.needed(ranks, owner)

    def count_needed(self, ranks: tuple[range, ...], owner: int) -> int:
        """The number of rows of all heads in `needed_rows`, without making the row sets where possible."""
        reach = self.row_reach
        if reach is not None:
            return reach.count(ranks, owner)
        pieces = (piece for run in ranks for piece in self._local_pieces(run, owner))
        return count_union(pieces, self.block_heads, self.layout.rows(owner))

    def _union(self, ranks: tuple[range, ...], owner: int) -> RowSets:
        pieces = (piece for run in ranks for piece in self._local_pieces(run, owner))
        return union(pieces, self.block_heads, self.layout.rows(owner))

    def _local_pieces(self, ranks: range, owner: int) -> Iterator[tuple[range, range]]:
        """(heads of the block, local rows) of the block of `owner` that some rank of `ranks` needs."""
        if not self.needs(ranks, range(owner, owner + 1)):
            return
        positions, exact = self.layout.span(ranks)
        if not exact:
            half = len(ranks) // 2
            yield from self._local_pieces(ranks[:half], owner)
            yield from self._local_pieces(ranks[half:], owner)
            return
        first = 0
        for block in self.layout.shard(owner):
            for mine in positions:
                for heads, rows in self._needed_pieces(mine, block):
                    local = locate(rows, block)
                    yield heads, range(local.start + first, local.stop + first, local.step)
            first += len(block)
