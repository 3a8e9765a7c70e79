"""Tokens at other places than their positions: padded and cropped rows of a batch."""

from __future__ import annotations

import numpy as np
import pytest

import ringattn as ra
from ringattn.pattern.tile import Tile
from ringattn.pattern.views import Slotted

#: Padding before, between and behind, and tokens that were cropped.
MARKS = (
    ((0, 0),),
    ((0, None), (5, 5)),
    ((0, 0), (7, None), (11, 4), (20, 9)),
    ((0, 0), (9, None), (16, 12), (25, None)),
)


def count(tiles: list[Tile], tokens: int) -> np.ndarray:
    """How often tiles hold each pair of one head."""
    found = np.zeros((tokens, tokens), dtype=int)
    for tile in tiles:
        for q in tile.q:
            for k in tile.k:
                found[q, k] += (tile.lo is None or q - k >= tile.lo) and (tile.hi is None or q - k <= tile.hi)
    return found


@pytest.mark.parametrize("shifts", MARKS)
@pytest.mark.parametrize(
    "text",
    [
        *("Causal()", "Causal() & Window(4)", "Causal() & (Sinks(2) | Window(3))", "Causal() & Documents([9, 22])"),
        "mix(Causal(), Strided(3))",
    ],
)
def test_tiles_are_those_of_the_positions(text: str, shifts: tuple[tuple[int, int | None], ...]) -> None:
    tokens, pattern = 31, ra.parse_pattern(text)
    slotted = Slotted(pattern, (shifts,))
    positions: dict[int, int] = {}
    for place in range(tokens):
        by = [shift for first, shift in shifts if first <= place][-1]
        if by is not None:
            positions[place] = place - by
    mask = pattern.mask(tokens)[0].astype(int)
    wanted = np.zeros((tokens, tokens), dtype=int)
    for q, i in positions.items():
        for k, j in positions.items():
            wanted[q, k] = mask[i, j]
    assert (count([*slotted.tiles(range(tokens), range(tokens))], tokens) == wanted).all()
    assert (slotted.mask(tokens)[0] == wanted).all()
    parts = [tile for r in range(3) for tile in slotted.tiles(range(r, tokens, 3), range(tokens))]
    assert (count(parts, tokens) == wanted).all()
