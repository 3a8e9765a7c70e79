"""Records that ranks exchange beside a plan's messages: frames, errors of other ranks, and remembered handshakes.

Every exchange has a stage: a name such as "plan". Each rank sends exactly one frame per exchange: magic bytes, the
version of this protocol, the kind of the frame (a value, an error of ringattn or another exception), the name of the
stage, and a body of bounded length. A frame that cannot be decoded, or that belongs to another stage, is a Mismatch
that names its rank.

The stage matters when a rank has left a call early: the rank's next frame meets the other ranks' frames of the old
call. All ranks raise in that exchange, so that the next call finds the ranks in step.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from types import TracebackType
from typing import Any, Protocol, Self

from ..errors import Mismatch, RingAttentionError
from ..text import plural

MAGIC, VERSION = b"ra", 1
#: Kinds of frames: a value, the text of a RingAttentionError, or the name and text of another exception.
VALUE, WRONG, FAILED = range(3)
#: Bytes of a frame before the name of its stage: magic, version, kind, length of the name.
PREFIX = 5
#: Characters of an error that other ranks repeat.
QUOTED = 1500
#: Bytes of a digest: ranks compare digests of what they are about to do and of what they have done.
MARK = 8
#: Handshakes that a transport remembers, each with its plan. The number is equal on all ranks, see `Handshakes`.
REMEMBERED = 64


class Gatherer(Protocol):
    """The part of a transport that an exchange uses."""

    def gather(self, record: bytes) -> list[bytes]:
        """Every rank's record, in rank order. Collective."""


def digest(data: bytes) -> bytes:
    """MARK bytes that stand for `data`."""
    return hashlib.blake2b(data, digest_size=MARK).digest()


class ErrorReport:
    """`with ErrorReport(transport, stage): ...` reports an exception of the block to the other ranks.

    The other ranks receive the report in their exchange of that stage. The exception propagates on this rank, even if
    the report fails. If the block raises nothing, nothing is sent.
    """

    def __init__(self, transport: Gatherer, stage: str) -> None:
        self.transport, self.stage = transport, stage

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._finish()
            return
        is_ours = isinstance(error, RingAttentionError)
        text = str(error) if is_ours else f"{type(error).__name__}: {error}"
        report = frame(self.stage, text[:QUOTED].encode(errors="replace"), WRONG if is_ours else FAILED)
        try:
            self.transport.gather(report)
        except RingAttentionError:
            return  # the exception of the block propagates: it is the cause

    def _finish(self) -> None:
        """Called if the block has raised nothing."""


class Exchange(ErrorReport):
    """`with Exchange(transport, stage) as exchange: exchange.mine = b"..."` exchanges one record per rank. Collective.

    After the block `exchange.records` holds the records of all ranks, in rank order. If the block of one rank raises,
    that rank raises its exception and the other ranks raise a Mismatch that names the rank. `limit`: most bytes of a
    record.
    """

    def __init__(self, transport: Gatherer, stage: str, limit: int | None = None) -> None:
        super().__init__(transport, stage)
        self.limit, self.mine = limit, b""
        self.records: list[bytes] = []

    def _finish(self) -> None:
        assert self.limit is None or len(self.mine) <= self.limit, f"{self.stage}: {len(self.mine):,} bytes"
        frames = self.transport.gather(frame(self.stage, self.mine, VALUE))
        self.records = [open_frame(raw, rank, self.stage, self.limit) for rank, raw in enumerate(frames)]


def frame(stage: str, body: bytes, kind: int) -> bytes:
    """A frame of a stage, as it is sent. `kind` is VALUE, WRONG or FAILED."""
    name = stage.encode()
    return MAGIC + bytes((VERSION, kind, len(name))) + name + body


def open_frame(raw: bytes, rank: int, stage: str, limit: int | None = None) -> bytes:
    """The body of a rank's frame. Raises a Mismatch that names the rank if the frame holds no value of this stage."""
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
    if kind == WRONG:
        raise Mismatch(f"rank {rank} cannot take part: {body.decode(errors='replace')}")
    if kind == FAILED:
        raise Mismatch(
            f"rank {rank} cannot take part: it raised {body.decode(errors='replace')}. Look at that rank's own "
            "traceback"
        )
    if kind != VALUE or name != stage:
        raise Mismatch(
            f"rank {rank} is at stage {name!r} of a call where others are at stage {stage!r}: the ranks make different "
            "calls, or an exception took this rank out of an earlier call; make the same calls in the same order on "
            "all ranks, and continue together after an error"
        )
    if limit is not None and len(body) > limit:
        raise Mismatch(
            f"rank {rank} sent {len(body):,} bytes at stage {stage!r}, where at most {limit:,} are expected; install "
            "the same ringattn on all ranks"
        )
    return body


class Handshakes:
    """The latest handshakes of a transport, by the marks of all ranks: a table that is equal on every rank.

    The table changes only by `begin` and `end`, which depend only on what all ranks have seen. `history` is a digest of
    all changes. Ranks exchange their histories with their marks. If the histories differ, because a rank has left a
    call in the middle or has made its transport anew, all ranks clear their tables in the same call. All ranks
    therefore know alike whether a handshake is remembered, and all ranks drop the same least recently used handshake.
    """

    def __init__(self) -> None:
        self.history = bytes(MARK)
        self._plans: OrderedDict[tuple[bytes, ...], Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def begin(self, marks: tuple[bytes, ...], histories: tuple[bytes, ...]) -> Any:
        """The plan remembered under these marks, or None. Afterwards all ranks hold the same table."""
        if any(history != self.history for history in histories):
            self._plans.clear()
            self.history = digest(b"".join(histories))
        return self._plans.get(marks)

    def end(self, marks: tuple[bytes, ...], plan: Any) -> None:
        """Record that the handshake of these marks has succeeded. `plan` is remembered unless it is None."""
        after = digest(self.history + b"".join(marks))
        # Until the last line the history is unique to this rank, so that an interruption here clears all tables.
        self.history = os.urandom(MARK)
        if plan is not None:
            self._plans[marks] = plan
            self._plans.move_to_end(marks)
            if len(self._plans) > REMEMBERED:
                self._plans.popitem(last=False)
        self.history = after
