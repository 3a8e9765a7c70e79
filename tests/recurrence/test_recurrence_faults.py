"""Failures of one rank in recurrent layers reach all ranks, and a good call follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import recurrence_faults
import torch
from recurrence_cases import KINDS, draw, run_virtual
from recurrence_faults import EARLY, LATE, break_function, check_faults

Run = Callable[..., list[Any]]
pytestmark = pytest.mark.multi
#: Every fault and every kind of call; a step of 1 gives every fault with every kind, in minutes.
SEEDS = [*range(0, len(KINDS) * len(EARLY + LATE), 5)]


def test_a_fault_of_one_rank_is_told_to_all_and_a_right_call_follows(run_ranks: Run) -> None:
    assert check_faults(run_ranks(recurrence_faults.run_faults, 2, SEEDS, timeout=120)) > len(SEEDS) - 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_on_virtual_ranks_leaves_the_next_call_right(kind: str) -> None:
    case = draw(5, kind, ranks=3)
    before = run_virtual(case)
    for fault in ("user", "backward", "interrupt"):
        with pytest.MonkeyPatch.context() as patch:
            break_function(patch, kind, fault)
            with pytest.raises((RuntimeError, KeyboardInterrupt)):
                run_virtual(case)
        assert all(torch.equal(x, before[name]) for name, x in run_virtual(case).items())


def test_a_checkpoint_that_stops_its_recomputation_early_is_no_fault(run_ranks: Run) -> None:
    assert run_ranks(recurrence_faults.checkpointed, 2) == [True, True]


def test_a_second_thread_is_refused_on_all_ranks(run_ranks: Run) -> None:
    (good,), (odd,) = run_ranks(recurrence_faults.second_thread, 2)
    assert odd[1].startswith("InvalidInput: thread ") and good[1].startswith("Mismatch: rank 1 cannot take part: thre")
    assert {good[0], good[2], odd[0], odd[2]} == {"fine"}
