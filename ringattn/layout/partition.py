"""What a layout is: a partition of the sequence over the ranks, and what tensors do under it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cache import Value
from ..errors import InvalidInput

if TYPE_CHECKING:
    import torch

#: A run of ranks is described by at most this many ranges; a longer description is replaced by a superset.
MAX_RANGES = 16


#: The most tokens, or ranks: sums and differences of positions stay within 64 bits.
MOST = 1 << 61


@dataclass(frozen=True)
class Layout(Value, ABC):
    """A partition of positions 0 .. tokens-1 over `ranks`; any tokens >= 0, any ranks >= 1, shards may be uneven.

    The local order of a shard is the order of its ranges, each walked from start to stop.
    """

    tokens: int
    ranks: int

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int | np.integer) or not isinstance(self.ranks, int | np.integer):
            raise InvalidInput(f"a layout needs whole numbers, got tokens={self.tokens!r} and ranks={self.ranks!r}")
        if self.tokens < 0 or self.ranks < 1:
            raise InvalidInput(
                f"a layout needs tokens >= 0 and ranks >= 1, got tokens={self.tokens} and ranks={self.ranks}"
            )
        if max(self.tokens, self.ranks) > MOST:
            raise InvalidInput(
                f"a layout of {self.tokens:.3g} tokens on {self.ranks:.3g} ranks: positions are 64-bit integers, so that "
                f"{MOST:.3g} tokens are the most; try tokens=1e12"
            )

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that `make_layout` reads back."""

    @property
    def digest(self) -> str:
        """Tells partitions apart that share `name`, `tokens` and `ranks`; empty where these three say everything."""
        return ""

    @property
    def regular(self) -> bool:
        """Whether every range of every `span` is known to hold a row of each of its ranks."""
        return False

    @abstractmethod
    def shard(self, rank: int) -> tuple[range, ...]:
        """The positions that `rank` owns: few disjoint, non-empty ranges, in local order."""

    @abstractmethod
    def owner(self, position: int) -> int:
        """The rank that owns `position`."""

    @abstractmethod
    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        """Ranges that cover the shards of consecutive `ranks`, and whether they hold nothing else."""

    @abstractmethod
    def grouped(self, size: int) -> Layout:
        """The layout of ranks / size ranks, each of which owns what `size` consecutive ranks of this one own."""

    def rows(self, rank: int) -> int:
        """Number of positions of `rank`."""
        return sum(map(len, self.shard(rank)))

    def positions(self, rank: int) -> np.ndarray:
        """The global positions of a shard in local order, int64 [rows]: what rotary embeddings need."""
        parts = [np.arange(r.start, r.stop, r.step, dtype=np.int64) for r in self.shard(rank)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def shard_tensor(self, x: torch.Tensor, rank: int, dim: int = -2) -> torch.Tensor:
        """The shard of `rank` of a whole tensor, along `dim` (a view where the shard is one range)."""
        self._check_length(x.shape[dim], self.tokens, "shard_tensor", dim)
        parts = [_take(x, r, dim) for r in self.shard(rank)]
        if len(parts) == 1:
            return parts[0]
        import torch

        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)

    def unshard_tensor(self, shards: Sequence[torch.Tensor], dim: int = -2) -> torch.Tensor:
        """The whole tensor from the shards of all ranks in rank order: the inverse of `shard_tensor`."""
        if len(shards) != self.ranks:
            raise InvalidInput(f"unshard_tensor needs one shard of each of the {self.ranks} ranks, got {len(shards)}")
        shape = list(shards[0].shape)
        shape[dim] = self.tokens
        # In the memory order of the shards: kernels keep tokens before heads.
        order = sorted(range(len(shape)), key=shards[0].stride, reverse=True)
        whole = shards[0].new_empty([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
        for rank, shard in enumerate(shards):
            self._check_length(shard.shape[dim], self.rows(rank), f"unshard_tensor, rank {rank}", dim)
            first = 0
            for r in self.shard(rank):
                _take(whole, r, dim).copy_(shard.narrow(dim, first, len(r)))
                first += len(r)
        return whole

    def shift(self, labels: torch.Tensor, rank: int, *, dim: int = -1, fill: int = -100) -> torch.Tensor:
        """Next-token labels of `rank`: at position p the label of p + 1 of the whole `labels`, `fill` at the end.

        Shifting each shard by itself would lose the label at every shard border.
        """
        self._check_length(labels.shape[dim], self.tokens, "shift", dim)
        moved = labels.roll(-1, dim)
        if self.tokens:
            moved.narrow(dim, self.tokens - 1, 1).fill_(fill)
        return self.shard_tensor(moved, rank, dim)

    def _check_length(self, found: int, wanted: int, where: str, dim: int) -> None:
        if found != wanted:
            raise InvalidInput(
                f"{where}: dim {dim} has {found:,} rows, the layout {self.name} of {self.tokens:,} tokens over "
                f"{self.ranks} ranks needs {wanted:,}; try another dim=, or a layout made with these sizes"
            )


def _take(x: Any, r: range, dim: int) -> Any:
    index = [slice(None)] * x.ndim
    index[dim] = slice(r.start, r.stop, r.step)
    return x[tuple(index)]


def filled(*ranges: range) -> tuple[range, ...]:
    return tuple(r for r in ranges if r)
