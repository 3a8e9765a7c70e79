"""Names and item sizes of the supported dtypes, and conversion of NumPy's numbers, without importing torch."""

from __future__ import annotations

import numpy as np

#: Bytes per number of each dtype that q, k and v may have.
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def dtype_name(dtype: object) -> str:
    """The name of `dtype` without "torch.": "float32" for torch.float32, "torch.float32" and "float32"."""
    return str(dtype).strip().removeprefix("torch.")


def take_numbers(options: object) -> None:
    """Convert the NumPy numbers in the fields of a frozen dataclass to Python numbers, in place.

    Later type checks need this: np.float32 is not a float, and np.bool is not a bool.
    """
    for name, value in vars(options).items():
        if isinstance(value, np.generic):
            object.__setattr__(options, name, value.item())
