"""Errors of ringattn. Each says what is wrong, why, and what to try."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable


class RingAttentionError(Exception):
    """Base of every error that ringattn raises on purpose."""


class InvalidInput(RingAttentionError, ValueError):
    """An argument, shape, dtype, file or option that cannot be used."""


class Unsupported(RingAttentionError, ValueError):
    """A valid request that the chosen kernel, transport or device cannot honour."""


class LaunchLimit(Unsupported):
    """A size that no launch of the device's kernels can have, such as a grid dimension above 65,535."""


class OutOfMemory(RingAttentionError, MemoryError):
    """The memory of a device is not enough, even after idle memory was given back; `__cause__` is its own error."""


class Mismatch(RingAttentionError, ValueError):
    """The ranks of one call disagree about shapes, dtypes, pattern, layout or plan."""


class CommFailure(RingAttentionError, RuntimeError):
    """A message did not arrive in time, or a peer is gone."""


class LaunchFailure(CommFailure):
    """A rank that this process started has failed, was killed, or did not end in time.

    `status` is the exit status of the rank that is blamed, below 0 for a signal; None where none is.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class NumericsFailure(RingAttentionError, RuntimeError):
    """A simulation found numbers, or a ledger, that are not what they must be."""


def raised_below(error: BaseException, packages: tuple[str, ...] = ()) -> bool:
    """Whether what the calling function called raised the error that it has just caught.

    The call runs compiled code, and Python code of these packages. Where the traceback has a frame of another module,
    a signal handler that ran in between raised the error: it is about something else, and must pass unchanged.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]  # the first is that of the caller
    modules = [str(frame.f_globals.get("__name__", "")) for frame in frames]
    return all(any(name == package or name.startswith(f"{package}.") for package in packages) for name in modules)


def plural(count: int, noun: str) -> str:
    """A number of things in words: "1 rank", "8,192 ranks", "2 passes"."""
    more = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else more}"


def did_you_mean(name: object, options: Iterable[str]) -> str:
    """The words "did you mean 'x'? " for the option that is nearest to a wrong name, or nothing."""
    near = difflib.get_close_matches(str(name), list(options), n=1)
    return f"did you mean {near[0]!r}? " if near and near[0] != name else ""
