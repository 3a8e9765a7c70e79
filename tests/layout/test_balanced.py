"""The balanced layout: bounds on imbalance and bytes, memory, what it is a function of, and its errors."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import patterns

import ringattn as ra
from ringattn import BlockSparse, Causal, Documents, InvalidInput, Pattern, Window, make_layout, make_plan
from ringattn.layout import MAX_RANGES
from ringattn.layout.regular import Balanced, deal
from ringattn.pattern.tile import ceil_div

TOKENS, RANKS = 4096, 8


def lognormal(tokens: int) -> Documents:
    lengths, source = [], np.random.default_rng(0)
    while sum(lengths) < tokens:
        length = max(1, int(source.lognormal(np.log(tokens / 60), 1.2)))
        lengths.append(min(length, tokens - sum(lengths)))
    return Documents(tuple(lengths))


def hot_rows(tokens: int) -> BlockSparse:
    """2 % of the blocks, and one row of blocks in sixteen sees every key."""
    source, blocks = np.random.default_rng(0), tokens // 16
    table = source.random((1, blocks, blocks)) < 0.02
    table[0, source.choice(blocks, blocks // 16, replace=False)] = True
    return BlockSparse(16, table)


#: Pattern, the imbalance that the contiguous layout exceeds, and the one that the balanced layout stays within.
UNEQUAL: dict[str, tuple[Pattern, float, float]] = {
    "documents": (lognormal(TOKENS), 1.5, 1.06),
    "causal documents": (Causal() & lognormal(TOKENS), 1.5, 1.06),
    "one long document": (Documents((2048, *[64] * 32)), 1.5, 1.06),
    "halving documents": (Documents((2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 2)), 1.4, 1.06),
    "causal": (Causal(), 1.5, 1.06),
    "hot rows": (hot_rows(TOKENS), 1.5, 1.1),
    "longnet": (ra.Dilated((256, 1024, 4096), (1, 2, 4), causal=True), 1.4, 1.06),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_imbalance(name: str) -> None:
    pattern, contiguous, balanced = UNEQUAL[name]
    assert make_plan(pattern, tokens=TOKENS, ranks=RANKS).imbalance > contiguous
    plan = make_plan(pattern, tokens=TOKENS, ranks=RANKS, layout="balanced")
    assert plan.imbalance <= balanced
    packed = name not in ("hot rows", "longnet")
    assert plan.layout.name == ("balanced(1)" if packed else "balanced(64)"), (
        "documents by token, else 8 chunks per rank"
    )
    assert max(map(plan.layout.rows, range(RANKS))) <= TOKENS / RANKS * (1.05 if packed else 1), "memory, too"


def test_neighbours_stay_together_where_balance_allows() -> None:
    local = make_plan(Causal() & Window(255), tokens=TOKENS, ranks=RANKS, layout="balanced")
    assert all(len(local.layout.shard(rank)) == 1 for rank in range(RANKS))
    assert local.bytes_sent() == make_plan(Causal() & Window(255), tokens=TOKENS, ranks=RANKS).bytes_sent()
    sent = [
        make_plan(lognormal(TOKENS), tokens=TOKENS, ranks=RANKS, layout=layout).bytes_sent()
        for layout in ("balanced", "striped(64)")
    ]
    assert sent[0] < 0.8 * sent[1]


def test_default_chunk() -> None:
    for tokens, ranks, chunk in ((0, 3, 1), (5, 9, 1), (1000, 4, 31), (1 << 20, 8, 16384), (1_000_000, 8, 15616)):
        name = f"balanced({chunk})"
        for asked in ("balanced", "balanced(auto)", name, f" balanced( chunk = {chunk} ) "):
            assert make_layout(asked, tokens=tokens, ranks=ranks, pattern=ra.Sinks(2)).name == name


@given(st.data())
def test_a_pure_function_that_respects_the_cap(data: st.DataObject) -> None:
    tokens, ranks, chunk = data.draw(st.tuples(st.integers(0, 60), st.integers(1, 9), st.integers(1, 9)))
    pattern, heads = data.draw(patterns(tokens)), data.draw(st.integers(1, 3))
    options: dict[str, Any] = {"tokens": tokens, "ranks": ranks, "pattern": pattern, "heads": heads}
    layout = make_layout(f"balanced({chunk})", **options)
    make_layout.__globals__["_balanced"].clear()
    again = make_layout(layout.name, **options)
    assert again == layout and hash(again) == hash(layout) and again.digest == layout.digest
    cap = ceil_div(ceil_div(tokens, chunk), ranks) * chunk
    assert max(map(layout.rows, range(ranks))) <= cap
    for rank in range(ranks):
        shard = layout.shard(rank)
        assert all(a.stop < b.start for a, b in pairwise(shard)), "ascending, adjacent ones merged"


@given(st.lists(st.tuples(*[st.integers(0, 1000)] * 3), max_size=60), st.integers(1, 3), st.integers(1, 9))
def test_deal_gives_every_chunk_once(costs: list[tuple[int, ...]], count: int, ranks: int) -> None:
    masks = [[chunk[i] for chunk in costs] for i in range(count)]
    shares = deal(masks, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    assert len(shares) == ranks and max(map(len, shares)) <= -(-len(costs) // ranks)

    def busiest(shares: list[list[int]]) -> int:
        return sum(max(sum(mask[i] for i in share) for share in shares) for mask in masks)

    even = [list(range(len(costs) * r // ranks, len(costs) * (r + 1) // ranks)) for r in range(ranks)]
    # A rank's mean cost is the least that its busiest rank can have, of which even runs may cost 1.05.
    least = 1.05 * sum(map(sum, masks)) / ranks
    for other in (even, *(deal([mask], ranks) for mask in masks)):
        assert busiest(shares) <= max(busiest(other), least), "never worse than even runs, or one mask's layout"


def test_heads_count_where_the_pattern_depends_on_them() -> None:
    options: dict[str, Any] = {"tokens": 128, "ranks": 2}
    table = np.zeros((2, 16, 16), dtype=bool)
    table[0, :8] = table[1, 8:] = True
    both = make_layout("balanced(8)", pattern=BlockSparse(8, table), heads=2, **options)
    one = make_layout("balanced(8)", pattern=BlockSparse(8, table[:1]), **options)
    assert both.shard(0) == (range(64),), "the heads together load every row alike"
    assert one.shard(0) != both.shard(0) and one != both and one.digest != both.digest
    for heads in (1, 2, 7):
        pattern = lognormal(128)
        assert make_layout("balanced(8)", pattern=pattern, heads=heads, **options) == make_layout(
            "balanced(8)", pattern=pattern, **options
        )


def test_a_long_span_is_a_superset_of_few_ranges() -> None:
    runs = tuple((i, i % 4) for i in range(200))
    layout = Balanced(1000, 4, 5, runs)
    parts, exact = layout.span(range(1, 3))
    assert not exact and len(parts) == MAX_RANGES
    assert layout.span(range(4)) == ((range(1000),), True)
    assert len(layout.span(range(1, 2))[0]) == 50, "one rank is exact"


def test_json_and_hash_hold_the_partition() -> None:
    made = make_layout("balanced(16)", tokens=TOKENS, ranks=RANKS, pattern=lognormal(TOKENS))
    shared = make_plan(Causal() & Window(99), tokens=TOKENS, ranks=RANKS, layout=made)
    named = make_plan(Causal() & Window(99), tokens=TOKENS, ranks=RANKS, layout="balanced(16)")
    assert shared.layout.name == named.layout.name and shared.hash != named.hash
    for plan in (shared, named):
        assert ra.Plan.from_json(plan.to_json()) == plan
    text = json.loads(shared.to_json())
    for wrong in ([[1, 0]], [[0, 0], [999, 1]], [[0, 9]], [[0]], 3, [["a", "b"]], [[0, 0]]):
        with pytest.raises(InvalidInput):
            ra.Plan.from_json(json.dumps({**text, "partition": wrong}))
    with pytest.raises(InvalidInput, match="is not stored with the ranks of its chunks"):
        ra.Plan.from_json(json.dumps({**text, "layout": "zigzag"}))


def test_equal_partitions_are_equal() -> None:
    a, b = Balanced(40, 2, 10, ((0, 0), (2, 1))), Balanced(40, 2, 10, ((0, 0), (1, 0), (2, 1), (3, 1)))
    assert a == b and hash(a) == hash(b) and a.digest == b.digest
    assert a != dataclasses.replace(a, runs=((0, 1), (2, 0)))
