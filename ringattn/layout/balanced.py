"""The balanced layout: chunks of the sequence, distributed so that all ranks compute about as many pairs."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from heapq import heappop, heappush
from itertools import groupby, pairwise
from math import gcd
from typing import TYPE_CHECKING

from ..errors import InvalidInput
from ..pattern.ranges import merge_runs
from ..text import shorten
from .partition import MAX_RANGES, Layout

if TYPE_CHECKING:
    from ..pattern import Pattern

#: Largest cost of a rank, in percent of the mean cost, for which each rank keeps a run of adjacent chunks: a finer
#: balance costs more bytes than it saves time.
BOUND = 105
#: Chunks per rank if the layout's name gives no chunk; a chunk longer than ALIGNED tokens is a multiple of ALIGNED.
CHUNKS, ALIGNED = 8, 128


@dataclass(frozen=True)
class Balanced(Layout):
    """Chunks of `chunk` tokens, distributed so that the ranks compute about as many pairs of a pattern.

    A rank owns at most ceil(chunks / ranks) chunks, so memory is balanced up to one chunk. Each rank keeps a run of
    adjacent chunks unless a rank then has more than 1.05 of the mean pairs; see `deal`.

    Counted on 8 ranks with documents of lognormal lengths: this layout reduces the imbalance from 1.67 (contiguous) to
    1.01 for 0.98 of a full ring's bytes, and striping to 1.05 for all of them. A window stays contiguous, for 0.12.

    `runs` are (first chunk, owner) of each run of chunks, ascending. Use `make_layout` to make one for a pattern.
    Raises InvalidInput for runs that are not a partition of the chunks.
    """

    chunk: int
    runs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise InvalidInput(f"balanced: the chunk is a number of tokens >= 1, got {self.chunk}; try balanced(128)")
        runs = tuple(
            next(same_owner)
            for _, same_owner in groupby(((i, owner) for i, owner in self.runs), key=lambda run: run[1])
        )
        self._normalize(runs=runs)
        firsts = [first for first, _ in self.runs]
        last = (self.tokens - 1) // self.chunk
        shown = shorten(repr(self.runs), 100)
        ascending = all(a < b for a, b in pairwise(firsts))
        if firsts[:1] != [0][: self.tokens] or not ascending or firsts[-1:] > [last]:
            raise InvalidInput(f"balanced: the runs must begin at chunk 0, ascend and end by chunk {last}, got {shown}")
        if not all(0 <= owner < self.ranks for _, owner in self.runs):
            raise InvalidInput(f"balanced: an owner is one of the {self.ranks} ranks, got {shown}")

    def __hash__(self) -> int:
        return self._hash  # cached: every call looks its plan up by layout

    @cached_property
    def _hash(self) -> int:
        return hash((self.tokens, self.ranks, self.chunk, self.runs))

    @cached_property
    def digest(self) -> str:
        """16 hex digits of the partition: ranks with different partitions detect it before the first message."""
        return sha256(repr(self.runs).encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        return f"balanced({self.chunk})"

    @cached_property
    def _starts(self) -> list[int]:
        return [first * self.chunk for first, _ in self.runs]

    @cached_property
    def _shards(self) -> dict[int, tuple[range, ...]]:
        ranges: dict[int, list[range]] = {}
        for (start, stop), (_, owner) in zip(pairwise([*self._starts, self.tokens]), self.runs, strict=True):
            ranges.setdefault(owner, []).append(range(start, stop))
        return {owner: merge_runs(parts) for owner, parts in ranges.items()}

    def shard(self, rank: int) -> tuple[range, ...]:
        self._check_rank(rank)
        return self._shards.get(rank, ())

    def owner(self, position: int) -> int:
        return self.runs[bisect_right(self._starts, position) - 1][1]

    def grouped(self, size: int) -> Layout:
        runs = tuple((first, owner // size) for first, owner in self.runs)
        return Balanced(self.tokens, self.ranks // size, self.chunk, runs)

    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        if len(ranks) == 1:
            return self.shard(ranks[0]), True  # exact whatever the number of ranges: a single rank cannot be halved
        parts = merge_runs(r for rank in ranks for r in self.shard(rank))
        if len(parts) <= MAX_RANGES:
            return parts, True
        # Keep the MAX_RANGES - 1 widest gaps between the ranges, and fill the others.
        gaps = sorted(range(1, len(parts)), key=lambda i: parts[i].start - parts[i - 1].stop)
        bounds = [0, *sorted(gaps[1 - MAX_RANGES :]), len(parts)]
        return tuple(range(parts[a].start, parts[b - 1].stop) for a, b in pairwise(bounds)), False


def balance(tokens: int, ranks: int, chunk: int | None, pattern: Pattern, heads: int) -> Balanced:
    """The layout that balances `pattern` over `heads` query heads. Costs O(chunks) calls of `pattern.count`.

    `chunk` None gives at least 8 chunks per rank, each a multiple of 128 tokens if it is longer than 128. If few rows
    hold most pairs, as global blocks do, only a smaller chunk can balance them. Raises InvalidInput for numbers that no
    layout has, and if the pattern does not fit.
    """
    # Report wrong numbers before the pattern is counted.
    Balanced(min(tokens, 0), ranks, 1 if chunk is None else chunk, ())
    if heads < 1:
        raise InvalidInput(f"heads={heads}: must be an integer >= 1; give the number of query heads")
    if chunk is None:
        chunk = max(tokens // (CHUNKS * ranks), 1)
        chunk -= chunk % ALIGNED if chunk > ALIGNED else 0
    pattern.check(tokens, heads)
    bound, positions = pattern.bind(heads, tokens), range(tokens)
    rows = [bound.row(index) for index in range(bound.rows or 1)]  # of a batch whose rows have patterns of their own
    costs = [
        sum(row.count(positions[start : start + chunk], positions, range(heads)) for row in rows)
        for start in range(0, tokens, chunk)
    ]
    # Without the common factor, a pattern that is the same for all heads gives one layout for any number of heads.
    common = gcd(*costs) or 1
    costs = [cost // common for cost in costs]
    owners = [0] * len(costs)
    for rank, share in enumerate(deal(costs, ranks)):
        for i in share:
            owners[i] = rank
    firsts = [i for i, owner in enumerate(owners) if i == 0 or owner != owners[i - 1]]
    return Balanced(tokens, ranks, chunk, tuple((i, owners[i]) for i in firsts))


def deal(costs: list[int], ranks: int) -> list[list[int]]:
    """The chunks of each rank, ascending, at most ceil(chunks / ranks), with about equal sums of `costs`.

    Runs of equally many adjacent chunks, where no rank then has more than 1.05 of the mean cost. Else the chunks are
    dealt heaviest first, each to the least loaded rank that has room for it, unless the runs are as good.
    """
    chunks, most = len(costs), -(-len(costs) // ranks)
    runs = [list(range(chunks * r // ranks, chunks * (r + 1) // ranks)) for r in range(ranks)]
    if 100 * ranks * _maximum(costs, runs) <= BOUND * sum(costs):
        return runs
    heap = [(0, 0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for chunk in sorted(range(chunks), key=lambda i: -costs[i]):
        load, count, rank = heappop(heap)
        insort(shares[rank], chunk)
        if count + 1 < most:
            heappush(heap, (load + costs[chunk], count + 1, rank))
    # Number the ranks by their first chunk, so that neighbours in the ring hold chunks near to each other.
    shares.sort(key=lambda share: share or [chunks])
    return min(runs, shares, key=lambda shares: _maximum(costs, shares))


def _maximum(costs: list[int], shares: list[list[int]]) -> int:
    """The cost of the most loaded rank."""
    return max(sum(costs[i] for i in share) for share in shares)
