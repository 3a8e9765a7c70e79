"""Exceptions of ringattn. Each message states what is wrong, why, and what to try."""

from __future__ import annotations

import traceback


class RingAttentionError(Exception):
    """Base class of every error that ringattn raises on purpose."""

    #: Whether an exchange has reported this error to all ranks.
    told = False


class InvalidInput(RingAttentionError, ValueError):
    """An argument, shape, dtype, file or option that cannot be used."""


class Unsupported(RingAttentionError, ValueError):
    """A valid request that the chosen kernel, transport or device cannot fulfil."""


class LaunchLimit(Unsupported):
    """A problem size beyond a launch limit of the device, such as a CUDA grid dimension above 65,535."""


class OutOfMemory(RingAttentionError, MemoryError):
    """A device ran out of memory; `__cause__` is the device library's error."""


class Mismatch(RingAttentionError, ValueError):
    """The ranks of one collective call disagree about shapes, dtypes, pattern, layout or plan."""


class CommFailure(RingAttentionError, RuntimeError):
    """A message did not arrive before the timeout, or its rank has ended."""


class LaunchFailure(CommFailure):
    """A rank that this process started has failed, was killed, or did not end before the timeout.

    `status` is the exit status of the rank that failed first, negative for a signal; None if no rank can be blamed.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class BenchFailure(RingAttentionError, RuntimeError):
    """Some cases of a benchmark failed; the benchmark's record has the other cases."""


class NumericsFailure(RingAttentionError, RuntimeError):
    """A numerics simulation found wrong numbers, or query-key pairs that were not computed exactly once."""


def raised_below(error: BaseException, packages: tuple[str, ...] = ()) -> bool:
    """Whether `error` comes from the call in the caller's `try` block, not from a signal handler that interrupted it.

    The call may run Python code only of `packages`: any other frame in the traceback is taken for one of a signal
    handler.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]  # the first frame is the caller's
    modules = [str(frame.f_globals.get("__name__", "")) for frame in frames]
    return all(any(name == package or name.startswith(f"{package}.") for package in packages) for name in modules)
