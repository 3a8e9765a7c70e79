"""A cache bounded by bytes, and a base class for dataclasses whose cached results are not pickled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from dataclasses import Field
from functools import cached_property, wraps
from itertools import count, islice
from threading import RLock
from typing import Any, ClassVar, Self, TypeVar, cast
from weakref import WeakValueDictionary

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

#: Bytes counted per entry in addition to its value: the key and the dictionary slots.
ENTRY = 256
#: `estimate_bytes` samples this many items of a longer collection, and visits at most this many objects in all.
SAMPLED, MOST = 16, 4096
#: How many of the least recently used entries are measured again with every new entry, if values grow.
REMEASURED = 8
SCALARS = frozenset((bool, int, float, type(None)))
_ABSENT: Any = object()
#: Every pattern and layout by its number in a graph of torch.compile. Numbers start at 2: torch.compile takes 0 and 1
#: for constants.
NUMBERED: WeakValueDictionary[int, Numbered] = WeakValueDictionary()
_numbers = count(2)
#: Whether torch.compile is tracing (set by `call.autograd`): a value made in a trace is not a real object, and gets
#: number 0.
is_tracing: Callable[[], bool] = bool


class Cache:
    """A thread-safe cache that drops the least recently used entries beyond `limit` bytes.

    The newest entry stays even if it alone exceeds the limit. `size` returns the bytes of a value (default:
    `estimate_bytes`). Set `grows` if values grow while they are cached: they are then measured again after each use,
    and before entries are dropped.
    """

    def __init__(self, limit: int, size: Callable[[Any], int] | None = None, *, grows: bool = False) -> None:
        self.limit, self.bytes = limit, 0
        self._size, self._grows = size or estimate_bytes, grows
        self._values: OrderedDict[Hashable, Any] = OrderedDict()  # least recently used first
        self._sizes: dict[Hashable, int] = {}
        self._used: set[Hashable] = set()
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._values)

    def answer(self, key: Hashable, make: Callable[[], T], *, keep: Callable[[T], bool] | None = None) -> T:
        """Return the cached value of `key`; if there is none, call `make()`, cache its result and return it.

        `keep(value)` decides whether a new result is cached; with None, every result is cached.
        """
        with self._lock:
            cached = self._values.get(key, _ABSENT)
            if cached is not _ABSENT:
                self._values.move_to_end(key)
                if self._grows:
                    self._used.add(key)
                return cast(T, cached)
        value = make()  # outside the lock: two threads may both compute the value, and either result is correct
        if keep is None or keep(value):
            self._put(key, value)
        return value

    def values(self) -> list[Any]:
        """All cached values."""
        with self._lock:
            return [*self._values.values()]

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._values.clear()
            self._sizes.clear()
            self._used.clear()
            self.bytes = 0

    def _put(self, key: Hashable, value: object) -> None:
        size = self._size(value) + ENTRY
        with self._lock:
            if self._grows:
                for other in (*self._used, *islice(self._values, REMEASURED)):
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


def cached(compute: F) -> F:
    """Decorate a method, or function of an object, with hashable arguments: results are kept in the object's `cache`.

    The key is the function and its arguments, so functions never share entries. A default argument left out or given
    makes two different keys.
    """

    @wraps(compute)
    def answer(owner: Any, /, *arguments: Any, **named: Any) -> Any:
        key = (compute, *arguments, *named.items())
        return owner.cache.answer(key, lambda: compute(owner, *arguments, **named))

    return cast("F", answer)


def estimate_bytes(value: object) -> int:
    """Estimate the bytes of memory that `value` and all objects it refers to take.

    For long collections, only some elements are measured; the others are assumed to be similar.
    """
    if type(value) in SCALARS:
        return 32
    total, visited = 0.0, 0
    todo: list[tuple[Collection[Any], float]] = [((value,), 1.0)]  # objects, and how many similar ones each represents
    while todo and visited < MOST:
        items, weight = todo.pop()
        visited += len(items)
        for item in items:
            kind = type(item)
            if kind in SCALARS:
                total += 32 * weight
            elif kind is range:
                total += 144 * weight
            elif kind is str or kind is bytes:
                total += (32 + len(item)) * weight
            elif kind is tuple or kind is list:
                total += (56 + 8 * len(item)) * weight
                sample = item[:: -(-len(item) // SAMPLED)] if len(item) > SAMPLED else item
                todo.append((sample, weight * len(item) / max(1, len(sample))))
            elif isinstance(item, dict):
                total += (64 + 100 * len(item)) * weight
                some = [member for pair in islice(item.items(), SAMPLED) for member in pair]
                todo.append((some, weight * 2 * len(item) / max(1, len(some))))
            elif (known := getattr(item, "nbytes", None)) is not None:  # an array, or an object that knows its own size
                total += (128 + known) * weight
            elif hasattr(item, "__dict__"):
                total += 160 * weight
                todo.append((vars(item).values(), weight))
            else:
                total += 64 * weight
    return int(total)


class Value:
    """Base of frozen dataclasses that cache derived results: pickling and copying keep only the fields.

    A cached hash would be wrong in another process, and caches are large and hold locks and functions.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))

    def kept_hash(self) -> int:
        """The hash of all fields, computed once and then stored.

        Classes use it as `__hash__` if their values are large or serve as keys of many dicts.
        """
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name in self.__dataclass_fields__}

    def _normalize(self, **values: object) -> None:
        """Set fields to their normal form, so that equivalent values compare equal and print the same.

        Only for `__init__` and `__post_init__`: a frozen dataclass does not change afterwards.
        """
        for name, value in values.items():
            object.__setattr__(self, name, value)


class Numbered(Value):
    """Base class of patterns and layouts, to which code compiled by torch.compile refers by numbers.

    Compiled code may create such values anew in every call: a new value is only a new number, so nothing is recompiled.
    """

    #: The key in `NUMBERED`. Every value has its own number, even if values are equal.
    number = 0

    def __new__(cls, *fields: Any, **named: Any) -> Self:
        value = super().__new__(cls)
        if not is_tracing():
            object.__setattr__(value, "number", next(_numbers))
            NUMBERED[value.number] = value
        return value
