"""Tensors in safetensors files, mapped into memory, and in npz files, loaded as a whole."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ..errors import InvalidInput

#: The supported dtypes, by their names in safetensors files.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def _map_tensor(
    path: Path, offset: int, shape: Sequence[int], dtype: torch.dtype, mode: Literal["r+", "c"]
) -> torch.Tensor:
    """The tensor at byte `offset` of a file, memory-mapped: its numbers are loaded when they are read."""
    if not prod(shape):  # nothing to map
        return torch.empty(*shape, dtype=dtype, device="cpu")
    numpy_dtype = {8: np.int64, 4: np.int32, 2: np.int16}[dtype.itemsize]
    return torch.from_numpy(np.memmap(path, numpy_dtype, mode, offset, tuple(shape))).view(dtype)


def create_safetensors(path: Path, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, torch.Tensor]:
    """Create a safetensors file of zeros with these shapes and dtypes; returns its tensors, mapped to be written.

    Format: https://github.com/huggingface/safetensors#format. Allocates the whole file, so that a full disk raises
    InvalidInput now instead of killing the process at a later write to mapped memory. On an error the file remains:
    pass a path from `files.replacing`.
    """
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    header, offsets, end = {}, {}, 0
    # Widest dtypes first, so that every number is aligned.
    for name, (shape, dtype) in sorted(tensors.items(), key=lambda item: -item[1][1].itemsize):
        offsets[name], start = end, end
        end += prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype_names[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    first = 8 + len(text)
    try:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(first + end)
            if end and hasattr(os, "posix_fallocate"):  # macOS lacks it: there, a full disk shows only on writing
                os.posix_fallocate(file.fileno(), first, end)
    except OSError as error:
        raise InvalidInput(
            f"output: cannot write {first + end:,} bytes to {path.parent} ({error.strerror or error}); "
            "give another output.path="
        ) from None
    return {
        name: _map_tensor(path, first + offsets[name], shape, dtype, "r+") for name, (shape, dtype) in tensors.items()
    }


def map_safetensors(path: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Map the tensors called `names` of a safetensors file; missing names are left out. Raises InvalidInput."""
    try:
        with safe_open(path, "pt") as checked:  # checks the header and the file size
            stored_names = list(checked.keys())
    except (SafetensorError, OSError) as error:
        raise InvalidInput(f"input.path={path}: not a complete safetensors file ({error}); write it again") from None
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    tensors = {}
    for name in set(stored_names) & set(names):
        dtype = header[name]["dtype"]
        if dtype not in DTYPES:
            raise InvalidInput(
                f"input.path={path}: {name} has dtype {dtype}; expected one of {', '.join(DTYPES)}; convert it"
            )
        offset = 8 + header_bytes + header[name]["data_offsets"][0]
        tensors[name] = _map_tensor(path, offset, header[name]["shape"], DTYPES[dtype], "c")
    return tensors


def read_npz(path: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Read the arrays called `names` from an npz file; missing names are left out. Raises InvalidInput."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in names if name in arrays}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidInput(f"input.path={path}: {error}; write the file again with numpy.savez") from None
    for name, x in tensors.items():
        if x.dtype not in DTYPES.values():
            raise InvalidInput(f"input.path={path}: {name} has dtype {x.dtype}; convert it to float32 or float64")
    return tensors
