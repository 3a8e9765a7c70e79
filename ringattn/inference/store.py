"""The keys and values of one layer on one rank, in blocks whose rows several rows of a batch may share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..plan.row_sets import Ranges
from ..runtime.memory import empty
from .holdings import Kept

#: A block of more rows than this is shared by the beams of a fork; a shorter one is copied.
SHARED_ROWS = 256


class Block:
    """Keys [R, K, capacity, D] and values [R, K, capacity, Dv], of which the first `count` rows are in use.

    `of` says which of the R rows is that of each row of the batch; None: R is the batch.
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
        """Keep these rows only."""
        count = sum(map(len, local))
        if local not in ((), (range(count),)):
            self._move(local, self.tensors, -(-count // page) * page)
        elif not count:
            self.tensors = ()
        self.count = count

    def _move(self, local: Ranges, like: tuple[Tensor, ...], capacity: int) -> None:
        """Move rows to new memory, of the shapes of `like`."""
        moved = [empty((*x.shape[:2], capacity, x.shape[3]), x.dtype, x.device) for x in like]
        first = 0
        for run in local:
            for x, room in zip(self.tensors, moved, strict=True):
                room[:, :, first : first + len(run)].copy_(x[:, :, run.start : run.stop])
            first += len(run)
        self.tensors = tuple(moved)

    def share(self, rows: Sequence[int]) -> None:
        """Let row i of the batch be what row rows[i] was. Rows that no row of the batch is any more are freed."""
        of = list(rows) if self.of is None else [self.of[row] for row in rows]
        used = sorted({*of})
        if self.tensors and len(used) < self.tensors[0].shape[0]:
            self.tensors = tuple(x[used] for x in self.tensors)
            of = [used.index(row) for row in of]
        held = self.tensors[0].shape[0] if self.tensors else 0
        self.of = None if of == [*range(held)] or not held else of

    def copy(self, rows: Sequence[int]) -> None:
        """As `share`, with a copy for each row of the batch."""
        self.tensors = tuple(x[list(rows)] for x in self.tensors)

    def batches(self, rows: Sequence[int] | None, count: int) -> Iterator[tuple[slice | None, tuple[Tensor, ...]]]:
        """(rows of the batch, their keys and values), one after another where they are not all; None: all."""
        if rows is None and self.of is None:
            yield None, self.tensors
            return
        for row in range(count) if rows is None else rows:
            at = row if self.of is None else self.of[row]
            yield slice(row, row + 1), tuple(x[at : at + 1] for x in self.tensors)


class LayerStore:
    """The blocks of one layer on one rank. Rows are added to the last one."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.blocks = [Block()]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add rows of k [B, K, n, D] and v [B, K, n, Dv]."""
        if k.shape[2]:
            self.blocks[-1].append((k, v), self.page)

    def trim(self, kept: Kept | None, rank: int) -> None:
        """Keep only those rows that `Holdings.keep` says of a rank."""
        for block, rows in zip(self.blocks, kept[rank], strict=True) if kept else ():
            block.keep(rows, self.page)

    def fork(self, rows: Sequence[int], *, seal: bool) -> None:
        """Let row i of the batch go on from row rows[i]. With `seal` all blocks are shared, and a new one begins."""
        for block in self.blocks if seal else self.blocks[:-1]:
            block.share(rows)
        if seal:
            self.blocks.append(Block())
        else:
            self.blocks[-1].copy(rows)

    @property
    def like(self) -> tuple[Tensor, ...]:
        """Keys and values of some block with rows; () where there is none."""
        for block in self.blocks:
            if block.count:
                return block.tensors
        return ()

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values, with the room for new ones."""
        return sum(x.numel() * x.element_size() for block in self.blocks for x in block.tensors)

    def whole(self) -> tuple[Tensor, ...]:
        """k [B, K, n, D] and v [B, K, n, Dv] of all rows: views of one block, else a copy; () where there is no row."""
        parts = [
            tuple((x if block.of is None else x[block.of])[:, :, : block.count] for x in block.tensors)
            for block in self.blocks
            if block.count
        ]
        return parts[0] if len(parts) == 1 else tuple(torch.cat(xs, 2) for xs in zip(*parts, strict=True))
