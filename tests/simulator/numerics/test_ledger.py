"""The ledger of pairs against brute force over the mask, and tiles that are not the mask."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numerics_cases import LAYOUTS, PATTERNS, make

import ringattn as ra
from ringattn.pattern import Pattern, Tile
from ringattn.pattern.tile import make_tile
from ringattn.simulator.numerics import numerics
from ringattn.simulator.numerics.ledger import PairLedger, expect, expected_counts, weights


def mixed(x: int) -> int:
    """The finaliser of splitmix64 after one increment, in Python integers."""
    z = (x + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_expected_ledger_is_that_of_the_mask(pattern: Pattern, layout: str) -> None:
    plan = make(pattern, layout=layout)
    mask = pattern.mask(256, 4)
    terms = []
    for key in range(256):
        a, b, c = (mixed(plan.layout.owner(key) * 4 + salt) for salt in range(3))
        terms.append(a + b * key + c * key * key)
    ledger = PairLedger(np.arange(256), 4)
    met = {r: expect(plan.pattern, plan.layout, [range(r, r + 1)], 4, ledger).tolist() for r in range(0, 256, 8)}
    for start in range(1, 8):  # many rows at a time
        expect(plan.pattern, plan.layout, [range(start, 256, 8)], 4, ledger)
    for head in range(4):
        for q in range(0, 256, 5):
            wanted = sum(int(times) * term for times, term in zip(mask[head, q], terms, strict=True))
            assert int(ledger.hashes[head, q]) == wanted % 2**64
            assert ledger.pairs[head, q] == mask[head, q].sum()
    for q, owners in met.items():
        assert owners == sorted({plan.layout.owner(int(key)) for key in np.flatnonzero(mask[:, q].any(0))})


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_the_counts_that_gradients_carry_are_those_of_the_mask(pattern: Pattern) -> None:
    bound, mask = pattern.bind(4, 256), pattern.mask(256, 4)
    w = weights(np.arange(256))
    assert w.min() == 1 and w.max() == 8
    part = range(3, 250, 2)
    keys = expected_counts(bound, [range(256)], part, 4, keys=True)
    np.testing.assert_array_equal(keys, np.einsum("hqk,q->hk", mask, w)[:, 3:250:2])
    queries = expected_counts(bound, [range(256)], part, 4, keys=False)
    np.testing.assert_array_equal(queries, np.einsum("hqk,k->hq", mask, w)[:, 3:250:2])


class OffByOne(Pattern):
    """A causal mask whose tiles show one key too many."""

    def tiles(self, q: range, k: range, heads: range = range(1)) -> Iterator[Tile]:
        tile = make_tile(heads, q, k, -1, None)
        if tile is not None:
            yield tile

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return k <= q


@pytest.mark.parametrize(("mode", "tokens"), [("sample", 256), ("sample", 1 << 20), ("all", 64)])
def test_tiles_that_are_not_the_mask_are_seen(mode: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringattn.simulator.numerics.oracle.MASK_CELLS", 4096)
    for pattern, passes in ((ra.Window(30, 0), True), (OffByOne(), False)):
        report = numerics(make(pattern, tokens=tokens, head_dim=4), mode=mode, rows=4)
        assert report.mask_keys == pytest.approx(4 * min(tokens, 1024), rel=0.1)
        assert report.wrong_mask_keys == (0 if passes else 4) and report.passed == passes
