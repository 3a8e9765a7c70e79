"""Patterns: tiles against the independent mask, counts, combination, repr and errors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import and_, or_

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import documents, pairs, patterns, ranges

import ringattn as ra
from ringattn import Causal, Dilated, Documents, Full, InvalidInput, Pattern, Sinks, Strided, Window, mix, parse_pattern
from ringattn.pattern import base, simple
from ringattn.pattern.base import Side
from ringattn.pattern.tile import Tile, clip, make_tile, subtract_tile

sized = st.integers(0, 25).flatmap(lambda n: st.tuples(st.just(n), patterns(n)))


def test_masks_written_by_hand() -> None:
    assert (Full().mask(3)[0] == 1).all()
    assert (Causal().mask(4)[0] == np.tril(np.ones((4, 4)))).all()
    assert Window(1).mask(3)[0].tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert Window(0, 1).mask(3)[0].tolist() == [[1, 1, 0], [0, 1, 1], [0, 0, 1]]
    assert Window(4095).mask(5000)[0].sum(1).max() == 4096
    assert Documents([1, 2]).mask(3)[0].tolist() == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    assert Sinks(1).mask(2)[0].tolist() == [[1, 0], [1, 0]]
    assert Strided(2).mask(3)[0].tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]
    assert (Causal() & (Sinks(1) | Window(0))).mask(3)[0].tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    assert mix(Causal(), Full()).mask(2)[0].tolist() == [[2, 1], [2, 2]]


@given(sized)
def test_tiles_are_disjoint_and_equal_the_mask(case: tuple[int, Pattern]) -> None:
    tokens, pattern = case
    found = np.zeros((pattern.branches, 2, tokens, tokens), dtype=int)
    for tile in pattern.tiles(range(tokens), range(tokens), range(2)):
        for pair in pairs(tile):
            found[tile.branch][pair] += 1
    assert found.max(initial=0) <= 1, "tiles of one branch are disjoint"
    assert (found.sum(0) == pattern.mask(tokens, 2)).all()


@given(sized, ranges(), ranges())
def test_count_of_a_rectangle(case: tuple[int, Pattern], q: range, k: range) -> None:
    tokens, pattern = case
    q, k = clip(q, 0, tokens - 1), clip(k, 0, tokens - 1)
    assert pattern.count(q, k) == pattern.mask(tokens)[0][np.ix_(list(q), list(k))].sum()


@given(sized)
def test_repr_reads_back_and_a_row_of_the_mask_is_known_alone(case: tuple[int, Pattern]) -> None:
    tokens, pattern = case
    assert parse_pattern(repr(pattern)) == pattern
    for position in range(0, tokens, 5):
        assert (pattern.row_mask(position, tokens) == pattern.mask(tokens)[0][position]).all()


def test_tiles_are_lazy() -> None:
    documents = Documents([1 << 10] * (1 << 16))
    tiles = documents.tiles(range(1 << 26), range(1 << 26))
    assert next(tiles).q == range(1 << 10)
    far = list(documents.tiles(range(0, 1 << 20), range(1 << 20, 1 << 26)))
    assert far == []


def test_picture() -> None:
    assert Causal().picture(4, ascii=True) == "#...\n##..\n###.\n####"
    assert Window(0).picture(64, cells=4, ascii=True) == "-...\n.-..\n..-.\n...-"
    assert Full().picture(0) == ""


def test_written_patterns() -> None:
    assert parse_pattern("Causal() & Window(4096)") == Causal() & Window(4096)
    assert parse_pattern("Causal") == Causal()
    assert parse_pattern("mix(Causal(), Window(left=3, right=1) | Sinks(2))") == mix(Causal(), Window(3, 1) | Sinks(2))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Casual()", ["Casual", "did you mean 'Causal'"]),
        ("Window(-1)", ["left=-1", ">= 0"]),
        ("Window()", ["Window()", "left"]),
        ("Causal() &", ["does not parse"]),
        ("__import__('os').system('true')", ["is not a pattern"]),
        ("Window(open('x'))", ["unknown name 'open'"]),
        ("Window(left=len)", ["not a plain value"]),
        ("Causal() + Full()", ["is not a pattern"]),
        ("Strided(0)", ["step=0", ">= 1"]),
        ("Sinks(-2)", ["n=-2"]),
        ("Documents([3, -1])", ["a length=-1 must be an integer >= 0"]),
        ("Documents([3]) | mix(Full(), Causal())", ["| takes patterns of one branch", "mix"]),
    ],
)
def test_wrong_patterns_say_what_and_what_to_try(text: str, words: list[str]) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_pattern(text)
    assert all(word in str(caught.value) for word in words)


def test_documents_must_fill_the_sequence() -> None:
    with pytest.raises(InvalidInput, match=r"sum to 5, the sequence has 7 tokens.*2 tokens"):
        ra.make_plan(Documents([2, 3]), tokens=7, ranks=2)


def test_only_patterns_combine() -> None:
    with pytest.raises(InvalidInput, match="& combines two patterns, got int"):
        Causal() & 3  # type: ignore[operator]
    with pytest.raises(InvalidInput, match="at least one"):
        mix()


@given(sized, ranges(), ranges(), st.integers(1, 3))
def test_rows_that_see_and_are_seen(case: tuple[int, Pattern], q: range, k: range, heads: int) -> None:
    tokens, pattern = case
    q, k = clip(q, 0, tokens - 1), clip(k, 0, tokens - 1)
    truth = pattern.mask(tokens, heads)
    pattern = pattern.bind(heads, tokens)
    sides: tuple[tuple[Side, range, int], ...] = (("queries", q, 1), ("keys", k, 0))
    for side, rows, axis in sides:
        found: list[set[int]] = [set() for _ in range(heads)]
        for seeing, part in pattern.paired(side, q, k, range(heads)):
            for head in seeing:
                found[head].update(part)
        for head in range(heads):
            touched = (truth[head][np.ix_(list(q), list(k))] != 0).any(axis)
            assert found[head] == {row for row, touches in zip(rows, touched, strict=True) if touches}


@given(st.integers(1, 40), st.data())
def test_runs_of_keys_and_queries_are_those_of_the_mask(tokens: int, data: st.DataObject) -> None:
    """The rows that a run of rows sees, or is seen by, known without tiles; arrays hold the same answers."""
    one = st.just(Causal()) | st.builds(Window, st.integers(0, 9), st.integers(0, 4)) | documents(tokens)
    a, b, c = (data.draw(one) for _ in range(3))
    last = data.draw(st.integers(0, tokens - 1))
    first, every = data.draw(st.integers(0, last)), np.arange(tokens)
    for pattern in (a, a & b, a | b, (a & b) | c, mix(a | b, c)):
        mask = pattern.mask(tokens)[0] > 0
        sides: tuple[tuple[Side, np.ndarray], ...] = (("keys", mask), ("queries", mask.T))
        for side, seen in sides:
            low, high = pattern.run(side, first, last) or (0, 0)
            wanted = np.flatnonzero(seen[first : last + 1].any(0)).tolist()
            assert list(range(max(low, 0), min(high, tokens - 1) + 1)) == wanted
            lows, highs = (np.broadcast_to(x, every.shape) for x in pattern.run(side, every, every) or ())
            assert (lows[first], highs[first]) == pattern.run(side, first, first)


def band_and_blocks(tokens: int, left: int, right: int, block: int) -> np.ndarray:
    """Which pairs lie at most `left` before or `right` after, in one block: the oracle of the next test."""
    q, k = np.mgrid[:tokens, :tokens]
    return (q - k <= left) & (k - q <= right) & (q // block == k // block)


BEYOND = [2**61, 2**63 - 21, 2**63 - 1, 2**63, 10**400, np.uint64(2**64 - 1), np.int64(2**63 - 1)]


@settings(max_examples=12)
@given(st.sampled_from(BEYOND), st.sampled_from(["contiguous", "zigzag", "striped", "striped(4)", "balanced(3)"]))
def test_numbers_beyond_any_sequence_are_no_bound(beyond: int, layout: str) -> None:
    cases = (
        (Window(7, beyond), (7, 20, 20)),
        (Window(beyond, 2), (20, 2, 20)),
        (Causal() & Sinks(beyond), (20, 0, 20)),
        (Strided(beyond), (0, 0, 20)),
        (Dilated([beyond], [1], causal=True), (20, 0, 20)),
        (Dilated([20, 1], [beyond, 1], mix="union"), (0, 0, 20)),
        (ra.BlockSparse(beyond, [[1]]), (20, 20, 20)),
        (ra.local_window(beyond, 1), (20, 20, 20)),
        (ra.local_window(4, beyond), (20, 20, 20)),
        (ra.global_local(4, globals=beyond, blocks=0), (20, 20, 20)),
        (ra.strided_blocks(4, beyond), (20, 20, 4)),
        (ra.dilated_blocks(4, [beyond]), (20, 20, 4)),
        (ra.hierarchical(4, [(1, 0), (beyond, 0)]), (20, 20, 4)),
        (ra.hierarchical(4, [(1, beyond)]), (20, 20, 20)),
    )
    for pattern, bounds in cases:
        expected = band_and_blocks(20, *bounds)
        assert (pattern.mask(20)[0] == expected).all()
        plan = ra.make_plan(pattern, tokens=20, ranks=3, layout=layout, schedule="direct")
        for rank in range(3):
            positions, needed = plan.layout.positions(rank), np.zeros(20, dtype=bool)
            for part in (hop for step in plan.for_rank(rank).forward for hop in step.visits):
                rows = range(plan.layout.rows(part.owner))
                local = part.row_set.rows_of(0) if hasattr(part.row_set, "rows_of") else (rows,)
                needed[plan.layout.positions(part.owner)[[i for r in local for i in r]]] = True
            others = np.setdiff1d(np.arange(20), positions)
            assert (needed[others] == expected[positions].any(0)[others]).all(), "the rank gets the keys that it sees"
            assert plan.pairs(rank) == expected[positions].sum()


def test_numbers_that_no_sequence_has_are_refused() -> None:
    for make in (
        lambda: Documents([20, 10**400]),
        lambda: Documents(cu_seqlens=np.array([0, 2**63 - 1])),
        lambda: Documents([20], q_lengths=[2**63]),
        lambda: Dilated([4], [2], mix="group", heads=0),
        lambda: ra.BlockSparse(4, f"{2**62}x{2**62}x{2**62}:a"),
        lambda: ra.attention(*torch.ones(3, 1, 1, 4, 8), Causal(), first=2**62),
    ):
        with pytest.raises(InvalidInput):
            make()


@pytest.mark.parametrize("length", [8, 16])
def test_a_chain_costs_no_more_than_its_pairs_of_operands(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are subtracted a polynomial number of times, and hold the pairs of the mask."""
    made = 0

    def count(*tiles: Tile) -> Iterator[Tile]:
        nonlocal made
        made += 1
        return subtract_tile(*tiles)

    monkeypatch.setattr(base, "subtract_tile", count)
    windows = [Window(3 * i + 1, i) & Sinks(60 - i) for i in range(length)]
    nested: Pattern = Window(2)
    for i in range(length):
        nested = (nested | Sinks(i)) & Window(4 * i + 20) | Strided(31)
    for pattern, most in (
        (reduce(or_, windows), 8 * length**2),
        (reduce(lambda a, b: b | a, windows), 8 * length**2),
        (reduce(or_, [Causal() & Strided(7)] * length), 7 * length**2),
        (reduce(and_, [Window(4 * i + 2) | Sinks(i) for i in range(length)]), 8 * length**2),
        (nested, 50 * length**2),
    ):
        made = 0
        pairs = sum(tile.pairs for tile in pattern.tiles(range(64), range(64)))
        assert pairs == pattern.mask(64).sum()
        assert made <= most


def test_a_wide_stride_has_the_tiles_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(simple, "make_tile", lambda *rows: asked.append(rows) or make_tile(*rows))
    assert len([*Strided(100_000).tiles(range(0, 40, 3), range(40))]) == 14
    assert len(asked) == 14


def test_numpy_integers_are_integers() -> None:
    assert repr(Window(np.int64(64), right=np.int32(2))) == "Window(left=64, right=2)"
    assert repr(Sinks(np.int64(4)) & Strided(np.uint8(3))) == repr(Sinks(4) & Strided(3))
    assert Dilated(np.array([32, 64]), np.array([1, 2])) == Dilated((32, 64), (1, 2))
