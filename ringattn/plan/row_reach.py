"""Which ranks need each row of striped blocks, by arithmetic on all rows at once.

The ranges of a striped block have a step, so that a document of a few rows per rank takes many small tiles. Where each
query attends one run of keys, no tiles are needed: the ranks that need a row are its owner, some places after the owner
around the ring, and some places before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..layout.regular import Layout, Striped
from .row_sets import NO_ROWS, WHOLE_BLOCK, Ranges, RowSet, RowSets, to_ranges

#: More tokens or ranks are planned by ranges: the arrays of a plan hold a few numbers for each token.
MOST_TOKENS, MOST_RANKS = 1 << 21, 512


class RowReach:
    """The ranks that need each row: up to `after` places after the owner, and up to `before` places before the owner.

    `before` and `after` count places by position, int64 [tokens], at most the number of ranks. `heads` are the heads
    of a block.
    """

    def __init__(self, layout: Layout, block: int, before: np.ndarray, after: np.ndarray, heads: int) -> None:
        #: The owners of the blocks.
        self.blocks = list(range(layout.ranks))
        self.layout, self.heads, self._before, self._after = layout, heads, before, after
        self._owner = np.resize(np.repeat(np.arange(layout.ranks), block), layout.tokens)
        self._rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        places = (np.arange(layout.ranks)[:, None] - np.arange(layout.ranks)) % layout.ranks
        farthest = np.full((2, layout.ranks), -1)  # nobody needs a block without rows
        self._pieces = self._find_pieces()
        for most, places_of_rows in zip(farthest, self._pieces[1:3], strict=True):
            np.maximum.at(most, self._pieces[0], places_of_rows)
        #: Whether a rank needs a row of the block of an owner: bool [ranks, owners].
        self._visits = (places <= farthest[1]) | (-places % layout.ranks <= farthest[0])

    @property
    def nbytes(self) -> int:
        return 5 * self._after.nbytes + self._visits.nbytes

    def needs(self, ranks: range, owners: range) -> bool:
        """Whether some rank of `ranks` needs a row of some block of `owners`."""
        return bool(self._visits[ranks.start : ranks.stop, owners.start : owners.stop].any())

    def count_carried(self, sign: int, limit: int) -> np.ndarray:
        """Rows of one head that each block sends on each hop of a way, the farthest hop first: int64 [ranks, hops].

        A hop carries what its target needs, or a rank beyond.
        """
        owner, before, after, rows = self._pieces
        ahead, behind = (after, before) if sign > 0 else (before, after)
        # A rank `behind` is reached the other way around the ring.
        hops = np.where(behind >= self.layout.ranks - limit, limit, np.minimum(ahead, limit))
        counts = np.bincount(owner * (limit + 1) + limit - hops, rows, self.layout.ranks * (limit + 1))
        return counts.reshape(self.layout.ranks, limit + 1).cumsum(1).astype(np.int64)[:, :limit]

    def needed(self, ranks: Sequence[range], owner: int, *, runs: bool) -> RowSets:
        """The rows of the block of `owner` that some rank of `ranks` needs, in `runs` or in few ranges."""
        return self._row_sets(self._mask(ranks, owner), runs=runs)

    def count(self, ranks: Sequence[range], owner: int) -> int:
        """The number of rows of all heads in `needed`."""
        return int(np.count_nonzero(self._mask(ranks, owner))) * self.heads

    def needed_only(self, ranks: Sequence[range], others: Sequence[Sequence[range]], owner: int) -> RowSets:
        """The rows that some rank of `ranks` needs and no rank of `others`, in as few ranges as possible."""
        mask = self._mask(ranks, owner)
        for other in others:
            mask &= ~self._mask(other, owner)
        return self._row_sets(mask, runs=False)

    def _mask(self, ranks: Sequence[range], owner: int) -> np.ndarray:
        """Which rows of the block of `owner`, in local order, some rank of `ranks` needs: bool [rows]."""
        if owner not in self._rows:
            shard = self.layout.shard(owner)
            parts = [[x[r.start : r.stop : r.step] for r in shard] for x in (self._before, self._after)]
            before, after = (np.concatenate(part) if part else np.empty(0, dtype=np.int64) for part in parts)
            self._rows[owner] = before, after
        before, after = self._rows[owner]
        size = self.layout.ranks
        ahead = min((0 if owner in run else (run.start - owner) % size for run in ranks), default=size + 1)
        behind = min((0 if owner in run else (owner - run.stop + 1) % size for run in ranks), default=size + 1)
        return (after >= ahead) | (before >= behind)

    def _row_sets(self, mask: np.ndarray, *, runs: bool) -> RowSets:
        """The rows of a mask as the rows of every head."""
        held = int(np.count_nonzero(mask))
        if held == len(mask):
            return WHOLE_BLOCK if held else NO_ROWS
        if not held:
            return NO_ROWS
        ranges = _find_runs(mask) if runs else to_ranges(np.flatnonzero(mask))
        return (RowSet(tuple(range(self.heads)), (ranges,)),)

    def _find_pieces(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(owner, before, after, rows): int64 [pieces], the numbers of rows that are needed alike."""
        one_way = [not self._before.any(), not self._after.any()]
        if not any(one_way):
            return self._owner, self._before, self._after, np.ones_like(self._after)
        size = self.layout.ranks + 1
        counts = np.bincount(self._owner * size + (self._after if one_way[0] else self._before))
        cells = np.flatnonzero(counts)
        owner, places = np.divmod(cells, size)
        nothing = np.zeros_like(places)
        return owner, *((nothing, places) if one_way[0] else (places, nothing)), counts[cells]


def _find_runs(mask: np.ndarray) -> Ranges:
    """The runs of adjacent members of a mask."""
    edges = (np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist()
    edges = [*([0] if mask[0] else []), *edges, *([len(mask)] if mask[-1] else [])]
    return tuple(map(range, edges[::2], edges[1::2]))


def find_row_reach(
    layout: Layout, heads: int, find_readers: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray] | None]
) -> RowReach | None:
    """The reach of the rows of blocks of `heads` heads; None where the layout or the pattern does not allow it.

    `find_readers` gives the first and last position that needs each of these positions, see `BlockDemand`.
    """
    if not isinstance(layout, Striped) or not 0 < layout.tokens <= MOST_TOKENS or layout.ranks > MOST_RANKS:
        return None
    positions = np.arange(layout.tokens)
    readers = find_readers(positions)
    if readers is None:
        return None
    first, last = np.maximum(readers[0], 0), np.minimum(readers[1], layout.tokens - 1)
    places = (first, positions, last) if layout.block == 1 else (x // layout.block for x in (first, positions, last))
    low, own, high = places
    before, after = np.minimum(own - low, layout.ranks), np.minimum(high - own, layout.ranks)
    return RowReach(layout, layout.block, before, after, heads)
