"""Dilated attention against masks written out by hand, for both conventions."""

from __future__ import annotations

import numpy as np
import pytest
from strategies import pairs

import ringattn as ra
from ringattn import Causal, Dilated, Full, InvalidInput, Window, make_plan, parse_pattern


def by_hand(tokens: int, heads: int, segments: tuple[int, ...], rates: tuple[int, ...], causal: bool, mix: str):  # type: ignore[no-untyped-def]
    """Multiplicities [H, N, N], position by position."""
    mask = np.zeros((heads, tokens, tokens), dtype=int)
    groups = [len(part) for part in np.array_split(np.arange(heads), len(segments))]
    owner = np.repeat(np.arange(len(segments)), groups)
    for head in range(heads):
        for i, (w, r) in enumerate(zip(segments, rates, strict=True)):
            if mix == "group" and owner[head] != i:
                continue
            offset = (i if mix == "group" else head) % r
            for start in range(0, tokens, w):
                members = range(start, min(start + w, tokens))[offset::r]
                for q in members:
                    for k in members:
                        mask[head, q, k] += not causal or k <= q
    return mask


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mix", ["lse", "group"])
@pytest.mark.parametrize(
    ("tokens", "heads", "segments", "rates"),
    [
        (16, 4, (4,), (1,)),
        (16, 8, (2, 4, 8), (1, 2, 4)),
        (64, 12, (8, 16, 32, 64), (1, 2, 4, 6)),
        (61, 5, (10, 100), (3, 7)),
        (1, 3, (8, 2), (1, 2)),
        (40, 2, (16, 3, 5), (2, 5, 1)),
    ],
)
def test_equals_the_definition(
    tokens: int, heads: int, segments: tuple[int, ...], rates: tuple[int, ...], mix: str, causal: bool
) -> None:
    pattern = Dilated(segments, rates, causal=causal, mix=mix)
    mask = by_hand(tokens, heads, segments, rates, causal, mix)
    assert (pattern.mask(tokens, heads) == mask).all()
    assert pattern.output_scale == (1 / len(segments) if mix == "group" else 1.0)
    bound, whole, found = pattern.bind(heads, tokens), range(tokens), np.zeros_like(mask)
    for tile in bound.tiles(whole, whole, range(heads)):
        for pair in pairs(tile):
            found[pair] += 1
    assert (found == mask).all() and bound.count(whole, whole, range(heads)) == mask.sum()


def test_longnet_defaults_need_little() -> None:
    plan = make_plan(Dilated(), tokens=1 << 20, ranks=8, heads=8)
    assert plan.pairs() == sum(
        (1 << 20) // w * sum(len(range(h % r, w, r)) ** 2 for h in range(8)) for w, r in
        zip(plan.pattern.segments, plan.pattern.rates, strict=True)
    )  # fmt: skip
    assert plan.bytes_sent() == 0  # 131,072 tokens per rank hold whole segments


def test_a_plan_binds_the_heads() -> None:
    pattern = Dilated((8, 16), (1, 2), mix="group")
    plan = make_plan(pattern, tokens=32, ranks=2, heads=3)
    assert plan.pattern == Dilated((8, 16), (1, 2), mix="group", heads=3)
    assert ra.Plan.from_json(plan.to_json()) == plan
    union = make_plan(pattern & Causal(), tokens=32, ranks=2, heads=3)
    assert union.pattern.branches == 1 and union.pattern.output_scale == 0.5
    with pytest.raises(InvalidInput, match="must know how many heads there are"):
        pattern.count(range(4), range(4))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Dilated((4, 8), (1,)), "2 segments but 1 rates"),
        (lambda: Dilated((), ()), "segments must be a list of integers"),
        (lambda: Dilated((4,), (0,)), "a value of rates=0 must be an integer >= 1"),
        (lambda: Dilated((4,), (1,), mix="lze"), "did you mean 'lse'"),
        (lambda: Dilated((4,), (1,), offsets="head"), "offsets='head'"),
        (lambda: Dilated((4,), (1,), mix="group", offsets="per_head"), "one offset per group"),
        (lambda: Dilated((4, 8), (1, 2)) | Window(3), "takes patterns of one branch"),
        (lambda: Dilated((4, 8), (1, 2), mix="group") | Full(), "scale their outputs differently"),
    ],
)
def test_errors(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidInput) as caught:
        make()
    assert words in str(caught.value)


def test_repr_reads_back() -> None:
    pattern = Dilated((4, 8), (1, 2), causal=True, mix="group", heads=4) & Causal()
    assert parse_pattern(repr(pattern)) == pattern
    assert parse_pattern("Dilated()") == Dilated()
