"""accelerate's `cp_size`, which is PyTorch's context parallelism with its load balancing: zigzag shards."""

from __future__ import annotations

from typing import Any

import torch

from ringattn.lab.audit.adapters import torch_cp


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: Any, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """PyTorch's context-parallel attention, with the load balancing that accelerate leaves switched on."""
    return torch_cp.attend(q, k, v, group=group, causal=causal, scale=scale, balanced=True)


attend.layout = "zigzag"  # type: ignore[attr-defined]
