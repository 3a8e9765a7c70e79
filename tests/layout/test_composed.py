"""Layouts of other positions than 0 .. tokens-1: shifted, and joined of parts."""

from __future__ import annotations

import pytest

import ringattn as ra
from ringattn import InvalidInput
from ringattn.layout.composed import join_layouts, shift_layout


def test_rows_of_a_cache() -> None:
    """A cache and a chunk after it."""
    cache = ra.make_layout("striped(4)", tokens=16, ranks=2)
    both = join_layouts([cache, shift_layout(ra.make_layout("contiguous", tokens=6, ranks=2), 64)])
    assert both.name == "joined(striped(4)[16], shifted(contiguous, 64)[6])"
    assert both.domain == (range(16), range(64, 70))
    assert both.shard(1) == (range(4, 8), range(12, 16), range(67, 70))
    assert both.places(1) == (range(4, 8), range(12, 16), range(19, 22))
    assert [both.rows(rank) for rank in range(2)] == [11, 11]
    assert join_layouts([both]).grouped(2).rows(0) == 22


@pytest.mark.parametrize(
    ("name", "tokens", "words"),
    [
        ("joined(zigzag[4], zigzag[4])", 8, "two parts share positions"),
        ("joined(zigzag, contiguous[2])", 8, "'zigzag' lacks its token count"),
        ("joined(zigzag[6], shifted(zigzag, 6)[3])", 8, "has 9 tokens, but the call has 8"),
        ("shifted(zigzag)", 8, "expected shifted"),
        ("shifted(zigzag, -1)", 8, "expected shifted"),
        ("kept(zigzag[8], 0:4)", 4, "unknown layout"),
        ("shifted(balanced, 4)", 8, "needs either pattern or patterns to weigh chunks"),
        ("shifted(zagzig, 4)", 8, "unknown layout 'zagzig'"),
    ],
)
def test_errors(name: str, tokens: int, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        ra.make_layout(name, tokens=tokens, ranks=2)


def test_a_partition_is_no_part() -> None:
    balanced = ra.make_layout("balanced", tokens=9, ranks=2, pattern="Causal()")
    with pytest.raises(InvalidInput, match="cannot be a part of joined"):
        shift_layout(balanced, 4)
    with pytest.raises(InvalidInput, match="different numbers of ranks"):
        join_layouts([ra.make_layout("zigzag", tokens=4, ranks=n) for n in (2, 3)])
