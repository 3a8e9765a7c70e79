"""Frames of records, without ranks."""

from __future__ import annotations

import socket
import time

import pytest
import torch.distributed as dist

from ringattn import CommFailure, Mismatch
from ringattn.transport.channel import Channel
from ringattn.transport.comparison import Comparison
from ringattn.transport.records import VALUE, Exchange, frame, open_frame


def test_frames() -> None:
    assert open_frame(frame("plan", b"\x00\xff", VALUE), 3, "plan") == b"\x00\xff"
    with pytest.raises(Mismatch, match="rank 3 is at stage 'plan' of a call where others are at stage 'call'"):
        open_frame(frame("plan", b"", VALUE), 3, "call")
    with pytest.raises(Mismatch, match="rank 3 sent 1 byte where the ranks exchange"):
        open_frame(b"r", 3, "call")


class Lost:
    """A transport whose ranks are gone."""

    def gather(self, record: bytes, stage: str) -> list[bytes]:
        from ringattn import CommFailure

        raise CommFailure("the others are gone")


def test_an_exception_that_nobody_can_be_told_of_is_raised_nevertheless() -> None:
    with pytest.raises(ZeroDivisionError), Exchange(Lost(), "plan"):
        raise ZeroDivisionError


def test_a_rank_that_is_not_reached_is_told_with_the_network() -> None:
    """Between nodes an address may lead nowhere, such as that of a loopback interface."""
    with socket.socket() as nobody:  # a port on which nobody listens
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        store = dist.HashStore()
        store.set("1", f"127.0.0.1 {port} {'00' * 16} node-b")
        rank = object.__new__(Channel)
        rank.rank, rank.size, rank.comparison = 0, 2, Comparison(0, 2, print)
        rank.comparison.hosts[0] = "node-a"
        with pytest.raises(CommFailure, match=f"rank 1 on node-b: no connection to 127.0.0.1:{port} .*IFNAME on"):
            rank._call(store, 1, time.monotonic() + 0.3)
