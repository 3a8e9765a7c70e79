"""PyTorch's context parallelism of scaled_dot_product_attention (torch.distributed.tensor.experimental), contiguous."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention as ring
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

MESHES: dict[int, Any] = {}


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    balanced: bool = False,
) -> torch.Tensor:
    """Attention inside `context_parallel`: contiguous shards, or zigzag shards if `balanced`."""
    ranks = torch.distributed.get_world_size(group)
    mesh = MESHES.setdefault(ranks, init_device_mesh(q.device.type, (ranks,)))
    ring._cp_options.enable_load_balance = balanced
    shown = torch.empty(2 * ranks, device=q.device)  # the context cuts at least one buffer; our shards are cut already
    with context_parallel(mesh, buffers=[shown], buffer_seq_dims=[0]):
        return functional.scaled_dot_product_attention(  # the context replaces this function
            q, k, v, is_causal=causal, scale=scale, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
        )
