"""Answers of `ringattn play` where numpy's default integer has 32 bits, as in a browser, in a process of its own.

`python narrow.py native|narrow` reads a JSON list of settings, and prints one answer per line. In a browser, arrays
without a dtype, indices and sums have 32 bits; `repeat` and `bincount` refuse 64 bits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy

#: Functions whose integers have the default size unless a dtype or an array of 64 bits says otherwise.
MAKING = ("arange", "array", "asarray", "full", "full_like", "concatenate", "append", "stack")
#: Functions, and methods of arrays, that return indices or counts.
INDEXING = ("argsort", "argmin", "argmax", "nonzero", "flatnonzero", "searchsorted", "bincount", "lexsort")
#: Those that add up small integers in the default size.
SUMMING = ("sum", "cumsum", "prod", "cumprod", "trace")
#: Those that take indices of the default size only.
COUNTING = ("repeat", "bincount")
#: What a browser has not, or would have to load first.
ABSENT = ("torch", "hydra", "omegaconf", "rich", "jinja2", "safetensors", "fcntl", "resource", "multiprocessing")


def wide(value: Any) -> bool:
    """Whether a value is, or holds, an array or number of 64 bits."""
    if isinstance(value, list | tuple):
        return any(map(wide, value))
    return isinstance(value, numpy.ndarray | numpy.generic) and value.dtype in (numpy.int64, numpy.uint64)


def shown(value: Any, narrow: bool) -> Any:
    """The value as arrays of `Small`; with `narrow`, its integers in 32 bits. OverflowError if they do not fit."""
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(shown(one, narrow) for one in value)
    if narrow and isinstance(value, numpy.ndarray | numpy.generic) and value.dtype == numpy.int64:
        if value.size and max(abs(int(value.max())), abs(int(value.min()))) >= 1 << 31:
            raise OverflowError("Python integer too large to convert to C long")
        value = value.astype(numpy.int32)
    return value.view(Small) if isinstance(value, numpy.ndarray) else value


def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of numpy, or a method of arrays, as it is where the default integer has 32 bits."""

    def call(*given: Any, **named: Any) -> Any:
        if named.get("dtype") is int:
            named["dtype"] = numpy.int32
        given = tuple(numpy.int32 if one is int else one for one in given)
        told = "dtype" in named or any(isinstance(one, type) for one in given)
        if name in COUNTING and any(wide(one) for one in (given if name == "bincount" else given[1:])):
            raise TypeError(f"Cannot cast array data to int32 according to the rule 'safe': {name}")
        if name in SUMMING and not told and not wide(given[0]) and numpy.asarray(given[0]).dtype.kind in "bi":
            named["dtype"] = numpy.int32
        narrow = name in INDEXING or (name in MAKING and not told and not wide(given))
        found = function(*given, **named)
        if name == "unique" and isinstance(found, tuple):
            return shown(found[0], False), *(shown(one, True) for one in found[1:])
        return shown(found, narrow)

    return call


class Small(numpy.ndarray[Any, Any]):
    """An array whose methods return integers of 32 bits where no other size is said."""


for method in (*INDEXING, *SUMMING, "repeat"):
    if hasattr(numpy.ndarray, method):
        setattr(Small, method, wrapped(method, getattr(numpy.ndarray, method)))


class Browser(ModuleType):
    """The module numpy, as it is in a browser."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(numpy, name)
        if name in ("intp", "int_"):
            return numpy.int32
        plain = callable(found) and not isinstance(found, type | numpy.ufunc)
        return wrapped(name, found) if plain else found


if __name__ == "__main__":
    if sys.argv[1] == "narrow":
        sys.modules["numpy"] = Browser("numpy")
        sys.modules |= dict.fromkeys(ABSENT)  # type: ignore[arg-type]
    from ringattn.lab.play.answer import answer

    for settings in json.load(sys.stdin):
        print(json.dumps(answer(settings)), flush=True)
