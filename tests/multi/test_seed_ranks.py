"""The acceptance cases of the seeds on two real Gloo ranks: the same cases as in tests/test_seeds.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import seed_ranks
from seed_cases import CASES
from seed_masks import samples
from test_seed_rings import RINGS

Run = Callable[..., list[Any]]
pytestmark = pytest.mark.multi


@pytest.mark.parametrize(("tokens", "heads", "block", "layout"), [(64, 4, 8, "contiguous"), (61, 5, 7, "zigzag")])
def test_acceptance_on_real_ranks(run_ranks: Run, tokens: int, heads: int, block: int, layout: str) -> None:
    wanted = len(samples(tokens, heads, block)) * len(CASES)
    assert run_ranks(seed_ranks.acceptance, 2, tokens, heads, block, layout, timeout=120) == [wanted] * 2


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_rings_of_real_ranks_are_one_device(run_ranks: Run, layout: str) -> None:
    assert run_ranks(seed_ranks.rings, 2, layout, timeout=120) == [len(RINGS)] * 2


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_no_tokens_on_real_ranks(run_ranks: Run, layout: str) -> None:
    assert run_ranks(seed_ranks.no_tokens, 2, layout, timeout=60) == [len(samples(0, 4, 8))] * 2
