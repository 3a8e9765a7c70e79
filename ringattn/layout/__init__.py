"""The interface of a layout: how the sequence is partitioned over the ranks, and how tensors are sharded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from ..cache import Numbered
from ..errors import InvalidInput
from ..pattern.base import check_integer
from ..pattern.documents import Documents
from ..pattern.tile import merge_runs, shift_range

if TYPE_CHECKING:
    from torch import Tensor

#: `Layout.span` returns at most this many ranges for several ranks; it replaces a longer answer by a superset.
MAX_RANGES = 16
#: The largest number of tokens or ranks: sums and differences of positions must fit into 64-bit integers.
MOST = 1 << 61


def check_sizes(tokens: object, ranks: object) -> dict[str, int]:
    """The sizes of a layout as keywords. Raises InvalidInput for anything but integers in their range."""
    return {
        "tokens": check_integer(tokens, "layout: tokens", 0, "tokens=4096"),
        "ranks": check_integer(ranks, "layout: ranks", 1, "ranks=8"),
    }


@dataclass(frozen=True)
class Layout(Numbered, ABC):
    """A partition of the positions 0 .. tokens-1 over `ranks` ranks: each rank owns a shard of the sequence.

    Any tokens >= 0 and ranks >= 1 work; shards may differ in length and may be empty. A shard is a tuple of ranges, and
    its local order is the order of these ranges, each from start to stop. Layouts are immutable values; `make_layout`
    makes one from its name. Raises InvalidInput for any other `tokens` or `ranks`.
    """

    tokens: int
    ranks: int

    def __post_init__(self) -> None:
        self._normalize(**check_sizes(self.tokens, self.ranks))
        self._check_most(self.tokens, self.ranks)

    def _check_most(self, *numbers: int) -> None:
        if max(numbers) > MOST:
            what = f"layout {self.name}: {max(numbers):.3g} tokens, positions or ranks"
            raise InvalidInput(f"{what}: the largest number is {MOST:.3g}; try fewer")

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that `make_layout` reads back, such as "striped(64)"."""

    @property
    def digest(self) -> str:
        """Text that distinguishes layouts with equal `name`, `tokens` and `ranks`; "" if these are enough."""
        return ""

    @property
    def base(self) -> Layout:
        """The layout of a single batch row; `self` unless this layout joins several batch rows (`stacked` > 1)."""
        return self

    @property
    def stacked(self) -> int:
        """The number of batch rows that this layout joins end to end; 1 for a single sequence."""
        return 1

    @property
    def domain(self) -> tuple[range, ...]:
        """All positions of the layout, as ascending ranges of adjacent positions.

        Usually the one range 0 .. tokens-1; `Stacked` and the layouts in `layout.composed` may have several ranges, or
        start elsewhere.
        """
        return nonempty(range(self.tokens))

    def shard(self, rank: int) -> tuple[range, ...]:
        """The positions that `rank` owns, in local order, as the fewest disjoint, non-empty ranges.

        Raises InvalidInput for a rank that the layout does not have.
        """
        if not 0 <= rank < self.ranks:
            raise InvalidInput(
                f"rank={rank}: the layout {self.name} has the ranks 0 .. {self.ranks - 1}; in a subgroup pass the rank "
                "within the group, torch.distributed.get_rank(group) or mesh['cp'].get_local_rank()"
            )
        return self.span(range(rank, rank + 1))[0]

    #: The rows that a rank owns in a tensor of all positions in ascending order, in local order.
    places = shard

    @cached_property
    def all_places(self) -> tuple[tuple[range, ...], ...]:
        """Each rank's row indices, as ranges, in a tensor that holds all positions in ascending order."""
        return tuple(map(self.places, range(self.ranks)))

    @abstractmethod
    def owner(self, position: int) -> int:
        """The rank that owns `position`."""

    @abstractmethod
    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        """(ranges, exact): ranges that together include every position owned by the adjacent `ranks`.

        `exact` is True if the ranges include no position of another rank.
        """

    def grouped(self, size: int) -> Layout:
        """This layout with every `size` adjacent ranks merged into one rank, which owns all their positions."""
        return replace(self, ranks=self.ranks // size)

    def rows(self, rank: int) -> int:
        """The number of positions that `rank` owns."""
        return sum(map(len, self.shard(rank)))

    def positions(self, rank: int) -> np.ndarray:
        """The global positions of a shard in local order, int64 [rows]; rotary embeddings need them."""
        parts = [np.arange(r.start, r.stop, r.step, dtype=np.int64) for r in self.shard(rank)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def shard_tensor(self, x: Tensor, rank: int, dim: int = -2) -> Tensor:
        """The rows of `x` that `rank` owns, in local order along `dim`; a view of `x` if the shard is one range.

        Raises InvalidInput unless `x` has `tokens` rows along `dim`, and for a rank that the layout does not have.
        """
        if x.shape[dim] != self.tokens:
            raise self._wrong_rows(x.shape[dim], self.tokens, "shard_tensor", dim)
        return _take_rows(x, self.places(rank), dim)

    def shard_all(self, x: Tensor, dim: int = -2) -> list[Tensor]:
        """`shard_tensor` for every rank, in rank order."""
        if x.shape[dim] != self.tokens:
            raise self._wrong_rows(x.shape[dim], self.tokens, "shard_tensor", dim)
        if self.is_cut:
            return list(x.unsafe_split_with_sizes(self.lengths, dim))
        return [_take_rows(x, places, dim) for places in self.all_places]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of positions that each rank owns."""
        return tuple(map(self.rows, range(self.ranks)))

    @cached_property
    def is_cut(self) -> bool:
        """Whether concatenating the shards in rank order gives the original sequence."""
        ends = accumulate(self.lengths, initial=0)
        return all(not p or p == (range(*run),) for p, run in zip(self.all_places, pairwise(ends), strict=True))

    @cached_property
    def single(self) -> bool:
        """Whether every rank's shard is empty or a single range."""
        return max(map(len, self.all_places)) <= 1

    def stack(self, x: Tensor) -> Tensor:
        """Reshape x [B, H, n, ...] for sharding: to [1, H, B * n, ...] if this layout joins batch rows."""
        return x

    def unstack(self, x: Tensor) -> Tensor:
        """Undo `stack`: return the tensor in its original shape [B, H, n, ...]."""
        return x

    def unshard_tensor(self, shards: Sequence[Tensor], dim: int = -2) -> Tensor:
        """Reassemble the whole sequence from all ranks' shards in rank order: the inverse of `shard_tensor`.

        Raises InvalidInput for a wrong number of shards, or a shard with the wrong number of rows.
        """
        if len(shards) != self.ranks:
            raise InvalidInput(
                f"unshard_tensor: give the shards of {self.ranks} ranks in rank order, got {len(shards)}"
            )
        shape = list(shards[0].shape)
        shape[dim] = self.tokens
        # Keep the memory order of the shards, because kernels may store tokens before heads.
        order = sorted(range(len(shape)), key=shards[0].stride, reverse=True)
        sequence = shards[0].new_empty([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
        for rank, (shard, rows) in enumerate(zip(shards, self.lengths, strict=True)):
            if shard.shape[dim] != rows:
                raise self._wrong_rows(shard.shape[dim], rows, f"unshard_tensor, rank {rank}", dim)
        if self.is_cut:
            import torch

            return torch.cat(list(shards), dim, out=sequence)
        by_rows = sequence.transpose(0, dim)
        for shard, places in zip(shards, self.all_places, strict=True):
            first = 0
            for r in places:
                by_rows[r.start : r.stop : r.step].copy_(shard.narrow(dim, first, len(r)).transpose(0, dim))
                first += len(r)
        return sequence

    def shift(
        self, labels: Tensor, rank: int, *, dim: int = -1, fill: int = -100, distance: int = 1,
        documents: Documents | None = None,
    ) -> Tensor:  # fmt: skip
        """The labels of `rank`, shifted: at position p the label of position p + `distance`, or `fill`.

        `fill` stands where the document ends before position p + `distance`. `labels` holds the whole sequence along
        `dim`, either as one document or as the packed `documents`; shifting each shard separately would lose labels at
        the shard boundaries. Raises InvalidInput unless `labels` has `tokens` rows.
        """
        if labels.shape[dim] != self.tokens:
            raise self._wrong_rows(labels.shape[dim], self.tokens, "shift", dim)
        return self.shard_tensor(shift_labels(labels, distance, documents, fill, dim), rank, dim)

    def _wrong_rows(self, rows: int, expected: int, where: str, dim: int) -> InvalidInput:
        return InvalidInput(
            f"{where}: dim {dim} has {rows:,} rows, the layout {self.name} of {self.tokens:,} tokens over "
            f"{self.ranks} ranks needs {expected:,}; try another dim=, or a layout made with these sizes"
        )


def _take_rows(x: Tensor, places: Sequence[range], dim: int) -> Tensor:
    """The rows of `x` at `places` along `dim`: a view for one range or none."""
    by_rows = x.transpose(0, dim)
    parts = [by_rows[r.start : r.stop : r.step].transpose(0, dim) for r in places]
    if len(parts) == 1:
        return parts[0]
    import torch

    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def shift_labels(labels: Tensor, distance: int, documents: Documents | None, fill: int, dim: int = -1) -> Tensor:
    """For each position, the label `distance` positions later; `fill` beyond the end of the position's document.

    With rows [B, N], the documents may differ between rows.
    """
    import torch

    labels, tokens = labels.movedim(dim, -1), labels.shape[dim]
    distance = min(check_integer(distance, "the distance of a label", 1, "1, the next token"), tokens)
    documents, places = documents or Documents((tokens,)), np.arange(tokens)
    documents.check(tokens, 1)
    if documents.rows and labels.shape[:-1] != (documents.rows,):
        raise InvalidInput(
            f"{documents.rows} rows of documents but labels {tuple(labels.shape)}; give one row of labels for each"
        )
    rows = map(documents.row, range(documents.rows or 1))
    beyond = np.array([places + distance >= np.repeat(row.starts[1:], row.lengths) for row in rows])
    mask = torch.from_numpy(beyond if documents.rows else beyond[0]).to(labels.device)
    return labels.roll(-distance, -1).masked_fill(mask, fill).movedim(-1, dim)


def nonempty(*ranges: range) -> tuple[range, ...]:
    """The `ranges` without the empty ones."""
    return tuple(r for r in ranges if r)


@dataclass(frozen=True)
class Stacked(Layout):
    """A layout of `count` batch rows joined end to end; each row is sharded by `row_layout`.

    `tokens` is the total over all rows. Position p of row i becomes position i * stride + p. Each rank gets the same
    rows from a tensor [1, H, count * N, D] as `row_layout` gives it from [count, H, N, D].
    """

    row_layout: Layout
    count: int
    stride: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_most(self.count * self.stride)

    @property
    def base(self) -> Layout:
        return self.row_layout

    @property
    def stacked(self) -> int:
        return self.count

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def digest(self) -> str:
        return self.base.digest

    @property
    def domain(self) -> tuple[range, ...]:
        return merge_runs(self._of_rows(self.base.domain, self.stride))

    def places(self, rank: int) -> tuple[range, ...]:
        return self._of_rows(self.base.places(rank), self.base.tokens)

    def owner(self, position: int) -> int:
        return self.base.owner(position % self.stride)

    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        ranges, exact = self.base.span(ranks)
        parts = self._of_rows(ranges, self.stride)
        if len(ranks) == self.ranks and all(r.step == 1 for r in parts):
            parts = merge_runs(parts)
        return parts, exact

    def _of_rows(self, ranges: tuple[range, ...], stride: int) -> tuple[range, ...]:
        """The given ranges of one batch row, repeated for every row."""
        return tuple(shift_range(r, row * stride) for row in range(self.count) for r in ranges)

    def grouped(self, size: int) -> Layout:
        return stack_rows(self.base.grouped(size), self.count, self.stride)

    def stack(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).reshape(1, x.shape[1], x.shape[0] * x.shape[2], *x.shape[3:])

    def unstack(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[1], self.count, x.shape[2] // self.count, *x.shape[3:]).transpose(0, 1)


def stack_rows(base: Layout, rows: int, stride: int) -> Stacked:
    """A layout of `rows` batch rows joined end to end, each sharded by `base`; row i starts at position i * stride."""
    return Stacked(base.tokens * rows, base.ranks, base, rows, stride)
