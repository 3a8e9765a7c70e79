"""Handshakes of real ranks: equal arguments in any form, tables that differ, exceptions in the middle, missing
ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import handshake_cases
import pytest
import side_records

from ringattn.runtime.handshake import Call

Run = Callable[..., list[Any]]
pytestmark = pytest.mark.multi
SIZE = 3
LOUD = 100.0


def test_equal_arguments_in_any_form_agree(run_ranks: Run) -> None:
    """All ranks pass the same number of exchanges: nobody remembers what another still compares."""
    told = run_ranks(handshake_cases.forms, SIZE, timeout=LOUD)
    assert told[0] == told[1] == told[2]
    for stages in told[0]:
        assert stages[:3] == ["call", "arguments", "plan"]
        assert stages.count("call") == 4 and stages.count("arguments") == stages.count("plan") <= 3


@pytest.mark.parametrize("nccl", [False, True])
def test_tables_that_differ_are_emptied_together(run_ranks: Run, nccl: bool) -> None:
    run = (side_records.handshakes, SIZE, "memories") if nccl else (handshake_cases.memories, SIZE)
    assert run_ranks(*run, timeout=LOUD) == [[3, 1, 3, 1, 3, 1, 3, 1, 3, 3]] * SIZE


def test_records_of_an_nccl_group_touch_no_device(run_ranks: Run) -> None:
    """Warm calls, forward and backward, wait for no device; a rank that diverges later is told by name."""
    for rank, (told, connected) in enumerate(run_ranks(side_records.calls, SIZE, timeout=LOUD)):
        assert told[:4] == ["fine"] * 4 and told[5] == "fine" and connected == 1
        assert "the ranks disagree about pattern" in told[4] and "on rank 1" in told[4], (rank, told)


def test_what_carries_records_ends_with_its_group(run_ranks: Run) -> None:
    assert run_ranks(side_records.lifetimes, SIZE, timeout=LOUD) == [[False] * 3] * SIZE


@pytest.mark.parametrize(
    ("kind", "own", "others"),
    [
        ("memory", "MemoryError: no room", "it raised MemoryError: no room. Look at that rank's"),
        ("interrupt", "KeyboardInterrupt: ", "it raised KeyboardInterrupt: "),
        ("ours", "Unsupported: not today", "not today"),
    ],
)
def test_any_exception_of_one_rank_is_told_to_all(run_ranks: Run, kind: str, own: str, others: str) -> None:
    told = run_ranks(handshake_cases.exceptions, SIZE, kind, timeout=LOUD)
    for stage in handshake_cases.STAGES:
        assert told[1][stage] == (own, "fine"), stage
        for rank in (0, 2):
            now, after = told[rank][stage]
            assert now.startswith(f"Mismatch: rank 1 cannot take part: {others}"), (stage, now)
            assert after == "fine", (stage, after)


def test_a_rank_that_leaves_after_the_agreement_finds_the_others_again(run_ranks: Run) -> None:
    left, stayed = [("MemoryError: no room", "fine"), ("KeyboardInterrupt: ", "fine")], [("fine", "fine")] * 2
    assert run_ranks(handshake_cases.after_agreement, SIZE, timeout=LOUD) == [stayed, left, stayed]


def test_every_argument_is_compared(run_ranks: Run) -> None:
    """Also options that were added since: each has a value in `handshake_cases.OTHERS`."""
    names = [entry.name for entry in fields(Call)]
    for told in run_ranks(handshake_cases.disagreements, SIZE, names, timeout=LOUD):
        for name in names:
            assert told[name].startswith(f"Mismatch: the ranks disagree about {name}: "), (name, told[name])


def test_exceptions_in_an_adaptive_module(run_ranks: Run) -> None:
    told = run_ranks(handshake_cases.adaptive, SIZE, timeout=LOUD)
    for step, (now, after) in enumerate(told[1][:-1]):
        assert (now, after) == ("MemoryError: no room", "fine"), step
        for rank in (0, 2):
            assert told[rank][step][0].startswith("Mismatch: rank 1 cannot take part: it raised MemoryError"), step
            assert told[rank][step][1] == "fine", step
    for rank, blamed in enumerate(("rank 1 has blocks of 6", "rank 0 has blocks of 4", "rank 1 has blocks of 6")):
        assert blamed in told[rank][-1][0] and told[rank][-1][1] == "fine"


@pytest.mark.parametrize("nccl", [False, True])
def test_ranks_that_are_out_of_step_are_told_and_go_on(run_ranks: Run, nccl: bool) -> None:
    run = (side_records.handshakes, SIZE, "out_of_step") if nccl else (handshake_cases.out_of_step, SIZE)
    told = run_ranks(*run, timeout=LOUD)
    for number, stage in enumerate(("arguments", "plan")):
        for rank in (0, 2):
            now, after = told[rank][number]
            assert f"rank 1 is at stage 'call' of a call where others are at stage '{stage}'" in now and after == "fine"
        now, after = told[1][number]
        assert f"rank 0 is at stage '{stage}' of a call where others are at stage 'call'" in now and after == "fine"
    words = (
        "sent 0 bytes where the ranks exchange",
        "sent 1 byte where the ranks exchange",
        "sent 1,400 bytes where",
        "speaks version 7",
        "sent 1 byte that cannot be decoded",
    )
    for number, word in enumerate(words, 2):
        for rank in (0, 2):
            now, after = told[rank][number]
            assert now.startswith("Mismatch: rank 1 ") and word in now and after == "fine"
        assert told[1][number] == ("-", "fine")
    for rank in range(SIZE):
        now, after = told[rank][-1]
        assert now.startswith("Mismatch: rank 1 sent 16 bytes that cannot be decoded") and after == "fine"


def test_the_timeout_is_that_of_the_group_and_errors_name_who_is_missing(run_ranks: Run) -> None:
    told = run_ranks(handshake_cases.timeouts, SIZE, 3.0, timeout=LOUD)
    for rank in range(SIZE):
        assert told[rank]["timeout"] == [600.0, 2.0, 9.0]
        assert told[rank]["late"] == "fine"
    for rank in range(SIZE - 1):
        text = told[rank]["absent"]
        assert f"CommFailure: rank {rank} of 3: records of all ranks, before the first message: " in text
        assert "receive from rank 2: not done within 2 s or the peer is gone" in text
