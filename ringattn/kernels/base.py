"""The interface of all kernels.

lse is the natural log of the sum of exp(scaled logits), [B, H, rows], in fp32 (fp64 for fp64 inputs). Every query row
that a kernel receives sees a key.

NaN and infinities behave as in torch's SDPA: every row that sees a key with a NaN is NaN, and other rows of the same
call may be NaN, too. A row that sees no key has out 0 and lse -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from ..plan.work import Work
from .calls import Kernel as Kernel
from .contract import OpChoice as OpChoice
from .memory import as_dtype as as_dtype
from .memory import expand_heads as expand_heads
from .memory import wide as wide

#: Maximum query rows of a strip of a band.
STRIP_ROWS = 256
#: Squares below the diagonal of a triangle have a multiple of this many keys: ops are slower with other numbers.
SQUARE_KEYS = 32


@lru_cache(maxsize=32)
def band(rows: int, keys: int, lo: int | None, hi: int | None, device: torch.device) -> Tensor:
    """Bool [rows, keys], True where lo <= i - j <= hi for row i and key j; None is unbounded. Shared: do not write."""
    with torch.inference_mode(False):  # the cached mask outlives the inference mode of the caller
        distance = torch.arange(rows, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if lo is not None:
            visible &= distance >= lo
        if hi is not None:
            visible &= distance <= hi
        return visible


def positive(scale: float) -> tuple[float, float]:
    """Split the scale of the logits into (sign, factor), with factor > 0 and sign * factor = scale.

    Multiply q by `sign`, and let the kernel scale by `factor`. Kernels need a positive scale, because libraries hide a
    key with the logit -inf before they multiply by the scale: a scale of -1 would turn it into +inf. For scale 0, sign
    is 0.
    """
    if scale > 0:
        return 1.0, scale
    return (-1.0, -scale) if scale < 0 else (0.0, 1.0)


def cut(work: Work, reads: Callable[[Work], bool]) -> Iterator[Work]:
    """Split a work by rows into at most three calls whose masks the kernel can express, as `reads` decides.

    If `reads(work)` is True, the work is the only call. Otherwise the rows of a call are bounded by `lo` alone, by `hi`
    alone, by both or by neither, and the call has only keys that these rows see: if `lo` applies, its last key is the
    last one that its last row sees; if `hi` applies, its first key is the first one that its first row sees.
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
        assert reads(part), "the op must read the band of every run of rows correctly"
        yield part


def halve(triangle: Work, least: int) -> Iterator[Work]:
    """Split a causal triangle into squares, and triangles of at most `least` rows.

    `least` is at least SQUARE_KEYS, so that no half of a triangle is empty. Within a triangle, ops also compute some
    hidden pairs (the flash op for CPUs up to 512 per row); smaller triangles have fewer of them.
    """
    rows = len(triangle.q)
    if rows <= least:
        yield triangle
        return
    half = -(-rows // (2 * SQUARE_KEYS)) * SQUARE_KEYS
    yield from halve(triangle.narrow((0, half), (0, half)), least)
    yield from halve(triangle.narrow((half, rows), (half, rows)), least)
    yield triangle.narrow((half, rows), (0, half))


def cut_strips(work: Work, share: int, least: int) -> Iterator[Work]:
    """Split a band with an upper bound into strips of adjacent rows, each with the keys that its rows see.

    A strip has 1 / `share` of the width of the band as rows, rounded up to a multiple of `least`, at most STRIP_ROWS.
    Strips of few rows compute fewer hidden pairs; strips of many rows make faster matrix products.
    """
    assert work.hi is not None
    rows, width = len(work.q), work.keys if work.lo is None else work.hi - work.lo + 1
    height = min(max(-(-width // (share * least)), 1) * least, STRIP_ROWS)
    for first in range(0, rows, height):
        yield work.narrow_rows(first, min(first + height, rows))
