"""Rotary position embedding (Su et al. 2021) in the rotate-half form, exact at positions in the billions."""

from __future__ import annotations

import math

import torch

from ..errors import InvalidInput

#: The base of the original paper.
BASE = 10000.0


def check(head_dim: int, base: float) -> None:
    """Raise InvalidInput where heads of `head_dim` cannot be rotated, or not with this base."""
    if head_dim % 2:
        raise InvalidInput(f"rotary embeddings turn pairs of columns, the head dim {head_dim} is odd")
    if not (math.isfinite(base) and base > 0):
        raise InvalidInput(f"the base of rotary embeddings is a finite number > 0, got {base}; try rotary=True")


def tables(
    positions: torch.Tensor, head_dim: int, base: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [n, head_dim / 2] of positions [n] (int64): fp32, fp64 for fp64.

    The angles are fp64: at position 1e9 an fp32 angle is wrong by whole turns.
    """
    inner = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.double()[:, None] * base**-inner
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return angles.cos().to(wide), angles.sin().to(wide)


def rotate(x: torch.Tensor, positions: torch.Tensor, base: float = BASE) -> torch.Tensor:
    """x [B, H, n, D] turned by the global `positions` [n] of its rows, computed in fp32 (fp64), in the dtype of x.

    Columns i and i + D / 2 are a pair, turned by position * base ** (-2 i / D). Raises InvalidInput where D is odd.
    """
    check(x.shape[-1], base)
    cos, sin = tables(positions, x.shape[-1], base, x.dtype)
    return apply(x, cos, sin)


def apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, H, n, D] turned by tables [n, D / 2] of `tables`."""
    left, right = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)
