"""How far a long computation is. It tells whoever listens, and knows nothing of terminals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
#: Called before each unit of work with its number, their count, and what they are.
Tell = Callable[[int, int, str], None]
#: A variable of the context, since loops lie deep below the calls that are asked for.
_listener: ContextVar[Tell | None] = ContextVar("listener", default=None)


@contextmanager
def listening(tell: Tell) -> Iterator[None]:
    """`tell` hears of what is `told` in the block."""
    token = _listener.set(tell)
    try:
        yield
    finally:
        _listener.reset(token)


def told(items: Iterable[T], count: int, what: str) -> Iterator[T]:
    """The items; the listener hears before each of them, but for a single one."""
    tell = _listener.get() if count > 1 else None
    for done, item in enumerate(items):
        if tell is not None:
            tell(min(done, count), count, what)
        yield item
