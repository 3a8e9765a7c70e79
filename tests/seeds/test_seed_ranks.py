"""The acceptance cases of the seeds on two real Gloo ranks: the same cases as in tests/seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import seed_ranks
from seed_cases import EVEN
from seed_rings import RINGS

Run = Callable[..., list[Any]]
pytestmark = pytest.mark.multi


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_acceptance_on_real_ranks(run_ranks: Run, layout: str) -> None:
    assert run_ranks(seed_ranks.acceptance, 2, layout, timeout=150) == [(len(EVEN) + len(RINGS)) // 2] * 2
