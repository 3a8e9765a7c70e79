"""What ranks tell each other beside a plan's messages: framed records, exceptions, and which handshakes are remembered.

An exchange has a stage, a name such as "plan". Each rank sends exactly one frame: magic bytes, the version of this
protocol, whether the frame holds a value, an error of ours or another exception, the name of the stage, and a body of
bounded length. A frame that cannot be decoded, or that belongs to another stage, is a Mismatch that names its rank. The
stage matters where one rank has left a call early: its next frame meets the others' frames of the old call, and every
rank raises in that one exchange, so that the next call finds the ranks in step.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import Mismatch, RingAttentionError, plural

if TYPE_CHECKING:
    from typing_extensions import Self

MAGIC, VERSION = b"ra", 1
#: What a frame holds: a value, the text of an error of ours, or another exception's name and text.
VALUE, WRONG, FAILED = range(3)
#: Bytes of a frame before the name of its stage: magic, version, kind, length of the name.
PREFIX = 5
#: Characters of an error that other ranks repeat.
QUOTED = 1500
#: Bytes of the digests by which ranks compare what they are about to do and what they have done.
MARK = 8
#: Handshakes that a transport remembers, each with its plan. All ranks have the same number, see `Agreed`.
REMEMBERED = 64


class Gatherer(Protocol):
    """What an exchange needs of a transport."""

    def gather(self, record: bytes) -> list[bytes]:
        """Every rank's record, in rank order. Collective."""


def digest(data: bytes) -> bytes:
    """MARK bytes that stand for `data`."""
    return hashlib.blake2b(data, digest_size=MARK).digest()


class Telling:
    """`with Telling(transport, stage): ...` tells the other ranks, in their exchange of that stage, what the block raises.

    Where the block raises nothing, nothing is sent. The exception goes on, also where the others cannot be told.
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
        wrong = isinstance(error, RingAttentionError)
        text = str(error) if wrong else f"{type(error).__name__}: {error}"
        told = frame(self.stage, text[:QUOTED].encode(errors="replace"), WRONG if wrong else FAILED)
        try:
            self.transport.gather(told)
        except RingAttentionError:
            return  # this rank's own exception is the one to look at

    def _finish(self) -> None:
        """The block has raised nothing."""


class Exchange(Telling):
    """`with Exchange(transport, stage) as told: told.mine = b"..."` leaves every rank's bytes in `told.records`.

    Collective. Whatever the block of one rank raises is told to all: that rank raises its own exception, the others a
    Mismatch that names the rank. `limit` is the most bytes of a record.
    """

    def __init__(self, transport: Gatherer, stage: str, limit: int | None = None) -> None:
        super().__init__(transport, stage)
        self.limit, self.mine = limit, b""
        self.records: list[bytes] = []

    def _finish(self) -> None:
        assert self.limit is None or len(self.mine) <= self.limit, f"{self.stage}: {len(self.mine):,} bytes"
        raw = self.transport.gather(frame(self.stage, self.mine, VALUE))
        self.records = [opened(record, rank, self.stage, self.limit) for rank, record in enumerate(raw)]


def frame(stage: str, body: bytes, kind: int) -> bytes:
    """A record of a stage, as it is sent."""
    name = stage.encode()
    return MAGIC + bytes((VERSION, kind, len(name))) + name + body


def opened(raw: bytes, rank: int, stage: str, limit: int | None = None) -> bytes:
    """The body of a rank's frame; a Mismatch that names the rank where the frame holds no value of this stage."""
    if len(raw) < PREFIX or not raw.startswith(MAGIC):
        raise Mismatch(
            f"rank {rank} sent {plural(len(raw), 'byte')} that are no record of a handshake, where the ranks exchange "
            f"{stage!r}; all ranks must make the same calls in the same order, and nothing else may use this transport "
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
            f"rank {rank} cannot take part: it raised {body.decode(errors='replace')}. Look at that rank's own traceback"
        )
    if kind != VALUE or name != stage:
        raise Mismatch(
            f"rank {rank} is at stage {name!r} of a call where others are at stage {stage!r}: the ranks make different "
            "calls, or an exception took one of them out of an earlier call; all ranks must make the same calls in the "
            "same order, and go on together after an error"
        )
    if limit is not None and len(body) > limit:
        raise Mismatch(f"rank {rank} sent {len(body):,} bytes at stage {stage!r}, where at most {limit:,} are expected")
    return body


class Agreed:
    """The last handshakes of a transport, by the marks of all ranks: a table that is the same on every rank.

    It changes by `begin` and `end` alone, which depend only on what all ranks have seen. `history` is a digest of all
    changes. Ranks exchange their histories with their marks; where these differ (a rank has left a call in the middle,
    or has made its transport anew) all ranks forget everything in the same call. So whether a handshake is remembered is
    the same fact on all ranks, and the least recently used one is dropped on all at once.
    """

    def __init__(self) -> None:
        self.history = bytes(MARK)
        self._plans: OrderedDict[tuple[bytes, ...], Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def begin(self, marks: tuple[bytes, ...], histories: tuple[bytes, ...]) -> Any:
        """What was remembered under these marks, or None; after it all ranks hold the same table."""
        if any(history != self.history for history in histories):
            self._plans.clear()
            self.history = digest(b"".join(histories))
        return self._plans.get(marks)

    def end(self, marks: tuple[bytes, ...], plan: Any) -> None:
        """The handshake of these marks has ended well; `plan` is remembered, unless it is None."""
        after = digest(self.history + b"".join(marks))
        self.history = os.urandom(MARK)  # that of no other rank, should an interruption come before the last line
        if plan is not None:
            self._plans[marks] = plan
            self._plans.move_to_end(marks)
            if len(self._plans) > REMEMBERED:
                self._plans.popitem(last=False)
        self.history = after
