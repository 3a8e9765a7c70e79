"""What is worked out once and kept: bounded by bytes, and left behind when its owner is pickled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sized
from functools import wraps
from threading import RLock
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

#: Bytes of an entry beside those of its value: its key, and the places that it takes.
ENTRY = 256
#: Of a longer tuple or list so many items are weighed; a weighing looks at no more than MOST objects.
SAMPLED, MOST = 16, 4096
#: Entries next to go that are weighed again with every new one, beside those that were used since the last.
AGAIN = 8
SMALL = (bool, int, float, type(None))
_ABSENT: Any = object()


class Cache:
    """Values by key. Beyond `limit` bytes the least recently used ones go; the newest stays, however large it is.

    `size` gives the bytes of a value. Values that grow while they are kept need `grows`: they are weighed again, after
    they were used and before they go.
    """

    def __init__(self, limit: int, size: Callable[[Any], int] | None = None, *, grows: bool = False) -> None:
        self.limit, self.bytes = limit, 0
        self._size, self._grows = size or weigh, grows
        self._values: OrderedDict[Hashable, Any] = OrderedDict()  # least recently used first
        self._sizes: dict[Hashable, int] = {}
        self._used: set[Hashable] = set()
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._values)

    def answer(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `key`; where there is none, `make()`, which is kept."""
        with self._lock:
            found = self._values.get(key, _ABSENT)
            if found is not _ABSENT:
                self._values.move_to_end(key)
                if self._grows:
                    self._used.add(key)
                return found
        value = make()  # outside of the lock: two threads may both make it, and either value will do
        self._put(key, value)
        return value

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._values.clear()
            self._sizes.clear()
            self._used.clear()
            self.bytes = 0

    def _put(self, key: Hashable, value: Any) -> None:
        size = self._size(value) + ENTRY
        with self._lock:
            if self._grows:
                for other in (*self._used, *[old for old, _ in zip(self._values, range(AGAIN), strict=False)]):
                    if other in self._values:
                        self._resize(other, self._size(self._values[other]) + ENTRY)
                self._used = {key}
            self._values[key] = value
            self._values.move_to_end(key)
            self._resize(key, size)
            while self.bytes > self.limit and len(self._values) > 1:
                oldest, _ = self._values.popitem(last=False)
                self.bytes -= self._sizes.pop(oldest)

    def _resize(self, key: Hashable, size: int) -> None:
        self.bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size


class HasCache(Protocol):
    """An object that keeps answers as long as it lives."""

    @property
    def cache(self) -> Cache:
        """The answers of the functions of this object that are marked `cached`."""


Owner = TypeVar("Owner", bound=HasCache)


def cached(compute: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """A function of an object and of hashable arguments whose answers are kept in the cache of the object.

    The function and its arguments are the key, so that the answers of two functions cannot meet. An argument that is
    left out and the same argument given make two keys.
    """

    @wraps(compute)
    def answer(owner: Owner, /, *arguments: P.args, **named: P.kwargs) -> T:
        key = (compute, *arguments, *named.items())
        return owner.cache.answer(key, lambda: compute(owner, *arguments, **named))

    return answer


def weigh(value: Any) -> int:
    """About how many bytes a value takes, with all that it refers to; of long sequences some items stand for all."""
    if type(value) in SMALL:
        return 32
    total, seen = 0.0, 0
    todo: list[tuple[Any, float]] = [(value, 1.0)]
    while todo and seen < MOST:
        one, times = todo.pop()
        seen += 1
        kind = type(one)
        if kind is range:
            total += 144 * times
        elif kind in (int, bool, float, str, bytes, type(None)):
            total += ((len(one) if isinstance(one, Sized) else 0) + 32) * times
        elif kind in (tuple, list):
            total += (56 + 8 * len(one)) * times
            some = one[:: -(-len(one) // SAMPLED)] if len(one) > SAMPLED else one
            todo += [(item, times * len(one) / len(some)) for item in some]
        elif isinstance(one, dict):
            total += (64 + 100 * len(one)) * times
            todo += [(item, times) for pair in one.items() for item in pair]
        elif hasattr(one, "nbytes"):  # an array or a tensor
            total += (128 + one.nbytes) * times
        elif hasattr(one, "__dict__"):
            total += 160 * times
            todo += [(item, times) for item in vars(one).values()]
        else:
            total += 64 * times
    return int(total)


class Value:
    """A dataclass that is pickled, and copied, as its fields: what it has worked out of them is left behind.

    Hashes that are kept would be wrong in another process; caches are large, and hold locks and functions.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name in self.__dataclass_fields__}  # type: ignore[attr-defined]
