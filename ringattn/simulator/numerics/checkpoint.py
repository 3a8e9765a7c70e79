"""The file of a long execution: what it has finished, so that the same execution continues after an interruption."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import InvalidInput
from ...files import check_writable, write_text

FORMAT = "ringattn execution 1"
#: Seconds between two writes.
INTERVAL = 10.0


class Checkpoint:
    """Keeps the state of an execution in a file, written at most every `INTERVAL` seconds; without a path, keeps none.

    `inputs` identify the execution. `state` is what the file contained, or {} if there was no file. Floats survive
    exactly.
    """

    def __init__(self, path: Path | None, inputs: dict[str, Any]) -> None:
        """Read the file if it exists. Raises InvalidInput if it belongs to another execution or cannot be written."""
        self.path, self.head = path, {"format": FORMAT, "version": __version__, **inputs}
        self.state: dict[str, Any] = {}
        self._written = time.monotonic()
        if path is None:
            return
        check_writable(path)
        if not path.exists():
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            head, self.state = found["execution"], found["state"]
            whole = found["hash"] == _hash(head, self.state)
        except (ValueError, KeyError, TypeError, RecursionError):
            whole = False
        if not whole:
            raise InvalidInput(f"{path}: not the state of an execution; give another file, or remove it")
        if head != json.loads(json.dumps(self.head)):
            keys = sorted(key for key in {*head, *self.head} if head.get(key) != self.head.get(key))
            raise InvalidInput(
                f"{path}: the state of another execution, with another {' and '.join(keys)}; give another file, or "
                "remove it"
            )

    @property
    def due(self) -> bool:
        """True if there is a file, and the last write is `INTERVAL` seconds ago."""
        return self.path is not None and time.monotonic() - self._written >= INTERVAL

    def write(self, state: dict[str, Any]) -> None:
        """Replace the file, if there is one. Raises InvalidInput if it cannot be written."""
        if self.path is not None:
            write_text(self.path, json.dumps({"execution": self.head, "state": state, "hash": _hash(self.head, state)}))
            self._written = time.monotonic()


def _hash(*parts: object) -> str:
    """A digest of plain data, the same for what a file returns."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


#: For an execution that keeps nothing.
NOT_KEPT = Checkpoint(None, {})
