"""Real Gloo ranks: bitwise equal to virtual ones, byte for byte as planned, and errors instead of hangs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_cases
from rank_cases import check_told, messages_left

from ringattn.errors import LaunchFailure
from ringattn.transport import launcher

Run = Callable[..., list[Any]]
pytestmark = pytest.mark.multi


def test_no_message_outlives_its_call(run_ranks: Run) -> None:
    """The thread that waits for messages once kept those of its last wait until the next call."""
    assert run_ranks(messages_left, 2) == [[], []]


@pytest.mark.parametrize(
    ("ranks", "dtype", "heads"), [(2, "float32", (4, 2)), (3, "float64", (3, 1)), (4, "bfloat16", (4, 1))]
)  # another dtype of each number of ranks: test_mpi.py
def test_gloo_equals_virtual_and_the_plan(run_ranks: Run, ranks: int, dtype: str, heads: tuple[int, int]) -> None:
    assert run_ranks(rank_cases.equals_virtual, ranks, dtype, heads, timeout=120) == [20] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_bits_are_those_of_one_process(run_ranks: Run, ranks: int) -> None:
    assert run_ranks(rank_cases.same_bits, ranks, timeout=60) == [[]] * ranks


def test_balanced_shards_on_real_ranks(run_ranks: Run) -> None:
    assert max(run_ranks(rank_cases.balanced_shards, 2, timeout=60)) <= 1e-12


def test_ranks_tell_how_many_rows_they_have(run_ranks: Run) -> None:
    assert max(run_ranks(rank_cases.own_rows, 2, timeout=60)) <= 1e-12


def test_every_rank_is_told_before_the_first_message(run_ranks: Run) -> None:
    check_told(run_ranks(rank_cases.errors_on_every_rank, 2, timeout=60))


@pytest.mark.parametrize("ranks", [2, 3])
def test_lengths_may_change_on_some_ranks_only(run_ranks: Run, ranks: int) -> None:
    assert max(run_ranks(rank_cases.varying_lengths, ranks, timeout=60)) <= 1e-12


@pytest.mark.parametrize("how", ["dies", "stays away"])
def test_a_lost_rank_makes_the_others_raise(
    new_ranks: Run, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "GRACE", 15.0)
    if how == "dies":
        with pytest.raises(LaunchFailure, match="rank 2 of 3 was killed by SIGKILL"):
            new_ranks(rank_cases.one_rank_is_lost, 3, how, str(tmp_path), timeout=50)
    else:
        new_ranks(rank_cases.one_rank_is_lost, 3, how, str(tmp_path), timeout=50)
    told = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    for text in told:
        message = r"rank [01] of 3: forward step \d+: (send to|receive from) rank 2, [\d,]+ bytes: not done within 2 s"
        assert re.search("rank 2 is gone" if how == "dies" else message, text), text


def test_mesh_axis_and_process_group(run_ranks: Run) -> None:
    assert run_ranks(rank_cases.mesh_and_subgroup, 4, timeout=60) == [True] * 4


@pytest.mark.parametrize(
    ("kind", "layout", "recompute"),
    [
        ("ring", "contiguous", "none"),
        ("ring", "zigzag", "projections"),
        ("ring", "zigzag", "all"),
        ("adaptive", "zigzag", "none"),
        ("adaptive", "contiguous", "projections"),
    ],
)
def test_multihead_modules_on_shards_equal_one_device(run_ranks: Run, kind: str, layout: str, recompute: str) -> None:
    assert max(run_ranks(rank_cases.multihead, 2, kind, layout, recompute, timeout=60)) <= 1e-12
