"""The algebra of ranges and tiles against plain enumeration."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strategies import pairs, ranges, raw_tiles

from ringattn.pattern import Tile
from ringattn.pattern import tile as algebra
from ringattn.pattern.tile import intersect_tiles, make_tile, subtract_tile


def trimmed(raw: Tile) -> Tile | None:
    return make_tile(raw.heads, raw.q, raw.k, raw.lo, raw.hi, raw.branch)


@given(ranges(), ranges())
def test_intersection_of_progressions(a: range, b: range) -> None:
    assert set(algebra.intersect(a, b)) == set(a) & set(b)


@given(ranges(), ranges())
def test_difference_of_progressions_is_disjoint_and_complete(a: range, b: range) -> None:
    members = [x for part in algebra.subtract(a, b) for x in part]
    assert sorted(members) == sorted(set(a) - set(b))


@given(st.lists(ranges(), max_size=4))
def test_union_holds_each_member_once(parts: list[range]) -> None:
    members = [x for part in algebra.union(parts) for x in part]
    assert sorted(members) == sorted(set().union(*map(set, parts)))


@given(ranges(), ranges(), st.integers(-40, 40))
def test_count_at_most(q: range, k: range, bound: int) -> None:
    assert algebra.count_at_most(q, k, bound) == sum(x - y <= bound for x in q for y in k)


def test_counts_are_closed_form_at_any_size() -> None:
    n = 1 << 60
    causal = make_tile(range(1), range(n), range(n), lo=0)
    assert causal is not None and causal.pairs == n * (n + 1) // 2
    odd = make_tile(range(1), range(0, n, 3), range(0, n, 7), lo=0)
    assert odd is not None and 0 < odd.pairs < len(odd.q) * len(odd.k)


@given(raw_tiles)
def test_trimming_keeps_the_pairs(raw: Tile) -> None:
    tile, truth = trimmed(raw), pairs(raw)
    assert pairs(tile) == truth
    assert (tile is None) == (not truth)
    if tile is not None:
        assert tile.pairs * len(tile.heads) == len(truth)


@given(raw_tiles)
def test_trimmed_rows_all_see_a_key(raw: Tile) -> None:
    tile = trimmed(raw)
    if tile is not None and (tile.dense or tile.q.step == tile.k.step):
        assert {x for _, x, _ in pairs(tile)} == set(tile.q)
        assert {y for _, _, y in pairs(tile)} == set(tile.k)


@given(raw_tiles)
def test_needed_rows(raw: Tile) -> None:
    tile = trimmed(raw)
    if tile is not None:
        for found, place in ((tile.rows("queries"), 1), (tile.rows("keys"), 2)):
            rows = [x for part in found for x in part]
            assert sorted(rows) == sorted({pair[place] for pair in pairs(raw)})


@given(raw_tiles)
def test_refinement_has_equal_steps_and_the_same_pairs_once(raw: Tile) -> None:
    tile = trimmed(raw)
    if tile is not None:
        parts = list(tile.refine())
        assert all(part.dense or part.q.step == part.k.step for part in parts)
        assert sum(len(pairs(part)) for part in parts) == len(pairs(tile))
        assert set().union(*map(pairs, parts)) == pairs(tile)


@given(raw_tiles, raw_tiles)
def test_meet(first: Tile, second: Tile) -> None:
    a, b = trimmed(first), trimmed(second)
    if a is not None and b is not None:
        assert pairs(intersect_tiles(a, b, 0)) == pairs(a) & pairs(b)


@given(raw_tiles, raw_tiles)
def test_difference_is_disjoint_and_complete(first: Tile, second: Tile) -> None:
    a, b = trimmed(first), trimmed(second)
    if a is not None and b is not None:
        parts = [pairs(part) for part in subtract_tile(a, b)]
        assert sum(map(len, parts)) == len(pairs(a) - pairs(b))
        assert set().union(*parts) == pairs(a) - pairs(b)
