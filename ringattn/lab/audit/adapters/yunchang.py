"""USP (yunchang): its Ulysses over contiguous shards; on CPUs around PyTorch's attention in place of flash-attn."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from yunchang import UlyssesAttention
from yunchang.kernels import AttnType


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: Any, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """Attention by yunchang's module UlyssesAttention."""
    attention = UlyssesAttention(group, attn_type=AttnType.FA if q.is_cuda else AttnType.TORCH_FLASH)
    if not q.is_cuda:
        attention.attn_fn = _attend_on_cpu
    rows = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return attention(*rows, causal=causal, softmax_scale=scale).transpose(1, 2)


def _attend_on_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    given: Any = {"enable_gqa": True, "is_causal": options["causal"], "scale": options["softmax_scale"]}
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, **given).transpose(1, 2)
