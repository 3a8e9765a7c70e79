"""Random numbers as functions of a counter: any rank can compute any number alone."""

from __future__ import annotations

import math
import struct

import torch


def counter_normal(stream: int, index: torch.Tensor) -> torch.Tensor:
    """Standard normal numbers, float64, by Box-Muller from two hashes of (stream, index); index is int64."""
    key = int.from_bytes(struct.pack("<q", stream & (1 << 63) - 1), "little") * 0xBF58476D1CE4E5B9 % (1 << 63)
    u = [_uniform(_mix(index * 2 + i ^ key)) for i in (0, 1)]
    return (-2 * (1 - u[0]).log()).sqrt() * (2 * math.pi * u[1]).cos()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), on int64 that wraps."""
    x = x * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _signed(x: int) -> int:
    return x - (1 << 64)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _uniform(x: torch.Tensor) -> torch.Tensor:
    return _shift(x, 11).double() * 2.0**-53
