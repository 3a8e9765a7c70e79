"""Names and item sizes of the supported dtypes, and types of arguments, without importing torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import NoneType

import numpy as np

from .errors import InvalidInput
from .text import shown

#: Bytes per number of each dtype that q, k and v may have.
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
#: Bytes per number of each dtype that tensors of `Rows` may have; those that `ITEM_BYTES` lacks have no gradient.
ROW_BYTES = {
    **ITEM_BYTES,
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1},
}


def dtype_name(dtype: object) -> str:
    """The name of `dtype` without "torch.": "float32" for torch.float32, "torch.float32" and "float32"."""
    return (shown(dtype) if isinstance(dtype, list | dict | int) else str(dtype)).strip().removeprefix("torch.")


def take_numbers(options: object) -> None:
    """Convert the NumPy numbers in the fields of a frozen dataclass to Python numbers, in place.

    Later type checks need this: np.float32 is not a float, and np.bool is not a bool.
    """
    for name, value in vars(options).items():
        if isinstance(value, np.generic):
            object.__setattr__(options, name, value.item())


def check_type(name: str, value: object, annotation: str) -> None:
    """Raise InvalidInput unless the value has one of the types in the annotation, such as "Sequence | int | None"."""
    large = "float" in annotation and isinstance(value, int) and value.bit_length() > 1023  # float(value) may overflow
    if large or not _has_type(type(value), annotation):  # type: ignore[arg-type]  # mypy: type's hash is its values'
        hint = f"; try {name}={name}.item()" if hasattr(value, "item") else ""
        raise InvalidInput(f"{name}={shown(value)}: expected {annotation}{hint}")


@lru_cache(maxsize=256)
def _has_type(kind: type, annotation: str) -> bool:
    """Whether `kind` is a type in the annotation. Compares names, as few calls load Machine and Dropout."""
    expected = {name.rpartition(".")[2] for name in annotation.split(" | ")}
    if kind is bool:  # a subclass of int, which does not pass for a number here
        return "bool" in expected
    found = {"None" if base is NoneType else base.__name__ for base in kind.__mro__}
    sequence = "Sequence" in expected and issubclass(kind, Sequence) and not issubclass(kind, str | bytes)
    return bool(expected & found) or ("float" in expected and "int" in found) or sequence
