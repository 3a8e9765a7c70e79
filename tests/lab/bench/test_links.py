"""Two nodes on one machine behind modelled links. No time is asserted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import rank_cases
import torch

from ringattn.errors import LaunchFailure
from ringattn.lab.bench import links as bench_links
from ringattn.lab.bench.links import SLOTS, DelayedTransport, InstantTransport, Links, MessageBoard, run_nodes
from ringattn.transport.base import Message, Post

LINKS = Links(2, 2, 1e9, 1e10)


@pytest.mark.multi
def test_two_nodes_equal_virtual_and_the_plan() -> None:
    """ring, direct, allgather and double_ring(2): bit for bit the virtual ranks, and the planned bytes."""
    assert run_nodes(rank_cases.on_nodes, LINKS, timeout=150) == [16] * 4


@pytest.mark.multi
def test_a_failure_behind_links_names_the_rank() -> None:
    with pytest.raises(LaunchFailure, match="a bad day on rank one"):
        run_nodes(rank_cases.fail_behind, Links(2, 1, 1e9, 1e10), "raise", timeout=60)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only sleeping moves; its one entry is the time."""
    now = [100.0]
    monkeypatch.setattr(bench_links.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(bench_links.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_links_are_queues(clock: list[float], tmp_path: Path) -> None:
    board = MessageBoard(tmp_path / "board", Links(2, 2, 10.0, 100.0))
    other = MessageBoard(tmp_path / "board", board.links)  # of another process
    for source, target, number in ((0, 2, 1), (1, 3, 1), (0, 1, 1), (2, 0, 1), (0, 2, 2)):
        board.post(source, target, number, 20)
    clock[0] = 103.0
    for source, target in ((1, 3), (0, 2), (0, 1), (2, 0)):
        other.post(source, target, 1, 20)
    # A message starts when the second side posts; both ranks of node 0 share its outer link, in that order.
    assert board.arrival(1, 3, 1) == other.arrival(1, 3, 1) == 105.0
    assert other.arrival(0, 2, 1) == 107.0
    assert other.arrival(2, 0, 1) == 105.0  # the way back is another link
    assert other.arrival(0, 1, 1) == pytest.approx(103.2)
    with pytest.raises(AssertionError, match="before both sides"):
        board.arrival(0, 2, 2)
    # A place is free again when both sides have asked.
    for number in range(1, 2 * SLOTS):
        for side in (board, other):
            side.post(3, 2, number, 1)
        assert board.arrival(3, 2, number) == other.arrival(3, 2, number)


def test_only_what_is_left_of_a_delay_is_slept(clock: list[float], tmp_path: Path) -> None:
    links, waited = Links(2, 2, 10.0, 100.0), list[str]()
    peer, board = (MessageBoard(tmp_path / "board", links) for _ in range(2))
    inner = SimpleNamespace(rank=0, size=4, post=lambda post: post.label, wait=waited.append)  # sends nothing
    transport = DelayedTransport(inner, board)  # type: ignore[arg-type]
    data = torch.zeros(30, dtype=torch.uint8)
    for wanted in (103.0, 106.0):  # equal tags, one after the other
        ticket = transport.post(Post((Message(2, 0, data),), (Message(1, 0, data),), "step"))
        number = 1 if wanted == 103.0 else 2
        peer.post(0, 2, number, 30)
        peer.post(1, 0, number, 30)
        clock[0] += 2.0  # computing
        transport.wait(ticket)
        assert clock[0] == wanted
    ticket = transport.post(Post((), (Message(1, 5, data),), "step"))
    peer.post(1, 0, 3, 30)
    clock[0] += 7.0
    transport.wait(ticket)
    assert clock[0] == 113.0  # nothing was left
    assert waited == ["step"] * 3


def test_free_messages_bring_zeros() -> None:
    data = torch.from_numpy(np.full(8, 255, dtype=np.uint8))
    transport = InstantTransport(None)  # type: ignore[arg-type]
    transport.wait(transport.post(Post((), (Message(1, 0, data),), "step")))
    assert not data.any()
