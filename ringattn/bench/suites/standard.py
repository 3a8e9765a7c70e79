"""Suite "standard": every system of the earlier reports at 1,024 and 2,048 tokens, on one device."""

from __future__ import annotations

from functools import partial

from ..case import BenchSuite, Claim
from ..systems import SYSTEMS, fastest, list_system_cases

LENGTHS = (1024, 2048)

SUITE = BenchSuite(
    partial(list_system_cases, SYSTEMS, LENGTHS, settings={"segment_lengths": (256, 512, 1024)}),
    title="Standard lengths: 1,024 and 2,048 tokens",
    about=(
        "All systems of the earlier reports under their names there: batch 1, 8 heads of 64, fp32, two threads, "
        "forward without gradients. Names that were different implementations there make the same module here, so "
        "that equal rows are expected, and their differences show the noise.",
    ),
    claims=(
        Claim(
            "Comprehensive report of June 27, 2025, GTX 1080, fp16, at 2K: DilatedAttention 1.09 ms, "
            "ImprovedDilatedAttention 0.83 ms, RingDilatedAttention 0.83 ms, BlockSparseRingDilatedAttention 18.65 "
            "ms.",
            "A batch of unstated size. ImprovedDilatedAttention and RingDilatedAttention gave (tokens, heads) to "
            "SDPA in the place of (heads, tokens): each token attended to the heads of its own group, and to no "
            "other token. RingDilatedAttention in one process was the Improved class. The block-sparse output was a "
            "sum of one softmax per block, not a softmax. Nothing was compared with dense attention.",
            lambda records: f"On a CPU, right by the error column: {fastest(records, LENGTHS[-1])}.",
        ),
    ),
)
