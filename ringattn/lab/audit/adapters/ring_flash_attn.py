"""ring-flash-attention (zhuzilin): its ring over contiguous shards; on CPUs over a stand-in for its CUDA kernel."""

from __future__ import annotations

from typing import Any

import torch

from ringattn.lab.bench.suites.peers import import_ring_flash_attn

LIBRARY = import_ring_flash_attn()


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention by ring_flash_attn_func of ring-flash-attention, on contiguous shards.

    The function applies a window to every block as if the block were on the diagonal.
    """
    window_size = (-1, -1) if window is None else (window, 0)
    options: dict[str, Any] = {"causal": causal, "window_size": window_size, "softmax_scale": scale, "group": group}
    rows = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return LIBRARY.ring_flash_attn_func(*rows, **options).transpose(1, 2)


attend.dtype = "bfloat16"  # type: ignore[attr-defined]  # its kernels have 16 bits
