"""A transport that runs all ranks in one process: their programs take turns, and messages are copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import CommFailure
from .base import Compute, Counters, Post, Program, Wait, compute
from .trace import get_trace

#: A buffer in flight of up to SMALL bytes is checked or poisoned entirely, a larger one in the first WATCHED bytes of
#: every PAGE. This catches blocks that are read too early or written too late, at 1 / 1024 of the full cost.
SMALL, PAGE, WATCHED = 1 << 16, 1 << 16, 64
#: The most messages that an error names.
NAMED = 8


T = TypeVar("T")
#: The type of a ticket that a program waits for.
K = TypeVar("K")


@dataclass
class _PostedMessage:
    """A message that one or both sides have posted.

    `watched` are the bytes of `source` that may not change, and as they were at its post; only for host memory, as a
    comparison would wait for a device.
    """

    source: Tensor | None = None
    watched: tuple[Tensor, Tensor] | None = None
    target: Tensor | None = None
    #: Whether both sides have been posted.
    matched: bool = False


#: The messages of one request, with their names for errors.
Named = list[tuple[str, _PostedMessage]]


def in_turns(
    programs: Sequence[Program[T]],
    post: Callable[[int, Post], K],
    is_ready: Callable[[K], bool],
    stuck: Callable[[Mapping[int, K]], str],
    resume: Callable[[K], None] = lambda ticket: None,
) -> list[T]:
    """Run the programs of one process in turns until all end; returns their results in order.

    `post(index, request)` starts the messages of program number `index` and returns a ticket. A program that waits for
    a ticket resumes once `is_ready(ticket)`, right after `resume(ticket)`. Raises CommFailure if no program can resume,
    with the text that `stuck` makes of the awaited tickets. Visits of a kernel that computes them `together` wait until
    no program can resume, and are then launched at once.
    """
    trace, results = get_trace(), dict[int, T]()
    waiting: dict[int, K] = {}
    parked: dict[int, Compute] = {}
    runnable = list(range(len(programs)))
    while runnable:
        for index in runnable:
            if index in waiting:
                resume(waiting.pop(index))
            try:
                request, reply = programs[index].send(None), None
                while not isinstance(request, Wait):
                    if isinstance(request, Post):
                        if trace is not None:
                            trace.advance(index)
                        reply = post(index, request)
                    elif request.kernel.together:
                        parked[index] = request
                        break
                    else:
                        compute(request, index)
                        reply = None
                    request = programs[index].send(reply)
                else:
                    waiting[index] = request.ticket
            except StopIteration as stop:
                results[index] = stop.value
        runnable = [index for index, ticket in waiting.items() if is_ready(ticket)]
        if parked and not runnable:
            _launch_together(parked.values())
            runnable, parked = list(parked), {}
    if waiting:
        raise CommFailure(
            f"the virtual ranks wait for each other forever, which is an error of the plan; please report it: "
            f"{stuck(waiting)}"
        )
    return [results[index] for index in range(len(programs))]


def _launch_together(requests: Iterable[Compute]) -> None:
    """Compute visits of several ranks, those of equal kernels by one launch."""
    by_key: dict[object, list[Compute]] = {}
    for request in requests:
        by_key.setdefault((request.kernel.key, request.backward), []).append(request)
    for group in by_key.values():
        group[0].kernel.launch(group)


class VirtualRanks:
    """`size` ranks in one process, whose programs run in turns.

    A `Transport` carries the messages of one rank, this class those of all. A receive buffer holds invalid data from
    its post to its wait, and a send buffer must not change in between, so a program that would have a race on a real
    network fails here.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.counters = [Counters() for _ in range(size)]
        #: Messages with one side posted, by sender, receiver and tag.
        self._open: dict[tuple[int, int, int], _PostedMessage] = {}

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Run one program per rank, in turns, until all end; returns their results in rank order."""
        assert len(programs) == self.size
        results = in_turns(programs, self._post, _is_ready, self._name_unmatched, _deliver)
        assert not self._open, f"messages that nobody received: {sorted(self._open)}"
        return results

    def _post(self, rank: int, post: Post) -> Named:
        """Match every message of a request with its other side, if already posted."""
        self.counters[rank].add(post)
        ticket: Named = []
        for is_send, messages in ((False, post.recvs), (True, post.sends)):
            for peer, tag, data in messages:
                assert data.numel() > 0 and data.is_contiguous()
                key = (rank, peer, tag) if is_send else (peer, rank, tag)
                name = f"rank {rank}, {post.label}: {'send to' if is_send else 'receive from'} rank {peer}"
                posted = self._open.pop(key, None)
                if posted is None:
                    posted = self._open[key] = _PostedMessage()
                else:
                    posted.matched = True
                watched = _watched(data)
                if is_send:
                    assert posted.source is None, f"{name}: another send has the same tag"
                    posted.source, posted.watched = data, (watched, watched.clone()) if data.is_cpu else None
                else:
                    assert posted.target is None, f"{name}: another receive has the same tag"
                    posted.target = data
                    watched.fill_(255)
                ticket.append((name, posted))
        return ticket

    def _name_unmatched(self, waiting: Mapping[int, Named]) -> str:
        """The names of messages whose other side is not posted."""
        names = [name for ticket in waiting.values() for name, message in ticket if not message.matched]
        return "; ".join(names[:NAMED]) + (" ..." if len(names) > NAMED else "")


def _is_ready(ticket: Named) -> bool:
    """Whether both sides of every message are posted."""
    for _, message in ticket:  # noqa: SIM110  # avoids a Python call for each message
        if not message.matched:
            return False
    return True


def _deliver(ticket: Named) -> None:
    """Deliver the messages of one rank right before it resumes, so that the rank reads them from the cache.

    A message that the other side has delivered is not copied again.
    """
    for name, message in ticket:
        if message.target is None:
            continue
        assert message.source is not None
        if message.watched is not None:
            assert torch.equal(*message.watched), f"{name}: written to while in flight"
        sizes = message.source.numel(), message.target.numel()
        assert sizes[0] == sizes[1], f"{name}: sender and receiver disagree on the size"
        message.target.copy_(message.source)
        message.source = message.target = message.watched = None


def _watched(data: Tensor) -> Tensor:
    """The view of the bytes that are checked or poisoned. All bits set is NaN in every floating dtype."""
    if data.numel() <= SMALL:
        return data
    pages = data.numel() // PAGE
    return data[: pages * PAGE].view(pages, PAGE)[:, :WATCHED]
