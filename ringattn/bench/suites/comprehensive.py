"""Suite "comprehensive": every system by its name on one device, and on 2 and 4 Gloo ranks."""

from __future__ import annotations

from functools import partial

from ..case import BenchSuite, CaseRecord, Claim
from ..systems import SYSTEMS, find_cases, list_system_cases

LENGTHS = (4096,)
RANKS = (1, 2, 4)


def count_right(records: list[CaseRecord]) -> str:
    """How many rows agree with the oracle, and the largest error, in words."""
    done = find_cases(records, "")
    worst = max((max(record["errors"].values()) for record in done), default=float("nan"))
    real = sum(record["ranks"] > 1 for record in done)
    return (
        f"{len(done)} of {len(records)} rows agree with fp64 softmaxes, the largest error is {worst:.1e}; {real} of "
        "them ran on 2 or 4 processes that sent each other keys and values."
    )


SUITE = BenchSuite(
    partial(list_system_cases, SYSTEMS, LENGTHS, ranks=RANKS),
    title="Every system by its name, on one device and on ranks",
    about=(
        "Batch 1, 8 heads of 64, fp32, forward without gradients. One device has two threads; 2 and 4 ranks are "
        "processes of one thread each, joined by Gloo, on the same two cores: 4 ranks share them. Each rank passes "
        "its shard of a contiguous layout.",
    ),
    claims=(
        Claim(
            "Comprehensive report: RingDilatedAttention on 'simulated multi-device' rings of 1 to 262,144.",
            "No version in the history of that project computed a correct distributed ring: one fell back to a "
            "single device at the first rotation, one called a function that does not exist, one gathered all keys "
            "on every rank and masked wrongly, one received keys and values into one buffer.",
            count_right,
        ),
    ),
)
