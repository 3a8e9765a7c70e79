"""TransformerEngine's context parallelism by point-to-point messages, zigzag shards; needs CUDA."""

from __future__ import annotations

from typing import Any

import torch
from transformer_engine.pytorch import DotProductAttention


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention by Transformer Engine's DotProductAttention, with a context-parallel group."""
    module: Any = DotProductAttention(
        q.shape[1], q.shape[3], num_gqa_groups=k.shape[1], qkv_format="bshd", softmax_scale=scale,
        attn_mask_type="causal" if causal else "no_mask", attention_dropout=dropout,
        window_size=(-1, 0 if causal else -1) if window is None else (window, 0),
    ).to(q.device)  # fmt: skip
    ranks = list(range(torch.distributed.get_world_size(group)))
    module.set_context_parallel_group(group, ranks, torch.cuda.Stream(), "p2p")
    out = module(*(x.transpose(1, 2).contiguous() for x in (q, k, v)))
    return out.unflatten(2, (q.shape[1], v.shape[3])).transpose(1, 2)


attend.layout = "zigzag"  # type: ignore[attr-defined]
attend.dtype = "bfloat16"  # type: ignore[attr-defined]  # its kernels have 16 bits
