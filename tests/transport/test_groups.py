"""Process groups end when their program says so, and what travels on them is told apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import group_cases
import pytest

from ringattn.transport.base import PLAN_TAGS, SPAN, TAGS, Tags

Run = Callable[..., list[Any]]
pytestmark = pytest.mark.multi

#: Each cycle makes and destroys 4 groups; the first cycles warm up what a process holds anyway.
CYCLES, WARM = 14, 5


def test_groups_leave_nothing_behind(new_ranks: Run, tmp_path: Path) -> None:
    for found in new_ranks(group_cases.cycles, 2, str(tmp_path), CYCLES, timeout=120):
        threads, descriptors, size = (list(numbers) for numbers in zip(*found, strict=True))
        assert max(threads[WARM:]) <= max(threads[:WARM])
        assert max(descriptors[WARM:]) <= max(descriptors[:WARM])
        assert size[-1] - size[WARM] < 4


def test_a_backward_after_its_group_has_ended_is_an_error(new_ranks: Run, tmp_path: Path) -> None:
    assert new_ranks(group_cases.after_the_end, 2, str(tmp_path), timeout=60) == [4, 4]


def test_passes_in_different_order_are_an_error_on_every_rank(run_ranks: Run) -> None:
    group_cases.check_order(run_ranks(group_cases.order_of_passes, 2, timeout=60))


def test_messages_of_the_program_itself_are_left_alone(run_ranks: Run) -> None:
    assert run_ranks(group_cases.messages_of_others, 2, timeout=60) == [True, True]


def test_a_fork_of_a_rank_is_no_rank(new_ranks: Run) -> None:
    told, nobody = new_ranks(group_cases.calls_of_a_fork, 2, timeout=60)
    assert len(told) == 3 and all("this process is a fork of a rank" in text for text in told) and not nobody


@pytest.mark.parametrize("count", [12, 200])
def test_strangers_do_not_delay_the_first_call(run_ranks: Run, count: int) -> None:
    """One after another, each would have its time, and those of all exceed the timeout of the call."""
    assert run_ranks(group_cases.among_strangers, 3, count, timeout=60) == ["fine"] * 3


def test_an_error_of_a_signal_handler_passes_unchanged(run_ranks: Run) -> None:
    told = f"RuntimeError: {group_cases.KILLED}"
    assert run_ranks(group_cases.errors_of_others, 2, timeout=60) == [[told, told], []]
    assert run_ranks(group_cases.errors_of_others_in_a_post, 2, timeout=60) == [[told]] * 2


def test_tags_tell_calls_and_passes_apart() -> None:
    hops = (0, 1, 1000, SPAN // 2 - 1)
    passes = [(number, backward) for number in (0, 1, 2, TAGS // SPAN - 1) for backward in (False, True)]
    tags = [Tags.of_call(number, backward=backward).of(hop) for number, backward in passes for hop in hops]
    assert len(set(tags)) == len(tags) == 32 and min(tags) >= 0 and max(tags) < TAGS
    again = Tags.of_call(TAGS // SPAN, backward=False)
    assert [again.of(hop) for hop in hops] == tags[:4] and [PLAN_TAGS.of(hop) for hop in hops] == list(hops)
