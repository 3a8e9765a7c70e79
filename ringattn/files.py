"""Writing files whole or not at all."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import InvalidInput

#: The path that stands for standard output.
STDOUT = "-"
#: The folder, within the current one, that outputs without a path of their own are in: outputs/<verb>/...
OUTPUTS = "outputs"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it at the end; removed, and `path` untouched, on an error."""
    check_writable(path)
    path = path.resolve()  # what a link points to is replaced, not the link
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path, *failures: type[Exception]) -> Iterator[Path]:
    """`replacing` for a block that only writes: its OSErrors and `failures`, such as of a full disk, are InvalidInput."""
    known: tuple[type[Exception], ...] = (OSError, *failures)
    with replacing(path) as temporary:
        try:
            yield temporary
        except known as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidInput(
                f"output {path}: could not be written ({reason}), and nothing is left of it; make room in "
                f"{path.parent.absolute()}, or choose another path"
            ) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with writing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str, data: Any) -> None:
    """Write data as JSON to a file, whole or not at all, or to standard output where `path` is "-".

    Numbers that are not finite, which JSON cannot hold, become null.
    """
    text = json.dumps(_finite(data), indent=2, allow_nan=False) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        write_text(Path(path), text)


def check_json(path: str | None) -> None:
    """Raise InvalidInput where `write_json` could not write to `path`; None is not written."""
    if path and path != STDOUT:
        check_writable(Path(path))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def check_writable(path: Path) -> None:
    """Raise InvalidInput where `path` cannot be written."""
    if path.is_dir():
        raise InvalidInput(f"output {path}: is a folder; give the path of a file")
    if path.exists() and not path.is_file():
        raise InvalidInput(f"output {path}: is no ordinary file, which could be replaced; give another path")
    _check_parent(path)
    if path.exists() and not os.access(path, os.W_OK):
        raise InvalidInput(f"output {path}: not writable by this user; choose another path")
    try:  # permissions do not tell of file systems that take no files
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent):
            pass
    except OSError as error:
        raise InvalidInput(
            f"output {path}: no file can be made in {path.parent} ({error.strerror}); choose another path"
        ) from None


def make_folder(path: Path) -> None:
    """Make a folder where it does not exist, in one that does, as of files; raise InvalidInput where nothing can be written
    to it."""
    if not path.is_dir():
        _check_parent(path)
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"output {path}: cannot be a folder ({error.strerror}); choose another path") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise InvalidInput(f"output {path}: not writable by this user; choose another path")


def _check_parent(path: Path) -> None:
    """Raise InvalidInput where the folder that a path lies in does not exist; folders within `OUTPUTS` are made."""
    if path.parts[:1] == (OUTPUTS,):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(
                f"output {path}: {path.parent} cannot be made ({error.strerror}); choose another path"
            ) from error
    if path.parent.exists() and not path.parent.is_dir():
        raise InvalidInput(f"output {path}: {path.parent} is no folder; choose another path")
    if not path.parent.is_dir():
        raise InvalidInput(f"output {path}: the folder {path.parent} does not exist; make it first")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
