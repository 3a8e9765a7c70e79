"""What the seeds' ring systems promise: any number of ranks computes the pattern of one device, whatever divides."""

from __future__ import annotations

from functools import partial

import pytest
from seed_rings import RINGS, compare, size

import ringattn as ra


@pytest.mark.parametrize("number", range(len(RINGS)), ids=lambda i: f"{size(RINGS[i])} {RINGS[i]}")
def test_every_ring_is_one_device(number: int) -> None:
    compare(ra.attention, number)
    for ranks in range(2, 6):
        layout = ("contiguous", "zigzag")[(ranks + number) % 2]
        compare(partial(ra.virtual_attention, ranks=ranks, layout=layout), number)
