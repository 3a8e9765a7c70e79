"""Block-sparse patterns against masks written out by hand, block by block and position by position."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count, islice

import numpy as np
import pytest
from strategies import pairs

import ringattn as ra
from ringattn import Causal, InvalidInput, Pattern, dilated_blocks, global_local, local_window, make_plan

SIZES = [(1, 9), (2, 16), (3, 31), (4, 61), (5, 3), (7, 7), (8, 1)]  # (block, tokens)
DENSITIES = [0.01, 0.1, 0.25, 0.4, 0.5, 0.77, 0.99, 1.0]


def expand(rule: Callable[[int, int], bool], block: int, tokens: int) -> np.ndarray:
    """[N, N] of a rule on blocks."""
    return np.array([[int(rule(q // block, k // block)) for k in range(tokens)] for q in range(tokens)])


def agree(pattern: Pattern, truth: np.ndarray, heads: int = 2) -> None:
    """Mask, tiles (disjoint), rectangles with steps, and repr, all against the truth [N, N] or [H, N, N]."""
    tokens = truth.shape[-1]
    truth = np.broadcast_to(truth, (heads, tokens, tokens))
    assert (pattern.mask(tokens, heads) == truth).all()
    bound = pattern.bind(heads, tokens)
    whole = range(tokens)
    for q, k in ((whole, whole), (whole[1::3], whole[::2]), (whole[tokens // 2 :], whole[: tokens // 3 + 1])):
        found = np.zeros_like(truth, shape=truth.shape)
        for tile in bound.tiles(q, k, range(heads)):
            for head, x, y in pairs(tile):
                found[head, x, y] += 1
        cut = np.zeros_like(found)
        cut[:, q.start : q.stop : q.step, k.start : k.stop : k.step] = 1
        assert (found == truth * cut).all()
    assert ra.parse_pattern(repr(pattern)) == pattern and ra.parse_pattern(repr(bound)) == bound


def nearest(i: int, n: int, low: int, high: int) -> set[int]:
    """n consecutive blocks of [low, high), centred on i where they fit, one more to the left where n is even."""
    window = list(range(i - n // 2, i - n // 2 + n))
    while window[0] < low:
        window = [j + 1 for j in window]
    while window[-1] >= high:
        window = [j - 1 for j in window]
    return set(window)


def kept(density: float, total: int) -> int:
    return max(1, round(density * total))


@pytest.mark.parametrize(("block", "tokens"), SIZES)
def test_widths(block: int, tokens: int) -> None:
    for w in (0, 1, 3):
        agree(local_window(block, w), expand(lambda i, j: i - w <= j <= i + w, block, tokens))
        for g in (0, 1, 2):
            truth = expand(lambda i, j: i < g or j < g or abs(i - j) <= w, block, tokens)
            agree(global_local(block, globals=g, blocks=w), truth)
    for offsets in ((1, 2, 4), (), (3,), (0, 7, 2)):
        near = expand(lambda i, j: i == j or i - j in offsets or j - i in offsets, block, tokens)
        agree(dilated_blocks(block, offsets), near)
    for stride in (1, 2, 5):
        agree(ra.strided_blocks(block, stride), expand(lambda i, j: (i - j) % stride == 0, block, tokens))
    for levels in (((1, 0), (2, 1), (4, -1)), ((3, 2),), ((2, 0), (3, 4))):
        truth = expand(
            lambda i, j: any(i % s == 0 and (w == -1 or i - w <= j <= i + w) for s, w in levels), block, tokens
        )
        agree(ra.hierarchical(block, levels), truth)
    assert dilated_blocks(block) == dilated_blocks(block, offsets=(4, 1, 2))


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize(("block", "tokens"), [*SIZES, (1, 37)])
def test_densities(block: int, tokens: int, density: float) -> None:
    total = -(-tokens // block)
    n = kept(density, total)

    windows = [nearest(i, n, 0, total) for i in range(total)]
    agree(local_window(block, density=density), expand(lambda i, j: j in windows[i], block, tokens))

    turns = [{(i + m * total // n) % total for m in range(n)} for i in range(total)]
    agree(ra.strided_blocks(block, density=density), expand(lambda i, j: j in turns[i], block, tokens))

    def spread() -> list[int]:
        powers = [1, 2, 4, 8, 16, 32]
        distances = powers + [d for d in range(1, 40) if d not in powers]
        return [0] + [sign * d for d in distances for sign in (-1, 1)]

    jumps = [set(list(islice((i + s for s in spread() if 0 <= i + s < total), n))) for i in range(total)]
    agree(dilated_blocks(block, density=density), expand(lambda i, j: j in jumps[i], block, tokens))

    for rows in (windows, turns, jumps):
        assert all(len(row) == n for row in rows)

    for g in (0, 1, 2):
        if g == 0 or density * total >= min(g + 1, total):
            own = {i: nearest(i, n - g, g, total) for i in range(g, total)}
            truth = expand(lambda i, j: i < g or j < g or j in own[i], block, tokens)
            assert all(len(own[i] | set(range(g))) == n for i in range(g, total))
            agree(global_local(block, globals=g, density=density), truth)
        else:
            with pytest.raises(InvalidInput, match=r"fewer than the .* globals and one local block"):
                global_local(block, globals=g, density=density).check(tokens, 1)


@pytest.mark.parametrize("total", [1, 2, 5, 16, 33, 100, 1000])
def test_hierarchical_density_is_that_of_the_mean_row(total: int) -> None:
    for density in DENSITIES:
        pattern = ra.hierarchical(1, density=density).bind(1, total)
        blocks = pattern.mask(total)[0]
        assert abs(blocks.sum() / total - density * total) <= 1
        if total <= 33:
            agree(ra.hierarchical(1, density=density), blocks)
            levels = pattern.resolved  # type: ignore[attr-defined]
            assert [stride for stride, _ in levels] == [1, 4, 16]
            truth = expand(lambda i, j: any(i % s == 0 and abs(i - j) <= w for s, w in levels), 1, total)
            assert (blocks == truth).all()


def test_density_holds_on_long_sequences() -> None:
    """Every family keeps what it promises where no mask can be made."""
    tokens, block = (1 << 20) * 3 + 5, 64
    total = -(-tokens // block)
    for density in (1e-4, 0.01, 0.3):
        n = kept(density, total)
        for family in (local_window, dilated_blocks, ra.strided_blocks):
            pattern = family(block, density=density).bind(1, tokens)
            for i in (0, 1, 5, total // 3, total // 2, total - 2):
                rows = range(i * block, (i + 1) * block)
                seen = sum(-(-len(tile.k) // block) for tile in pattern.tiles(rows, range(tokens)))
                assert seen == n, (pattern, i)
        rough = ra.hierarchical(block, density=density).bind(1, tokens)
        levels = dict(rough.resolved)
        counted = [min(total, i + levels[s] + 1) - max(0, i - levels[s]) for s, i in (
            (16 if i % 16 == 0 else 4 if i % 4 == 0 else 1, i) for i in range(total))]  # fmt: skip
        assert abs(sum(counted) / total - density * total) <= 1


def test_tables() -> None:
    rng = np.random.default_rng(0)
    for block, tokens in SIZES:
        total = -(-tokens // block)
        for heads in (1, 3):
            table = rng.random((heads, total, total)) < 0.4
            truth = np.array([expand(lambda i, j: table[h, i, j], block, tokens) for h in range(heads)])
            agree(ra.BlockSparse(block, table), truth, heads=3)
            agree(ra.BlockSparse(block, table) & Causal(), truth * np.tril(np.ones((tokens, tokens), int)), heads=3)
            assert ra.BlockSparse(block, table.tolist()) == ra.BlockSparse(block, table.astype(int))
    empty = ra.BlockSparse(4, np.zeros((1, 0, 0), bool))
    assert ra.parse_pattern(repr(empty)) == empty and empty.mask(0).shape == (1, 0, 0)


def test_a_table_is_a_value() -> None:
    table = np.eye(3, dtype=bool)
    pattern, text = ra.BlockSparse(2, table), repr(ra.BlockSparse(2, table))
    table[0, 2] = True
    assert repr(pattern) == text and hash(pattern) == hash(ra.BlockSparse(2, np.eye(3, dtype=bool)))
    assert (
        pattern != ra.BlockSparse(2, table) and pattern != ra.BlockSparse(3, np.eye(3, dtype=bool)) and pattern != text
    )
    with pytest.raises(ValueError, match="read-only"):
        pattern.table[0, 0, 1] = True


def test_tiles_join_blocks_and_heads() -> None:
    tiles = list(local_window(4, 1).tiles(range(64), range(64), range(8)))
    assert len(tiles) == 16 and all(tile.dense and tile.heads == range(8) for tile in tiles)
    assert tiles[3].q == range(12, 16) and tiles[3].k == range(8, 20)
    one = ra.BlockSparse(4, [[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1]])
    assert [(tile.q.start, tile.k) for tile in one.tiles(range(16), range(16), range(2))] == [
        (0, range(8)), (0, range(12, 16)), (8, range(16)), (12, range(4, 8)), (12, range(12, 16)),
    ]  # fmt: skip


def families(block: int, density: float, width: int, stride: int, levels: tuple[tuple[int, int], ...]) -> list[Pattern]:
    """Each family by a width and by a density."""
    return [
        *(local_window(block, width), local_window(block, density=density)),
        *(dilated_blocks(block), dilated_blocks(block, density=density)),
        *(global_local(block, globals=1, blocks=width), global_local(block, globals=1, density=density)),
        *(ra.strided_blocks(block, stride), ra.strided_blocks(block, density=density)),
        *(ra.hierarchical(block, levels), ra.hierarchical(block, density=density)),
    ]


@pytest.mark.parametrize("pattern", families(3, 0.4, 1, 2, ((1, 0), (2, 2))), ids=repr)
def test_combined_planned_and_read_back(pattern: Pattern) -> None:
    tokens = 37
    own = pattern.mask(tokens)[0]
    lower = np.tril(np.ones((tokens, tokens), int))
    agree(pattern & Causal(), own * lower)
    other = ra.Dilated((8, 16), (1, 2), mix="union")
    agree(pattern | other, np.array([own | (other.mask(tokens, 2)[h]) for h in range(2)]))
    plan = make_plan(pattern & Causal(), tokens=tokens, ranks=3, heads=2)
    assert ra.Plan.from_json(plan.to_json()) == plan
    assert plan.density == pytest.approx((own * lower).mean(), abs=1e-12)
    assert (pattern.row_mask(7, tokens) == own[7]).all()
    assert pattern.picture(tokens, cells=4, ascii=True).count("\n") == 3


def test_density_of_a_plan() -> None:
    assert make_plan(Causal(), tokens=0, ranks=2).density == 0.0
    assert make_plan(Causal(), tokens=4, ranks=2, heads=3).density == 10 / 16
    assert make_plan(local_window(4, density=0.25), tokens=64, ranks=2).density == 0.25


def test_dilated_union_counts_each_pair_once() -> None:
    for offsets in ("per_head", "group"):
        for causal in (False, True):
            each = ra.Dilated((6, 12, 40), (1, 2, 3), causal=causal, offsets=offsets)
            once = ra.Dilated((6, 12, 40), (1, 2, 3), causal=causal, offsets=offsets, mix="union")
            agree(once, np.minimum(each.mask(45, 4), 1), heads=4)
            assert once.branches == 1 and once.output_scale == 1.0


class Counted(Exception):
    """The pattern was asked about too many rows."""


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 20,000 block rows may be enumerated, of millions."""
    from ringattn.pattern.block_table import BlockTable

    asked, original = count(), BlockTable._occupied_blocks

    def counting(self, rows, q):  # type: ignore[no-untyped-def]
        for row in original(self, rows, q):
            if next(asked) > 20000:
                raise Counted
            yield row

    monkeypatch.setattr(BlockTable, "_occupied_blocks", counting)


@pytest.mark.parametrize("pattern", families(128, 1e-6, 2, 4096, ((1, 0), (16, 2))), ids=repr)
def test_far_keys_are_found_empty_at_once(pattern: Pattern, few_calls: None) -> None:
    bound = pattern.bind(1, 1 << 30)
    keys = range(1 << 29, (1 << 29) + 4096)
    tile = next(bound.tiles(range(1 << 30), keys))
    assert tile.pairs > 0 and tile.k[0] >= keys[0] and tile.k[-1] <= keys[-1]
    assert list(local_window(128, 2).tiles(range(1 << 28), keys)) == []
    assert list(islice(bound.tiles(range(0, 1 << 30, 1 << 22), range(1 << 30)), 5))


def test_one_rank_of_very_many(few_calls: None) -> None:
    plan = make_plan(local_window(128, blocks=4), tokens=1 << 30, ranks=262144, heads=8)
    assert len(plan.for_rank(100000).forward) <= 4
    assert len(make_plan(dilated_blocks(4096), tokens=1 << 30, ranks=1 << 18).for_rank(100000).forward) <= 40


def test_top_k() -> None:
    scores = np.array([[3, 1, 3, 2], [0, 0, 0, 0], [-5, -np.inf, 2, 2], [1, 2, 3, 4]])
    plain = ra.top_k(2, 2, scores).table[0].astype(int).tolist()
    assert plain == [[1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    causal = ra.top_k(2, 2, scores, causal=True).table[0].astype(int).tolist()
    assert causal == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]]
    low = np.array([[9, 9, 9], [9, 0, 9], [5, 6, 0]])  # the own block is kept whatever its score
    assert ra.top_k(1, 1, low, causal=True).table[0].tolist() == np.eye(3, dtype=bool).tolist()
    assert ra.top_k(1, 9, scores).table.all() and ra.top_k(2, None, scores, density=0.5) == ra.top_k(2, 2, scores)
    rng = np.random.default_rng(1)
    many = rng.integers(0, 4, (5, 12, 12)).astype(np.uint8)
    for k in (1, 4, 12):
        for causal_ in (False, True):
            table = ra.top_k(3, k, many, causal=causal_).table
            for h in range(5):
                for i in range(12):
                    near = [j for j in range(12) if not causal_ or j <= i]
                    best = sorted(near, key=lambda j: (causal_ and j != i, -int(many[h, i, j]), j))[:k]
                    assert np.flatnonzero(table[h, i]).tolist() == sorted(best)
    assert (ra.top_k(2, 2, scores).mask(7)[0][::2, ::2] == ra.top_k(2, 2, scores).table[0]).all()


TEXT = repr(ra.BlockSparse(2, np.eye(3)[None].astype(bool))).split("'")[1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ra.BlockSparse(0, [[1]]), "BlockSparse: block=0 must be an integer >= 1"),
        (lambda: ra.BlockSparse(2, [[1, 0], [1]]), "not a rectangular array"),
        (lambda: ra.BlockSparse(2, [[0.5]]), "must hold bools"),
        (lambda: ra.BlockSparse(2, [[2]]), "must hold bools"),
        (lambda: ra.BlockSparse(2, np.ones((1, 2, 3), bool)), "expected [heads or 1, blocks, blocks]"),
        (lambda: ra.BlockSparse(2, "eye"), "is not a table that repr printed"),
        (lambda: ra.BlockSparse(2, "1x3x4" + TEXT[5:]), "expected [heads or 1, blocks, blocks]"),
        (lambda: ra.BlockSparse(2, "9x9x9" + TEXT[5:]), "the 92 bytes that the shape needs"),
        (lambda: ra.BlockSparse(2, TEXT[:-3]), "is not a table that repr printed"),
        (lambda: ra.BlockSparse(2, [[1]]).check(3, 1), "3 tokens make 2 blocks"),
        (lambda: ra.BlockSparse(4, np.ones((2, 1, 1), bool)).check(3, 4), "for 2 heads, but there are 4"),
        (lambda: local_window(4), "give blocks= or density="),
        (lambda: local_window(4, 1, density=0.5), "give one"),
        (lambda: local_window(4, -1), "blocks=-1 must be an integer >= 0"),
        (lambda: local_window(4, density=0), "0 < density <= 1"),
        (lambda: local_window(4, density=1.5), "0 < density <= 1"),
        (lambda: local_window(4, density=True), "0 < density <= 1"),
        (lambda: local_window(4, density="x"), "0 < density <= 1"),
        (lambda: local_window(4, density=0.5).count(range(4), range(4)), "a density needs the tokens"),
        (lambda: global_local(4, density=0.5).count(range(4), range(4)), "a density needs the tokens"),
        (lambda: ra.hierarchical(4, density=0.5).count(range(4), range(4)), "a density needs the tokens"),
        (lambda: ra.strided_blocks(4, density=0.5).visible(np.arange(4), np.arange(4), 0, 4), "needs the tokens"),
        (lambda: ra.strided_blocks(4), "give stride= or density="),
        (lambda: ra.strided_blocks(4, 0), "stride=0 must be an integer >= 1"),
        (lambda: dilated_blocks(4, (1, -2)), "an offset=-2"),
        (lambda: dilated_blocks(4, 3), "must be a list of integers"),
        (lambda: dilated_blocks(4, (1,), density=0.5), "give one"),
        (lambda: global_local(4), "give blocks= or density="),
        (lambda: global_local(4, globals=-1, blocks=1), "globals=-1"),
        (lambda: make_plan(global_local(4, globals=3, density=0.5), tokens=24, ranks=2), "try globals=2"),
        (lambda: ra.hierarchical(4), "give levels= or density="),
        (lambda: ra.hierarchical(4, ((1, 2, 3),)), "must be a list of (stride, window in blocks"),
        (lambda: ra.hierarchical(4, ((0, 1),)), "a stride=0"),
        (lambda: ra.hierarchical(4, ((1, -2),)), "a w=-2"),
        (lambda: ra.top_k(4, None, np.ones((2, 2))), "give either k or density"),
        (lambda: ra.top_k(4, 1, np.ones((2, 2)), density=0.5), "give either k or density"),
        (lambda: ra.top_k(4, 0, np.ones((2, 2))), "k=0 must be an integer >= 1"),
        (lambda: ra.top_k(4, 1, np.ones((2, 3))), "scores of shape (1, 2, 3)"),
        (lambda: ra.top_k(4, 1, [[np.nan]]), "hold NaN"),
        (lambda: ra.top_k(4, 1, [["a"]]), "hold dtype"),
        (lambda: ra.top_k(4, 1, [[1], [1, 2]]), "numpy cannot read"),
        (lambda: ra.Dilated((4, 8), (1, 2)) | local_window(4, 1), "try Dilated(..., mix='union')"),
        (lambda: ra.Dilated((4, 8), (1, 2), mix="group", heads=2).mask(8, 3), "heads=2): got 3 heads"),
        (lambda: ra.Window(3) | local_window(4, density=2), "density=2"),
    ],
)
def test_errors(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(words)):
        make()


def test_a_density_may_be_any_real_number() -> None:
    assert local_window(4, density=np.float32(0.5)) == local_window(4, density=0.5)
    assert repr(local_window(4, density=1)) == "local_window(4, density=1.0)"
    assert global_local(4, globals=0, density=0.1).bind(1, 8).mask(8).sum() == 32  # one block per row, at least
