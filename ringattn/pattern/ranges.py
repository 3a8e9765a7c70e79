"""Algebra of arithmetic progressions, written as Python `range`s with a positive step.

Everything here is exact integer arithmetic; nothing enumerates the members of a range.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd

EMPTY = range(0)


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b, for b > 0."""
    return -(-a // b)


def clip(r: range, low: int, high: int) -> range:
    """The members of `r` in the closed interval [low, high]."""
    first = r.start if low <= r.start else r.start + ceil_div(low - r.start, r.step) * r.step
    return range(first, min(r.stop, high + 1), r.step)


def intersect(a: range, b: range) -> range:
    """The members that two progressions share (Chinese remainder theorem)."""
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
    origin = a.start + turns * a.step  # in both classes; may lie below either start
    low, high = max(a.start, b.start), min(a[-1], b[-1])
    return range(origin + ceil_div(low - origin, step) * step, high + 1, step)


def subtract(a: range, b: range) -> Iterator[range]:
    """Disjoint progressions that hold the members of `a` that are not in `b`."""
    shared = intersect(a, b)
    if not shared:
        if a:
            yield a
        return
    first, last = shared[0], shared[-1]
    if a.start < first:
        yield range(a.start, first, a.step)
    if len(shared) > 1:
        for skip in range(a.step, shared.step, a.step):
            yield range(first + skip, last, shared.step)
    if a[-1] > last:
        yield range(last + a.step, a.stop, a.step)


def union(ranges: Iterable[range]) -> tuple[range, ...]:
    """Disjoint progressions that hold every member of `ranges` once."""
    kept: list[range] = []
    for new in ranges:
        pieces = [new] if new else []
        for old in kept:
            pieces = [rest for piece in pieces for rest in subtract(piece, old)]
        kept += pieces
    return tuple(kept)


def joined(runs: Iterable[range]) -> Iterator[range]:
    """Ascending runs of step 1, with those that touch or overlap joined."""
    held = range(0)
    for run in runs:
        if not run:
            continue
        if held and run.start <= held.stop:
            held = range(held.start, max(held.stop, run.stop))
        else:
            if held:
                yield held
            held = run
    if held:
        yield held


def merged(runs: Iterable[range]) -> tuple[range, ...]:
    """The union of runs of step 1 in any order, as the fewest of them, ascending."""
    return tuple(joined(sorted(runs, key=lambda r: r.start)))


def locate(part: range, whole: range) -> range:
    """Indices within `whole` of the members of `part`, a sub-progression of `whole`."""
    start = (part.start - whole.start) // whole.step
    step = part.step // whole.step if len(part) > 1 else 1
    return range(start, start + (len(part) - 1) * step + 1, step)


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """sum((a * i + b) // m for i in range(n)) for a, b >= 0 and m > 0, in O(log) steps.

    The Euclid-like recursion of Graham, Knuth, Patashnik, Concrete Mathematics, section 3.5.
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
    """Number of pairs (x in q, y in k) with x - y <= bound."""
    if not q or not k:
        return 0
    # Member i of q does not see the first clamp((base + i * q.step) // k.step, 0, len(k)) members of k.
    base = q.start - bound - k.start + k.step - 1
    rises = min(len(q), max(0, ceil_div(k.step - base, q.step)))
    full = max(rises, min(len(q), max(0, ceil_div(len(k) * k.step - base, q.step))))
    hidden = (len(q) - full) * len(k)
    if full > rises:
        hidden += floor_sum(full - rises, k.step, q.step, base + rises * q.step)
    return len(q) * len(k) - hidden
