"""Attention as modules: the cores without parameters, and their multihead forms with torch's names."""

from .adaptive import AdaptiveAttention
from .core import BlockSparseAttention, DilatedAttention, RingAttention
from .multihead import (
    MultiheadAdaptiveAttention,
    MultiheadAttention,
    MultiheadBlockSparseAttention,
    MultiheadDilatedAttention,
    MultiheadRingAttention,
)
from .rotary import rotate

__all__ = [
    "AdaptiveAttention",
    "BlockSparseAttention",
    "DilatedAttention",
    "MultiheadAdaptiveAttention",
    "MultiheadAttention",
    "MultiheadBlockSparseAttention",
    "MultiheadDilatedAttention",
    "MultiheadRingAttention",
    "RingAttention",
    "rotate",
]
