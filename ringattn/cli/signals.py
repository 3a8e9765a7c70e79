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
    """Context manager in which SIGINT or SIGTERM ends the process immediately, without cleanup.

    No exception is raised, because imports, Hydra and OmegaConf would treat it as an error of their own. A signal that
    is ignored, or for which the caller has installed a handler, is left alone.
    """
    return handling({number: (default, _end) for number, (_, _, default) in SIGNALS.items()})


@contextmanager
def ending_tidily(launched: bool) -> Iterator[None]:
    """Context manager in which SIGINT or SIGTERM raises an exception, so that the process cleans up and exits.

    Use it inside `ending_at_once`. Set `launched` if this process is a rank of a launched job: SIGTERM then ends it
    immediately, because it may be waiting in a collective, where Python cannot handle signals.
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
