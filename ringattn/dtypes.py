"""Names and item sizes of the supported dtypes, without importing torch."""

from __future__ import annotations

#: Bytes per number of each dtype that q, k and v may have.
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def dtype_name(dtype: object) -> str:
    """The name of `dtype` without "torch.": "float32" for torch.float32, "torch.float32" and "float32"."""
    return str(dtype).strip().removeprefix("torch.")
