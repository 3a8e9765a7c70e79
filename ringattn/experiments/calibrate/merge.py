"""The rate of merging partial results: `softmax.merge_` on outputs of several sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from statistics import median

import torch

from ...kernels.base import wide
from ...runtime.softmax import merge_
from ...timing.rates import MERGE_PASSES
from .measuring_ranks import MeasuringRanks

#: Bytes of the outputs that are merged in turn, so that each has left the caches before its next turn, as in a pass,
#: where a visit lies between two merges; and the most outputs, which limits their number for the smallest sizes.
COLD_BYTES, MOST_OUTPUTS = 1 << 27, 64


def time_merges(
    ranks: MeasuringRanks, rows: Sequence[int], heads: int, head_dim: int, dtype: torch.dtype, repeat: int
) -> list[tuple[int, list[float]]]:
    """(bytes of an output and its lse in the wider dtype, seconds of merging another into them on all ranks)."""
    times = []
    for n in rows:
        size = n * heads * (head_dim + 1) * wide(dtype).itemsize
        count = max(2, min(COLD_BYTES // (2 * size), MOST_OUTPUTS))
        partials = cycle([_make_partials(ranks.device, n, heads, head_dim, dtype) for _ in range(count)])
        seconds = ranks.gather(ranks.time_repeated(partial(_merge_next, partials), repeat))
        times.append((size, [t for of_rank in seconds for t in of_rank]))
    return times


def _merge_next(partials: Iterator[tuple[torch.Tensor, ...]]) -> None:
    merge_(*next(partials))


def _make_partials(
    device: torch.device, rows: int, heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """(out, lse, other out, other lse) of two partial results of the same rows."""
    shapes = [(1, heads, rows, head_dim), (1, heads, rows)] * 2
    return tuple(torch.randn(shape, device=device, dtype=wide(dtype)) for shape in shapes)


def merge_rate(times: Sequence[tuple[int, Sequence[float]]]) -> float:
    """Bytes per second that a merge reads and writes together: the median over sizes."""
    return median(MERGE_PASSES * size / median(seconds) for size, seconds in times)
