"""The rate at which partial results are merged: `softmax.merge_` on outputs of several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from ..kernels.base import wide
from ..softmax import merge_
from ..timing.rates import MERGE_PASSES
from .team import Team


def measure(
    team: Team, rows: Sequence[int], heads: int, head_dim: int, dtype: torch.dtype, repeat: int
) -> list[tuple[int, list[float]]]:
    """(bytes of an output and its lse in the wider dtype, seconds of merging one into it on all ranks) by size."""
    found = []
    for n in rows:
        out, part = (torch.randn(1, heads, n, head_dim, device=team.device, dtype=wide(dtype)) for _ in range(2))
        lse, part_lse = (torch.randn(1, heads, n, device=team.device, dtype=wide(dtype)) for _ in range(2))
        size = (out.numel() + lse.numel()) * out.element_size()

        def merge(out=out, lse=lse, part=part, part_lse=part_lse) -> None:  # type: ignore[no-untyped-def]
            merge_(out, lse, part, part_lse)

        seconds = team.repeated(merge, repeat)
        found.append((size, [t for rank in team.everyone(seconds) for t in rank]))
    return found


def rate(found: Sequence[tuple[int, Sequence[float]]]) -> float:
    """Bytes per second that a merge reads and writes together: the median over sizes."""
    return median(MERGE_PASSES * size / median(seconds) for size, seconds in found)
