"""The journal of a study's finished points or a suite's cases, one JSON line each; interrupted runs continue from it.

A line is appended when its point is finished, so a killed process loses only the point that it was computing. A last
line that was cut off is dropped. Each line ends with a checksum, which detects changed lines. A study's
lines hold no times, so an interrupted study ends with the same file as any other.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import subprocess
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ...errors import InvalidInput

#: The folder of the package, whose source is hashed.
PACKAGE = Path(__file__).resolve().parents[2]
#: The head of a journal, or the record of a finished point.
Record = dict[str, Any]


def write_line(record: Record) -> bytes:
    """The JSON line of a record, ending with the CRC-32 of the text before it."""
    text = json.dumps(record).encode()[:-1]
    return b'%b, "crc": %d}\n' % (text, zlib.crc32(text))


def read_journal(path: Path, data: bytes | None = None) -> tuple[Record | None, dict[str, Record]]:
    """Read a journal: (first record, other records by key); (None, {}) if it has no lines.

    A last line that was cut off is ignored. `data` is the content of the file, if it was already read. Works while
    another process has the journal open. Raises InvalidInput for a damaged line, or if the file cannot be read.
    """
    records: list[Record] = []
    if data is None:
        data = _read_bytes(path, path.read_bytes) if path.is_file() else b""
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        match = re.fullmatch(rb'(.*), "crc": (\d{1,10})\}', line)
        if match is None or zlib.crc32(match[1]) != int(match[2]):
            raise InvalidInput(
                f"{path}: line {number} is damaged; remove it and run the same command, which computes its point again"
                if records
                else f"{path}: line 1 is not from a study or suite of this version; give another path"
            )
        records.append(json.loads(match[1] + b"}"))
    return records[0] if records else None, {record["key"]: record for record in records[1:]}


class Journal:
    """A file to which finished records are appended, so that an interrupted study can continue.

    Its first line is `head`; `records` has the records by key. Only one process at a time can have a journal open. If
    the process is killed, the operating system frees the lock.
    """

    def __init__(self, path: Path, head: Record) -> None:
        """Open or begin a journal.

        Raises InvalidInput if another process has the journal open, if the journal belongs to another study or is
        damaged, or if it cannot be read or written.
        """
        self.path = path
        self.records: dict[str, Record] = {}
        try:
            # Unbuffered: writing a line succeeds or raises at once. `_open` follows no link: it could lead to any file.
            self._file = open(path, "a+b", buffering=0, opener=_open)  # noqa: SIM115
        except OSError as error:
            raise InvalidInput(
                f"output {path}: cannot be written ({error.strerror}); give another output.path"
            ) from error
        with ExitStack() as opened:
            opened.callback(self._file.close)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidInput(
                    f"{path.parent}: another process is running this study; wait for it, or give another output.path"
                ) from None
            except OSError as error:
                raise InvalidInput(
                    f"{path}: cannot be locked on this file system ({error}); give an output.path on another one"
                ) from error
            self._read(head)
            opened.pop_all()

    def _read(self, head: Record) -> None:
        """Read the records, or write `head` to an empty journal. Raises InvalidInput if the head differs."""
        self._file.seek(0)
        data = _read_bytes(self.path, self._file.read)
        written, self.records = read_journal(self.path, data)
        if written is None and not write_line(head).startswith(data):
            raise InvalidInput(
                f"{self.path}: not the journal of a study's or suite's finished points; give another output.path, or "
                "remove the file"
            )
        if written is not None and written != json.loads(json.dumps(head)):
            keys = {*written, *head}
            differing = ["name" if key == "study" else key for key in keys if written.get(key) != head.get(key)]
            raise InvalidInput(
                f"{self.path.parent}: holds the study {written.get('study')!r}, and this one differs in its "
                f"{' and '.join(sorted(differing))}; give another output.path, or remove that folder to start again"
            )
        self._file.truncate(data.rfind(b"\n") + 1)
        if written is None:
            self._append(head)

    def add(self, key: str, record: Record) -> None:
        """Append the record of a point. Raises InvalidInput if the line cannot be written."""
        self._append({"key": key, **record})
        self.records[key] = json.loads(json.dumps({"key": key, **record}))  # as a later process reads it

    def _append(self, record: Record) -> None:
        line = write_line(record)
        try:
            written, reason = self._file.write(line) == len(line), "only part of a line"
        except OSError as error:
            written, reason = False, str(error.strerror)
        if not written:
            raise InvalidInput(
                f"output {self.path}: could not be written ({reason}); free some space and run the same command, which "
                "continues after the finished points"
            )

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def _open(path: str, flags: int) -> int:
    """A descriptor of an ordinary file, opened without following a link. Raises OSError for anything else."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not an ordinary file")
    return descriptor


def _read_bytes(path: Path, read: Callable[[], bytes]) -> bytes:
    try:
        return read()
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read ({error.strerror}); give another path") from error


def source() -> str:
    """A hash of this package's Python files and templates as they are on disk now: 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted((*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.j2"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def git(*arguments: str) -> str | None:
    """The output of a git command in the checkout of this package; None without a checkout, or if git fails."""
    if not (PACKAGE.parent / ".git").exists():
        return None
    command = ["git", "-C", str(PACKAGE.parent), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
