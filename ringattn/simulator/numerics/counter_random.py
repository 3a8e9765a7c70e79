"""Random numbers as functions of a counter: any rank can compute any number alone."""

from __future__ import annotations

import math
import struct

import torch

from ...kernels.dropout import GAMMA, finalize, shift


def counter_normal(stream: int, index: torch.Tensor) -> torch.Tensor:
    """Standard normal numbers, float64, by Box-Muller from two hashes of (stream, index); index is int64."""
    key = int.from_bytes(struct.pack("<q", stream & (1 << 63) - 1), "little") * 0xBF58476D1CE4E5B9 % (1 << 63)
    u = [_uniform(finalize((index * 2 + i ^ key) * GAMMA)) for i in (0, 1)]
    return (-2 * (1 - u[0]).log()).sqrt() * (2 * math.pi * u[1]).cos()


def _uniform(x: torch.Tensor) -> torch.Tensor:
    return shift(x, 11).double() * 2.0**-53
