"""Names of dtypes, and the bytes of their numbers; without torch."""

from __future__ import annotations

from typing import Any

#: Bytes of a number of each dtype that q, k and v may have.
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def dtype_name(dtype: Any) -> str:
    """The name of a torch dtype, or of a name that is written with or without "torch."."""
    return str(dtype).strip().removeprefix("torch.")
