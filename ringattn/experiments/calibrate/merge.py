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
from .measuring_ranks import MeasuringRanks, Settings, count_turns


def time_merges(ranks: MeasuringRanks, rows: Sequence[int], settings: Settings) -> list[tuple[int, list[float]]]:
    """(bytes of an output and its lse in the wider dtype, seconds of merging another into them on all ranks)."""
    times, heads, dtype = [], settings.heads, wide(settings.torch_dtype)
    for n in rows:
        size = n * heads * (settings.head_dim + 1) * dtype.itemsize
        shapes = [(1, heads, n, settings.head_dim), (1, heads, n)] * 2  # out and lse of two results of the same rows
        turns = range(count_turns(2 * size))
        partials = cycle([[torch.randn(shape, device=ranks.device, dtype=dtype) for shape in shapes] for _ in turns])
        times.append((size, ranks.time_on_all(partial(_merge_next, partials), settings.repeat)))
    return times


def _merge_next(partials: Iterator[list[torch.Tensor]]) -> None:
    merge_(*next(partials))


def merge_rate(times: Sequence[tuple[int, Sequence[float]]]) -> float:
    """Bytes per second that a merge reads and writes together: the median over sizes."""
    return median(MERGE_PASSES * size / median(seconds) for size, seconds in times)
