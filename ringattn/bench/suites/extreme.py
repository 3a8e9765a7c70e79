"""Suite "extreme": 4K to 1M tokens and on until memory ends, with the class of every failure."""

from __future__ import annotations

from ..case import BenchCase, BenchSuite, Claim
from ..systems import list_long_cases, longest

LENGTHS = (4096, 16384, 65536, 1048576, 4194304)
#: The longest sequence of systems that do the same work as `LONGEST`: a row of 1M tokens takes two minutes.
MOST_OF_OTHERS = 65536
LONGEST = "RingDilatedAttentionProduction_r16"
OTHERS = (
    "DilatedAttention",
    "ImprovedDilatedAttention",
    *(f"RingDilatedAttentionV2_r{ranks}" for ranks in (1, 4, 8, 16)),
    *(f"RingDilatedAttentionProduction_r{ranks}" for ranks in (1, 8)),
)
#: Labels of the report, blocks on either side of a query's block (there, the sparsity was not read), and the lengths.
#: Suite "memory" has 1M tokens with four blocks on either side.
SPARSE = {
    "BlockSparse_LocalWindow_0.9": (4, LENGTHS[:3]),
    "BlockSparse_LocalWindow_0.95": (2, LENGTHS),
}


def list_cases() -> list[BenchCase]:
    """The rows of the report, and the lengths that it did not reach."""
    cases = list_long_cases((LONGEST, *OTHERS), LENGTHS, most=dict.fromkeys(OTHERS, MOST_OF_OTHERS))
    for label, (blocks, lengths) in SPARSE.items():
        settings = {"pattern": f"local_window(64, blocks={blocks})"}
        cases += list_long_cases(["BlockSparseRingDilatedAttention"], lengths, settings=settings, label=label)
    return cases


SUITE = BenchSuite(
    list_cases,
    title="Extreme lengths: 4K tokens and on until memory ends",
    about=(
        "Batch 1, 8 heads of 64, bfloat16 storage (computed in fp32), two threads, forward without gradients. A "
        "length is tried where the length before it was computed, and a call would take at most a minute. The "
        "dilated systems and their rings do equal work: only RingDilatedAttentionProduction_r16 goes beyond 65,536 "
        "tokens. Of the two windows only the narrower does; `ringattn report memory` has the other at 1,048,576. A "
        "failure is the class of a typed error: OutOfMemory, Unsupported, InvalidInput, WrongResult, Timeout, "
        "Killed. With "
        "memory=8GiB the system refuses every allocation by which a process would have more; without it, memory is "
        "what the machine has. Several ranks r are virtual here: one process holds all of them, so that the memory "
        "is that of the whole ring.",
    ),
    claims=(
        Claim(
            "Extreme length reports of June 27, 2025: BlockSparseRing 786,432 tokens in 3.01 GB, 'winner'; "
            "RingDilatedAttentionProduction_r16 262,144 tokens in 14.34 ms and 288 MB; DilatedAttention 0 tokens, "
            "'DIVISIBILITY'; ImprovedDilatedAttention fails at 262,144 with 'OTHER'.",
            "3.01 GB are q, k, v and the output in fp16 and nothing else; a query saw at most 7 blocks of 128, and "
            "the result was a sum of softmaxes. Production returned zeros in every row that 'succeeded': its "
            "segments began at 65,536, longer than each chunk. The r8 and r16 rows are independent local attentions: "
            "nothing crossed a chunk. 'OTHER' hid a launch limit: segment / dilation above 65,535 stood in the place "
            "of the heads. Classes were found by searching the text of any exception; every time is one run that was "
            "not warm.",
            lambda records: (
                "; ".join(
                    longest(records, name)
                    for name in (
                        "BlockSparse_LocalWindow_0.95",
                        LONGEST,
                        "DilatedAttention",
                    )
                )
                + "."
            ),
        ),
    ),
)
