"""A K/V cache on ranks of Gloo: the bits of virtual ranks, counted messages, and errors on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from generations import deferred_steps, equals_virtual, faults_on_every_rank, rank_is_lost, step_counts
from recurrence_faults import REFUSALS, check_refusals, run_refusals

import ringattn as ra
from ringattn.errors import LaunchFailure
from ringattn.transport import launcher

Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize("size", [2, 3])
def test_gloo_has_the_bits_of_virtual_ranks(run_ranks: Ranks, size: int) -> None:
    assert max(run_ranks(equals_virtual, size, list(range(100 * size, 100 * size + 5)), timeout=120)) < 1e-12


@pytest.mark.parametrize(("merge", "tokens"), [("gather", 1), ("scatter", 1), ("gather", 3), ("scatter", 3)])
def test_messages_and_bytes_of_a_step(run_ranks: Ranks, merge: str, tokens: int) -> None:
    """P - 1 messages of M bytes, or twice as many with 2 (P - 1) / P M bytes, M being (Dv + 1) numbers per row."""
    size, heads, dim = 3, 6, 16
    message = heads * tokens * (dim + 1) * 4
    wanted = {"gather": (2, 2 * message), "scatter": (4, 4 * message // 3)}[merge]
    assert run_ranks(step_counts, size, merge, (heads, 2, dim), tokens) == [wanted] * size


@pytest.mark.parametrize(("merge", "sent"), [("gather", 115_584), ("scatter", 28_896)])
def test_bytes_of_a_large_model(merge: str, sent: int) -> None:
    """Llama-3-8B on 8 ranks: bytes that a rank sends in a layer for each token."""
    cache = ra.KVCache("Causal()", layers=1, ranks=8, merge=merge)
    cache.step(0, torch.randn(1, 32, 1, 128), *torch.randn(2, 1, 8, 1, 128))
    counters = cache.transport.counters
    assert isinstance(counters, list)
    assert {(x.sent_bytes, x.sent_messages) for x in counters} == {(sent, 7 if merge == "gather" else 14)}


def test_what_differs_is_an_error_on_every_rank(run_ranks: Ranks) -> None:
    wanted = (
        ("Mismatch: .*cache", "Mismatch: .*cache"),
        ("Mismatch: .*cache", "Mismatch: .*cache"),
        ("Mismatch: rank 2 cannot take part: .*batch of 1 and 2 query heads", "InvalidInput: q .* 2 query heads"),
        ("Mismatch: .*new tokens", "Mismatch: .*new tokens"),
        ("Mismatch: .*note", "Mismatch: .*note"),
        ("Mismatch: .*scale", "Mismatch: .*scale"),
        ("Mismatch: .*sinks", "Mismatch: .*sinks"),
        ("InvalidInput: unknown option 'schedule'",) * 2,
        ("Mismatch: rank 2 cannot take part: layer=1: the cache has 1 layer", "InvalidInput: layer=1"),
        ("Mismatch: .*length", "Mismatch: .*length"),
        ("Mismatch: .*crops and forks", "Mismatch: .*crops and forks"),
        ("Mismatch: rank . is at stage '(step|prefill)'", "Mismatch: rank . is at stage '(step|prefill)'"),
        ("InvalidInput: 9 new tokens after 0: the cache has max_tokens=8",) * 2,
        ("InvalidInput: 1 new token after 5: the cache has max_tokens=5",) * 2,
        ("fine", "fine"),
    )
    told = run_ranks(faults_on_every_rank, 3)
    for (others, last), *texts in zip(wanted, *told, strict=True):
        for text, pattern in zip(texts, (others, others, last), strict=True):
            assert re.match(pattern, text, re.DOTALL), (pattern, text)


def test_a_step_that_is_refused_in_a_later_layer_is_repeated(run_ranks: Ranks) -> None:
    assert check_refusals(run_ranks(run_refusals, 3, list(range(2 * len(REFUSALS))))) == 2 * len(REFUSALS)


@pytest.mark.parametrize("how", ["dies", "parts"])
def test_a_rank_that_is_lost_ends_the_generation(
    new_ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(launcher, "GRACE", 15.0)
    if how == "dies":
        with pytest.raises(LaunchFailure, match="rank 2 of 3 was killed by SIGKILL"):
            new_ranks(rank_is_lost, 3, how, str(tmp_path), timeout=50)
    else:
        new_ranks(rank_is_lost, 3, how, str(tmp_path), timeout=50)
    for rank in range(2):
        assert re.search("rank 2 (is gone|has not joined)", (tmp_path / str(rank)).read_text())


def test_a_step_has_one_record_and_may_be_compared_later(new_ranks: Ranks) -> None:
    for records, told in new_ranks(deferred_steps, 2):
        assert records == [1, 1, 1, 1]
        assert told.startswith("Mismatch: the ranks disagree about new tokens: 1 on rank 0; 2 on rank 1")
