"""The points of a study that are done, one JSON line each: what an interrupted study goes on from.

A line is appended when its point is done, so that a process that is killed loses the point in flight alone. A last line
that was cut off is dropped. Lines hold no times, so that an interrupted study ends with the same file as any other.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from ...errors import InvalidInput

#: Seconds between calls that bring lines to the disk. A process that dies loses none of them, a machine at most these.
SYNC = 1.0


class Journal:
    """The journal of a study in `path`, whose first line is `head`. One process at a time has it."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        """Open or begin a journal. Raises InvalidInput where it is that of another study, broken, or in use."""
        self.path = path
        self.known: dict[str, dict[str, Any]] = {}
        try:
            self._file = path.open("a+b", buffering=0)  # what is written is written, or an error
        except OSError as error:
            raise InvalidInput(
                f"output {path}: cannot be written ({error.strerror}); give another output.path"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise InvalidInput(
                f"{path.parent}: another process is at work on this study; wait for it, or give another output.path"
            ) from None
        except OSError as error:
            self._file.close()
            raise InvalidInput(
                f"{path}: cannot be locked on this file system ({error.strerror}); give an output.path on another"
            ) from error
        try:
            self._read(head)
        except InvalidInput:
            self._file.close()
            raise
        self._synced = time.monotonic()

    def _read(self, head: dict[str, Any]) -> None:
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        lines = whole.splitlines()
        if not lines:
            self._append(head)
            return
        records = [self._parsed(number, line) for number, line in enumerate(lines, 1)]
        if records[0] != json.loads(json.dumps(head)):
            keys = {*records[0], *head}
            differ = ["name" if key == "study" else key for key in keys if records[0].get(key) != head.get(key)]
            raise InvalidInput(
                f"{self.path.parent}: holds the study {records[0].get('study')!r}, and this one differs in its {' and '.join(sorted(differ))}; "
                "give another output.path, or remove that folder to begin anew"
            )
        self.known = {record["key"]: record for record in records[1:]}

    def _parsed(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict) or (number > 1 and "key" not in found):
            raise InvalidInput(f"{self.path}: line {number} is no record of a study; remove the folder to begin anew")
        return found

    def add(self, key: str, record: dict[str, Any]) -> None:
        """Append the record of a point; `known` has it as it is read back."""
        self._append({"key": key, **record})
        self.known[key] = json.loads(json.dumps({"key": key, **record}))
        if time.monotonic() - self._synced > SYNC:
            self.sync()

    def sync(self) -> None:
        """Bring what was appended to the disk."""
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        try:
            whole, why = self._file.write(line) == len(line), "only a part of a line"
        except OSError as error:
            whole, why = False, str(error.strerror)
        if not whole:
            raise InvalidInput(
                f"output {self.path}: could not be written ({why}); make room, and the same command goes on after the points "
                "that are done"
            )

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sync()
        self._file.close()
