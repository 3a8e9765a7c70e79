"""The layout that deals chunks of the sequence to the ranks so that all compute about as many pairs of a pattern."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from heapq import heappop, heappush
from itertools import accumulate, groupby, pairwise
from math import gcd
from typing import TYPE_CHECKING

from ..errors import InvalidInput
from ..pattern.ranges import merge_runs
from .partition import MAX_RANGES, Layout

if TYPE_CHECKING:
    from ..pattern import Pattern

#: The busiest rank may have this many percent of the mean cost: a finer balance costs more bytes than it saves time.
BOUND = 105
#: Rounds of exchanges between heavy and light ranks.
ROUNDS = 32

#: Chunks of a rank where the layout's name does not say how long a chunk is, and what they are a multiple of when long.
CHUNKS, ALIGNED = 8, 128

Shares = list[list[int]]


@dataclass(frozen=True)
class Balanced(Layout):
    """Chunks of `chunk` tokens, dealt so that the ranks compute about as many pairs of a pattern.

    A rank holds at most ceil(chunks / ranks) chunks, so memory stays balanced within a chunk; it keeps a run of neighbours
    unless it has more than 1.05 of the mean pairs, and then exchanges ends of its run with a light rank. Counted on 8 ranks
    this takes documents of lognormal lengths from an imbalance of 1.67 to 1.04 for 0.61 of a full ring's bytes, where the
    heaviest chunk first gives 1.01 for 0.98 and striping 1.05 for 1.00; a window stays contiguous, at 0.12.

    `runs` are (first chunk, owner) of the runs of chunks, ascending. `make_layout` makes it.
    """

    chunk: int
    runs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise InvalidInput(f"balanced: the chunk is a number of tokens >= 1, got {self.chunk}; {_DEFAULT_CHUNK}")
        runs = [next(same) for _, same in groupby(((i, owner) for i, owner in self.runs), key=lambda run: run[1])]
        object.__setattr__(self, "runs", tuple(runs))  # one form for one partition
        firsts = [first for first, _ in self.runs]
        last = (self.tokens - 1) // self.chunk
        ascending = all(a < b for a, b in pairwise(firsts))
        if firsts[:1] != [0][: self.tokens] or not ascending or firsts[-1:] > [last]:
            raise InvalidInput(
                f"balanced: the runs must begin at chunk 0, ascend and end by chunk {last}, got {_shown(self.runs)}; "
                "make the layout with make_layout"
            )
        if not all(0 <= owner < self.ranks for _, owner in self.runs):
            raise InvalidInput(f"balanced: an owner is one of the {self.ranks} ranks, got {_shown(self.runs)}")

    def __hash__(self) -> int:
        return self._hash  # plans look layouts up in every call

    @cached_property
    def _hash(self) -> int:
        return hash((self.tokens, self.ranks, self.chunk, self.runs))

    @cached_property
    def digest(self) -> str:
        """Ranks whose layouts were made for different patterns see it here before the first message."""
        return sha256(repr(self.runs).encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        return f"balanced({self.chunk})"

    @cached_property
    def _starts(self) -> list[int]:
        return [first * self.chunk for first, _ in self.runs]

    @cached_property
    def _shards(self) -> dict[int, tuple[range, ...]]:
        found: dict[int, list[range]] = {}
        for (start, stop), (_, owner) in zip(pairwise([*self._starts, self.tokens]), self.runs, strict=True):
            found.setdefault(owner, []).append(range(start, stop))
        return {owner: merge_runs(parts) for owner, parts in found.items()}

    def shard(self, rank: int) -> tuple[range, ...]:
        return self._shards.get(rank, ())

    def owner(self, position: int) -> int:
        return self.runs[bisect_right(self._starts, position) - 1][1]

    def grouped(self, size: int) -> Layout:
        runs = tuple((first, owner // size) for first, owner in self.runs)
        return Balanced(self.tokens, self.ranks // size, self.chunk, runs)

    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        if len(ranks) == 1:
            return self.shard(ranks[0]), True  # a single rank cannot be halved: exact, whatever its ranges
        parts = merge_runs(r for rank in ranks for r in self.shard(rank))
        if len(parts) <= MAX_RANGES:
            return parts, True
        gaps = sorted(range(1, len(parts)), key=lambda i: parts[i].start - parts[i - 1].stop)
        cuts = [0, *sorted(gaps[1 - MAX_RANGES :]), len(parts)]
        return tuple(range(parts[a].start, parts[b - 1].stop) for a, b in pairwise(cuts)), False


_DEFAULT_CHUNK = "try balanced(128), or balanced for about 8 chunks per rank"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def balanced(tokens: int, ranks: int, chunk: int | None, pattern: Pattern, heads: int) -> Balanced:
    """The layout that balances `pattern`. It counts every chunk, so it costs O(chunks) calls of `pattern.count`.

    The default `chunk` makes at least 8 chunks per rank, of a multiple of 128 tokens where they are that long. Where few
    rows hold most pairs, such as global blocks, only a smaller chunk can balance them.
    """
    # The errors of wrong numbers come before anything is counted.
    Balanced(min(tokens, 0), ranks, 1 if chunk is None else chunk, ())
    if heads < 1:
        raise InvalidInput(f"heads={heads}: must be an integer >= 1")
    if chunk is None:
        chunk = max(tokens // (CHUNKS * ranks), 1)
        chunk -= chunk % ALIGNED if chunk > ALIGNED else 0
    pattern.check(tokens, heads)
    bound, whole = pattern.bind(heads, tokens), range(tokens)
    costs = [bound.count(whole[start : start + chunk], whole, range(heads)) for start in range(0, tokens, chunk)]
    # Patterns that are the same for all heads give one layout, whatever the number of heads.
    common = gcd(*costs) or 1
    costs = [cost // common for cost in costs]
    owners = [0] * len(costs)
    for rank, share in enumerate(deal(costs, ranks)):
        for i in share:
            owners[i] = rank
    firsts = [i for i, owner in enumerate(owners) if i == 0 or owner != owners[i - 1]]
    return Balanced(tokens, ranks, chunk, tuple((i, owners[i]) for i in firsts))


def deal(costs: list[int], ranks: int) -> Shares:
    """Ascending chunks of each rank, at most ceil(chunks / ranks) of them, with about equal sums of `costs`.

    The ranks start with runs of equally many chunks, and only one that holds more than 1.05 of the mean cost exchanges
    chunks with a light rank, so that neighbours stay together. Where this does not reach the bound, all chunks are dealt
    heaviest first to the least loaded rank instead, if that balances better by a percent.
    """
    chunks = len(costs)
    runs = [list(range(chunks * r // ranks, chunks * (r + 1) // ranks)) for r in range(ranks)]
    found = _exchanged(costs, runs)
    top = _heaviest(costs, found)
    if _light(top, ranks, sum(costs)):
        return found
    greedy = _exchanged(costs, _greedy(costs, ranks))
    return greedy if 101 * _heaviest(costs, greedy) < 100 * top else found


def _heaviest(costs: list[int], shares: Shares) -> int:
    return max(sum(costs[i] for i in share) for share in shares)


def _light(load: int, ranks: int, total: int) -> bool:
    return 100 * ranks * load <= BOUND * total


def _greedy(costs: list[int], ranks: int) -> Shares:
    """The heaviest chunk first, each to the least loaded rank that may still take one."""
    most = -(-len(costs) // ranks)
    heap = [(0, 0, rank) for rank in range(ranks)]
    shares: Shares = [[] for _ in range(ranks)]
    for chunk in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, held, rank = heappop(heap)
        insort(shares[rank], chunk)
        if held + 1 < most:
            heappush(heap, (load + costs[chunk], held + 1, rank))
    # Ranks are numbered by where they begin: neighbours in the ring are as near as can be.
    return sorted(shares, key=lambda share: share or [len(costs)])


def _exchanged(costs: list[int], shares: Shares) -> Shares:
    """The shares after exchanges of equally many chunks: the heaviest rank with the lightest, the next with the next."""
    shares, ranks, total = list(shares), len(shares), sum(costs)
    loads = [sum(costs[i] for i in share) for share in shares]
    for _ in range(ROUNDS):
        order = sorted(range(ranks), key=lambda rank: loads[rank])
        changed = False
        for light, heavy in zip(order[: ranks // 2], reversed(order), strict=False):
            if _light(loads[heavy], ranks, total):
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


def _exchange(costs: list[int], heavy: list[int], light: list[int], bound: int) -> Shares | None:
    """Both shares after the exchange that leaves the lower maximum; below `bound`, the one of the fewest chunks."""
    high, low = (sum(costs[i] for i in share) for share in (heavy, light))
    best: tuple[int, int] = (high, 0)
    found: Shares | None = None

    def consider(moved: int, count: int, i: int, j: int) -> None:
        nonlocal best, found
        rank = (max(high - moved, low + moved, bound), count)
        if rank < best and max(high - moved, low + moved) < high:
            best = rank
            found = [
                heavy[:i] + heavy[i + count :] + light[j : j + count],
                light[:j] + light[j + count :] + heavy[i : i + count],
            ]

    heavy_sums, light_sums = (list(accumulate((costs[i] for i in share), initial=0)) for share in (heavy, light))
    for count in range(1, min(len(heavy), len(light)) + 1):
        for i in (0, len(heavy) - count):
            for j in (0, len(light) - count):
                moved = heavy_sums[i + count] - heavy_sums[i] - light_sums[j + count] + light_sums[j]
                consider(moved, count, i, j)
    if best[0] > bound:  # then any chunk for any other, though it cuts a run in two
        # The difference that is wanted; for each chunk of the heavy rank only the nearest partners matter.
        wanted = (high - low) // 2
        order = sorted(range(len(light)), key=lambda j: costs[light[j]])
        keys = [costs[light[j]] for j in order]
        for i, chunk in enumerate(heavy):
            place = bisect_left(keys, costs[chunk] - wanted)
            for at in range(max(place - 1, 0), min(place + 1, len(order))):
                consider(costs[chunk] - keys[at], 1, i, order[at])
    return found
