"""Bands as the masks of libraries' ops: which band an op reads correctly, and cuts of a work into such bands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from ..plan.work import Work

#: Most query rows of a strip of a band.
STRIP_ROWS = 256
#: Squares below the diagonal of a triangle have a multiple of so many keys: ops are slower with other numbers.
SQUARE_KEYS = 32


def cut(work: Work, reads: Callable[[Work], bool]) -> Iterator[Work]:
    """The calls that compute a work, each with a band that `reads` accepts: the work, or two or three runs of rows.

    Each run is bounded by `lo` alone, by `hi` alone, by both or by neither, and has only the keys that its rows see:
    where `lo` binds, the last row sees the last key and no key behind; where `hi` binds, the first row sees the first
    key and no key before.
    """
    if reads(work):
        yield work
        return
    rows, keys = len(work.q), work.keys
    # Rows from `unbounded` on are not bounded by `lo`; rows from `bounded` on are bounded by `hi`.
    unbounded = 0 if work.lo is None else min(max(keys + work.lo, 0), rows)
    bounded = rows if work.hi is None else min(max(work.hi, 0), rows)
    for first, last in pairwise(sorted({0, unbounded, bounded, rows})):
        part = work.narrow_rows(first, last)
        assert reads(part), "the op reads the band of every run of rows correctly"
        yield part


def halve(triangle: Work, least: int) -> Iterator[Work]:
    """The calls that compute a triangle: squares, and triangles of at most `least` rows.

    `least` is SQUARE_KEYS or more, so that no half of a triangle is empty. Ops compute hidden pairs of a triangle, the
    flash op for CPUs up to 512 keys of each row.
    """
    rows = len(triangle.q)
    if rows <= least:
        yield triangle
        return
    half = -(-rows // (2 * SQUARE_KEYS)) * SQUARE_KEYS
    yield from halve(triangle.narrow((0, half), (0, half)), least)
    yield from halve(triangle.narrow((half, rows), (half, rows)), least)
    yield triangle.narrow((half, rows), (0, half))


@dataclass(frozen=True)
class Strips:
    """Cuts of bands into strips of rows: the width of the band over `share`, in multiples of `least`.

    Low strips compute fewer hidden pairs, high strips make faster matrix products.
    """

    share: int
    least: int

    def cut(self, work: Work) -> Iterator[Work]:
        """The strips of a band that is bounded above, each with the keys that its rows see."""
        assert work.hi is not None
        rows, width = len(work.q), work.keys if work.lo is None else work.hi - work.lo + 1
        height = min(max(-(-width // (self.share * self.least)), 1) * self.least, STRIP_ROWS)
        for first in range(0, rows, height):
            yield work.narrow_rows(first, min(first + height, rows))


def is_causal(work: Work) -> bool:
    """Whether row i sees key j iff j <= i, counted from the first row and the first key."""
    return work.lo == 0 and work.hi is None


def flash_window(work: Work) -> tuple[int, int]:
    """(window_size_left, window_size_right) of the flash op, in which -1 is unbounded."""
    left, right = (-1 if bound is None else bound for bound in window_bounds(work))
    return left, right


def flash_reads(work: Work) -> bool:
    """Whether flash hides the pairs that the band of a work hides, and no others.

    FlashAttention 2 reads a bound below 0, or of as many keys as there are, as unbounded. Beside a bounded side it
    reads an unbounded side as a bound of as many keys as there are (flash_api.cpp; flash-attention issue 895).
    """
    rows, keys = len(work.q), work.keys
    left, right = window_bounds(work)
    read_left = left if left is not None and 0 <= left < keys else None
    read_right = right if right is not None and 0 <= right < keys else None
    if read_left is None and read_right is not None:
        read_left = keys
    elif read_right is None and read_left is not None:
        read_right = keys
    return _same_bound(read_left, left, keys - 1) and _same_bound(read_right, right, rows - 1)


@dataclass(frozen=True)
class EfficientMask:
    """The band of a work as the memory-efficient op takes it.

    `mask_type` 2 hides keys behind the diagonal that ends at the last row and the last key; `window` counts the keys
    up to that diagonal that a row sees, None is all. `flip`: rows and keys are given in reverse order, which turns a
    bound on the left into a bound on the right, the only one that the op has without the other.
    """

    flip: bool = False
    mask_type: int = 0
    window: int | None = None


def efficient_mask(work: Work) -> EfficientMask | None:
    """The mask of the memory-efficient op for a band; None if the op has none."""
    shift = len(work.q) - work.keys
    if work.dense:
        return EfficientMask()
    if work.lo is None:
        return EfficientMask(flip=True, mask_type=2) if work.hi == 0 else None
    if work.lo != shift:
        return None
    return EfficientMask(mask_type=2, window=None if work.hi is None else work.hi - work.lo + 1)


def efficient_reads(work: Work) -> bool:
    """Whether the memory-efficient op has a mask for the band of a work."""
    return efficient_mask(work) is not None


def _same_bound(read: int | None, needed: int | None, nothing_hidden: int) -> bool:
    """Whether two bounds of a window hide the same keys; a bound of at least `nothing_hidden` hides no key."""
    hides_nothing = [bound is None or bound >= nothing_hidden for bound in (read, needed)]
    return all(hides_nothing) or (not any(hides_nothing) and read == needed)


def window_bounds(work: Work) -> tuple[int | None, int | None]:
    """(left, right) of the band as a window that is anchored at the last row and the last key; None is unbounded.

    Row i sees key j iff i + keys - rows - left <= j <= i + keys - rows + right.
    """
    shift = 0 if work.sequences else work.keys - len(work.q)
    return None if work.hi is None else work.hi + shift, None if work.lo is None else -work.lo - shift
