"""Tensors in files, read and written by rows: no file is ever in memory as a whole."""

from __future__ import annotations

import json
import os
import struct
import tokenize
import warnings
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ..errors import InvalidInput

#: Names of dtypes in safetensors files.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
#: How numpy reads the header of an array, by the version of the npy format. Version 3.0 differs from 2.0 in the names of fields,
#: which plain numbers do not have.
HEADERS: dict[tuple[int, int], Callable[..., Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,
}
#: Bytes of the last record of a zip file, without its comment, and bytes that are read at a time.
END, PIECE = 22, 1 << 20
#: What zipfile and numpy raise over a file that is broken: numpy hands a header to Python's own parser.
BROKEN = (
    zipfile.BadZipFile, struct.error, ValueError, TypeError, OSError, EOFError, NotImplementedError, RuntimeError, SyntaxError,
    tokenize.TokenError, MemoryError, UserWarning, SyntaxWarning, DeprecationWarning,
)  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """An uncompressed tensor [B, heads, N, ...] within a file."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    writable: bool = False

    def rows(self, r: range) -> torch.Tensor:
        """Rows `r` of dim 2, mapped until the tensor is dropped. What is written to them is in the file if `writable`."""
        kind = {8: np.int64, 4: np.int32, 2: np.int16}[self.dtype.itemsize]
        mode: Literal["r+", "c"] = "r+" if self.writable else "c"
        whole = np.memmap(self.path, dtype=kind, mode=mode, offset=self.offset, shape=self.shape)
        return torch.from_numpy(whole[:, :, r.start : r.stop : r.step]).view(self.dtype)


def create_safetensors(path: Path, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, Stored]:
    """A safetensors file of zeros with tensors of these shapes and dtypes, whose rows can be written.

    The format: https://github.com/huggingface/safetensors#format. The file is allocated here, so that a full disk is
    an InvalidInput, and not the end of a process that writes to mapped memory. Leaves a file behind on an error: pass one of `files.replacing`.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, places, end = {}, {}, 0
    # The widest first, so that every number is aligned.
    for name, (shape, dtype) in sorted(tensors.items(), key=lambda item: -item[1][1].itemsize):
        places[name], start = end, end
        end += prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    first = 8 + len(text)
    try:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(first + end)
            if end and hasattr(os, "posix_fallocate"):  # macOS has none: there a full disk is met when it is written to
                os.posix_fallocate(file.fileno(), first, end)
    except OSError as error:
        raise InvalidInput(
            f"output: {first + end:,} bytes cannot be written to {path.parent} ({error.strerror or error}); give another "
            "output.path="
        ) from None
    return {
        name: Stored(path, first + places[name], tuple(shape), dtype, writable=True)
        for name, (shape, dtype) in tensors.items()
    }


def read_safetensors(path: Path, wanted: Collection[str]) -> dict[str, Stored]:
    """The tensors of these names that a safetensors file holds. Raises InvalidInput."""
    try:
        with safe_open(path, "pt") as checked:  # checks the header, and that the file has all its bytes
            names = list(checked.keys())
    except (SafetensorError, OSError) as error:
        raise InvalidInput(f"input.path={path}: not a whole safetensors file ({error})") from None
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    found = {}
    for name in set(names) & set(wanted):
        dtype = header[name]["dtype"]
        if dtype not in DTYPES:
            raise InvalidInput(f"input.path={path}: {name} has dtype {dtype}; expected one of {', '.join(DTYPES)}")
        start = 8 + length + header[name]["data_offsets"][0]
        found[name] = Stored(path, start, tuple(header[name]["shape"]), DTYPES[dtype])
    return found


def read_npz(path: Path, wanted: Collection[str]) -> dict[str, Stored]:
    """The arrays of these names that an uncompressed npz file holds. Raises InvalidInput.

    The bytes of the arrays are read once, for their checksums. A safetensors file has none, so that a large one opens at once.
    """
    found: dict[str, Stored] = {}
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
            _check_count(archive, raw)
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name not in wanted:
                    continue
                if name in found:
                    raise InvalidInput(f"input.path={path}: holds {name} twice; write it again with numpy.savez")
                if info.compress_type != zipfile.ZIP_STORED:
                    raise InvalidInput(
                        f"input.path={path}: {name} is compressed and cannot be read by rows; write it with numpy.savez"
                    )
                found[name] = _member(archive, info, raw, path, name)
    except InvalidInput:
        raise
    except BROKEN as error:
        why = str(error).partition("\n")[0][:200] or type(error).__name__
        raise InvalidInput(
            f"input.path={path}: not a whole npz file ({why}); write it again with numpy.savez"
        ) from None
    return found


def _check_count(archive: zipfile.ZipFile, raw: BinaryIO) -> None:
    """Raise BadZipFile where the file names fewer or more members than its directory has; zipfile does not look."""
    raw.seek(-(END + len(archive.comment)), os.SEEK_END)
    here, told = struct.unpack("<8xHH", raw.read(12))
    if max(here, told) < 0xFFFF and {here, told} != {len(archive.infolist())}:  # 0xFFFF: another record has the number
        raise zipfile.BadZipFile(f"{told} members are told, and {len(archive.infolist())} are listed")


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, raw: BinaryIO, path: Path, name: str) -> Stored:
    """Where the numbers of an array are, after its size and its checksum were found right."""
    if info.compress_size != info.file_size:
        raise zipfile.BadZipFile(
            f"{name} is stored as it is, and has two sizes, {info.compress_size} and {info.file_size}"
        )
    with archive.open(info) as ring_plan:  # compares the two headers of the member
        version = np.lib.format.read_magic(ring_plan)
        if version not in HEADERS:
            raise InvalidInput(
                f"input.path={path}: {name} has version {version[0]}.{version[1]} of the npy format; expected 1.0, 2.0 or 3.0"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy's word on headers of Python 2
            shape, fortran, dtype = HEADERS[version](ring_plan)
        if fortran or dtype not in (np.float64, np.float32, np.float16) or not dtype.isnative:
            raise InvalidInput(
                f"input.path={path}: {name} must be a C-ordered array of native float64, float32 or float16"
            )
        if not all(type(n) is int and n >= 0 for n in shape):  # numpy takes True and -1
            raise InvalidInput(f"input.path={path}: {name} has the shape {shape}; expected whole numbers >= 0")
        start, held = ring_plan.tell(), info.file_size - ring_plan.tell()
        if prod(shape) * dtype.itemsize != held:
            raise InvalidInput(
                f"input.path={path}: {name} with shape {shape} and {dtype.name} is {prod(shape) * dtype.itemsize:,} bytes, and the "
                f"file holds {held:,} of it; write it again with numpy.savez"
            )
        while ring_plan.read(PIECE):  # at the end zipfile compares the checksum
            pass
    raw.seek(info.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", raw.read(4))
    first = info.header_offset + 30 + name_length + extra_length
    return Stored(path, first + start, shape, getattr(torch, dtype.name))
