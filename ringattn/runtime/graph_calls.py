"""The functions that torch's graphs call as one operator, by name; `runtime.autograd.compilable` puts them here."""

from collections.abc import Callable
from typing import Any

COMPILABLE: dict[str, Callable[..., Any]] = {}
