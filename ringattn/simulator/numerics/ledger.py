"""The ledger: compares a 64-bit hash of the pairs that kernels compute with the hash of the pattern's pairs.

For every query row and head, the hash is the sum over visits of

    a(owner) * count + b(owner) * sum of key positions + c(owner) * sum of their squares        (mod 2^64)

with pseudo-random coefficients for each owner. This is a multiset hash: it does not depend on the order of visits or
on how a visit is split into kernel calls, but changes if a visit is lost, doubled or uses the wrong rows. The computed
pairs are read at each kernel call from the tags that `RowSource` writes into q, k and v. The expected pairs come from
the pattern's tiles and the layout's ranges, in closed form. Neither side uses the schedule.

In a backward, the gradients carry counts. Some columns of dk, dv and dq are 0 by construction, so each row can hold a
sum there: a small weight for every row that it was paired with. Sums travel with the gradients, so a gradient that is
lost on the way to its owner is missing from the sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ...kernels.base import Kernel
from ...layout.regular import Layout
from ...pattern import Pattern, Tile
from ...pattern.tile import intersect
from ...plan.work import Work
from .source import K_TAG, Q_TAG, RAMP, RowSource

#: Elements of a (rows x shard ranges) array computed at a time.
CELLS = 1 << 18
#: Weights of rows are 1 .. WEIGHTS: small enough for exact fp32 sums over more than a million rows.
WEIGHTS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
#: Stands for an invalid position: tags of K and V that contradict each other or are not whole numbers.
STRAY = -(1 << 40)


def scramble(x: np.ndarray, salt: int) -> np.ndarray:
    """Pseudo-random hashes of integers: uint64, different for each `salt`.

    Source: the last mixing function of splitmix64 (Steele, Lea, Flood 2014).
    """
    with np.errstate(over="ignore"):
        z = x.astype(np.uint64) + np.uint64(salt + 1) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def weights(positions: np.ndarray) -> np.ndarray:
    """A weight from 1 to WEIGHTS for each position, int64: how much a row counts in the checks of gradients."""
    return (scramble(positions, 7) % np.uint64(WEIGHTS)).astype(np.int64) + 1


def coefficients(owner: np.ndarray) -> np.ndarray:
    """Pseudo-random coefficients (a, b, c) for each block owner, which make hashes depend on it: uint64 [3, ...]."""
    salts = np.arange(3, dtype=np.int64).reshape(3, *[1] * owner.ndim)
    return scramble(owner[None] * 4 + salts, 0)


def entry(coefficient: np.ndarray, count: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """What is added to a row's hash when it attends `count` keys of a block, uint64.

    `coefficient` is the block owner's. `first` is the sum of the keys' positions, `second` the sum of their squares.
    All arrays broadcast with `coefficient[0]`.
    """
    with np.errstate(over="ignore"):
        return coefficient[0] * count.astype(np.uint64) + coefficient[1] * first + coefficient[2] * second


class PairLedger:
    """For some query rows, how many keys each attended (int64), and a hash of which ones (uint64): [H, rows] each.

    Rows are in ascending order of position.
    """

    def __init__(self, positions: np.ndarray, heads: int) -> None:
        self.positions = np.sort(positions)
        self.hashes = np.zeros((heads, len(positions)), dtype=np.uint64)
        self.pairs = np.zeros((heads, len(positions)), dtype=np.int64)
        #: Number of computed rows that are not among `positions`.
        self.strays = 0
        #: Number of kernel calls.
        self.calls = 0

    def add(self, head: int, positions: np.ndarray, hashes: np.ndarray, pairs: np.ndarray) -> None:
        """Add the hashes and numbers of pairs of one head's rows at `positions`; each array is [rows]."""
        index = np.searchsorted(self.positions, positions)
        index[index == len(self.positions)] = 0
        known = self.positions[index] == positions
        if not known.all():
            self.strays += int((~known).sum())
            index, hashes, pairs = index[known], hashes[known], pairs[known]
        np.add.at(self.hashes[head], index, hashes)
        np.add.at(self.pairs[head], index, pairs)

    def counts(self) -> dict[str, Any]:
        """The entries as plain data that `restore` takes."""
        return {
            "hashes": self.hashes.tolist(), "pairs": self.pairs.tolist(), "strays": self.strays, "calls": self.calls
        }  # fmt: skip

    def restore(self, counts: dict[str, Any]) -> None:
        """Continue from the `counts` of a ledger of the same rows."""
        self.hashes[:] = np.array(counts["hashes"], dtype=np.uint64)
        self.pairs[:] = counts["pairs"]
        self.strays, self.calls = counts["strays"], counts["calls"]

    def digest(self) -> str:
        """16 hexadecimal digits that depend on every entry."""
        return hashlib.sha256(self.positions.tobytes() + self.hashes.tobytes() + self.pairs.tobytes()).hexdigest()[:16]

    def wrong(self, other: PairLedger) -> int:
        """The number of rows, over all heads, in which two ledgers differ, plus the `strays` of both.

        Strays are computed rows that the ledger does not cover.
        """
        return int(((self.hashes != other.hashes) | (self.pairs != other.pairs)).sum()) + self.strays + other.strays


class AuditingKernel(Kernel):
    """A kernel that also records the pairs it computes in a ledger, and writes checkable counts into the gradients.

    With `queries_travel` (pass-Q), head h of a work is the h-th head of the message, not of the plan.
    """

    def __init__(
        self, inner: Kernel, source: RowSource, layout: Layout, ledger: PairLedger, queries_travel: bool = False
    ) -> None:
        self.inner, self.source, self.layout, self.ledger = inner, source, layout, ledger
        self.name, self.queries_travel = inner.name, queries_travel

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.inner.check(q, k, v)

    def split(self, work: Work) -> Iterator[Work]:
        return self.inner.split(work)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.ledger.calls += 1
        self._enter(q, k, v, work)
        return self.inner.forward(q, k, v, work, scale)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        work: Work,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.ledger.calls += 1
        found = self.inner.backward(grad, q, k, v, out, lse, work, scale)
        dq, dk, dv = (x if x.is_contiguous() else x.contiguous() for x in found)
        of_queries, of_keys = weights(self._read(q[..., Q_TAG])), weights(self.keys(k, v))
        rows, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        i, j = np.arange(rows), np.arange(keys)
        low, high = _bounds(i, range(keys), work.lo, work.hi)
        dq[..., Q_TAG] = torch.from_numpy(_between(of_keys, low, high).repeat(group, 1)).to(dq.dtype)
        # Key j is seen by row i iff -hi <= j - i <= -lo.
        low, high = _bounds(j, range(rows), *(None if bound is None else -bound for bound in (work.hi, work.lo)))
        seen = _between(of_queries, low, high)
        carried = torch.from_numpy(seen.reshape(len(seen), k.shape[1], group, keys).sum(2))
        dk[..., K_TAG], dv[..., RAMP] = carried.to(dk.dtype), carried.to(dv.dtype)
        return dq, dk, dv

    def _enter(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work) -> None:
        query, place = self._read(q[..., Q_TAG]), self.keys(k, v)
        rows, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        known = self._coefficients(place[..., 0])
        wide = place.astype(np.uint64)
        with np.errstate(over="ignore"):
            if work.dense:
                count = np.full((1, 1, 1), keys, dtype=np.int64)
                sums = [m.sum(-1, keepdims=True, dtype=np.uint64) for m in (wide, wide * wide)]
            else:
                low, high = _bounds(np.arange(rows), range(keys), work.lo, work.hi)
                count = (high - low)[None, None]
                sums = [_between(m, low, high) for m in (wide, wide * wide)]
            seen = np.broadcast_to(entry(known, count, *sums), (*place.shape[:2], rows))
        pairs = np.broadcast_to(count, seen.shape)
        for i, head in enumerate(self._find_heads(q, query) if self.queries_travel else work.heads):
            at = query[:, i].ravel()
            self.ledger.add(head, at, seen[:, i // group].ravel(), pairs[:, i // group].ravel())

    def _find_heads(self, q: torch.Tensor, query: np.ndarray) -> list[int]:
        """The number of each head of `q`, found by the head's first row, as a message may bring some heads only."""
        places = query[0, :, 0].tolist()
        rows = {p: self.source.rows("q", range(p, p + 1))[0, :, 0] for p in {*places}}  # mostly one place
        return [int((rows[p] == q[0, i, 0]).all(-1).byte().argmax()) for i, p in enumerate(places)]

    def keys(self, k: torch.Tensor, v: torch.Tensor) -> np.ndarray:
        """The positions of keys, int64 [B, K, keys], as encoded in V; STRAY where K encodes something else."""
        of_k, of_v = self._read(k[..., K_TAG]), self._read(v[..., RAMP])
        period = self.source.period
        # Instead of of_v % period, which numpy computes four times slower.
        agree = of_k == (of_v if period is None else of_v - of_v // period * period)
        return of_v if agree.all() else np.where(agree, of_v, STRAY)

    def _coefficients(self, first: np.ndarray) -> np.ndarray:
        """Coefficients [3, B, K, 1] of the owners of the blocks that begin at positions `first` [B, K]."""
        domain = self.layout.domain
        known = (any(p in run for run in domain) for p in first.ravel().tolist())
        owners = [self.layout.owner(p) if ok else STRAY for p, ok in zip(first.ravel().tolist(), known, strict=True)]
        return coefficients(np.array(owners).reshape(*first.shape, 1))

    def _read(self, tags: torch.Tensor) -> np.ndarray:
        read = tags.double().numpy() * (1 / self.source.unit)
        with np.errstate(invalid="ignore"):
            place = read.astype(np.int64)
        valid = place == read  # a fraction or NaN is not a position
        return place if valid.all() else np.where(valid, place, STRAY)


def _bounds(x: np.ndarray, keys: range, lo: int | None, hi: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(low, high): row x sees keys[low:high], that is, the keys y with lo <= x - y <= hi."""
    count, step = len(keys), keys.step
    low = np.zeros_like(x) if hi is None else np.clip(-((keys.start + hi - x) // step), 0, count)
    high = np.full_like(x, count) if lo is None else np.clip((x - lo - keys.start) // step + 1, 0, count)
    return low, np.maximum(high, low)


def _between(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Sums of x [..., keys] over low .. high - 1 for each row: [..., rows]."""
    total = np.zeros((*x.shape[:-1], x.shape[-1] + 1), dtype=x.dtype)
    np.cumsum(x, -1, out=total[..., 1:])
    return total[..., high] - total[..., low]


# -- expected pairs -------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def pieces(layout: Layout) -> tuple[np.ndarray, list[tuple[range, int]]]:
    """The ranges of all shards, as (contiguous ranges, others).

    Contiguous ranges are an array of starts, stops and owners, ascending, which takes 24 bytes per range; others are a
    list of (range, owner).
    """
    others: list[tuple[range, int]] = []

    def contiguous() -> Iterator[tuple[int, int, int]]:
        for rank in range(layout.ranks):
            for r in layout.shard(rank):
                if r.step == 1:
                    yield r.start, r.stop, rank
                else:
                    others.append((r, rank))

    runs = np.fromiter(contiguous(), np.dtype((np.int64, 3)))
    return np.ascontiguousarray(runs[np.argsort(runs[:, 0])].T), others


def expect(pattern: Pattern, layout: Layout, runs: Sequence[range], heads: int, ledger: PairLedger) -> np.ndarray:
    """Add to a ledger all pairs that the pattern has for the queries at `runs`, in all heads, without listing them.

    Returns the owners of the blocks in which at least one of these queries sees a key, ascending.
    """
    met = [np.empty(0, dtype=np.int64)]
    for tile in (tile for q in runs for keys in layout.domain for tile in pattern.tiles(q, keys, range(heads))):
        rows = np.arange(tile.q.start, tile.q.stop, tile.q.step)
        for owner, first, count, step in seen_pieces(tile, layout):
            with np.errstate(over="ignore"):
                hashes = entry(coefficients(owner), *moments(first, count, step)).sum(-1, dtype=np.uint64)
            for head in tile.heads:
                ledger.add(head, rows, hashes, count.sum(-1))
            met.append(owner[(count > 0).any(0)])
    return np.unique(np.concatenate(met))


def seen_pieces(tile: Tile, layout: Layout) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, int]]:
    """Yield which keys each row of a tile sees in each range of the shards, for S ranges at a time.

    Each item is (owners [S], first position [rows, S], number of keys [rows, S], step).
    """
    (start, stop, owners), others = pieces(layout)
    low, high = np.searchsorted(stop, tile.k[0], "right"), np.searchsorted(start, tile.k[-1], "right")
    rows = np.arange(tile.q.start, tile.q.stop, tile.q.step)[:, None]
    width = max(1, CELLS // len(rows))
    for at in range(low, high, width):
        part = slice(at, min(at + width, high))
        yield owners[part], *_inside(tile, tile.k, rows, start[part], stop[part])
    for r, owner in others:
        shared = intersect(tile.k, r)
        if shared:
            ends = np.array([shared[0]]), np.array([shared[-1] + 1])
            yield np.array([owner]), *_inside(tile, shared, rows, *ends)


def _inside(
    tile: Tile, k: range, rows: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    first = np.maximum(0, -((k.start - start) // k.step))
    last = np.minimum(len(k), -((k.start - stop) // k.step))
    first, last = np.broadcast_arrays(first, last, rows)[:2]
    if tile.hi is not None:
        first = np.maximum(first, -((k.start + tile.hi - rows) // k.step))
    if tile.lo is not None:
        last = np.minimum(last, (rows - tile.lo - k.start) // k.step + 1)
    return k.start + first * k.step, np.maximum(last - first, 0), k.step


def moments(first: np.ndarray, count: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(count, sum, sum of squares), modulo 2^64, of the numbers first, first + step, ... (`count` of them)."""
    n, p, s = count.astype(np.uint64), first.astype(np.uint64), np.uint64(step)
    less = np.where(count > 0, count - 1, 0).astype(np.uint64)
    ones = less * n // np.uint64(2)  # 0 + 1 + .. + n-1
    double = less + n  # 2n - 1
    by_three = ones % np.uint64(3) == 0
    squares = np.where(by_three, ones // np.uint64(3) * double, ones * (double // np.uint64(3)))
    return n, n * p + s * ones, n * p * p + np.uint64(2) * p * s * ones + s * s * squares


def expected_counts(pattern: Pattern, others: Sequence[range], rows: range, heads: int, *, keys: bool) -> np.ndarray:
    """The counts that correct gradients contain, int64 [heads, rows].

    For each head and position in `rows`, a count is the sum of `weights` over all positions in `others` that form a
    visible pair with it. With `keys`, `rows` are keys and `others` queries; otherwise the reverse.
    """
    found = np.zeros((heads, len(rows)), dtype=np.int64)
    sides = ((other, rows) if keys else (rows, other) for other in others)
    tiles = (tile for q, k in sides for tile in pattern.tiles(q, k, range(heads)))
    for tile in (part for whole in tiles for part in whole.refine()):
        mine, other = (tile.k, tile.q) if keys else (tile.q, tile.k)
        lo, hi = (None if b is None else -b for b in (tile.hi, tile.lo)) if keys else (tile.lo, tile.hi)
        at = np.arange(mine.start, mine.stop, mine.step)
        met = weights(np.arange(other.start, other.stop, other.step))
        sums = _between(met, *_bounds(at, other, lo, hi))
        for head in tile.heads:
            found[head, (at - rows.start) // rows.step] += sums
    return found
