"""Reading ordinary files only, and writing files whole or not at all."""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import InvalidInput

#: The path that stands for standard output.
STDOUT = "-"
#: The folder, within the current one, that outputs without a path of their own are in: outputs/<verb>/...
OUTPUTS = "outputs"
#: What the names of temporary files have between the name of their target and a random part.
MARK = ".ringattn-"
#: Bytes of the target's name that the name of a temporary file repeats: file systems allow 255 for the whole name.
NAMED = 150


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it at the end; removed, and `path` untouched, on an error.

    An output that exists keeps its mode. What killed processes left behind beside `path` is removed first.
    """
    path = _checked(path)
    with _temporary(path) as (temporary, mode):
        yield temporary
        try:
            temporary.chmod(mode)
            temporary.replace(path)
        except OSError as error:
            raise InvalidInput(f"output {path}: cannot be replaced ({error.strerror}); choose another path") from error


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
    """Raise InvalidInput where `path` cannot be written. What killed processes left beside `path` is removed."""
    with _temporary(_checked(path)):  # permissions do not tell of file systems that take no files
        pass


def check_readable(path: Path, name: str) -> None:
    """Raise InvalidInput, naming the setting `name`, where `path` is no ordinary file that this user can read.

    A pipe or a device is never opened: reading one can wait for ever, and cannot be repeated by every rank.
    """
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        what = "no such file" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", None) or error
        raise InvalidInput(f"{name}={path}: {what}") from None
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
        raise InvalidInput(f"{name}={path}: is {what}, not an ordinary file; give the path of a file")
    if not os.access(path, os.R_OK):
        raise InvalidInput(f"{name}={path}: not readable by this user; choose another path")


def make_folder(path: Path) -> None:
    """Make a folder where it does not exist, in one that does, as of files; raise InvalidInput where nothing can be written
    to it."""
    if not stat.S_ISDIR(_kind(path)):
        _check_parent(path, path)
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"output {path}: cannot be a folder ({error.strerror}); choose another path") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise InvalidInput(f"output {path}: not writable by this user; choose another path")


def _checked(path: Path) -> Path:
    """The file that writing to `path` replaces: the target of a link, not the link. Raises InvalidInput."""
    kind = _kind(path)  # also finds a link that points to itself, before it is resolved
    target = path.resolve()
    if stat.S_ISDIR(kind):
        raise InvalidInput(f"output {path}: is a folder; give the path of a file")
    if kind and not stat.S_ISREG(kind):
        raise InvalidInput(f"output {path}: is no ordinary file, which could be replaced; give another path")
    _check_parent(path, target)
    if kind and not os.access(target, os.W_OK):
        raise InvalidInput(f"output {path}: not writable by this user; choose another path")
    return target


def _check_parent(path: Path, target: Path) -> None:
    """Raise InvalidInput where the folder that a file lies in does not exist; folders within `OUTPUTS` are made."""
    if path.parts[:1] == (OUTPUTS,):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(
                f"output {path}: {path.parent} cannot be made ({error.strerror}); choose another path"
            ) from error
    link = "" if not path.is_symlink() else f" (the link points to {target})"
    parent = path.parent if not link else target.parent
    kind = _kind(parent)
    if kind and not stat.S_ISDIR(kind):
        raise InvalidInput(f"output {path}: {parent} is no folder; choose another path{link}")
    if not kind:
        raise InvalidInput(f"output {path}: the folder {parent} does not exist; make it first{link}")


def _kind(path: Path) -> int:
    """The type of what is at `path`, as `stat` tells it; 0: nothing. Raises InvalidInput where no path can be so."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except (
        OSError,
        ValueError,
    ) as error:  # too long a name, links in a circle, a folder that is closed, a NUL character
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"output {path}: cannot be written ({reason}); choose another path") from None


@contextmanager
def _temporary(path: Path) -> Iterator[tuple[Path, int]]:
    """A new empty file beside `path`, removed at the end where it is still there, and the mode that `path` is to have.

    A lock on the file says that its writer lives: the lock ends with the process, however the process ends. So no number
    of a process has to be trusted, which another machine or container may use as well.
    """
    # The name is known before the file is made: a signal that raises in between leaves no file behind.
    temporary, handle = path.with_name(_prefix(path) + secrets.token_hex(4)), -1
    try:
        try:
            _remove_dead(path)
            known = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
            mode = 0o600 if known is not None else 0o666  # the system takes the umask away
            while handle < 0:
                handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
                if (
                    _lock(handle) is False or not temporary.exists()
                ):  # another process took the file for one left behind
                    os.close(handle)
                    handle = -1
        except OSError as error:
            raise InvalidInput(
                f"output {path}: no file can be made in {path.parent} ({error.strerror}); choose another path"
            ) from None
        yield temporary, stat.S_IMODE(os.fstat(handle).st_mode) if known is None else known
    finally:
        temporary.unlink(missing_ok=True)
        if handle >= 0:
            os.close(handle)


def _lock(handle: int) -> bool | None:
    """Whether this process has the lock of a file now; None where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_dead(path: Path) -> None:
    """Remove the temporary files of `path` whose processes have ended without doing so, as after SIGKILL."""
    prefix = _prefix(path)
    with os.scandir(path.parent) as entries:
        found = [
            entry.path for entry in entries if entry.name.startswith(prefix) and entry.is_file(follow_symlinks=False)
        ]
    for name in found:
        with suppress(FileNotFoundError, PermissionError):
            handle = os.open(name, os.O_RDWR | os.O_CLOEXEC)
            try:
                if _lock(handle):
                    Path(name).unlink()
            finally:
                os.close(handle)


def _prefix(path: Path) -> str:
    return f".{path.name.encode()[:NAMED].decode(errors='ignore')}{MARK}"
