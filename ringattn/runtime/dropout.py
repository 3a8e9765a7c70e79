"""Kernels whose dropout knows the global positions of a call's rows and keys. Only calls with dropout load this."""

from __future__ import annotations

import numpy as np
import torch

from ..kernels.base import Kernel
from ..kernels.dropout import key_steps, row_streams
from ..plan.plan import Plan
from ..plan.row_sets import RowSet, to_numbers
from ..plan.steps import Part
from ..plan.work import Work
from .accumulators import RowViews, select_inputs


class DroppingKernels:
    """The kernels of one visit of `rank` to `part`, for a batch of `batch` elements."""

    def __init__(self, plan: Plan, rank: int, part: Part, kernel: Kernel, batch: int, device: torch.device) -> None:
        ring_plan, owner = plan.ring_plan(rank)
        by_queries = part.kind in ("q", "query")
        local = Part("kv" if by_queries else "q", owner)
        queries, keys = (part, local) if by_queries else (local, part)
        first = rank % plan.ulysses_size * ring_plan.heads
        (heads, rows), (kv_heads, columns) = (_places(ring_plan, x, device) for x in (queries, keys))
        assert kernel.dropout is not None and kernel.dropout.seed is not None
        self.kernel = kernel
        self._streams = RowViews(row_streams(kernel.dropout.seed, batch, heads + first, rows))
        self._steps = RowViews(key_steps(columns).expand(batch, len(kv_heads), -1).unsqueeze(-1))

    def select(self, work: Work, batch: slice | None) -> Kernel:
        """The kernel for one call, for some elements of the batch; None is all of them."""
        streams, steps = select_inputs(work, batch, self._streams, self._steps)
        return self.kernel.derive(numbers=(*streams, *steps))


def _places(plan: Plan, part: Part, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(heads [H], positions [1 or H, rows]) of a part of a block, int64. Cached by the plan."""

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        positions, rows = plan.layout_of(part.kind).positions(part.owner), part.row_set
        heads = np.arange(plan.part_heads(part.kind))
        if isinstance(rows, RowSet):
            heads, positions = np.array(rows.heads), np.stack([positions[to_numbers(x)] for x in rows.rows])
        with torch.inference_mode(False):  # cached tensors outlive the inference mode of the caller
            return torch.as_tensor(heads, device=device), torch.as_tensor(np.atleast_2d(positions), device=device)

    return plan.cache.answer((_places, part, device), compute)
