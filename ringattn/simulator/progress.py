"""Progress of long computations: loops report to a listener, which may draw a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
#: Called before each item of a loop: (index of the item, number of items, plural noun for the items).
Listener = Callable[[int, int, str], None]
# A context variable, because the loops lie many calls below the code that sets the listener.
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Send the progress of every `track` loop inside the `with` block to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def track(items: Iterable[T], count: int, what: str) -> Iterator[T]:
    """Iterate over `items` and report progress to the listener of `listening`; silent for a single item.

    `count` is the expected number of items, `what` a plural noun for them, such as "steps".
    """
    listener = _listener.get() if count > 1 else None
    for index, item in enumerate(items):
        if listener is not None:
            listener(min(index, count), count, what)
        yield item
