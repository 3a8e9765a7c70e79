"""Works as the planner makes them."""

from __future__ import annotations

from ringattn.plan.work import Work


def trimmed(rows: int, keys: int, lo: int | None, hi: int | None) -> Work | None:
    """A work whose every row sees a key, as the planner makes them."""
    first = max(0, lo) if lo is not None else 0
    last = min(rows, keys + hi) if hi is not None else rows
    left = max(0, first - hi) if hi is not None else 0
    right = min(keys, last - lo) if lo is not None else keys
    if first >= last or left >= right:
        return None
    whole = Work(range(4), range(2), range(rows), (range(keys),), lo, hi)
    return whole.narrow((first, last), (left, right))
