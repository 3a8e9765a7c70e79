"""Kernels whose dropout uses the global positions of a call's queries and keys. Only calls with dropout load this."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..cache import cached
from ..kernels.base import Kernel
from ..kernels.dropout import key_steps, row_streams
from ..plan.plan import Plan
from ..plan.row_sets import RowSet, to_numbers
from ..plan.steps import Part
from ..plan.work import Work
from .accumulators import RowViews, select_inputs


def dropping_kernels(
    plan: Plan, rank: int, part: Part, kernel: Kernel, batch: int, device: torch.device
) -> Callable[[Work, slice | None], Kernel]:
    """A function that maps (work, batch slice or None) to `kernel` with the right dropout for that call on `part`."""
    ring_plan, owner = plan.ring_plan(rank)
    passes_q = part.kind in ("q", "query")
    local = Part("kv" if passes_q else "q", owner)
    queries, keys = (part, local) if passes_q else (local, part)
    first = rank % plan.ulysses_size * ring_plan.heads
    (heads, rows), (kv_heads, columns) = (_places(ring_plan, x, device) for x in (queries, keys))
    assert kernel.dropout is not None and kernel.dropout.seed is not None
    streams = RowViews(row_streams(kernel.dropout.seed, batch, heads + first, rows))
    steps = RowViews(key_steps(columns).expand(batch, len(kv_heads), -1).unsqueeze(-1))

    def choose(work: Work, elements: slice | None) -> Kernel:
        of_rows, of_keys = select_inputs(work, elements, streams, steps)
        return kernel.derive(numbers=(*of_rows, *of_keys))

    return choose


@cached
def _places(plan: Plan, part: Part, device: torch.device) -> tuple[Tensor, Tensor]:
    """(heads [H], positions [1 or H, rows]) of a part of a block, int64."""
    positions, rows = plan.layout_of(part.kind).positions(part.owner), part.row_set
    heads = np.arange(plan.part_heads(part.kind))
    if isinstance(rows, RowSet):
        heads, positions = np.array(rows.heads), np.stack([positions[to_numbers(x)] for x in rows.rows])
    with torch.inference_mode(False):  # the cache outlives the caller's inference mode
        return torch.as_tensor(heads, device=device), torch.as_tensor(np.atleast_2d(positions), device=device)
