"""Where tokens live: which positions of the sequence each rank owns."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import InvalidInput, did_you_mean

if TYPE_CHECKING:
    import torch

    from .pattern import Pattern

#: A run of ranks is described by at most this many ranges; a longer description is replaced by a superset.
MAX_RANGES = 16


@dataclass(frozen=True)
class Layout(ABC):
    """A partition of positions 0 .. tokens-1 over `ranks`; any tokens >= 0, any ranks >= 1, shards may be uneven.

    The local order of a shard is the order of its ranges, each walked from start to stop.
    """

    tokens: int
    ranks: int

    def __post_init__(self) -> None:
        if self.tokens < 0 or self.ranks < 1:
            raise InvalidInput(
                f"a layout needs tokens >= 0 and ranks >= 1, got tokens={self.tokens} and ranks={self.ranks}"
            )

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that `make_layout` reads back."""

    @abstractmethod
    def shard(self, rank: int) -> tuple[range, ...]:
        """The positions that `rank` owns: few disjoint, non-empty ranges, in local order."""

    @abstractmethod
    def owner(self, position: int) -> int:
        """The rank that owns `position`."""

    @abstractmethod
    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        """Ranges that cover the shards of consecutive `ranks`, and whether they hold nothing else."""

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


def _filled(*ranges: range) -> tuple[range, ...]:
    return tuple(r for r in ranges if r)


@dataclass(frozen=True)
class Contiguous(Layout):
    """Rank r owns one run of about tokens / ranks positions."""

    @property
    def name(self) -> str:
        return "contiguous"

    def shard(self, rank: int) -> tuple[range, ...]:
        return self.span(range(rank, rank + 1))[0]

    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        edge = [self.tokens * i // self.ranks for i in (ranks.start, ranks.stop)]
        return _filled(range(*edge)), True

    def owner(self, position: int) -> int:
        return ((position + 1) * self.ranks - 1) // self.tokens


@dataclass(frozen=True)
class Zigzag(Layout):
    """The sequence is cut into 2P chunks; rank r owns chunks r and 2P-1-r, which balances causal work."""

    @property
    def name(self) -> str:
        return "zigzag"

    def shard(self, rank: int) -> tuple[range, ...]:
        return self.span(range(rank, rank + 1))[0]

    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        chunks = 2 * self.ranks
        ends = (ranks.start, ranks.stop), (chunks - ranks.stop, chunks - ranks.start)
        low, high = (range(*(self.tokens * i // chunks for i in pair)) for pair in ends)
        if low and high and low.stop == high.start:
            return (range(low.start, high.stop),), True
        return _filled(low, high), True

    def owner(self, position: int) -> int:
        chunk = ((position + 1) * 2 * self.ranks - 1) // self.tokens
        return min(chunk, 2 * self.ranks - 1 - chunk)


@dataclass(frozen=True)
class Striped(Layout):
    """Blocks of `block` tokens are dealt to the ranks in turn."""

    block: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 1:
            raise InvalidInput(f"striped: the block is a number of tokens >= 1, got {self.block}; try striped(64)")

    @property
    def name(self) -> str:
        return f"striped({self.block})"

    def shard(self, rank: int) -> tuple[range, ...]:
        return self.span(range(rank, rank + 1))[0]

    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        width = len(ranks) * self.block
        if len(ranks) == self.ranks:
            return _filled(range(self.tokens)), True
        if len(ranks) > 1 and min(width, self._stripes) > MAX_RANGES:
            return _filled(range(self.tokens)), False
        return self._ranges(ranks.start * self.block, width), True

    @property
    def _stripes(self) -> int:
        return -(-self.tokens // (self.ranks * self.block))

    def _ranges(self, first: int, width: int) -> tuple[range, ...]:
        """Positions p with first <= p mod (ranks * block) < first + width, in the fewer of two forms."""
        period = self.ranks * self.block
        if width <= self._stripes:
            return _filled(*(range(first + i, self.tokens, period) for i in range(width)))
        starts = range(first, self.tokens, period)
        return _filled(*(range(start, min(start + width, self.tokens)) for start in starts))

    def owner(self, position: int) -> int:
        return position // self.block % self.ranks


_NAMES = {"contiguous": Contiguous, "zigzag": Zigzag, "striped": Striped}


@lru_cache(maxsize=256)
def _named(name: str, tokens: int, ranks: int) -> Layout:
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(?:block\s*=\s*)?(\d+)\s*\))?\s*", name)
    kind = match[1] if match else name
    if match is None or kind not in _NAMES or (match[2] and kind != "striped"):
        hint = did_you_mean(kind, _NAMES)
        raise InvalidInput(f"unknown layout {name!r}; {hint}expected contiguous, zigzag, striped or striped(block)")
    if match[2]:
        return Striped(tokens, ranks, int(match[2]))
    return _NAMES[kind](tokens, ranks)


def make_layout(name: str | Layout, *, tokens: int, ranks: int, pattern: Pattern | None = None) -> Layout:
    """The layout called `name` ("contiguous", "zigzag", "striped", "striped(64)"); a Layout is checked and returned.

    `pattern` is for layouts that balance the work of a pattern; none of these three looks at it.
    """
    if isinstance(name, Layout):
        if (name.tokens, name.ranks) != (tokens, ranks):
            raise InvalidInput(
                f"the layout {name.name} was made for {name.tokens:,} tokens over {name.ranks} ranks, "
                f"the call has {tokens:,} tokens over {ranks}; try layout={name.name!r} by name"
            )
        return name
    return _named(name, tokens, ranks)
