"""The finished points of a study, one JSON line each: an interrupted study continues from this file.

A line is appended when its point is finished, so a killed process loses only the point that it was computing. A last
line that was cut off is dropped. Lines hold no times, so an interrupted study ends with the same file as any other.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from ...errors import InvalidInput

#: Seconds between calls of fsync. A killed process loses no line; a machine without power loses those of this time.
SYNC_INTERVAL = 1.0


def read_keys(path: Path) -> set[str]:
    """The keys of the finished points of a journal, empty where there is none; another process may have it open."""
    if not path.is_file():
        return set()
    data = path.read_bytes()
    lines = data[: data.rfind(b"\n") + 1].splitlines()[1:]
    return {json.loads(line)["key"] for line in lines}


class Journal:
    """The journal of a study in the file `path`, whose first line is `head`. `records` has the finished points by key.

    One process at a time may have a journal open. The lock is a file of its own beside `path`, as filelock may empty
    the file that it locks. The operating system frees the lock of a killed process.
    """

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        """Open or begin a journal.

        Raises InvalidInput where another process has the journal open, where the journal belongs to another study or is
        broken, and where it cannot be written.
        """
        self.path = path
        self.records: dict[str, dict[str, Any]] = {}
        try:
            self._file = path.open("a+b", buffering=0)  # unbuffered: a line is written at once, or raises
        except OSError as error:
            raise InvalidInput(
                f"output {path}: cannot be written ({error.strerror}); give another output.path"
            ) from error
        # After the journal exists: a folder with a lock file alone would not be recognised as that of a study.
        self._lock = FileLock(f"{path}.lock", timeout=0)
        try:
            self._acquire_lock()
            self._read(head)
        except InvalidInput:
            self._close()
            raise
        self._synced = time.monotonic()

    def _acquire_lock(self) -> None:
        try:
            self._lock.acquire()
        except Timeout:
            raise InvalidInput(
                f"{self.path.parent}: another process is at work on this study; wait for it, or give another "
                "output.path"
            ) from None
        except (OSError, NotImplementedError) as error:
            raise InvalidInput(
                f"{self.path}: cannot be locked on this file system ({error}); give an output.path on another"
            ) from error

    def _read(self, head: dict[str, Any]) -> None:
        """Read the records, or write `head` into an empty journal. Raises InvalidInput for another head."""
        self._file.seek(0)
        data = self._file.read()
        complete = data[: data.rfind(b"\n") + 1]
        if len(complete) < len(data):
            self._file.truncate(len(complete))
        lines = complete.splitlines()
        if not lines:
            self._append(head)
            return
        records = [self._parse(number, line) for number, line in enumerate(lines, 1)]
        if records[0] != json.loads(json.dumps(head)):
            keys = {*records[0], *head}
            differing = ["name" if key == "study" else key for key in keys if records[0].get(key) != head.get(key)]
            raise InvalidInput(
                f"{self.path.parent}: holds the study {records[0].get('study')!r}, and this one differs in its "
                f"{' and '.join(sorted(differing))}; give another output.path, or remove that folder to begin anew"
            )
        self.records = {record["key"]: record for record in records[1:]}

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or (number > 1 and "key" not in record):
            raise InvalidInput(f"{self.path}: line {number} is no record of a study; remove the folder to begin anew")
        return record

    def add(self, key: str, record: dict[str, Any]) -> None:
        """Append the record of a point. Raises InvalidInput where the line cannot be written."""
        self._append({"key": key, **record})
        self.records[key] = json.loads(json.dumps({"key": key, **record}))  # as a later process reads it
        if time.monotonic() - self._synced > SYNC_INTERVAL:
            self.sync()

    def sync(self) -> None:
        """Force the appended lines to the disk."""
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        try:
            written, reason = self._file.write(line) == len(line), "only a part of a line"
        except OSError as error:
            written, reason = False, str(error.strerror)
        if not written:
            raise InvalidInput(
                f"output {self.path}: could not be written ({reason}); free some space, and the same command goes on "
                "after the finished points"
            )

    def _close(self) -> None:
        self._file.close()
        self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sync()
        self._close()
