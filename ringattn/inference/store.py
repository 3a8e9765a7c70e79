"""The keys and values of one layer on one rank, in blocks that rows of a batch can share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..kernels.memory import empty
from ..plan.row_sets import Ranges
from .holdings import Kept

#: A fork shares blocks of more rows than this between beams, and copies shorter blocks.
SHARED_ROWS = 256


def of_both(function: Callable[[Tensor], Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(function(k), function(v)); one tensor twice if the keys are the values, too, so that v is k."""
    first = function(k)
    return first, first if v is k else function(v)


class Block:
    """Keys [R, K, capacity, D] and values [R, K, capacity, Dv] of a cache; the first `count` of `capacity` are in use.

    There is one tensor if the keys are the values, too.

    Rows of the batch can share memory: row i of the batch has the keys at index `of[i]`, 0 <= `of[i]` < R. If `of` is
    None, the rows of the batch are the R rows in order.
    """

    def __init__(self) -> None:
        self.tensors: tuple[Tensor, ...] = ()
        self.count = 0
        self.of: list[int] | None = None

    def append(self, new: tuple[Tensor, ...], page: int) -> None:
        """Add rows; memory grows by whole pages."""
        count = self.count + new[0].shape[2]
        if not self.tensors or count > self.tensors[0].shape[2]:
            self._move(((range(self.count),) if self.count else ()), new, -(-count // page) * page)
        for mine, x in zip(self.tensors, new, strict=True):
            mine[:, :, self.count : count].copy_(x)
        self.count = count

    def keep(self, local: Ranges, page: int) -> None:
        """Keep only the local rows in `local`; memory shrinks by multiples of `page` rows."""
        count = sum(map(len, local))
        if local not in ((), (range(count),)):
            self._move(local, self.tensors, -(-count // page) * page)
        elif not count:
            self.tensors = ()
        self.count = count

    def _move(self, local: Ranges, like: tuple[Tensor, ...], capacity: int) -> None:
        """Move rows to new memory with the shapes of `like`."""
        moved = [empty((*x.shape[:2], capacity, x.shape[3]), x.dtype, x.device) for x in like]
        first = 0
        for run in local:
            for x, room in zip(self.tensors, moved, strict=True):
                room[:, :, first : first + len(run)].copy_(x[:, :, run.start : run.stop])
            first += len(run)
        self.tensors = tuple(moved)

    def share(self, rows: Sequence[int]) -> None:
        """Replace the rows of the batch: the new row i refers to the memory of the old row rows[i].

        Frees memory to which no row refers any more.
        """
        of = list(rows) if self.of is None else [self.of[row] for row in rows]
        used = sorted({*of})
        if self.tensors and len(used) < self.tensors[0].shape[0]:
            self.tensors = tuple(x[used] for x in self.tensors)
            of = [used.index(row) for row in of]
        held = self.tensors[0].shape[0] if self.tensors else 0
        self.of = None if of == [*range(held)] or not held else of

    def copy(self, rows: Sequence[int]) -> None:
        """Like `share`, but every row of the batch gets its own copy in memory."""
        self.tensors = tuple(x[list(rows)] for x in self.tensors)

    def batches(self, rows: Sequence[int] | None, count: int) -> Iterator[tuple[slice | None, tuple[Tensor, ...]]]:
        """Pairs (rows of the batch, their keys and values), one for each row in `rows`; None: all rows.

        If `rows` is None and no rows share memory, a single pair (None, tensors) stands for the whole batch.
        """
        if rows is None and self.of is None:
            yield None, _pair(self.tensors)
            return
        for row in range(count) if rows is None else rows:
            at = row if self.of is None else self.of[row]
            yield slice(row, row + 1), _pair(tuple(x[at : at + 1] for x in self.tensors))


def _pair(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tensors * 2 if len(tensors) == 1 else tensors


class LayerStore:
    """The blocks of one layer on one rank. New rows go to the last block."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.blocks = [Block()]
        #: What an indexer knows of the same rows; None if there is none.
        self.index: LayerStore | None = None

    def append(self, k: Tensor, v: Tensor, index: Tensor | None = None) -> None:
        """Add rows of k [B, K, n, D] and v [B, K, n, Dv]; v may be k, which is then kept once."""
        if k.shape[2]:
            self.blocks[-1].append((k,) if v is k else (k, v), self.page)
        if index is not None:
            self.index = self.index or LayerStore(self.page)
            self.index.append(index, index)

    def trim(self, kept: Kept | None, rank: int) -> None:
        """Keep only the rows that `Holdings.keep` returned for this rank; with None, keep all."""
        for block, rows in zip(self.blocks, kept[rank], strict=True) if kept else ():
            block.keep(rows, self.page)
        if self.index is not None:
            self.index.trim(kept, rank)

    def fork(self, rows: Sequence[int], *, seal: bool) -> None:
        """Replace the rows of the batch: the new row i continues the old row rows[i].

        With `seal`, the rows share all blocks, and new keys go to a new block. Otherwise the last block is copied for
        each row.
        """
        for block in self.blocks if seal else self.blocks[:-1]:
            block.share(rows)
        if seal:
            self.blocks.append(Block())
        else:
            self.blocks[-1].copy(rows)
        if self.index is not None:
            self.index.fork(rows, seal=seal)

    @property
    def like(self) -> tuple[Tensor, ...]:
        """Keys and values of any block that has rows, as a template of their shape; () if there is none."""
        return next((_pair(block.tensors) for block in self.blocks if block.count), ())

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values, and of what an indexer knows, including room for new rows."""
        own = sum(x.numel() * x.element_size() for block in self.blocks for x in block.tensors)
        return own + (0 if self.index is None else self.index.nbytes)

    def whole(self) -> tuple[Tensor, ...]:
        """k [B, K, n, D] and v [B, K, n, Dv] with the rows of all blocks; () if there are no rows.

        Views if there is one block, otherwise a copy.
        """
        parts = [
            tuple((x if block.of is None else x[block.of])[:, :, : block.count] for x in block.tensors)
            for block in self.blocks
            if block.count
        ]
        return _pair(parts[0] if len(parts) == 1 else tuple(torch.cat(xs, 2) for xs in zip(*parts, strict=True)))
