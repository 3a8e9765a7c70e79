"""accelerate's `cp_size`, which is PyTorch's context parallelism with its load balancing: zigzag shards."""

from __future__ import annotations

from typing import Any

import torch

from . import torch_cp


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: Any, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """As `torch_cp`, with the load balancing that accelerate leaves on."""
    return torch_cp.attend(q, k, v, group=group, causal=causal, scale=scale, balanced=True)


attend.layout = "zigzag"  # type: ignore[attr-defined]
