"""A K/V cache over ranks: attention of new tokens is that of one device, whatever was cropped, forked or let go."""

from __future__ import annotations

import pytest
from generations import Generation

import ringattn.inference.cache


@pytest.mark.parametrize("seed", range(40))
def test_generations_equal_a_dense_oracle(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, padded or not, then steps, crops and forks in random order, by random patterns and heads."""
    if seed % 2:
        monkeypatch.setattr(ringattn.inference.cache, "SHARED_ROWS", 3)
    generation = Generation(seed, 1 + seed % 5)
    generation.run(12, chunks=False)
    assert generation.worst < 1e-12, generation.patterns


@pytest.mark.parametrize("seed", range(40))
def test_chunks_of_prompts_equal_a_dense_oracle(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of any size, padded or not, between steps, crops and forks."""
    if seed % 2:
        monkeypatch.setattr(ringattn.inference.cache, "SHARED_ROWS", 3)
    generation = Generation(1000 + seed, 1 + seed % 5)
    generation.run(10, chunks=True)
    assert generation.worst < 1e-12, generation.patterns
