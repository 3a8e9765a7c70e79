"""Random ranges, tiles, patterns and layouts, and the sets they stand for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

import ringattn as ra
from ringattn import BlockSparse, Causal, Dilated, Documents, Full, Pattern, Sinks, Strided, Window, mix
from ringattn.pattern import Tile

LAYOUTS = (
    "contiguous", "zigzag", "striped", "striped(3)", "striped(8)", "rows", "balanced(1)", "balanced(3)",
)  # fmt: skip


def ranges(most: int = 30) -> st.SearchStrategy[range]:
    return st.builds(
        lambda start, length, step: range(start, start + length, step),
        st.integers(0, 20),
        st.integers(0, most),
        st.sampled_from([1, 1, 2, 3, 4, 6]),
    )


bounds = st.none() | st.integers(-20, 20)
heads = st.builds(range, st.integers(0, 2), st.integers(0, 5), st.integers(1, 2))
raw_tiles = st.builds(Tile, heads, ranges(), ranges(), bounds, bounds)


def pairs(tile: Tile | None) -> set[tuple[int, int, int]]:
    """(head, query, key) triples of a tile, by enumeration."""
    if tile is None:
        return set()
    return {
        (h, x, y)
        for h in tile.heads
        for x in tile.q
        for y in tile.k
        if (tile.lo is None or x - y >= tile.lo) and (tile.hi is None or x - y <= tile.hi)
    }


@st.composite
def documents(draw: st.DrawFn, tokens: int) -> Documents:
    lengths, left = [], tokens
    while left:
        lengths.append(draw(st.integers(0, min(left, 12))))
        left -= lengths[-1]
        if len(lengths) > 8 and left:
            lengths.append(left)
            left = 0
    return Documents(tuple(lengths))


def dilated(branches: list[tuple[int, int]]) -> st.SearchStrategy[Pattern]:
    segments, rates = zip(*branches, strict=True)
    offsets = st.sampled_from(["per_head", "group"])
    return st.builds(
        lambda causal, where, mix: Dilated(segments, rates, causal=causal, offsets=where, mix=mix),
        st.booleans(),
        offsets,
        st.sampled_from(["lse", "union"]),
    )


@st.composite
def block_sparse(draw: st.DrawFn, tokens: int) -> Pattern:
    """Tables, and the families with a width or, bound to `tokens`, with a density."""
    block, width = draw(st.integers(1, 5)), draw(st.integers(0, 3))
    kind = draw(st.sampled_from(["table", "window", "dilated", "strided", "global", "hierarchical", "density"]))
    if kind == "table":
        blocks = -(-tokens // block)
        return BlockSparse(block, np.random.default_rng(draw(st.integers(0, 99))).random((1, blocks, blocks)) < 0.4)
    if kind == "window":
        return ra.local_window(block, width)
    if kind == "dilated":
        return ra.dilated_blocks(block, draw(st.lists(st.integers(0, 6), max_size=3)))
    if kind == "strided":
        return ra.strided_blocks(block, width + 1)
    if kind == "global":
        return ra.global_local(block, globals=draw(st.integers(0, 2)), blocks=width)
    if kind == "hierarchical":
        levels = st.lists(st.tuples(st.integers(1, 5), st.integers(-1, 3)), min_size=1, max_size=3)
        return ra.hierarchical(block, draw(levels))
    family = draw(st.sampled_from([ra.local_window, ra.dilated_blocks, ra.strided_blocks, ra.hierarchical]))
    return family(block, density=draw(st.floats(0.05, 1.0))).bind(1, tokens)


@st.composite
def patterns(draw: st.DrawFn, tokens: int, depth: int = 2) -> Pattern:
    if depth == 0 or draw(st.booleans()):
        return draw(
            st.just(Full())
            | st.just(Causal())
            | st.builds(Window, st.integers(0, 12), st.integers(0, 6))
            | st.builds(Sinks, st.integers(0, 5))
            | st.builds(Strided, st.integers(1, 5))
            | documents(tokens)
            | block_sparse(tokens)
            | st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5)), min_size=1, max_size=2).flatmap(dilated)
        )
    a, b = draw(patterns(tokens, depth - 1)), draw(patterns(tokens, depth - 1))
    kind = draw(st.sampled_from(["and", "or", "mix"]))
    if kind == "and":
        return a & b
    if kind == "or" and a.branches == b.branches == 1:
        return a | b
    return mix(a, b)


@st.composite
def layout_names(draw: st.DrawFn, tokens: int, ranks: int) -> str:
    """The name of a layout; of "rows" with counts that fit, among them 0."""
    name = draw(st.sampled_from(LAYOUTS))
    if name != "rows":
        return name
    cuts = sorted(draw(st.lists(st.integers(0, tokens), min_size=ranks - 1, max_size=ranks - 1)))
    return f"rows({', '.join(str(b - a) for a, b in pairwise([0, *cuts, tokens]))})"


@st.composite
def problems(draw: st.DrawFn, most_tokens: int = 40, most_ranks: int = 9) -> tuple[Pattern, int, int, str]:
    """(pattern, tokens, ranks, layout)"""
    tokens, ranks = draw(st.integers(0, most_tokens)), draw(st.integers(1, most_ranks))
    return draw(patterns(tokens)), tokens, ranks, draw(layout_names(tokens, ranks))


head_counts = st.sampled_from([(1, 1), (4, 2), (3, 3), (6, 2)])


def schedules(ranks: int) -> list[str]:
    inner = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return ["ring", "direct", "allgather", *(f"double_ring({n})" for n in inner)]
