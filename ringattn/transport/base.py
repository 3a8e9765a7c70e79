"""The interface between a rank's program and a transport: messages, requests, counters and record exchanges."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import InvalidInput
from .trace import get_trace, named_range


class Message(NamedTuple):
    """A contiguous uint8 tensor to send to `peer`, or to receive from it. Sender and receiver use the same `tag`."""

    peer: int
    tag: int
    data: Tensor


class Post(NamedTuple):
    """A program's request to start messages; the program goes on at once, with a ticket to wait for them later.

    The tensors are in flight until the program has waited for the ticket. `label` names the messages in errors.
    """

    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]
    label: str


class Wait(NamedTuple):
    """Request to resume when all messages of the ticket are done."""

    ticket: Any


class Compute(NamedTuple):
    """Request to compute a visit; the program goes on when it is done.

    `kernel` has a method `launch`, which takes one or several requests and reads the `visit` and the `tensors` of each,
    the arguments after the visit. `label` names the visit in traces.
    """

    kernel: Any
    visit: Any
    tensors: tuple[Any, ...]
    backward: bool
    label: str


T = TypeVar("T")
#: A rank's program: yields requests to post messages, to compute and to wait, and returns its result.
Program = Generator[Post | Compute | Wait, Any, T]


@dataclass
class Counters:
    """Messages and bytes of one rank since the last reset."""

    sent_messages: int = 0
    sent_bytes: int = 0
    received_messages: int = 0
    received_bytes: int = 0

    def add(self, post: Post) -> None:
        """Count the messages of a request."""
        self.sent_messages += len(post.sends)
        self.received_messages += len(post.recvs)
        for message in post.sends:
            self.sent_bytes += message.data.numel()
        for message in post.recvs:
            self.received_bytes += message.data.numel()

    def reset(self) -> None:
        """Set all counters to 0."""
        self.sent_messages = self.sent_bytes = self.received_messages = self.received_bytes = 0


class Carrier(Protocol):
    """The part of a transport that a program needs: it starts messages and waits for them.

    A ticket is the value that `post` returns.
    """

    def post(self, post: Post) -> Any:
        """Start the messages of a step and return a ticket."""

    def wait(self, ticket: Any) -> None:
        """Block until the messages of a ticket are done. Raises CommFailure after the timeout."""


class Transport(Carrier, Protocol):
    """How one of `size` ranks communicates: messages between two ranks, and exchanges of records among all ranks."""

    rank: int
    size: int
    counters: Counters

    @property
    def events(self) -> int:
        """The number of exchanges and deferred calls so far, equal on all ranks."""

    def check(self, device: torch.device) -> None:
        """Raise InvalidInput if this transport does not carry tensors of `device`."""

    def gather(self, record: bytes, stage: str = "exchange") -> list[bytes]:
        """Every rank's record, in rank order. Collective. `stage` names the exchange in errors."""

    def defers(self, check: str | None) -> bool:
        """Whether ranks compare a call while its messages travel (True) or before its first message (False).

        `check` is the caller's option.
        """

    def announce(self, record: bytes) -> int:
        """Begin a call that ranks compare while its messages travel; returns the call's number.

        `record` describes the call in JSON. The number is the call's index among all calls and, in the lowest TAG_BITS
        bits, a digest that distinguishes different calls of the same index.
        """

    def synchronize(self) -> None:
        """Wait until this rank's deferred calls are known to match on all ranks, or raise their error. Collective."""

    def fail(self, text: str) -> None:
        """Report to all ranks, if the transport can, that an exception has ended a call on this rank."""


#: Tags of numbered calls are below TAGS; those of a call start at SPAN times the last TAG_BITS bits of its number.
TAG_BITS, SPAN = 14, 1 << 16
TAGS = SPAN << TAG_BITS


class Tags(NamedTuple):
    """Converts the tags of a plan to tags that also distinguish passes.

    A plan's tags are unique only between two ranks and within one pass.
    """

    first: int
    step: int

    @classmethod
    def of_call(cls, number: int, *, backward: bool) -> Tags:
        """Tags for one pass of call `number`; no other pass in the last TAGS / SPAN calls has the same."""
        return cls(number * SPAN + backward, 2)

    def of(self, tag: int) -> int:
        """The tag of a message whose tag in the plan is `tag`."""
        return (self.first + self.step * tag) % TAGS


#: The tags of the plan, unchanged.
PLAN_TAGS = Tags(0, 1)


#: When ranks compare a call: before its first message, or while its messages travel.
CHECKS = ("now", "deferred")


def check_timeout(timeout: float | None) -> None:
    """Raise InvalidInput unless `timeout` is None or a number of seconds above 0."""
    if timeout is not None and not timeout > 0:
        raise InvalidInput(
            f"timeout={timeout}: must be a number of seconds above 0; leave it out for the transport's default"
        )


def describe_loss(transport: Transport, messages: str, timeout: float, reason: str) -> str:
    """The text of the CommFailure to raise when messages did not arrive."""
    return (
        f"rank {transport.rank} of {transport.size}: {messages}: not done within {timeout:g} s or the peer is gone "
        f"({reason}). Look for the first error among the other ranks; ranks that call ring_attention with other "
        "arguments than before, or in another order, also end here"
    )


def drive(program: Program[T], carrier: Carrier, rank: int = 0) -> T:
    """Run one rank's program and return its result."""
    reply: Any = None
    label = ""
    while True:
        try:
            request = program.send(reply)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, Compute):
            compute(request, rank)
            reply = None
            continue
        trace = get_trace()
        if isinstance(request, Post):
            label, reply = request.label, carrier.post(request)
            if trace is not None:
                trace.post(rank, request, reply)
        else:
            with named_range(rank, f"{label}, wait"):
                carrier.wait(request.ticket)
            reply = None
            if trace is not None:
                trace.wait(request.ticket)


def compute(request: Compute, rank: int) -> None:
    """Compute one visit, which an open trace records under the rank."""
    with named_range(rank, request.label):
        request.kernel.launch((request,))


def sort_by_tag(messages: tuple[Message, ...]) -> list[Message]:
    """The messages in tag order, which is the same on both sides of a pair of ranks."""
    return sorted(messages, key=lambda message: (message.tag, message.peer))
