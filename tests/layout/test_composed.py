"""Layouts of other positions than 0 .. tokens-1: shifted, and joined of parts."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from rectangles import name_layout

import ringattn as ra
from ringattn import InvalidInput
from ringattn.layout.composed import join_layouts, shift_layout
from ringattn.layout.regular import layout_name


@pytest.mark.parametrize("seed", range(40))
def test_every_position_has_one_owner(seed: int) -> None:
    rng = random.Random(seed)
    tokens, ranks, first = rng.randint(0, 60), rng.randint(1, 6), rng.choice([0, 7])
    layout = ra.make_layout(name_layout(rng, tokens, ranks, first), tokens=tokens, ranks=ranks)
    positions = [layout.positions(rank) for rank in range(ranks)]
    assert sorted(np.concatenate(positions)) == [p for r in layout.domain for p in r] == [*range(first, first + tokens)]
    assert all(layout.owner(int(p)) == rank for rank, mine in enumerate(positions) for p in mine)
    for one, other in ((0, ranks), (0, 1), (ranks // 2, ranks)):
        found, exact = layout.span(range(one, other))
        covered, owned = {p for r in found for p in r}, {int(p) for mine in positions[one:other] for p in mine}
        assert covered >= owned and (covered == owned or not exact)
    x = torch.arange(tokens * 2.0).view(tokens, 2)
    shards = [layout.shard_tensor(x, rank) for rank in range(ranks)]
    assert all(
        torch.equal(shard[:, 0], 2.0 * torch.from_numpy(mine - first))
        for shard, mine in zip(shards, positions, strict=True)
    )
    assert torch.equal(layout.unshard_tensor(shards), x)


@pytest.mark.parametrize("seed", range(20))
def test_a_name_reads_back(seed: int) -> None:
    rng = random.Random(seed)
    tokens, ranks = rng.randint(1, 60), rng.randint(1, 6)
    layout = ra.make_layout(name_layout(rng, tokens, ranks, rng.choice([0, 7])), tokens=tokens, ranks=ranks)
    again = ra.make_layout(layout.name, tokens=tokens, ranks=ranks)
    assert (again, hash(again), again.name) == (layout, hash(layout), layout.name)
    assert layout_name(layout.name.replace(",", " , ").replace("(", " ( ")) == layout.name


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
        ("joined(zigzag[4], zigzag[4])", 8, "two parts have the same positions"),
        ("joined(zigzag, contiguous[2])", 8, "'zigzag' lacks its tokens"),
        ("joined(zigzag[6], shifted(zigzag, 6)[3])", 8, "has 9 tokens, and 8 are asked for"),
        ("shifted(zigzag)", 8, "expected shifted"),
        ("shifted(zigzag, -1)", 8, "expected shifted"),
        ("kept(zigzag[8], 0:4)", 4, "unknown layout"),
        ("shifted(balanced, 4)", 8, "weighs chunks by the pairs of a pattern"),
        ("shifted(zagzig, 4)", 8, "unknown layout 'zagzig'"),
    ],
)
def test_errors(name: str, tokens: int, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        ra.make_layout(name, tokens=tokens, ranks=2)


def test_a_partition_is_no_part() -> None:
    balanced = ra.make_layout("balanced", tokens=9, ranks=2, pattern="Causal()")
    with pytest.raises(InvalidInput, match="cannot be part of a layout"):
        shift_layout(balanced, 4)
    with pytest.raises(InvalidInput, match="different ranks"):
        join_layouts([ra.make_layout("zigzag", tokens=4, ranks=n) for n in (2, 3)])
