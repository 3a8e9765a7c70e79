"""The tile: affine query rows x affine key rows, with a band on their distance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm

from .ranges import ceil_div, clip, count_at_most, intersect, subtract, union


@dataclass(frozen=True)
class Tile:
    """Query position x in `q` attends key position y in `k` iff lo <= x - y <= hi, for each head in `heads`.

    Positions are global; `lo` or `hi` None means unbounded. A tile made by `make` or by an operation of
    this module is *trimmed*: it is not empty, bounds that do not bind are None, and where both steps are
    equal (or there is no band) every row of `q` sees a key and every row of `k` is seen.
    `branch` numbers the attention of a multi-branch pattern that the tile belongs to.
    """

    heads: range
    q: range
    k: range
    lo: int | None = None
    hi: int | None = None
    branch: int = 0

    @property
    def dense(self) -> bool:
        """True where every query row sees every key row."""
        return self.lo is None and self.hi is None

    @property
    def pairs(self) -> int:
        """Exact number of (query, key) pairs of one head, in closed form."""
        total = len(self.q) * len(self.k)
        if self.hi is not None:
            total = count_at_most(self.q, self.k, self.hi)
        if self.lo is not None:
            total -= count_at_most(self.q, self.k, self.lo - 1)
        return total

    def refine(self) -> Iterator[Tile]:
        """The same pairs as tiles that are dense or have equal steps (residue classes of the lcm)."""
        if self.dense or self.q.step == self.k.step:
            yield self
            return
        step = lcm(self.q.step, self.k.step)
        for q in _classes(self.q, step):
            for k in _classes(self.k, step):
                tile = make(self.heads, q, k, self.lo, self.hi, self.branch)
                if tile is not None:
                    yield tile

    def key_rows(self) -> tuple[range, ...]:
        """Disjoint ranges of the key positions that some query row of the tile sees."""
        return union(tile.k for tile in self.refine())

    def query_rows(self) -> tuple[range, ...]:
        """Disjoint ranges of the query positions that see some key of the tile."""
        return union(tile.q for tile in self.refine())


def _classes(r: range, step: int) -> Iterator[range]:
    for start in range(r.start, min(r.stop, r.start + step), r.step):
        yield range(start, r.stop, step)


def make(
    heads: range, q: range, k: range, lo: int | None = None, hi: int | None = None, branch: int = 0
) -> Tile | None:
    """The trimmed tile of these rows and band, or None where no pair is left."""
    if not heads or not q or not k or (lo is not None and hi is not None and lo > hi):
        return None
    # Most tiles that a planner asks for are whole or empty: that is seen from their corners.
    least, most = q[0] - k[-1], q[-1] - k[0]
    if (lo is not None and lo > most) or (hi is not None and hi < least):
        return None
    if lo is not None and lo <= least:
        lo = None
    if hi is not None and hi >= most:
        hi = None
    if lo is None and hi is None:
        return Tile(heads, *_plain(q, k), branch=branch)
    if hi is not None:
        q, k = clip(q, q.start, k[-1] + hi), clip(k, q.start - hi, k[-1])
    if not q or not k:
        return None
    if lo is not None:
        q, k = clip(q, k.start + lo, q[-1]), clip(k, k.start, q[-1] - lo)
    if not q or not k:
        return None
    step = q.step if len(q) > 1 else k.step
    same_step = step == k.step or len(k) == 1
    if same_step and (lo is not None or hi is not None):
        # Bounds on the compressed distance i - j; tightening them makes equal tiles compare equal.
        base = q.start - k.start
        if lo is not None:
            lo = base + ceil_div(lo - base, step) * step
        if hi is not None:
            hi = base + (hi - base) // step * step
        if lo is not None and hi is not None and lo > hi:
            return None
        if hi is not None:
            q, k = clip(q, q.start, k[-1] + hi), clip(k, q.start - hi, k[-1])
        if lo is not None and q and k:
            q, k = clip(q, k.start + lo, q[-1]), clip(k, k.start, q[-1] - lo)
        if not q or not k:
            return None
    if not same_step and (len(q) == 1 or len(k) == 1):
        return make(heads, q, k, lo, hi, branch)
    if lo is not None and lo <= q[0] - k[-1]:
        lo = None
    if hi is not None and hi >= q[-1] - k[0]:
        hi = None
    tile = Tile(heads, *_plain(q, k), lo, hi, branch)
    if not same_step and not tile.dense and not tile.pairs:
        return None
    return tile


def _plain(q: range, k: range) -> tuple[range, range]:
    """The rows in the form in which equal ones compare, and show, as equal."""
    # A single row has no step of its own: give it the other side's, so that equal steps are seen as such.
    if len(q) == 1:
        return range(q[0], q[0] + 1, k.step), range(k[0], k[-1] + 1, k.step)
    step = q.step if len(k) == 1 else k.step
    return range(q[0], q[-1] + 1, q.step), range(k[0], k[-1] + 1, step)


def meet(a: Tile, b: Tile, branch: int) -> Tile | None:
    """The pairs that both tiles hold, as one tile of the given branch."""
    los = [bound for bound in (a.lo, b.lo) if bound is not None]
    his = [bound for bound in (a.hi, b.hi) if bound is not None]
    return make(
        intersect(a.heads, b.heads),
        intersect(a.q, b.q),
        intersect(a.k, b.k),
        max(los, default=None),
        min(his, default=None),
        branch,
    )


def difference(a: Tile, b: Tile) -> Iterator[Tile]:
    """Disjoint tiles that hold the pairs of `a` that `b` does not hold; they keep the branch of `a`."""
    shared = meet(a, b, a.branch)
    if shared is None:
        yield a
        return
    heads, q, k = (intersect(x, y) for x, y in ((a.heads, b.heads), (a.q, b.q), (a.k, b.k)))
    pieces = [replace(a, heads=rest) for rest in subtract(a.heads, b.heads)]
    pieces += [replace(a, heads=heads, q=rest) for rest in subtract(a.q, b.q)]
    pieces += [replace(a, heads=heads, q=q, k=rest) for rest in subtract(a.k, b.k)]
    if b.lo is not None:
        his = b.lo - 1 if a.hi is None else min(a.hi, b.lo - 1)
        pieces.append(replace(a, heads=heads, q=q, k=k, hi=his))
    if b.hi is not None:
        los = b.hi + 1 if a.lo is None else max(a.lo, b.hi + 1)
        pieces.append(replace(a, heads=heads, q=q, k=k, lo=los))
    for piece in pieces:
        tile = make(piece.heads, piece.q, piece.k, piece.lo, piece.hi, piece.branch)
        if tile is not None:
            yield tile
