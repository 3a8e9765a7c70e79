"""Layouts partition the sequence, whatever the sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rectangles import name_layout
from strategies import layout_names, patterns

from ringattn import Documents, Full, InvalidInput, Layout, make_layout
from ringattn.layout.regular import layout_name


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tokens, ranks = draw(st.integers(0, 50)), draw(st.integers(1, 9))
    name = draw(layout_names(tokens, ranks))
    pattern = draw(patterns(tokens)) if name.startswith("balanced") else None
    return make_layout(name, tokens=tokens, ranks=ranks, pattern=pattern)


@st.composite
def composed(draw: st.DrawFn) -> Layout:
    """Layouts of layouts, also of positions that begin later than at 0."""
    rng, tokens, ranks = draw(st.randoms(use_true_random=False)), draw(st.integers(0, 60)), draw(st.integers(1, 6))
    return make_layout(name_layout(rng, tokens, ranks, draw(st.sampled_from([0, 7]))), tokens=tokens, ranks=ranks)


@given(layouts() | composed())
def test_every_position_has_one_owner(layout: Layout) -> None:
    shards = [layout.positions(rank) for rank in range(layout.ranks)]
    positions = [position for run in layout.domain for position in run]
    first = positions[0] if positions else 0
    assert sorted(np.concatenate(shards).tolist()) == positions == list(range(first, first + layout.tokens))
    for rank, shard in enumerate(shards):
        assert layout.rows(rank) == len(shard)
        assert all(layout.owner(int(p)) == rank for p in shard)


@given(layouts() | composed())
def test_a_name_reads_back(layout: Layout) -> None:
    """Of balanced layouts the name says the chunk alone."""
    name = layout.name
    assert layout_name(f" {name.replace('(', ' ( ').replace(', ', ',')} ") == name
    if not layout.digest:
        again = make_layout(name, tokens=layout.tokens, ranks=layout.ranks)
        assert (again, hash(again), again.name) == (layout, hash(layout), name)


@given(layouts() | composed(), st.data())
def test_span_covers_a_run_of_ranks(layout: Layout, data: st.DataObject) -> None:
    ranks = layout.ranks
    first = data.draw(st.integers(0, ranks - 1))
    stop = data.draw(st.integers(first + 1, ranks))
    parts, exact = layout.span(range(first, stop))
    members = [p for part in parts for p in part]
    owned = {int(p) for rank in range(first, stop) for p in layout.positions(rank)}
    assert len(members) == len(set(members)) and set(members) >= owned
    assert not exact or set(members) == owned


@given(layouts() | composed(), st.sampled_from([0, 1, 2, -1, -2]))
def test_shard_and_unshard(layout: Layout, dim: int) -> None:
    tokens, ranks = layout.tokens, layout.ranks
    shape = [2, 3, 4]
    shape[dim] = tokens
    first = next((run[0] for run in layout.domain if run), 0)
    whole = torch.arange(int(np.prod(shape))).view(shape)
    shards = [layout.shard_tensor(whole, rank, dim) for rank in range(ranks)]
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, whole.index_select(dim, torch.from_numpy(layout.positions(rank)) - first))
    assert torch.equal(layout.unshard_tensor(shards, dim), whole)


@given(layouts())
def test_labels_shift_across_shards(layout: Layout) -> None:
    tokens, ranks = layout.tokens, layout.ranks
    labels = torch.arange(tokens) + 100
    for rank in range(ranks):
        for position, label in zip(layout.positions(rank), layout.shift(labels, rank), strict=True):
            assert label == (position + 101 if position + 1 < tokens else -100)
    assert torch.equal(labels, torch.arange(tokens) + 100)


@given(layouts(), st.integers(1, 9), st.lists(st.integers(0, 40), max_size=4), st.sampled_from([-1, 0]))
def test_labels_any_distance_on_stay_within_documents(layout: Layout, k: int, cuts: list[int], dim: int) -> None:
    tokens = layout.tokens
    rows = [sorted(min(cut, tokens) for cut in some) for some in (cuts, cuts[:1])]
    documents = Documents(cu_seqlens=[[0, *row, tokens] for row in (rows if dim else rows[:1])])
    labels = torch.arange(2 * tokens).view(2, tokens)
    for rank in range(layout.ranks):
        given = labels if dim else labels.T
        mine = layout.shift(given, rank, dim=dim, distance=k, documents=documents, fill=-7)
        for row, found in enumerate(mine if dim else mine.T):
            ends = rows[row if dim else 0]
            for position, label in zip(layout.positions(rank), found, strict=True):
                crosses = position + k >= tokens or any(position < end <= position + k for end in ends)
                assert label == (-7 if crosses else labels[row, position + k])


def test_a_distance_is_at_least_one_and_documents_fit() -> None:
    layout, labels = make_layout("zigzag", tokens=8, ranks=2), torch.arange(8)
    for options, words in (
        ({"distance": 0}, "the distance of a label=0 must be an integer >= 1"),
        ({"documents": Documents([5])}, "the 1 lengths sum to 5, the sequence has 8"),
        ({"documents": Documents([[5, 3], [8]])}, "2 rows"),
    ):
        with pytest.raises(InvalidInput, match=words):
            layout.shift(labels, 0, **options)  # type: ignore[arg-type]


def test_zigzag_pairs_early_with_late() -> None:
    layout = make_layout("zigzag", tokens=16, ranks=4)
    assert layout.shard(0) == (range(0, 2), range(14, 16))
    assert layout.shard(3) == (range(6, 10),)


def test_rows_of_ranks_without_tokens() -> None:
    layout = make_layout("rows(0, 5, 0, 3)", tokens=8, ranks=4)
    assert [layout.shard(rank) for rank in range(4)] == [(), (range(5),), (), (range(5, 8),)]
    assert [layout.owner(p) for p in range(8)] == [1] * 5 + [3] * 3
    assert layout.grouped(2).name == "rows(5, 3)"


def test_striped_takes_the_shorter_description() -> None:
    assert make_layout("striped", tokens=1 << 30, ranks=4).shard(1) == (range(1, 1 << 30, 4),)
    assert make_layout("striped(64)", tokens=512, ranks=4).shard(1) == (range(64, 128), range(320, 384))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("zig-zag", {}, "did you mean 'zigzag'"),
        (3, {}, "layout=3: expected a Layout, or its name"),
        ("contiguous(3)", {}, "unknown layout"),
        ("striped(0)", {}, "striped: block=0 must be an integer >= 1"),
        ("zigzag", {"tokens": -1}, "tokens=-1"),
        ("zigzag", {"ranks": 0}, "ranks=0"),
        ("balanced(8)", {}, "needs either pattern or patterns to weigh chunks, got pattern=None and patterns=None"),
        ("balanced", {"pattern": "Causl()"}, "did you mean 'Causal'"),
        ("balanced(0)", {"pattern": Full()}, "balanced: chunk=0 must be an integer >= 1; try balanced(128)"),
        ("balanced", {"pattern": Full(), "tokens": -1}, "tokens=-1"),
        ("balanced", {"pattern": Full(), "ranks": 0}, "ranks=0"),
        ("balanced", {"pattern": Full(), "heads": 0}, "heads=0"),
        ("balanced", {"pattern": Documents((5,))}, "the 1 lengths sum to 5"),
        ("balanced(block=8)", {"pattern": Full()}, "unknown layout"),
        ("striped(auto)", {}, "unknown layout"),
        ("rows(5, 4)", {}, "has 9 tokens on 2 ranks, the call has 8 tokens on 2 ranks"),
        ("rows(8)", {}, "has 8 tokens on 1 ranks, the call has 8 tokens on 2 ranks"),
        ("rows", {}, "rows(11, 9)"),
        ("rows(5, -4)", {}, "unknown layout"),
        ("rows(8,)", {}, "unknown layout"),
        ("ballanced", {}, "did you mean 'balanced'"),
    ],
)
def test_errors(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        make_layout(name, **{"tokens": 8, "ranks": 2, **options})
    assert words in str(caught.value)


def test_a_layout_of_other_sizes_is_refused() -> None:
    layout = make_layout("zigzag", tokens=8, ranks=2)
    assert make_layout(layout, tokens=8, ranks=2) is layout
    with pytest.raises(InvalidInput, match="made for 8 tokens over 2 ranks"):
        make_layout(layout, tokens=9, ranks=2)
    with pytest.raises(InvalidInput, match="dim -2 has 7 rows"):
        layout.shard_tensor(torch.zeros(7, 1), 0)


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped(2)", "rows(9, 7)", "balanced(2)"])
@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_the_layout_does_not_have_is_refused(name: str, rank: int) -> None:
    layout = make_layout(name, tokens=16, ranks=2, pattern="Causal()")
    for call in (layout.rows, layout.positions, lambda r: layout.shard_tensor(torch.zeros(16, 1), r)):
        with pytest.raises(InvalidInput, match=f"rank={rank}: the layout .* has the ranks 0 .. 1"):
            call(rank)
