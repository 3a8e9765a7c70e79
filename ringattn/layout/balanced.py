"""The balanced layout: chunks of the sequence, distributed so that all ranks compute about as many pairs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from heapq import heappop, heappush
from itertools import accumulate, groupby, pairwise
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InvalidInput
from ..pattern.ranges import merge_runs
from ..text import shorten
from .partition import MAX_RANGES, Layout

if TYPE_CHECKING:
    from ..pattern import Pattern

#: Largest accepted cost of a rank, in percent of the mean cost. A finer balance costs more bytes than it saves time.
BOUND = 105
#: Largest number of rounds in which heavy and light ranks exchange chunks.
ROUNDS = 32
#: Chunks per rank if the layout's name gives no chunk; a chunk longer than ALIGNED tokens is a multiple of ALIGNED.
CHUNKS, ALIGNED = 8, 128
DEFAULT_CHUNK_HINT = "try balanced(128), or balanced for about 8 chunks per rank"

#: The chunks of each rank, ascending.
Shares = list[list[int]]


@dataclass(frozen=True)
class Balanced(Layout):
    """Chunks of `chunk` tokens, distributed so that the ranks compute about as many pairs of a pattern.

    A rank owns at most ceil(chunks / ranks) chunks, so memory is balanced up to one chunk. A rank keeps a run of
    adjacent chunks unless it has more than 1.05 of the mean pairs; then it exchanges the ends of its run with a light
    rank.

    Counted on 8 ranks with documents of lognormal lengths: this layout reduces the imbalance from 1.67 (contiguous) to
    1.04 and sends 0.61 of a full ring's bytes, where heaviest-chunk-first distribution gives 1.01 for 0.98 of the
    bytes, and striping 1.05 for 1.00. A window stays contiguous, for 0.12 of the bytes.

    `runs` are (first chunk, owner) of each run of chunks, ascending. Use `make_layout` to make one for a pattern.
    Raises InvalidInput for runs that are not a partition of the chunks.
    """

    chunk: int
    runs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise InvalidInput(
                f"balanced: the chunk is a number of tokens >= 1, got {self.chunk}; {DEFAULT_CHUNK_HINT}"
            )
        runs = tuple(
            next(same_owner)
            for _, same_owner in groupby(((i, owner) for i, owner in self.runs), key=lambda run: run[1])
        )
        self._normalize(runs=runs)
        firsts = [first for first, _ in self.runs]
        last = (self.tokens - 1) // self.chunk
        ascending = all(a < b for a, b in pairwise(firsts))
        if firsts[:1] != [0][: self.tokens] or not ascending or firsts[-1:] > [last]:
            raise InvalidInput(
                f"balanced: the runs must begin at chunk 0, ascend and end by chunk {last}, got "
                f"{shorten(repr(self.runs), 100)}; make the layout with make_layout"
            )
        if not all(0 <= owner < self.ranks for _, owner in self.runs):
            raise InvalidInput(
                f"balanced: an owner is one of the {self.ranks} ranks, got {shorten(repr(self.runs), 100)}; make the "
                "layout with make_layout"
            )

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


def deal(costs: list[int], ranks: int) -> Shares:
    """The chunks of each rank, at most ceil(chunks / ranks), with about equal sums of `costs` (cost of each chunk).

    The ranks start with runs of equally many adjacent chunks. Only a rank with more than 1.05 of the mean cost
    exchanges chunks with a light rank, so that neighbours stay together. If that does not reach the bound, the chunks
    are dealt heaviest first to the least loaded rank instead, provided that this lowers the maximum by more than a
    percent.
    """
    chunks = len(costs)
    runs = [list(range(chunks * r // ranks, chunks * (r + 1) // ranks)) for r in range(ranks)]
    local = _exchange_all(costs, runs)
    local_maximum = _maximum(costs, local)
    if _within_bound(local_maximum, ranks, sum(costs)):
        return local
    greedy = _exchange_all(costs, _deal_greedily(costs, ranks))
    return greedy if 101 * _maximum(costs, greedy) < 100 * local_maximum else local


def _maximum(costs: list[int], shares: Shares) -> int:
    """The cost of the most loaded rank."""
    return max(sum(costs[i] for i in share) for share in shares)


def _within_bound(load: int, ranks: int, total: int) -> bool:
    return 100 * ranks * load <= BOUND * total


def _deal_greedily(costs: list[int], ranks: int) -> Shares:
    """Shares from dealing the heaviest chunk first, each chunk to the least loaded rank that has room for it."""
    most = -(-len(costs) // ranks)
    heap = [(0, 0, rank) for rank in range(ranks)]
    shares: Shares = [[] for _ in range(ranks)]
    for chunk in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, count, rank = heappop(heap)
        insort(shares[rank], chunk)
        if count + 1 < most:
            heappush(heap, (load + costs[chunk], count + 1, rank))
    # Number the ranks by their first chunk, so that neighbours in the ring hold chunks near to each other.
    return sorted(shares, key=lambda share: share or [len(costs)])


def _exchange_all(costs: list[int], shares: Shares) -> Shares:
    """The shares after rounds of exchanges: the heaviest rank with the lightest, the second with the second, ..."""
    shares, ranks, total = list(shares), len(shares), sum(costs)
    loads = [sum(costs[i] for i in share) for share in shares]
    for _ in range(ROUNDS):
        order = sorted(range(ranks), key=lambda rank: loads[rank])
        changed = False
        for light, heavy in zip(order[: ranks // 2], reversed(order), strict=False):
            if _within_bound(loads[heavy], ranks, total):
                break
            parts = _exchange(costs, shares[heavy], shares[light], -(-BOUND * total // (100 * ranks)))
            if parts is not None:
                shares[heavy], shares[light] = (sorted(part) for part in parts)
                for rank in (heavy, light):
                    loads[rank] = sum(costs[i] for i in shares[rank])
                changed = True
        if not changed:
            break
    return shares


class _Swap(NamedTuple):
    """`chunks` chunks from index `i` of the heavy share for as many from index `j` of the light share."""

    cost: int  # by which the heavy share becomes lighter
    chunks: int
    i: int
    j: int


def _exchange(costs: list[int], heavy: list[int], light: list[int], bound: int) -> Shares | None:
    """Both shares after the swap with the lowest maximum; None if no swap lowers it.

    Of the swaps with a maximum of at most `bound`, the swap of the fewest chunks is taken.
    """
    high, low = (sum(costs[i] for i in share) for share in (heavy, light))

    def rank(swap: _Swap) -> tuple[int, int]:
        return max(high - swap.cost, low + swap.cost, bound), swap.chunks

    swaps = [swap for swap in _end_swaps(costs, heavy, light) if rank(swap)[0] < high]
    best = min(swaps, key=rank, default=None)
    if best is None or rank(best)[0] > bound:
        single = _single_swaps(costs, heavy, light, (high - low) // 2)
        swaps = [*swaps, *(swap for swap in single if rank(swap)[0] < high)]
        best = min(swaps, key=rank, default=None)
    if best is None:
        return None
    i, j, chunks = best.i, best.j, best.chunks
    return [
        heavy[:i] + heavy[i + chunks :] + light[j : j + chunks],
        light[:j] + light[j + chunks :] + heavy[i : i + chunks],
    ]


def _end_swaps(costs: list[int], heavy: list[int], light: list[int]) -> Iterator[_Swap]:
    """Swaps of equally many chunks at an end of each share, which keep runs together."""
    heavy_sums, light_sums = (list(accumulate((costs[i] for i in share), initial=0)) for share in (heavy, light))
    for count in range(1, min(len(heavy), len(light)) + 1):
        for i in (0, len(heavy) - count):
            for j in (0, len(light) - count):
                cost = heavy_sums[i + count] - heavy_sums[i] - light_sums[j + count] + light_sums[j]
                yield _Swap(cost, count, i, j)


def _single_swaps(costs: list[int], heavy: list[int], light: list[int], target: int) -> Iterator[_Swap]:
    """Swaps of each chunk of `heavy` for the two chunks of `light` that bring the swap's cost nearest to `target`."""
    order = sorted(range(len(light)), key=lambda j: costs[light[j]])
    ascending = [costs[light[j]] for j in order]
    for i, chunk in enumerate(heavy):
        place = bisect_left(ascending, costs[chunk] - target)
        for nearest in range(max(place - 1, 0), min(place + 1, len(order))):
            yield _Swap(costs[chunk] - ascending[nearest], 1, i, order[nearest])
