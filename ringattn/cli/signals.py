"""Ends a command on SIGINT or SIGTERM, with one line on standard error and the conventional exit status."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, NoReturn

from ..transport.launcher import TERMINATED, handling, terminable

#: Exit status after Ctrl-C.
INTERRUPTED = 130
#: For each signal: the word to print, the exit status, and Python's default handler.
SIGNALS: dict[int, tuple[str, int, Any]] = {
    signal.SIGINT: ("interrupted", INTERRUPTED, signal.default_int_handler),
    signal.SIGTERM: ("terminated", TERMINATED, signal.SIG_DFL),
}


def ending_at_once() -> AbstractContextManager[None]:
    """Within the block, a signal ends the process at once, without cleanup.

    The signal raises no exception, as imports, Hydra and OmegaConf would take that for an error of their own. Signals
    that are ignored, or have handlers of the caller's own, stay as they are.
    """
    return handling({number: (default, _end) for number, (_, _, default) in SIGNALS.items()})


@contextmanager
def ending_tidily(launched: bool) -> Iterator[None]:
    """Within the block, nested in `ending_at_once`, a signal raises an exception: the process cleans up, then exits.

    `launched`: this process is a rank of a launched job; SIGTERM then ends it at once, as it may be waiting in a
    collective, where Python handles no signals.
    """
    try:
        with (
            handling({number: (_end, default) for number, (_, _, default) in SIGNALS.items()}),
            nullcontext() if launched else terminable(),
        ):
            yield
    except KeyboardInterrupt:
        _print_word(signal.SIGINT)
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as end:
        if end.code == TERMINATED:
            _print_word(signal.SIGTERM)
        raise


def _end(number: int, frame: FrameType | None = None) -> NoReturn:
    _print_word(number)
    os._exit(SIGNALS[number][1])


def _print_word(number: int) -> None:
    os.write(2, f"ringattn: {SIGNALS[number][0]}\n".encode())  # sys.stderr may be in the middle of a line
