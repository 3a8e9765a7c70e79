"""ring-attention-pytorch (lucidrains): its ring over contiguous shards of equal length."""

from __future__ import annotations

from typing import Any

import torch
from ring_attention_pytorch.ring_flash_attention import ring_flash_attn


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: Any, causal: bool = False, window: int | None = None
) -> torch.Tensor:
    """ring-attention-pytorch's attention, with one bucket per rank.

    The library rounds a window to whole buckets.
    """
    ranks, rows = torch.distributed.get_world_size(group), q.shape[2]
    options: dict[str, Any] = {"causal": causal, "bucket_size": rows, "ring_reduce_col": True, "ring_size": ranks}
    if window is not None:
        options |= {"max_lookback_seq_len": window + 1}
    out = ring_flash_attn(*(x.transpose(1, 2) for x in (q, k, v)), **options)
    return out.transpose(1, 2)
