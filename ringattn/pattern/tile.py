"""Tiles, which are ranges of query and key positions with a band on their distance, and set operations on ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Literal

import numpy as np

EMPTY = range(0)


def ceil_div(a: int, b: int) -> int:
    """The smallest integer >= a / b, for b > 0."""
    return -(-a // b)


def shift_range(r: range, by: int) -> range:
    """The range `r` moved by `by`: every member is increased by `by`."""
    return range(r.start + by, r.stop + by, r.step)


def clip(r: range, low: int, high: int) -> range:
    """The members of `r` from `low` to `high`, both included."""
    first = r.start if low <= r.start else r.start + ceil_div(low - r.start, r.step) * r.step
    return range(first, min(r.stop, high + 1), r.step)


def intersect(a: range, b: range) -> range:
    """The numbers that both ranges contain, as a range; the ranges may have different steps."""
    if not a or not b:
        return EMPTY
    if a.step == 1:
        return clip(b, a[0], a[-1])
    if b.step == 1:
        return clip(a, b[0], b[-1])
    common = gcd(a.step, b.step)
    shift, rest = divmod(b.start - a.start, common)
    if rest:
        return EMPTY
    modulus = b.step // common
    turns = shift * pow(a.step // common, -1, modulus) % modulus if modulus > 1 else 0
    step = a.step * modulus
    origin = a.start + turns * a.step  # congruent to both progressions, but possibly below their starts
    low, high = max(a.start, b.start), min(a[-1], b[-1])
    return range(origin + ceil_div(low - origin, step) * step, high + 1, step)


def subtract(a: range, b: range) -> Iterator[range]:
    """Yield disjoint ranges that hold the members of `a` that are not in `b`."""
    shared = intersect(a, b)
    if not shared:
        if a:
            yield a
        return
    first, last = shared[0], shared[-1]
    if a.start < first:
        yield range(a.start, first, a.step)
    if len(shared) > 1:
        for offset in range(a.step, shared.step, a.step):
            yield range(first + offset, last, shared.step)
    if a[-1] > last:
        yield range(last + a.step, a.stop, a.step)


def union(ranges: Iterable[range]) -> tuple[range, ...]:
    """Disjoint ranges that hold every member of `ranges`, each once."""
    disjoint: list[range] = []
    for new in ranges:
        pieces = [new] if new else []
        for old in disjoint:
            pieces = [rest for piece in pieces for rest in subtract(piece, old)]
        disjoint += pieces
    return tuple(disjoint)


def join_runs(runs: Iterable[range]) -> Iterator[range]:
    """Ascending ranges of step 1, with ranges that touch or overlap joined into one; empty ranges are dropped."""
    current = range(0)
    for run in runs:
        if not run:
            continue
        if current and run.start <= current.stop:
            current = range(current.start, max(current.stop, run.stop))
        else:
            if current:
                yield current
            current = run
    if current:
        yield current


def append_run(runs: list[range], run: range) -> None:
    """Append a range, or extend the last range if the new one continues it."""
    if runs and runs[-1].step == run.step and runs[-1][-1] + run.step == run.start:
        runs[-1] = range(runs[-1].start, run.stop, run.step)
    else:
        runs.append(run)


def find_runs(mask: np.ndarray, first: int = 0) -> tuple[range, ...]:
    """The runs of adjacent True entries of a bool mask, ascending; entry i stands for the number `first` + i."""
    if not len(mask):
        return ()
    edges = ((mask[1:] != mask[:-1]).nonzero()[0] + (first + 1)).tolist()
    edges = [*([first] if mask[0] else []), *edges, *([first + len(mask)] if mask[-1] else [])]
    return tuple(map(range, edges[::2], edges[1::2]))


def merge_runs(runs: Iterable[range]) -> tuple[range, ...]:
    """The union of ranges of step 1 given in any order, as the fewest possible ranges, ascending."""
    return tuple(join_runs(sorted(runs, key=lambda run: run.start)))


def locate(part: range, whole: range) -> range:
    """The indices in `whole` of the members of `part`, as a range; every member of `part` must be in `whole`."""
    start = (part.start - whole.start) // whole.step
    step = part.step // whole.step if len(part) > 1 else 1
    return range(start, start + (len(part) - 1) * step + 1, step)


def index_ranges(ranges: Sequence[range], first: int = 0) -> Callable[[range], Iterator[range]]:
    """A function that maps a range of numbers to their indices in the concatenated `ranges`, counted from `first`.

    The function ignores numbers that are in none of `ranges`, and yields the indices as few ranges.
    """
    starts, steps, lasts, lengths = np.array([(r.start, r.step, r[-1], len(r)) for r in ranges]).T
    firsts = np.cumsum(lengths) - lengths + first

    def find(part: range) -> Iterator[range]:
        shared, offset = np.gcd(steps, part.step), part.start - starts
        strides, pairs = part.step // shared, [*zip(steps.tolist(), shared.tolist(), strict=True)]
        inverse = {(step, common): pow(step // common, -1, part.step // common) for step, common in {*pairs}}
        rows = offset // shared % strides * np.array([inverse[pair] for pair in pairs]) % strides
        rows -= (rows - np.maximum(-(-offset // steps), 0)) // strides * strides
        counts = ((np.minimum(lasts, part[-1]) - starts) // steps - rows) // strides + 1
        meets = (counts > 0) & (offset % shared == 0)
        rows, counts, strides = (rows + firsts)[meets], counts[meets], strides[meets]
        cuts = np.flatnonzero((np.diff(rows) != (counts * strides)[:-1]) | np.diff(strides)) + 1
        parts = zip(*(np.split(x, cuts) for x in (rows, counts, strides)), strict=True)
        yield from (range(int(a[0]), int(a[0] + n.sum() * by[0]), int(by[0])) for a, n, by in parts if len(a))

    return find


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """sum((a * i + b) // m for i in range(n)) for a, b >= 0 and m > 0, in O(log m) steps.

    Source: the Euclid-like recursion of Graham, Knuth, Patashnik, Concrete Mathematics, section 3.5.
    """
    total = 0
    while n > 0:
        total += (n - 1) * n // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        if top < m:
            break
        n, m, a, b = top // m, a, m, top % m
    return total


def count_at_most(q: range, k: range, bound: int) -> int:
    """The number of pairs (x in q, y in k) with x - y <= bound, in closed form."""
    if not q or not k:
        return 0
    # Member i of q pairs with all of k except the first clamp((base + i * q.step) // k.step, 0, len(k)) members.
    base = q.start - bound - k.start + k.step - 1
    # Members of q before index `some_excluded` pair with all of k, those from index `all_excluded` on with none.
    some_excluded = min(len(q), max(0, ceil_div(k.step - base, q.step)))
    all_excluded = max(some_excluded, min(len(q), max(0, ceil_div(len(k) * k.step - base, q.step))))
    excluded = (len(q) - all_excluded) * len(k)
    if all_excluded > some_excluded:
        excluded += floor_sum(all_excluded - some_excluded, k.step, q.step, base + some_excluded * q.step)
    return len(q) * len(k) - excluded


@dataclass(frozen=True)
class Tile:
    """A set of query-key pairs: x in `q` attends y in `k` iff lo <= x - y <= hi, for each head in `heads`.

    Positions are global, and steps of `q` and `k` may exceed 1. None for `lo` or `hi` means unbounded. `branch` is the
    branch of a multi-branch pattern to which the tile belongs.

    Tiles made by `make_tile` and the functions of this module are trimmed: a tile is not empty, a bound that excludes
    no pair is None, and if `q` and `k` have equal steps, or the tile is dense, every query row and every key row is in
    at least one pair.
    """

    heads: range
    q: range
    k: range
    lo: int | None = None
    hi: int | None = None
    branch: int = 0

    @property
    def dense(self) -> bool:
        """True if every query row attends every key row."""
        return self.lo is None and self.hi is None

    @property
    def pairs(self) -> int:
        """The exact number of query-key pairs of one head, in closed form."""
        total = len(self.q) * len(self.k)
        if self.hi is not None:
            total = count_at_most(self.q, self.k, self.hi)
        if self.lo is not None:
            total -= count_at_most(self.q, self.k, self.lo - 1)
        return total

    def refine(self) -> Iterator[Tile]:
        """Yield tiles with the same pairs, each of which is dense or has equal steps in `q` and `k`."""
        if self.dense or self.q.step == self.k.step:
            yield self
            return
        step = lcm(self.q.step, self.k.step)
        for q in _residue_classes(self.q, step):
            for k in _residue_classes(self.k, step):
                tile = make_tile(self.heads, q, k, self.lo, self.hi, self.branch)
                if tile is not None:
                    yield tile

    def rows(self, side: Literal["keys", "queries"]) -> tuple[range, ...]:
        """The positions of the keys (or queries, see `side`) that are in at least one pair, as disjoint ranges."""
        return union(tile.k if side == "keys" else tile.q for tile in self.refine())


def make_tile(
    heads: range, q: range, k: range, lo: int | None = None, hi: int | None = None, branch: int = 0
) -> Tile | None:
    """A tile with these heads, queries, keys and distance bounds, trimmed (see `Tile`); None if it has no pair."""
    if not heads or not q or not k or (lo is not None and hi is not None and lo > hi):
        return None
    # Most tiles that a planner asks for are dense or empty, which the extreme distances alone decide.
    least, most = q[0] - k[-1], q[-1] - k[0]
    if (lo is not None and lo > most) or (hi is not None and hi < least):
        return None
    lo, hi = _drop_loose_bounds(q, k, lo, hi)
    if lo is None and hi is None:
        return Tile(heads, *_canonical_rows(q, k), branch=branch)
    q, k = _clip_to_band(q, k, lo, hi)
    if not q or not k:
        return None
    step = q.step if len(q) > 1 else k.step
    same_step = step == k.step or len(k) == 1
    if same_step:
        lo, hi = _tighten(lo, hi, q.start - k.start, step)
        if lo is not None and hi is not None and lo > hi:
            return None
        q, k = _clip_to_band(q, k, lo, hi)
        if not q or not k:
            return None
    elif len(q) == 1 or len(k) == 1:
        return make_tile(heads, q, k, lo, hi, branch)
    lo, hi = _drop_loose_bounds(q, k, lo, hi)
    tile = Tile(heads, *_canonical_rows(q, k), lo, hi, branch)
    if not same_step and not tile.dense and not tile.pairs:
        return None
    return tile


def _drop_loose_bounds(q: range, k: range, lo: int | None, hi: int | None) -> tuple[int | None, int | None]:
    """The bounds, with None for a bound that excludes no pair."""
    return None if lo is None or lo <= q[0] - k[-1] else lo, None if hi is None or hi >= q[-1] - k[0] else hi


def _clip_to_band(q: range, k: range, lo: int | None, hi: int | None) -> tuple[range, range]:
    """The rows without the leading and trailing rows that the band excludes; the result may be empty."""
    if hi is not None:
        q, k = clip(q, q.start, k[-1] + hi), clip(k, q.start - hi, k[-1])
    if lo is not None and q and k:
        q, k = clip(q, k.start + lo, q[-1]), clip(k, k.start, q[-1] - lo)
    return q, k


def _tighten(lo: int | None, hi: int | None, base: int, step: int) -> tuple[int | None, int | None]:
    """Bounds moved inward to distances that occur, base + n * step, so that tiles with equal pairs compare equal."""
    if lo is not None:
        lo = base + ceil_div(lo - base, step) * step
    if hi is not None:
        hi = base + (hi - base) // step * step
    return lo, hi


def _canonical_rows(q: range, k: range) -> tuple[range, range]:
    """The same rows in canonical form: equal rows compare and print as equal."""
    # A single row has no step of its own; give it the step of the other side, so that both steps are equal.
    if len(q) == 1:
        step = k.step if len(k) > 1 else 1
        return range(q[0], q[0] + 1, step), range(k[0], k[-1] + 1, step)
    step = q.step if len(k) == 1 else k.step
    return range(q[0], q[-1] + 1, q.step), range(k[0], k[-1] + 1, step)


def _residue_classes(r: range, step: int) -> Iterator[range]:
    for start in range(r.start, min(r.stop, r.start + step), r.step):
        yield range(start, r.stop, step)


def intersect_tiles(a: Tile, b: Tile, branch: int) -> Tile | None:
    """The pairs that both tiles contain, as one tile of the given branch; None if there is no such pair."""
    lows = [bound for bound in (a.lo, b.lo) if bound is not None]
    highs = [bound for bound in (a.hi, b.hi) if bound is not None]
    return make_tile(
        intersect(a.heads, b.heads),
        intersect(a.q, b.q),
        intersect(a.k, b.k),
        max(lows, default=None),
        min(highs, default=None),
        branch,
    )


def subtract_tile(a: Tile, b: Tile) -> Iterator[Tile]:
    """The pairs of `a` that `b` does not contain, as disjoint tiles with the branch of `a`."""
    if intersect_tiles(a, b, a.branch) is None:
        yield a
        return
    heads, q, k = (intersect(x, y) for x, y in ((a.heads, b.heads), (a.q, b.q), (a.k, b.k)))
    pieces = [replace(a, heads=rest) for rest in subtract(a.heads, b.heads)]
    pieces += [replace(a, heads=heads, q=rest) for rest in subtract(a.q, b.q)]
    pieces += [replace(a, heads=heads, q=q, k=rest) for rest in subtract(a.k, b.k)]
    if b.lo is not None:
        high = b.lo - 1 if a.hi is None else min(a.hi, b.lo - 1)
        pieces.append(replace(a, heads=heads, q=q, k=k, hi=high))
    if b.hi is not None:
        low = b.hi + 1 if a.lo is None else max(a.lo, b.hi + 1)
        pieces.append(replace(a, heads=heads, q=q, k=k, lo=low))
    for piece in pieces:
        tile = make_tile(piece.heads, piece.q, piece.k, piece.lo, piece.hi, piece.branch)
        if tile is not None:
            yield tile
