"""Process groups end when their program says so, and what travels on them is told apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import group_cases
import pytest
import torch

from ringattn.transport.base import SPAN, TAGS, Message, Post, drive, number_tags

Run = Callable[..., list[Any]]
pytestmark = pytest.mark.multi

#: Each cycle makes and destroys 4 groups; the first cycles warm up what a process holds anyway.
CYCLES, WARM = 25, 6


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


def test_an_error_of_a_signal_handler_passes_unchanged(run_ranks: Run) -> None:
    told = f"RuntimeError: {group_cases.KILLED}"
    assert run_ranks(group_cases.errors_of_others, 2, timeout=60) == [[told, told], []]
    assert run_ranks(group_cases.errors_of_others_in_a_post, 2, timeout=60) == [[told, told]] * 2


def test_tags_tell_calls_and_passes_apart() -> None:
    class Heard:
        def __init__(self) -> None:
            self.tags: list[int] = []

        def post(self, post: Post) -> None:
            self.tags += [message.tag for message in (*post.sends, *post.recvs)]

        def wait(self, ticket: None) -> None: ...

    def program() -> Any:
        data = torch.zeros(1, dtype=torch.uint8)
        for hop in (0, 1, 1000, SPAN // 2 - 1):
            yield Post((Message(0, hop, data),), (Message(1, hop, data),), "step")

    heard = Heard()
    for number in (0, 1, 2, TAGS // SPAN - 1):
        for backward in (False, True):
            drive(number_tags(program(), number, backward=backward), heard)
    assert heard.tags[::2] == heard.tags[1::2] and len(set(heard.tags)) == len(heard.tags) // 2 == 32
    assert min(heard.tags) >= 0 and max(heard.tags) < TAGS
    again = Heard()
    drive(number_tags(program(), TAGS // SPAN, backward=False), again)
    assert again.tags == heard.tags[:8]
