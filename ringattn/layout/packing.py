"""Packed documents over ranks: equal tokens and pairs, then as few rows that travel as can be found."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from heapq import nsmallest
from itertools import pairwise
from math import ceil
from operator import itemgetter

import numpy as np

from ..pattern import Pattern
from . import Layout

#: Tokens and pairs of the busiest rank, in percent of the mean: the most with packed documents, and with one document,
#: where a finer balance costs more in bytes than it saves in time. If no partition is within the bound, those whose
#: busiest ranks have at most BOUND_OF_ONE percent of the fewest pairs are as good.
BOUND, BOUND_OF_ONE = 103, 105
#: At what percentage the received rows of contiguous and zigzag shards count.
SIMPLER = 98
#: How `_Filling` tries: how far a rank may be from the mean, and by how much its whole documents may exceed its pairs,
#: in percent of the mean; into how many units of neighbouring short documents its share is divided; and whether
#: documents are dealt first. The last way is for batches that the others leave unequal.
TRIES = ((3, 2, 16, True), (3, 2, 4, False), (3, 6, 8, False), (1, 2, 4, False))
#: A longer sequence is cut at multiples of the least number of tokens that makes at most so many.
CUTS = 1 << 20
#: Adjacent positions: (pairs, first, end).
Part = tuple[int, int, int]
#: The (first, end) of the parts of each rank, ascending.
Shares = list[list[tuple[int, int]]]


def pack(
    tokens: int, ranks: int, masks: Sequence[tuple[Pattern, int]], most_runs: int | None, dealt: Callable[[int], Layout]
) -> tuple[int, Shares] | None:
    """Choose each rank's positions; returns (step, shares), with positions counted in steps of `step` tokens.

    The candidates are contiguous shards, zigzag shards, and shards made by filling one rank after another with
    documents (`_Filling`). Among candidates that give no rank more than `BOUND` percent of the mean number of pairs or
    tokens, the one in which ranks receive the fewest rows wins. If there is no such candidate, `dealt(step)` is added,
    and among the candidates whose busiest rank has nearly the fewest pairs, the one with the fewest received rows wins.

    masks: (pattern, weight) for each mask. most_runs: the largest allowed number of runs of adjacent positions on a
    rank. Returns None if there are no tokens, or if some query attends more than one run of keys. Depends on its
    arguments only.
    """
    step, masks = max(-(-tokens // CUTS), 1), [(pattern, weight) for pattern, weight in masks if weight]
    rows = [(row, weight) for x, weight in masks for row in ([x] if x.rows is None else map(x.row, range(x.rows)))]
    found = [(weight, _read(row, tokens, step)) for row, weight in rows]
    runs = [(weight, *run) for weight, run in found if run is not None]
    if not tokens or len(runs) < len(found):
        return None
    count = len(runs[0][1])
    place = np.arange(1, count)
    crossed = np.logical_or.reduce([(high[:-1] >= place) | (low[1:] < place) for _, low, high, _ in runs])
    borders = [0, *(np.flatnonzero(~crossed) + 1).tolist(), count]
    sums = [np.concatenate(([0], np.cumsum(weight * pairs))) for weight, *_, pairs in runs]
    bound = BOUND if len(borders) > 2 else BOUND_OF_ONE
    views = [(weight, low.data, high.data, x.data) for (weight, low, high, _), x in zip(runs, sums, strict=True)]
    within, beyond = list[tuple[int, int, Shares]](), list[tuple[int, int, Shares]]()

    def add(shares: Shares, percent: int = 100) -> None:
        if most_runs is not None and any(len(share) > most_runs for share in shares):
            return
        loads = [[sum(b - a for a, b in share) for share in shares]]
        loads += [[sum(x[b] - x[a] for a, b in share) for share in shares] for *_, x in views]
        over = any(100 * ranks * max(load) > bound * sum(load) for load in loads)
        received = sum(weight * _received(share, low, high) for share in shares for weight, low, high, _ in views)
        (beyond if over else within).append((sum(map(max, loads[1:])), received * percent, shares))

    cuts = [count * i // (2 * ranks) for i in range(2 * ranks + 1)]
    add([_join([(cuts[2 * r], cuts[2 * r + 2])]) for r in range(ranks)], SIMPLER)
    add([_join([(cuts[r], cuts[r + 1]), (cuts[-r - 2], cuts[-r - 1])]) for r in range(ranks)], SIMPLER)
    # By the pairs of all masks together; if that fails, by those of each. A row in a hundred is as good as none.
    if not within or (min(received for _, received, _ in within) > SIMPLER * count // 100 and len(borders) > 2):
        for pairs in sums if len(sums) == 1 else (np.sum(sums, 0), *sums):
            for way in TRIES:
                if not within or way != TRIES[-1]:
                    add(_Filling(pairs.data, borders, ranks, *way).shares())
            if within:
                break
    if not within:
        if most_runs is None:
            layout = dealt(step)
            add([[(x.start // step, -(-x.stop // step)) for x in layout.shard(rank)] for rank in range(ranks)])
        least = min(busiest for busiest, *_ in beyond + within)
        within = [one for one in beyond + within if 100 * one[0] <= BOUND_OF_ONE * least]
    return step, min(within, key=itemgetter(1))[2]


def _read(pattern: Pattern, tokens: int, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(first key, last key, keys of a row) for each step of tokens, keys in steps; None if keys form several runs."""
    first, bounds = np.arange(0, tokens, step, dtype=np.int64), []
    last = first if step == 1 else np.minimum(first + step, tokens) - 1
    for x in (first,) if step == 1 else (first, last):
        if (run := pattern.run("keys", x, x)) is None:
            return None
        bounds += [np.minimum(np.maximum(np.broadcast_to(x, first.shape), 0), tokens - 1) for x in run]
    if step == 1:
        return bounds[0], bounds[1], bounds[1] - bounds[0] + 1
    keys = bounds[1] - bounds[0] + bounds[3] - bounds[2] + 2  # changes evenly from the first to the last row
    return bounds[0] // step, bounds[3] // step, keys * (last - first + 1) // (2 * step)


def _join(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts ascending, adjacent ones as one, without empty ones."""
    joined: list[tuple[int, int]] = []
    for first, end in sorted(parts):
        if joined and joined[-1][1] == first:
            joined[-1] = joined[-1][0], end
        elif first < end:
            joined.append((first, end))
    return joined


def _received(share: list[tuple[int, int]], low: memoryview, high: memoryview) -> int:
    """How many rows the queries of a share attend that lie on other ranks."""
    count = end = 0
    for a, b in share:  # neither end of the runs of keys moves left
        count += max(high[b - 1] + 1 - max(low[a], end), 0) - (b - a)
        end = high[b - 1] + 1
    return count


class _Filling:
    """Fills one rank after another with the mean tokens and pairs of what is left.

    The document with the most pairs comes first, and beside it the shortest ones. If it does not fit, the rank gets its
    tail, so that few ranks need its keys. What is missing then is the tail of one document and the head of another,
    whose lengths follow from the missing tokens and pairs.
    """

    def __init__(
        self, pairs: memoryview, borders: list[int], ranks: int, far: int, more: int, units: int, dealt: bool
    ) -> None:
        self.pairs, self.ranks, self.far = pairs, ranks, far
        self.whole = borders[-1], pairs[borders[-1]]
        self.excess = more * self.whole[1] // (100 * ranks)
        self.left = list(self.whole)
        self.pool: list[Part] = []
        self.dealt: Shares = [[] for _ in range(ranks)]
        start = 0
        for border, end in pairwise(borders):  # short neighbours stay together
            if start < border and any(
                units * ranks * x > all
                for x, all in zip((end - start, self.count(start, end)), self.whole, strict=True)
            ):
                self.put(start, border)
                start = border
        self.put(start, borders[-1])
        if dealt:
            self.deal()

    def shares(self) -> Shares:
        """The shares of all ranks."""
        return [_join(self.fill(rank)) for rank in range(self.ranks)]

    def count(self, first: int, end: int) -> int:
        """The number of query-key pairs of the queries at positions first .. end - 1."""
        return self.pairs[end] - self.pairs[first]

    def put(self, first: int, end: int) -> None:
        """Return positions first .. end - 1 to the pool, from which later ranks are filled."""
        if first < end:
            insort(self.pool, (self.count(first, end), first, end))

    def take(self, first: int, end: int) -> None:
        """Give positions first .. end - 1 to the rank that is being filled."""
        if first < end:
            self.share.append((first, end))
            self.tokens -= end - first
            self.missing -= self.count(first, end)

    def deal(self) -> None:
        """Distribute parts, those with the most pairs first, to the ranks with the least load.

        A part goes whole to one rank, or in zigzag pieces to several ranks. A part that would overload a rank stays in
        the pool.
        """
        (tokens, pairs), pool, self.pool = self.whole, self.pool, []
        loads = [[0.0, 0.0] for _ in range(self.ranks)]  # relative to the mean
        limit = 1 + self.far / 100
        for weight, first, end in reversed(pool):
            length, work = self.ranks * (end - first) / tokens, self.ranks * weight / pairs
            count = min(ceil(max(length, work) / limit), self.ranks)
            length, work = length / count, work / count
            after = [(max(x + length, y + work), r) for r, (x, y) in enumerate(loads)]
            emptiest = nsmallest(count, after)
            if emptiest[-1][0] > limit:
                self.put(first, end)
                continue
            cuts = [first + (end - first) * i // (2 * count) for i in range(2 * count + 1)]
            for i, (_, rank) in enumerate(emptiest):
                self.dealt[rank] += (cuts[i], cuts[i + 1]), (cuts[-i - 2], cuts[-i - 1])
                loads[rank] = [loads[rank][0] + length, loads[rank][1] + work]

    def fill(self, rank: int) -> list[tuple[int, int]]:
        """Choose the parts (first, end) that `rank` owns; call this for each rank in ascending order."""
        rest, self.share = self.ranks - rank, list[tuple[int, int]]()
        if rest == 1:
            return self.dealt[rank] + [(first, end) for _, first, end in self.pool]
        mean = [x // rest for x in self.left]
        self.tokens, self.missing = mean
        # How far beyond the mean the rank may be, and below it without too much for the ranks after it.
        self.above, self.below = [], []
        for total, m, left in zip(self.whole, mean, self.left, strict=True):
            self.above.append(max(total * (100 + self.far) // (100 * self.ranks) - m, 0))
            later = (rest - 1) * total * (200 + self.far) // (200 * self.ranks)
            self.below.append(max(min(total * self.far // (100 * self.ranks), m - left + later), 0))
        for first, end in self.dealt[rank]:
            self.take(first, end)
        if self.pool and self.lacks() and not self.fits(len(self.pool) - 1):
            self.cut(self.pool.pop())
        while (i := next((i for i in range(len(self.pool) - 1, -1, -1) if self.fits(i)), None)) is not None:
            self.take(*self.pool.pop(i)[1:])
        while self.pool and self.lacks():
            self.close()
        self.left = [left - m + x for left, m, x in zip(self.left, mean, (self.tokens, self.missing), strict=True)]
        return self.share

    def lacks(self) -> bool:
        """Whether the rank needs more tokens or pairs, and has room for tokens."""
        return self.tokens > 0 and (self.tokens > self.below[0] or self.missing > self.below[1])

    def least(self, tokens: int, skip: int) -> int:
        """Estimate the fewest pairs that `tokens` tokens of whole parts can have, without using part `skip`."""
        count = pairs = 0
        for i, (more, first, end) in enumerate(self.pool):
            if count >= tokens:
                break
            if i != skip:
                count, pairs = count + end - first, pairs + more
        return pairs * tokens // count if count else 0

    def fits(self, i: int) -> bool:
        """Whether the rank can take all of part i and then fill up with parts that have few pairs."""
        pairs, first, end = self.pool[i]
        tokens, missing = self.tokens - (end - first), self.missing - pairs
        enough = tokens >= -self.above[0] and missing >= -self.above[1]
        return enough and missing >= self.least(tokens, i) - self.excess

    def cut(self, dense: Part) -> None:
        """Give the rank short parts, and then the last tokens of `dense` to supply the pairs still missing."""
        _, first, end = dense
        while self.pool:
            pairs, a, b = self.pool[0]
            tokens = self.tokens - (b - a)
            tail = self.count(max(end - tokens, first), end) if tokens > 0 else 0
            if not 0 <= self.missing - pairs <= tail + self.least(tokens - (end - first), 0) or tokens <= 0:
                break
            self.take(a, b)
            del self.pool[0]
        for i, (pairs, a, b) in enumerate(self.pool):  # a whole part beside the tail
            tail = self.tokens - (b - a)
            if (
                0 <= tail <= end - first
                and -self.above[1] <= self.missing - pairs - self.count(end - tail, end) <= self.below[1]
            ):
                del self.pool[i]
                self.take(a, b)
                self.take(end - tail, end)
                return self.put(first, end - tail)
        self.put(first, end)
        if self.tokens > 0:
            self.mix(dense, self.sparsest())

    def sparsest(self) -> Part:
        """The part whose first tokens, at most as many as the rank still needs, have the fewest pairs per token."""
        pairs, tokens = self.pairs, self.tokens

        def density(part: Part) -> float:
            _, first, end = part
            length = end - first if end - first < tokens else tokens
            return (pairs[first + length] - pairs[first]) / length

        return min(self.pool, key=density)

    def close(self) -> None:
        """Give the rank positions that bring it closer to its target numbers of tokens and pairs."""
        sparse = _, first, end = self.sparsest()
        length = min(self.tokens, end - first)
        head = self.count(first, first + length)
        if head > self.missing + self.excess:  # shorter heads have fewer pairs for each token
            length = min((self.tokens + 1) // 2, length)
        elif length == self.tokens and self.missing - head > self.below[1]:
            return self.mix(next((part for part in self.pool if self.reaches(part, sparse)), self.pool[-1]), sparse)
        self.pool.remove(sparse)
        self.take(first, first + length)
        self.put(first + length, end)

    def reaches(self, dense: Part, sparse: Part) -> bool:
        """Whether the end of `dense` and the start of `sparse` can supply the tokens and pairs the rank needs."""
        tail = min(self.tokens, dense[2] - dense[1])
        head = min(self.tokens - tail, sparse[2] - sparse[1])
        pairs = self.count(dense[2] - tail, dense[2]) + self.count(sparse[1], sparse[1] + head)
        return dense != sparse and pairs >= self.missing

    def mix(self, dense: Part, sparse: Part) -> None:
        """Give the rank the end of `dense` and the start of `sparse`, with the tokens and pairs it still needs.

        If `dense` and `sparse` are the same part, the rank gets both ends of it.
        """
        (_, first, end), (_, a, b) = dense, sparse
        most = min(self.tokens, end - first)
        tokens = most if dense == sparse else self.tokens
        if most == self.tokens and -self.above[1] <= self.missing - self.count(end - most, end) <= self.below[1]:
            tail = most
        else:
            tail = bisect_left(
                range(most), self.missing,
                key=lambda x: self.count(end - x, end) + self.count(a, min(a + tokens - x, b)),
            )  # fmt: skip
        head = min(tokens - tail, b - a)
        for part in {dense, sparse} if head else {dense}:
            self.pool.remove(part)
        self.take(a, a + head)
        self.take(end - tail, end)
        if dense == sparse:
            return self.put(a + head, end - tail)
        self.put(first, end - tail)
        if head:
            self.put(a + head, b)
