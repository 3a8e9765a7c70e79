"""How ranks compare what they do while messages travel: one rank's part, without sockets or threads.

Ranks act together in a sequence of events with the same numbers on all ranks: calls, backwards and record exchanges.

- For a deferred event (`announce`) a rank sends a fingerprint, a digest, to the next rank, and goes on. Each rank
  compares the previous rank's fingerprints with its own. Equality is transitive, so one message per rank and event
  compares all ranks.
- An exchange (`contribute`) gives every rank the records of all ranks in ceil(log2 P) rounds: in round k a rank sends
  all that it has to the rank 2^k ahead (Bruck et al., IEEE TPDS 8(11), 1997). A rank takes part once the fingerprints
  of all earlier events have arrived from the previous rank and equal its own. A completed exchange therefore proves
  that all earlier events match on all ranks.

If a fingerprint differs, or an exchange does not end in time, the rank that notices reports it to all ranks, every rank
reports where it stands, and all raise the same error (`records.explain`). Exceptions and the end of a process are
reported in the same way. Such an error is final: the group can make no more calls.
"""

from __future__ import annotations

import json
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from ..errors import CommFailure, Mismatch, RingAttentionError
from .records import add_hosts, explain

#: Kind, number of the event (or rank that begins a report), and length of the body.
HEAD = struct.Struct("<BQI")
#: Kinds of frames: a fingerprint, a round of an exchange, the end of a rank, and four reports that every rank relays.
FINGERPRINT, ROUND, BYE, FAILED, LOST, PARTED, STANDING = range(7)
#: The own events that a rank keeps to explain how ranks differ.
HISTORY = 4096
#: Seconds in which ranks must report where they stand after an error.
GRACE = 2.0


class Event(NamedTuple):
    """One thing that all ranks do together: a call or an exchange, described by the JSON `record`.

    For a call, `fingerprint` is a digest of its arguments; for an exchange it is b"".
    """

    fingerprint: bytes
    record: bytes


@dataclass
class Gathering:
    """An exchange in progress: the records by rank, and rounds that have arrived early."""

    records: dict[int, bytes] = field(default_factory=dict)
    arrived: dict[int, dict[int, bytes]] = field(default_factory=dict)
    sent: int = 0
    received: int = 0


class Comparison:
    """One rank's part in comparing what all ranks do; it sends and receives frames, without sockets or threads.

    `send(peer, frame)` must keep the order of frames to a peer. Not thread-safe.
    """

    def __init__(self, rank: int, size: int, send: Callable[[int, bytes], None]) -> None:
        self.rank, self.size, self._send = rank, size, send
        self.rounds = (size - 1).bit_length()
        #: The ranks that this rank exchanges frames with.
        self.peers = sorted({(rank + way * 2**k) % size for k in range(self.rounds) for way in (1, -1)} - {rank})
        #: The hosts of this rank and of its peers, if known.
        self.hosts: dict[int, str] = {}
        #: The number of events of this rank, and how many of them match the previous rank's.
        self.count = self._compared = 0
        #: The number of first events that are known to match on all ranks.
        self.confirmed = 0
        #: The error that ends the group's calls, once it is known.
        self.error: RingAttentionError | None = None
        #: Whether the error is a lost process: messages already sent may still arrive.
        self.is_loss = False
        self._events: dict[int, Event] = {}
        self._before: deque[bytes] = deque()
        self._gatherings: dict[int, Gathering] = {}
        self._ended: dict[int, int] = {}
        self._reports: set[tuple[int, int]] = set()
        self._standings: dict[int, dict[str, Any]] = {}
        self._parted: tuple[int, str] | None = None
        self.deadline: float | None = None
        #: Set when an exchange has ended or an error is known.
        self.has_news = False

    # What this rank does.

    def announce(self, event: Event) -> int:
        """Begin a call that ranks compare while its messages travel; returns its number."""
        number = self._add(event)
        self._send((self.rank + 1) % self.size, _frame(FINGERPRINT, number, event.fingerprint))
        self._advance()
        return number

    def contribute(self, record: bytes, label: bytes) -> int:
        """Begin an exchange of records with all ranks; returns its number, with which `take` gets the result.

        `label` describes the purpose in JSON.
        """
        number = self._add(Event(b"", label))
        self._gathering(number).records[self.rank] = record
        self._advance()
        return number

    def take(self, number: int) -> list[bytes] | None:
        """The records of all ranks, in rank order, or None if the exchange has not ended."""
        if self._gatherings[number].received < self.rounds:
            return None
        records = self._gatherings.pop(number).records
        self.confirmed = max(self.confirmed, number + 1)
        return [records[rank] for rank in range(self.size)]

    def next_sender(self, number: int) -> int:
        """The rank whose frame an exchange needs next."""
        return (self.rank - 2 ** self._gatherings[number].received) % self.size

    def fail(self, text: str) -> None:
        """Report to all ranks that this rank has raised an exception."""
        if self.error is None:
            self._report(FAILED, self.rank, text.encode())
            self._end_by(
                CommFailure(
                    f"rank {self.rank} of {self.size} left an earlier call by an error, and the other ranks have "
                    "stopped; end the job, or make a new group on all ranks"
                )
            )

    def part(self, number: int, why: str) -> None:
        """Tell all ranks that they differ from event `number` on, so that all raise an error.

        `why` says what is late; it is "" if the fingerprints of two ranks differ.
        """
        if self.error is None and self._parted is None:
            self._report(PARTED, self.rank, json.dumps([number, why]).encode())
            self._stand(number, why)

    def end(self) -> None:
        """Tell the connected ranks that this rank takes part in no further events."""
        for peer in self.peers:
            self._send(peer, _frame(BYE, self.count, b""))

    # What other ranks report.

    def receive(self, peer: int, kind: int, number: int, body: bytes) -> None:
        """Process a frame from a peer."""
        if kind == FINGERPRINT:
            self._before.append(body)
        elif kind == ROUND:
            round, parts = body[0], _unpack(body[1:])
            if round == 0:
                self._before.append(b"")
            ranks = ((self.rank - 2**round - distance) % self.size for distance in range(len(parts)))
            self._gathering(number).arrived[round] = dict(zip(ranks, parts, strict=True))
        elif kind == BYE:
            self._ended[peer] = number
        elif (kind, number) not in self._reports:
            self._report(kind, number, body, but=peer)
            self._hear(kind, number, body)
        self._advance()

    def lose(self, peer: int) -> None:
        """Note that the connection to a peer has ended."""
        if peer not in self._ended:
            self._tell_loss(peer, f"rank {peer} is gone: its process has ended, or its host; look for its first error")

    def tick(self) -> None:
        """Check the time; once the other ranks should have reported, build the error from the reports that came.

        Must be called repeatedly.
        """
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self._conclude()

    def _hear(self, kind: int, rank: int, body: bytes) -> None:
        """Process a report that rank `rank` has begun."""
        if kind == STANDING:
            self._standings[rank] = json.loads(body)
        elif kind == PARTED and self._parted is None:
            self._stand(*json.loads(body))
        elif kind == LOST:
            self._end_by(CommFailure(body.decode()), is_loss=True)
        elif kind == FAILED:
            self._end_by(Mismatch(f"rank {rank} cannot take part: {body.decode(errors='replace')}"))

    def _stand(self, number: int, why: str) -> None:
        """Report to all ranks what this rank has done at event `number`."""
        self._parted, self.deadline = (number, why), time.monotonic() + GRACE
        event = self._events.get(number)
        mine: dict[str, Any] = {"count": self.count, "record": None if event is None else event.record.decode()}
        came = self.rounds * (self._compared > number)
        progress = self._gatherings.get(number, Gathering(sent=self.rounds, received=came))
        mine |= {"sent": progress.sent, "received": progress.received, "hosts": [*self.hosts.items()]}
        self._standings[self.rank] = mine
        self._report(STANDING, self.rank, json.dumps(mine).encode())

    def _report(self, kind: int, rank: int, body: bytes, but: int | None = None) -> None:
        """Pass a report on to all peers, once."""
        self._reports.add((kind, rank))
        for peer in self.peers:
            if peer != but:
                self._send(peer, _frame(kind, rank, body))

    # What follows from both.

    def _add(self, event: Event) -> int:
        number = self.count
        self._events[number] = event
        self._events.pop(number - HISTORY, None)
        self.count += 1
        return number

    def _gathering(self, number: int) -> Gathering:
        return self._gatherings.setdefault(number, Gathering())

    def _advance(self) -> None:
        """Compare the fingerprints that have arrived, and continue exchanges."""
        while self._before and self._compared < self.count and self._parted is None:
            if self._events[self._compared].fingerprint != self._before.popleft():
                self.part(self._compared, "")
            else:
                self._compared += 1
        for number, gathering in [*self._gatherings.items()]:
            self._exchange(number, gathering)
        for peer, count in self._ended.items():
            if self.count > count and self._parted is None:
                self._tell_loss(peer, f"rank {peer} has left the group, while rank {self.rank} makes another call")
        if self._parted is not None and len(self._standings) == self.size:
            self._conclude()

    def _tell_loss(self, peer: int, text: str) -> None:
        """Report to all ranks that a peer is gone."""
        if self.error is None:
            text = add_hosts(text, self.hosts)
            self._report(LOST, peer, text.encode())
            self._end_by(CommFailure(text), is_loss=True)

    def _end_by(self, error: RingAttentionError, *, is_loss: bool = False) -> None:
        """Record the first error, which ends the calls of this rank."""
        if self.error is None:
            self.error, self.is_loss, self.has_news, self.deadline = error, is_loss, True, None

    def _exchange(self, number: int, gathering: Gathering) -> None:
        """Send and receive the rounds of an exchange that are possible now."""
        if self.rank not in gathering.records or self._compared < number or self.error or self._parted:
            return
        while gathering.received < self.rounds:
            round, reach = gathering.received, 2**gathering.received
            if gathering.sent == round:
                parts = [gathering.records[(self.rank - x) % self.size] for x in range(min(reach, self.size - reach))]
                frame = _frame(ROUND, number, bytes((round,)) + _pack(parts))
                self._send((self.rank + reach) % self.size, frame)
                gathering.sent += 1
            if round not in gathering.arrived:
                return
            gathering.records.update(gathering.arrived.pop(round))
            gathering.received += 1
        self.has_news = True

    def _conclude(self) -> None:
        """Make the error from the ranks' reports."""
        assert self._parted is not None
        self.deadline = None
        number, why = self._parted
        self._end_by(explain(self._standings, number, why, self.size))


def _frame(kind: int, number: int, body: bytes) -> bytes:
    return HEAD.pack(kind, number, len(body)) + body


def read_frames(data: bytearray) -> Iterator[tuple[int, int, bytes]]:
    """Remove the complete frames at the start of `data`, and yield their (kind, number, body)."""
    while len(data) >= HEAD.size:
        kind, number, length = HEAD.unpack_from(data)
        if len(data) < HEAD.size + length:
            return
        body = bytes(data[HEAD.size : HEAD.size + length])
        del data[: HEAD.size + length]
        yield kind, number, body


def _pack(parts: list[bytes]) -> bytes:
    """Encode the parts; equal neighbours are written once, so equal records take no more bytes on more ranks."""
    return b"".join(_RUN.pack(len([*run]), len(part)) + part for part, run in groupby(parts))


def _unpack(data: bytes) -> list[bytes]:
    parts, first = list[bytes](), 0
    while first < len(data):
        times, length = _RUN.unpack_from(data, first)
        first += _RUN.size + length
        parts += [data[first - length : first]] * times
    return parts


#: The number of repetitions of a part of a round, and its length.
_RUN = struct.Struct("<HI")
