"""Set operations on arithmetic progressions, written as Python `range`s with a positive step.

All results are exact integers, and no function enumerates the members of a range.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd

EMPTY = range(0)


def ceil_div(a: int, b: int) -> int:
    """The smallest integer >= a / b, for b > 0."""
    return -(-a // b)


def shift_range(r: range, by: int) -> range:
    """The range with all members `by` larger."""
    return range(r.start + by, r.stop + by, r.step)


def clip(r: range, low: int, high: int) -> range:
    """The members of `r` in the closed interval [low, high]."""
    first = r.start if low <= r.start else r.start + ceil_div(low - r.start, r.step) * r.step
    return range(first, min(r.stop, high + 1), r.step)


def intersect(a: range, b: range) -> range:
    """The common members of two progressions, by the Chinese remainder theorem."""
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
    """The members of `a` that are not in `b`, as disjoint progressions."""
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
    """The members of all `ranges`, each member once, as disjoint progressions."""
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


def merge_runs(runs: Iterable[range]) -> tuple[range, ...]:
    """The union of ranges of step 1 given in any order, as the fewest possible ranges, ascending."""
    return tuple(join_runs(sorted(runs, key=lambda run: run.start)))


def locate(part: range, whole: range) -> range:
    """The indices in `whole` of the members of `part`; `part` must be a sub-progression of `whole`."""
    start = (part.start - whole.start) // whole.step
    step = part.step // whole.step if len(part) > 1 else 1
    return range(start, start + (len(part) - 1) * step + 1, step)


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
    # Member i of q pairs with all of k but its first clamp((base + i * q.step) // k.step, 0, len(k)) members.
    base = q.start - bound - k.start + k.step - 1
    # Members of q before `some_excluded` pair with all of k, members from `all_excluded` on with none of k.
    some_excluded = min(len(q), max(0, ceil_div(k.step - base, q.step)))
    all_excluded = max(some_excluded, min(len(q), max(0, ceil_div(len(k) * k.step - base, q.step))))
    excluded = (len(q) - all_excluded) * len(k)
    if all_excluded > some_excluded:
        excluded += floor_sum(all_excluded - some_excluded, k.step, q.step, base + some_excluded * q.step)
    return len(q) * len(k) - excluded
