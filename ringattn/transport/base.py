"""What an executor asks of a transport, and what a transport counts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from ..errors import InvalidInput, Mismatch
from .records import Agreed


@dataclass(frozen=True)
class Message:
    """A contiguous uint8 tensor to send to, or to receive from, `peer`; `tag` is equal on both sides."""

    peer: int
    tag: int
    data: torch.Tensor


@dataclass(frozen=True)
class Post:
    """Start these messages; resumed at once with a ticket. Their tensors are in flight until it is waited for."""

    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]
    label: str


@dataclass(frozen=True)
class Wait:
    """Resume when all messages of the ticket are done."""

    ticket: Any


T = TypeVar("T")
#: A rank's program: yields Post and Wait requests, returns its result.
Program = Generator[Post | Wait, Any, T]


@dataclass
class Counters:
    """Messages and bytes of one rank since the last reset."""

    sent_messages: int = 0
    sent_bytes: int = 0
    received_messages: int = 0
    received_bytes: int = 0

    def add(self, post: Post) -> None:
        self.sent_messages += len(post.sends)
        self.sent_bytes += sum(message.data.numel() for message in post.sends)
        self.received_messages += len(post.recvs)
        self.received_bytes += sum(message.data.numel() for message in post.recvs)

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


class Carrier(Protocol):
    """Starts messages, and waits for them: all that a program needs."""

    def post(self, post: Post) -> Any:
        """Start the messages of a step and return a ticket."""

    def wait(self, ticket: Any) -> None:
        """Block until the messages of a ticket are done; CommFailure where they do not within the timeout."""


class Transport(Carrier, Protocol):
    """Point-to-point messages of one rank among `size` ranks."""

    rank: int
    size: int
    counters: Counters
    #: The numbers of the calls of the ring, 0, 1, 2 ..., in the order in which all ranks make them.
    calls: Iterator[int]
    #: The last handshakes of these ranks; filled by `agreement.agree`.
    agreed: Agreed

    def check(self, device: torch.device) -> None:
        """Raise InvalidInput where this transport does not carry tensors of `device`."""

    def gather(self, record: bytes) -> list[bytes]:
        """Every rank's record, in rank order. Collective."""


#: The tags of messages of numbered calls are below TAGS, and the first ones of two calls in a row are SPAN apart.
TAGS, SPAN = 1 << 28, 1 << 16


def readdressed(program: Program[T], change: Callable[[Message], Message]) -> Program[T]:
    """The same program with every message that it posts replaced by `change(message)`."""
    reply: Any = None
    while True:
        try:
            request = program.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if isinstance(request, Post):
            sends, recvs = (tuple(map(change, messages)) for messages in (request.sends, request.recvs))
            request = Post(sends, recvs, request.label)
        reply = yield request


def numbered(program: Program[T], number: int, *, backward: bool) -> Program[T]:
    """The program of a call, with tags that tell its messages from those of all other calls and of the other pass.

    Tags repeat after TAGS / SPAN calls. A program alone has the tags of its plan, which are unique between two ranks.
    """
    first = number * SPAN + backward
    return readdressed(program, lambda message: replace(message, tag=(first + 2 * message.tag) % TAGS))


#: Bytes that tell the length of a record, and the most bytes of a record.
HEAD, LONGEST = 8, 1 << 32
#: The name of an exchange of records in errors.
RECORDS = "records of all ranks, before the first message"


def check_timeout(timeout: float | None) -> None:
    """Raise InvalidInput where `timeout` is neither None nor a number of seconds."""
    if timeout is not None and not timeout > 0:
        raise InvalidInput(f"timeout={timeout}: must be a number of seconds above 0")


def gather_in_rounds(exchange: Callable[[bytes], list[bytes]], record: bytes, short: int) -> list[bytes]:
    """Every rank's record, by an `exchange` of equally long ones: one round where none is longer than `short` bytes.

    The first round carries each record's length and its start; a second one, as long as the longest, the rest.
    """
    first = exchange(len(record).to_bytes(HEAD, "little") + record[:short].ljust(short, b"\0"))
    sizes = [int.from_bytes(raw[:HEAD], "little") for raw in first]
    for rank, size in enumerate(sizes):
        if size > LONGEST:  # on all ranks alike, which see the same bytes
            raise Mismatch(
                f"rank {rank} announces a record of {size:,} bytes, where at most {LONGEST:,} are expected: what it sent "
                "is no record; nothing else may use this transport meanwhile"
            )
    more = max(sizes) - short
    rest = exchange(record[short:].ljust(more, b"\0")) if more > 0 else [b""] * len(sizes)
    return [(a[HEAD:] + b)[:size] for a, b, size in zip(first, rest, sizes, strict=True)]


def drive(program: Program[T], transport: Carrier) -> T:
    """Run one rank's program on a transport."""
    reply: Any = None
    while True:
        try:
            request = program.send(reply)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, Post):
            reply = transport.post(request)
        else:
            transport.wait(request.ticket)
            reply = None


def by_tag(messages: tuple[Message, ...]) -> list[Message]:
    """In tag order, in which both sides of a pair list their messages."""
    return sorted(messages, key=lambda message: (message.tag, message.peer))
