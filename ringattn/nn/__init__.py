"""Attention as modules: the cores without parameters, and their multihead forms with torch's names."""

from .core import BlockSparseAttention, DilatedAttention, RingAttention
from .multihead import (
    MultiheadAttention,
    MultiheadBlockSparseAttention,
    MultiheadDilatedAttention,
    MultiheadRingAttention,
)
from .rotary import rotate

__all__ = [
    "BlockSparseAttention",
    "DilatedAttention",
    "MultiheadAttention",
    "MultiheadBlockSparseAttention",
    "MultiheadDilatedAttention",
    "MultiheadRingAttention",
    "RingAttention",
    "rotate",
]
