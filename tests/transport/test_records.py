"""The parts of a handshake without ranks: the table that all remember alike, and frames."""

from __future__ import annotations

import random

import pytest

from ringattn import Mismatch
from ringattn.transport import records
from ringattn.transport.records import REMEMBERED, VALUE, Exchange, Handshakes, digest, frame, open_frame


def test_whether_a_handshake_is_remembered_is_the_same_on_all_ranks() -> None:
    """Ranks that leave calls in the middle, or begin anew, at random: nobody remembers what another does not."""
    choice = random.Random(0)
    tables = [Handshakes() for _ in range(3)]
    hits = 0
    for _ in range(4000):
        call = choice.randrange(80)
        marks = tuple(digest(bytes((call, rank))) for rank in range(3))
        histories = tuple(table.history for table in tables)
        left = choice.randrange(3) if choice.random() < 0.03 else None
        if choice.random() < 0.01:
            tables[choice.randrange(3)] = Handshakes()
            histories = tuple(table.history for table in tables)
        known = [table.begin(marks, histories) for table in tables]
        assert known in ([None] * 3, [marks] * 3)
        hits += known[0] is not None
        for rank, table in enumerate(tables):
            if rank != left:
                table.end(marks, marks)
        assert all(len(table) <= REMEMBERED for table in tables)
    assert hits > 500


def test_the_least_recently_used_handshake_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "REMEMBERED", 2)
    table = Handshakes()

    def call(mark: bytes) -> bool:
        known = table.begin((mark,), (table.history,))
        table.end((mark,), known or mark)
        return known is not None

    assert [call(mark) for mark in (b"a", b"b", b"a", b"c", b"a", b"b")] == [False, False, True, False, True, False]
    table.end((b"transient",), None)
    assert len(table) == 2


def test_frames() -> None:
    assert open_frame(frame("plan", b"\x00\xff", VALUE), 3, "plan") == b"\x00\xff"
    with pytest.raises(Mismatch, match="rank 3 sent 9 bytes at stage 'plan', where at most 8 are expected"):
        open_frame(frame("plan", bytes(9), VALUE), 3, "plan", 8)
    with pytest.raises(Mismatch, match="rank 3 is at stage 'plan' of a call where others are at stage 'call'"):
        open_frame(frame("plan", b"", VALUE), 3, "call")
    with pytest.raises(Mismatch, match="rank 3 sent 1 byte where the ranks exchange"):
        open_frame(b"r", 3, "call")


class Lost:
    """A transport whose ranks are gone."""

    def gather(self, record: bytes, stage: str) -> list[bytes]:
        from ringattn import CommFailure

        raise CommFailure("the others are gone")


def test_an_exception_that_nobody_can_be_told_of_is_raised_nevertheless() -> None:
    with pytest.raises(ZeroDivisionError), Exchange(Lost(), "plan"):
        raise ZeroDivisionError
