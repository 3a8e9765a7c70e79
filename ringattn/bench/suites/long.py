"""Suite "long": 8K to 64K tokens on one device."""

from __future__ import annotations

from functools import partial

from ..case import BenchSuite, Claim
from ..systems import fastest, list_system_cases

SYSTEM_NAMES = (
    "DilatedAttention",
    "ImprovedDilatedAttention",
    "RingDilatedAttention",
    "RingDilatedAttentionV2_r4",
    "BlockSparseRingDilatedAttention",
)
LENGTHS = (8192, 16384, 32768, 65536)

SUITE = BenchSuite(
    partial(list_system_cases, SYSTEM_NAMES, LENGTHS),
    title="Long sequences: 8K to 64K tokens",
    about=(
        "Batch 1 at every length, so that times of different lengths may be compared: 8 heads of 64, fp32, two "
        "threads, forward without gradients.",
    ),
    claims=(
        Claim(
            "Comprehensive report: ImprovedDilatedAttention 574 ms at 8K and 1,332 ms at 64K, RingDilatedAttention "
            "570 and 1,335 ms, BlockSparseRingDilatedAttention 364 and 1,257 ms; 'sub-linear scaling', 'crossover at "
            "8K'.",
            "The batch was 8, 8, 4, 2 from 8K to 64K, one column each: the scaling and the crossover are the "
            "batch's. The Improved and Ring rows are one class, which attended over heads.",
            lambda records: f"At batch 1 throughout: {fastest(records, LENGTHS[0])}; {fastest(records, LENGTHS[-1])}.",
        ),
    ),
)
