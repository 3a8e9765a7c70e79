"""The rate of merging partial results: `softmax.merge_` on outputs of several sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from statistics import median

import torch

from ...kernels.base import wide
from ...runtime.softmax import merge_
from ..timing.rates import MERGE_PASSES
from .measuring_ranks import MeasuringRanks, Settings, TimedBytes, count_turns


def time_merges(ranks: MeasuringRanks, rows: Sequence[int], settings: Settings) -> list[TimedBytes]:
    """Bytes of an output and its lse in the wider dtype, and seconds of merging another into them on all ranks."""
    times, heads, dtype = [], settings.heads, wide(settings.torch_dtype)
    for n in rows:
        size = n * heads * (settings.head_dim + 1) * dtype.itemsize
        shapes = [(1, heads, n, settings.head_dim), (1, heads, n)] * 2  # out and lse of two results of the same rows
        turns = range(count_turns(2 * size))
        first = [torch.randn(shape, device=ranks.device, dtype=dtype) for shape in shapes]
        partials = cycle([[x.clone() for x in first] for _ in turns])
        (seconds,) = ranks.time_alternating([partial(_merge_next, partials)])
        times.append(TimedBytes(size, ranks.gather_times(seconds)))
    return times


def _merge_next(partials: Iterator[list[torch.Tensor]]) -> None:
    merge_(*next(partials))


def merge_rate(times: Sequence[TimedBytes]) -> float:
    """Bytes per second that a merge reads and writes together: the median over sizes."""
    return median(MERGE_PASSES * one.bytes / median(one.seconds) for one in times)
