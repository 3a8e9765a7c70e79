"""Transports between ranks on one machine: one delays messages as modelled links would, one takes no time at all."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...transport.base import Post, Transport, sort_by_tag
from ...transport.launcher import run_local
from ...transport.torchdist import TorchDist

#: How times behind links are obtained; stored in the record.
NETWORK = "MODELLED links between processes of this machine: messages are held back for the time of their link"

#: Maximum number of messages in flight from one rank to another.
SLOTS = 64
#: Fields of a slot of the board: the message's number; the arrival time (time.monotonic), inf until both sides have
#: posted; how many sides have yet to ask for that time.
NUMBER, ARRIVAL, ASKS_LEFT = range(3)


@dataclass(frozen=True)
class Links:
    """`nodes` nodes of `ranks_per_node` ranks, with rates in bytes per second.

    The ranks of a node share one outgoing link to the other nodes (`bandwidth`); within a node, each rank has its own
    link to each of the others (`node_bandwidth`).
    """

    nodes: int
    ranks_per_node: int
    bandwidth: float
    node_bandwidth: float

    @property
    def ranks(self) -> int:
        """The number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    def node(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.ranks_per_node


class MessageBoard:
    """Arrival times of messages between processes of one machine, kept in a memory-mapped file that all share.

    The model: a message starts once both sides have posted it and its link has finished all earlier messages.
    It occupies its link for bytes / rate. Each link is a queue: one for all messages that leave a node, and one for
    each ordered pair of ranks in a node. Both sides post the messages from one rank to another in the same order, and
    number them from 1.
    """

    def __init__(self, path: Path, links: Links) -> None:
        self.links = links
        pairs = links.ranks * links.ranks
        size = pairs * (1 + SLOTS * 3) * 8
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, size)  # a new file reads as zeros; the contents of an existing file stay
        numbers = np.frombuffer(mmap.mmap(self._file, size), dtype=np.float64)
        self._link_free = numbers[:pairs].reshape(links.ranks, links.ranks)
        self._slots = numbers[pairs:].reshape(links.ranks, links.ranks, SLOTS, 3)

    def post(self, source: int, target: int, number: int, size: int) -> None:
        """Record that one side has posted a message of `size` bytes; the second post queues it on its link."""
        with self._locked():
            slot = self._slots[source, target, number % SLOTS]
            if slot[NUMBER] != number:
                assert not slot[ASKS_LEFT], f"more than {SLOTS} messages from rank {source} to rank {target} at a time"
                slot[:] = number, np.inf, 2
                return
            node, target_node = self.links.node(source), self.links.node(target)
            inside = node == target_node
            queue = (source, target) if inside else (node * self.links.ranks_per_node,) * 2
            rate = self.links.node_bandwidth if inside else self.links.bandwidth
            start = max(time.monotonic(), self._link_free[queue])
            self._link_free[queue] = slot[ARRIVAL] = start + size / rate

    def arrival(self, source: int, target: int, number: int) -> float:
        """The message's arrival time (time.monotonic). Each side calls this once, after both sides have posted."""
        with self._locked():
            slot = self._slots[source, target, number % SLOTS]
            assert slot[NUMBER] == number and np.isfinite(slot[ARRIVAL]), "asked before both sides had posted"
            slot[ASKS_LEFT] -= 1
            return float(slot[ARRIVAL])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


class Wrapper:
    """A transport that delegates everything except messages to `inner`."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class DelayedTransport(Wrapper):
    """A transport whose messages arrive no earlier than the links of a MessageBoard would deliver them.

    The messages are really sent, too. Their modelled time passes while the rank computes; `wait` sleeps for the rest,
    which leaves the cores to ranks that compute. Handshakes are not delayed.
    """

    def __init__(self, inner: Transport, board: MessageBoard) -> None:
        assert inner.size == board.links.ranks
        super().__init__(inner)
        self.board = board
        self._posted: Counter[tuple[int, int]] = Counter()

    def post(self, post: Post) -> Any:
        """Start the messages of a step and return a ticket."""
        messages = [((self.rank, message.peer), message) for message in sort_by_tag(post.sends)]
        messages += [((message.peer, self.rank), message) for message in sort_by_tag(post.recvs)]
        keys = []
        for pair, message in messages:
            self._posted[pair] += 1
            keys.append((*pair, self._posted[pair]))
            # Before sending: then the board has the posts of both sides by the time a message arrives.
            self.board.post(*keys[-1], message.data.numel())
        return self.inner.post(post), keys

    def wait(self, ticket: Any) -> None:
        """Block until the messages of a ticket have really arrived and their modelled time is over."""
        inner_ticket, keys = ticket
        self.inner.wait(inner_ticket)
        left = max((self.board.arrival(*key) for key in keys), default=0.0) - time.monotonic()
        if left > 0:
            time.sleep(left)


class InstantMessages:
    """Messages that take no time and deliver zeros, so that a program takes only its computing time."""

    def post(self, post: Post) -> None:
        """Fill the receive buffers with zeros."""
        for message in post.recvs:  # NaNs in a reused buffer would slow kernels down
            message.data.zero_()

    def wait(self, ticket: None) -> None:
        """Return at once: no message is in flight."""


class InstantTransport(InstantMessages, Wrapper):
    """A transport with `InstantMessages`."""


def run_nodes(function: Callable[..., Any], links: Links, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call function(rank, transport, *args) on new Gloo ranks behind links; returns their results in rank order.

    `function` must be importable from its module. `timeout` (seconds) bounds the whole run and every message. Raises
    LaunchFailure with the last output of the ranks if one fails; leaves no process behind.
    """
    with tempfile.TemporaryDirectory(prefix="ringattn-") as scratch:
        board = str(Path(scratch, "board"))
        return run_local(_run_rank, links.ranks, function, links, board, timeout, args, timeout=timeout, threads=1)


def _run_rank(
    rank: int, function: Callable[..., Any], links: Links, board: str, timeout: float, args: tuple[Any, ...]
) -> Any:
    return function(rank, DelayedTransport(TorchDist(timeout=timeout), MessageBoard(Path(board), links)), *args)
