"""Rotary position embedding (Su et al., RoFormer, 2021) in the rotate-half form, exact at positions in the billions."""

from __future__ import annotations

import math

import torch

from ..errors import InvalidInput
from ..kernels.base import wide

#: The base of the original paper.
BASE = 10000.0


def check_rotary(head_dim: int, base: float) -> None:
    """Raise InvalidInput for an odd head dim, or a base that is not a finite number > 0."""
    if head_dim % 2:
        raise InvalidInput(
            f"rotary embeddings rotate pairs of columns, but the head dim {head_dim} is odd; try an even head dim"
        )
    if not (math.isfinite(base) and base > 0):
        raise InvalidInput(f"the base of rotary embeddings must be a finite number > 0, got {base}; try rotary=True")


def rotation_tables(
    positions: torch.Tensor, head_dim: int, base: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [n, head_dim / 2] of the angles at positions int64 [n]: fp32, or fp64 if `dtype` is fp64.

    The angles are computed in fp64: at position 1e9 an fp32 angle is wrong by whole turns.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.double()[:, None] * base**-exponents
    return angles.cos().to(wide(dtype)), angles.sin().to(wide(dtype))


def rotate(x: torch.Tensor, positions: torch.Tensor, base: float = BASE) -> torch.Tensor:
    """x [..., n, D] rotated by the global `positions` int64 [n] of its rows, in the dtype of x.

    Computed in fp32 (fp64 for fp64). Columns i and i + D / 2 are a pair, rotated by the angle
    position * base ** (-2 i / D). Raises InvalidInput for odd D.
    """
    check_rotary(x.shape[-1], base)
    cos, sin = rotation_tables(positions, x.shape[-1], base, x.dtype)
    return rotate_by(x, cos, sin)


def rotate_by(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., n, D] rotated by `rotation_tables` [n, D / 2], in the dtype of x."""
    left, right = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)
