"""All ranks in one process: their programs take turns, and messages are copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..errors import CommFailure
from .base import Counters, Message, Post, Program, Wait

T = TypeVar("T")
#: A small buffer in flight is watched, or poisoned, as a whole, a larger one in the first WATCHED bytes of every PAGE:
#: enough to catch a block read too early or written too late, at 1 / 1024 of the cost of touching all of it.
SMALL, PAGE, WATCHED = 1 << 16, 1 << 16, 64


@dataclass
class _PostedMessage:
    """A message with one or both sides posted."""

    source: torch.Tensor | None = None
    snapshot: torch.Tensor | None = None
    target: torch.Tensor | None = None
    done: bool = False

    @property
    def matched(self) -> bool:
        return self.source is not None and self.target is not None

    def deliver(self, name: str) -> None:
        if self.done:
            return
        assert self.source is not None and self.target is not None and self.snapshot is not None
        assert torch.equal(_watched(self.source), self.snapshot), f"{name}: written to while in flight"
        assert self.source.numel() == self.target.numel(), f"{name}: sender and receiver disagree on the size"
        self.target.copy_(self.source)
        self.done, self.source, self.target = True, None, None


@dataclass
class _VirtualTicket:
    label: str
    flights: list[tuple[str, _PostedMessage]] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Whether both sides of every message are posted."""
        return all(flight.done or flight.matched for _, flight in self.flights)


def in_turns(
    programs: Sequence[Program[T]],
    post: Callable[[int, Post], Any],
    stuck: Callable[[Mapping[int, Any]], str],
    resume: Callable[[Any], None] = lambda ticket: None,
) -> list[T]:
    """Run programs of one process to the end, in turns, and return their results in order.

    `post` takes a program's number and its request, and gives a ticket, whose `ready` says whether a wait for it ends;
    `resume` is called with it right before its program goes on. Where nobody can, CommFailure is raised with what `stuck`
    says of the tickets that are waited for.
    """
    results: list[Any] = [None] * len(programs)
    waiting: dict[int, Any] = {}
    free = list(range(len(programs)))
    while free:
        for index in free:
            if index in waiting:
                resume(waiting.pop(index))
            try:
                request = programs[index].send(None)
                while isinstance(request, Post):
                    request = programs[index].send(post(index, request))
            except StopIteration as stop:
                results[index] = stop.value
                continue
            assert isinstance(request, Wait)
            waiting[index] = request.ticket
        free = [index for index, ticket in waiting.items() if ticket.ready]
    if waiting:
        raise CommFailure(f"the virtual ranks wait for each other forever: {stuck(waiting)}")
    return results


class Virtual:
    """`size` ranks of one process. A receive buffer is poisoned from its post to its wait, and a send buffer
    must not change in between, so that a program that would race on a real fabric fails here.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.counters = [Counters() for _ in range(size)]
        self._open: dict[tuple[int, int, int], _PostedMessage] = {}

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Run one program per rank to the end, in turns, and return their results in rank order."""
        assert len(programs) == self.size
        results = in_turns(programs, self._post, self._stuck, self._deliver)
        assert not self._open, f"messages that nobody received: {sorted(self._open)}"
        return results

    def _post(self, rank: int, post: Post) -> _VirtualTicket:
        self.counters[rank].add(post)
        ticket = _VirtualTicket(post.label)
        for message in post.recvs:
            flight = self._flight((message.peer, rank, message.tag), message)
            assert flight.target is None, f"rank {rank}, {post.label}: two receives share peer and tag"
            _watched(message.data).fill_(255)
            flight.target = message.data
            ticket.flights.append((f"rank {rank}, {post.label}: receive from rank {message.peer}", flight))
            self._close(flight, (message.peer, rank, message.tag))
        for message in post.sends:
            flight = self._flight((rank, message.peer, message.tag), message)
            assert flight.source is None, f"rank {rank}, {post.label}: two sends share peer and tag"
            flight.source, flight.snapshot = message.data, _watched(message.data).clone()
            ticket.flights.append((f"rank {rank}, {post.label}: send to rank {message.peer}", flight))
            self._close(flight, (rank, message.peer, message.tag))
        return ticket

    def _flight(self, key: tuple[int, int, int], message: Message) -> _PostedMessage:
        assert message.data.numel() > 0 and message.data.is_contiguous()
        return self._open.setdefault(key, _PostedMessage())

    def _close(self, flight: _PostedMessage, key: tuple[int, int, int]) -> None:
        if flight.matched:
            del self._open[key]

    def _deliver(self, ticket: _VirtualTicket) -> None:
        # Messages of one rank at a time, right before it runs: what it reads next is still in the cache.
        for name, flight in ticket.flights:
            flight.deliver(name)

    def _stuck(self, waiting: Mapping[int, _VirtualTicket]) -> str:
        names = [n for ticket in waiting.values() for n, f in ticket.flights if not f.done and not f.matched]
        return "; ".join(names[:8]) + (" ..." if len(names) > 8 else "")


def _watched(data: torch.Tensor) -> torch.Tensor:
    """The view of the bytes that are watched. All bits set is NaN in every floating dtype."""
    if data.numel() <= SMALL:
        return data
    pages = data.numel() // PAGE
    return data[: pages * PAGE].view(pages, PAGE)[:, :WATCHED]
