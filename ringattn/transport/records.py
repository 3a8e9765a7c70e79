"""Records that ranks exchange in addition to a plan's messages: frames, errors of other ranks, and comparisons.

Every exchange has a stage: a name such as "plan". Each rank sends exactly one frame per exchange: magic bytes, the
version of this protocol, the kind of the frame (a value or an exception), the name of the stage, and a body. A frame
that cannot be decoded, or that belongs to another stage, is a Mismatch that names its rank.

The stage matters when a rank has left a call early: its next frame meets the other ranks' frames of the old call. All
ranks raise in that exchange, so in the next call they are in step again.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from msgspec import msgpack

from ..errors import CommFailure, Mismatch, RingAttentionError
from ..text import plural

if TYPE_CHECKING:
    from .base import Transport

MAGIC, VERSION = b"ra", 1
#: Kinds of frames: a value, or the text of an exception.
VALUE, FAILED = range(2)
#: Bytes of a frame before the name of its stage: magic, version, kind, length of the name.
PREFIX = 5
#: The most characters of an error that other ranks repeat.
QUOTED = 1500
#: The name of a record exchange in errors.
RECORDS = "records of all ranks"
#: Bytes of a digest: ranks compare digests of what they are about to do and of what they have done.
FINGERPRINT_BYTES = 8


def digest(data: bytes) -> bytes:
    """A digest of `data`, FINGERPRINT_BYTES long."""
    return hashlib.blake2b(data, digest_size=FINGERPRINT_BYTES).digest()


def describe_error(error: BaseException) -> str:
    """The text with which other ranks report an exception."""
    if isinstance(error, RingAttentionError):
        return str(error)[:QUOTED]
    return f"it raised {type(error).__name__}: {error}"[:QUOTED] + ". Look at that rank's own traceback"


class ErrorReport:
    """A context that reports an exception in its block to the other ranks: `with ErrorReport(transport, stage): ...`.

    The other ranks receive the report in their exchange of that stage; with `deferred`, at once, wherever they are.
    Exceptions of the types in `common` are not reported, because they occur on every rank alike. The exception
    propagates on this rank, even if the report fails. If the block raises nothing, nothing is sent. With `once`, an
    error that an exchange within the block has already reported is not sent again: the other ranks have raised it, and
    would take the report for their next call.
    """

    def __init__(
        self, transport: Transport, stage: str, *, deferred: bool = False, common: tuple[type[Exception], ...] = (),
        once: bool = False,
    ) -> None:  # fmt: skip
        self.transport, self.stage, self.deferred, self.common, self.once = transport, stage, deferred, common, once

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            try:
                self._finish()
            except RingAttentionError as found:
                found.told = True
                raise
            return
        if isinstance(error, RingAttentionError):
            if self.once and error.told:
                return
            error.told = not self.deferred
        if self.deferred:
            if not isinstance(error, self.common):
                self.transport.fail(describe_error(error))
            return
        report = frame(self.stage, describe_error(error).encode(errors="replace"), FAILED)
        with suppress(RingAttentionError):  # the exception of the block propagates, as it is the cause
            self.transport.gather(report, self.stage)

    def _finish(self) -> None:
        """Called if the block has raised nothing."""


class Exchange(ErrorReport):
    """A context that exchanges one record per rank. Collective.

    Use it as `with Exchange(transport, stage) as exchange: exchange.mine = b"..."`. After the block `exchange.records`
    holds the records of all ranks, in rank order. If the block of one rank raises, that rank raises its exception and
    the other ranks raise a Mismatch that names the rank. `limit` is the largest allowed size of a record in bytes.
    """

    def __init__(self, transport: Transport, stage: str, limit: int | None = None, *, once: bool = False) -> None:
        super().__init__(transport, stage, once=once)
        self.limit, self.mine = limit, b""
        self.records: list[bytes] = []

    def _finish(self) -> None:
        assert self.limit is None or len(self.mine) <= self.limit, f"{self.stage}: {len(self.mine):,} bytes"
        frames = self.transport.gather(frame(self.stage, self.mine, VALUE), self.stage)
        self.records = [open_frame(raw, rank, self.stage) for rank, raw in enumerate(frames)]


def exchange_values(transport: Transport | None, stage: str, value: Any, kind: Any = Any) -> list[Any]:
    """The values of all ranks, in rank order, as msgspec decodes type `kind`; [value] without ranks. Collective."""
    if transport is None:
        return [value]
    with Exchange(transport, stage) as exchange:
        exchange.mine = msgpack.encode(value)
    return [msgpack.decode(raw, type=kind) for raw in exchange.records]


def frame(stage: str, body: bytes, kind: int) -> bytes:
    """Pack `body` with a header that names its stage and its kind, VALUE or FAILED."""
    name = stage.encode()
    return MAGIC + bytes((VERSION, kind, len(name))) + name + body


def open_frame(raw: bytes, rank: int, stage: str) -> bytes:
    """Unpack what `frame` packed; raises a Mismatch that names the rank if this is no value for the given stage."""
    if len(raw) < PREFIX or not raw.startswith(MAGIC):
        raise Mismatch(
            f"rank {rank} sent {plural(len(raw), 'byte')} where the ranks exchange handshake records of stage "
            f"{stage!r}; make the same calls in the same order on all ranks, and let nothing else use this transport "
            "meanwhile"
        )
    if raw[2] != VERSION:
        raise Mismatch(
            f"rank {rank} speaks version {raw[2]} of the handshake, the others version {VERSION}; install the same "
            "ringattn on all ranks"
        )
    end = PREFIX + raw[4]
    kind, name, body = raw[3], raw[PREFIX:end].decode(errors="replace"), raw[end:]
    if kind == FAILED:
        raise Mismatch(f"rank {rank} cannot take part: {body.decode(errors='replace')}")
    if kind != VALUE or name != stage:
        raise Mismatch(
            f"rank {rank} is at stage {name!r} of a call where others are at stage {stage!r}: the ranks make different "
            "calls, or an exception took this rank out of an earlier call; make the same calls in the same order on "
            "all ranks, and continue together after an error"
        )
    return body


def compare_records(records: list[bytes]) -> list[dict[str, Any]]:
    """Decode the JSON records of all ranks and compare them; returns the fields of each.

    Raises Mismatch, on every rank alike, if compared fields differ, or if a record cannot be decoded; it names the
    ranks.
    """
    decoded: list[dict[str, Any]] = []
    for rank, raw in enumerate(records):
        try:
            fields = json.loads(raw)
        except ValueError:  # not UTF-8, or not JSON
            fields = None
        if not isinstance(fields, dict) or (decoded and fields.keys() != decoded[0].keys()):
            raise undecoded(rank, raw)
        decoded.append(fields)
    compare(dict(enumerate(decoded)))
    return decoded


def undecoded(rank: int, raw: bytes) -> Mismatch:
    """The error for a record that cannot be decoded."""
    return Mismatch(
        f"rank {rank} sent {plural(len(raw), 'byte')} that cannot be decoded as its part of the handshake; install the "
        "same ringattn on all ranks, and let nothing else use this transport meanwhile"
    )


def compare(records: dict[int, dict[str, Any]]) -> None:
    """Raise a Mismatch that names the ranks and their values if a compared field differs between ranks."""
    for name in next(iter(records.values())):
        values = {rank: record[name] for rank, record in records.items()}
        first = next(iter(values.values()))
        alike = (value == first or (value != value and first != first) for value in values.values())
        if name in _NOT_COMPARED or all(alike):
            continue
        if name == "layout" and _are_undecided([*values.values()]):
            continue
        advice = "Run backwards and calls in the same order" if name in (ORDER, "call") else "Pass the same"
        raise Mismatch(f"the ranks disagree about {name}: {by_rank(values)}. {advice} on all ranks")


def by_rank(values: dict[int, Any]) -> str:
    """A text that lists each different value, with the first ranks that have it."""
    ranks = {value: [rank for rank, other in values.items() if other == value] for value in values.values()}
    return "; ".join(f"{value} on rank{'s' if len(who) > 1 else ''} {_list_ranks(who)}" for value, who in ranks.items())


#: The record field that names the call whose backward a rank runs.
ORDER = "which backward to run"
#: Fields of a record that may differ between ranks.
_NOT_COMPARED = ("rows", "labels")


def _are_undecided(layouts: list[str]) -> bool:
    """Whether some rank gives a balanced layout by name: its partition is known, and compared, only with the plan."""
    return all(x.startswith("balanced") for x in layouts) and not all("partition" in x for x in layouts)


def _list_ranks(ranks: list[int]) -> str:
    """The first ranks of a list, as text."""
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def add_hosts(text: str, hosts: dict[int, str]) -> str:
    """`text` with the host of each rank, if several are known: "ranks 2 and 3" become "ranks 2 and 3 on node-b"."""

    def add(found: re.Match[str]) -> str:
        where = {hosts[rank]: "" for rank in map(int, re.findall(r"\d+", found[1])) if rank in hosts}
        return f"{found[0]} on {', '.join(where)}" if where else found[0]

    named = r"\b(rank \d+|ranks \d+(?:, \d+)*(?: and \d+)?)(?: of \d+)?"
    return re.sub(named, add, text) if len({*hosts.values()}) > 1 else text


def explain(standings: dict[int, dict[str, Any]], number: int, why: str, size: int) -> RingAttentionError:
    """The error to raise when ranks differ from event `number` on; it says how, from the last state of each rank.

    `why` says what did not end in time; it is "" if the fingerprints of two ranks differ. See `comparison`.
    """
    silent = [rank for rank in range(size) if rank not in standings]
    least = min(standing["count"] for standing in standings.values())
    late = [rank for rank in range(size) if rank in standings and standings[rank]["count"] == least <= number]
    hosts = {rank: host for standing in standings.values() for rank, host in standing["hosts"]}
    if silent or (why and late):
        one, who = len(silent or late) == 1, re.sub(r", (\d+)$", r" and \1", _list_ranks(silent or late))
        what = (
            f"do{'es' * one} not answer: a process hangs or is stopped, or a host or a network is down"
            if silent
            else f"ha{'s' if one else 've'} not joined the call of the others: a process hangs or does something else"
        )
        return CommFailure(add_hosts(f"rank{'s' * (not one)} {who} {what} ({why})", hosts))
    made = {rank: json.loads(raw) for rank in range(size) if (raw := standings[rank]["record"])}
    try:
        compare({rank: {"call": f"{fields['stage']}"} for rank, fields in made.items()})
        compare(made)
    except Mismatch as error:
        return error
    for rank, standing in standings.items():
        sender = (rank - 2 ** standing["received"]) % size
        if standing["received"] < standings[sender]["sent"]:
            why = f"what rank {sender} sends does not reach rank {rank}: a network between them loses it ({why})"
    return CommFailure(add_hosts(why, hosts))
