"""USP (yunchang): Ulysses over all ranks, with contiguous shards and torch's kernel."""

from __future__ import annotations

from typing import Any

import torch
from yunchang import LongContextAttention, set_seq_parallel_pg
from yunchang.kernels import AttnType

SET: set[int] = set()


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: Any, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """LongContextAttention with a Ulysses group of all ranks."""
    ranks, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    if ranks not in SET:
        set_seq_parallel_pg(ranks, 1, rank, ranks)
        SET.add(ranks)
    attention = LongContextAttention(ring_impl_type="basic", attn_type=AttnType.TORCH)
    rows = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return attention(*rows, causal=causal, softmax_scale=scale).transpose(1, 2)
