"""The rate at which partial results are merged: `softmax.merge_` on outputs of several sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from statistics import median

import torch

from ...kernels.base import wide
from ...runtime.softmax import merge_
from ...timing.rates import MERGE_PASSES
from .team import Team

#: Outputs of so many bytes in all are merged in turn, so that each has left the caches: in a pass, a visit lies between
#: two merges. Of the smallest ones, fewer will do.
COLD, MOST_SETS = 1 << 27, 64


def measure(
    team: Team, rows: Sequence[int], heads: int, head_dim: int, dtype: torch.dtype, repeat: int
) -> list[tuple[int, list[float]]]:
    """(bytes of an output and its lse in the wider dtype, seconds of merging one into it on all ranks) by size."""
    found = []
    for n in rows:
        size = n * heads * (head_dim + 1) * wide(dtype).itemsize
        sets = [_partials(team, n, heads, head_dim, dtype) for _ in range(max(2, min(COLD // (2 * size), MOST_SETS)))]
        turn = cycle(sets)

        def merge(turn: Iterator[tuple[torch.Tensor, ...]] = turn) -> None:
            merge_(*next(turn))

        seconds = team.repeated(merge, repeat)
        found.append((size, [t for rank in team.everyone(seconds) for t in rank]))
    return found


def _partials(team: Team, rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(out, lse) and another partial of the same rows."""
    found: list[torch.Tensor] = []
    for _ in range(2):
        found.append(torch.randn(1, heads, rows, head_dim, device=team.device, dtype=wide(dtype)))
        found.append(torch.randn(1, heads, rows, device=team.device, dtype=wide(dtype)))
    return tuple(found)


def rate(found: Sequence[tuple[int, Sequence[float]]]) -> float:
    """Bytes per second that a merge reads and writes together: the median over sizes."""
    return median(MERGE_PASSES * size / median(seconds) for size, seconds in found)
