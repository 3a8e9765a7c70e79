"""Modelled links, for tests and benchmarks: a transport whose messages take as long as a slow network would need, and
one whose messages take no time at all.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...transport.base import Message, Post, Transport

#: Messages between one rank and one other that may be under way at a time.
SLOTS = 64
#: Fields of a message: its tag, how often this tag was used before, when it is through, and how often it was looked up.
TAG, TURN, DUE, LEFT = range(4)


@dataclass(frozen=True)
class Links:
    """`nodes` of `inner` ranks each, bytes per second of their links, and seconds until a byte is through.

    A node has one outer link for all that its ranks send to other nodes (`outer`), and every rank one link of its own
    to its neighbours in the node (`fast`).
    """

    nodes: int
    inner: int
    outer: float
    fast: float
    latency: float = 0.0

    @property
    def ranks(self) -> int:
        return self.nodes * self.inner

    def node(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.inner


class Board:
    """What the processes of one machine know of each other's messages: a file in memory, under a lock.

    The model: a message starts when both sides have posted it, and when the messages before it on its link are through.
    It occupies its link for bytes / rate, and is through `latency` later. Links are queues: one per node for all that
    leaves it, shared by its ranks, and one per pair of ranks of a node and direction.
    """

    def __init__(self, path: Path, links: Links) -> None:
        self.links = links
        cells = links.ranks * links.ranks
        size = cells * (1 + SLOTS * 4) * 8
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, size)  # zeros, or what another process has written already
        whole = np.frombuffer(mmap.mmap(self._file, size), dtype=np.float64)
        self._free = whole[:cells].reshape(links.ranks, links.ranks)
        self._slots = whole[cells:].reshape(links.ranks, links.ranks, SLOTS, 4)

    def post(self, source: int, target: int, tag: int, turn: int, size: int) -> None:
        """One side has posted the message; the second one to do so puts it on its link."""
        with self._lock():
            slot = self._find(source, target, tag, turn)
            if slot is None:
                empty = np.flatnonzero(self._slots[source, target, :, LEFT] == 0)
                assert len(empty), f"more than {SLOTS} messages from rank {source} to rank {target} at a time"
                self._slots[source, target, empty[0]] = tag, turn, np.inf, 2
                return
            here, there = self.links.node(source), self.links.node(target)
            queue = (source, target) if here == there else (here * self.links.inner,) * 2
            start = max(time.monotonic(), self._free[queue])
            self._free[queue] = start + size / (self.links.fast if here == there else self.links.outer)
            slot[DUE] = self._free[queue] + self.links.latency

    def due(self, source: int, target: int, tag: int, turn: int) -> float:
        """When (time.monotonic) the message is through; each side asks once, after both have posted."""
        with self._lock():
            slot = self._find(source, target, tag, turn)
            assert slot is not None and np.isfinite(slot[DUE]), "asked before both sides had posted"
            slot[LEFT] -= 1
            return float(slot[DUE])

    def _find(self, source: int, target: int, tag: int, turn: int) -> np.ndarray | None:
        slots = self._slots[source, target]
        found = np.flatnonzero((slots[:, LEFT] > 0) & (slots[:, TAG] == tag) & (slots[:, TURN] == turn))
        return slots[found[0]] if len(found) else None

    @contextmanager
    def _lock(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


class Delayed:
    """A transport between ranks of one machine whose messages are done no sooner than the model of `Board` says.

    The messages are really sent, too. The modelled time runs while the rank computes; what is left of it at the wait
    is slept, so that no core is taken from those who compute. Handshakes are not delayed.
    """

    def __init__(self, inner: Transport, board: Board) -> None:
        assert inner.size == board.links.ranks
        self.inner, self.board = inner, board
        self.rank, self.size = inner.rank, inner.size
        self.counters, self.calls, self.agreed = inner.counters, inner.calls, inner.agreed
        self._turns: Counter[tuple[int, int, int]] = Counter()

    def check(self, device: torch.device) -> None:
        self.inner.check(device)

    def post(self, post: Post) -> Any:
        names = [self._name(m, self.rank, m.peer) for m in post.sends]
        names += [self._name(m, m.peer, self.rank) for m in post.recvs]
        for name, message in zip(names, (*post.sends, *post.recvs), strict=True):
            self.board.post(*name, message.data.numel())  # first: a message that has arrived was posted by both
        return self.inner.post(post), names

    def wait(self, ticket: Any) -> None:
        sent, names = ticket
        self.inner.wait(sent)
        left = max((self.board.due(*name) for name in names), default=0.0) - time.monotonic()
        if left > 0:
            time.sleep(left)

    def gather(self, record: bytes) -> list[bytes]:
        return self.inner.gather(record)

    def _name(self, message: Message, source: int, target: int) -> tuple[int, int, int, int]:
        key = source, target, message.tag
        self._turns[key] += 1
        return *key, self._turns[key]


class Free:
    """A transport whose messages take no time, and bring zeros: what is left of a program is its computing."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.counters, self.calls, self.agreed = inner.counters, inner.calls, inner.agreed

    def check(self, device: torch.device) -> None:
        self.inner.check(device)

    def post(self, post: Post) -> None:
        for message in post.recvs:  # what a reused buffer holds may be NaN, of which kernels make exceptions
            message.data.zero_()

    def wait(self, ticket: None) -> None:
        """Nothing is under way."""

    def gather(self, record: bytes) -> list[bytes]:
        return self.inner.gather(record)
