"""Attention modules: cores without projections, and multihead modules with the parameter names of torch."""

from .adaptive import AdaptiveAttention
from .core import BlockSparseAttention, DilatedAttention, RingAttention
from .multihead import (
    MultiheadAdaptiveAttention,
    MultiheadAttention,
    MultiheadBlockSparseAttention,
    MultiheadDilatedAttention,
    MultiheadRingAttention,
    rotate,
)

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
