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
from typing import IO, Any, BinaryIO, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ..errors import InvalidInput

#: The dtypes that are read and written, by their names in safetensors files.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
#: numpy's readers of the header of an array, by the version of the npy format. Version 3.0 differs from 2.0 only in
#: field names, which plain numbers do not have.
HEADER_READERS: dict[tuple[int, int], Callable[..., Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,
}
#: Bytes of the last record of a zip file without its comment, and the bytes that are read at a time.
ZIP_END_BYTES, READ_BYTES = 22, 1 << 20
#: What zipfile and numpy raise for a broken file: numpy hands the header of an array to Python's parser.
BROKEN_FILE_ERRORS = (
    zipfile.BadZipFile,
    struct.error,
    ValueError,
    TypeError,
    OSError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    MemoryError,
    UserWarning,
    SyntaxWarning,
    DeprecationWarning,
)


@dataclass(frozen=True)
class StoredTensor:
    """An uncompressed tensor [B, heads, N, ...] within a file, from byte `offset` on."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    writable: bool = False

    def rows(self, r: range) -> torch.Tensor:
        """Rows `r` of dim 2, mapped from the file until the tensor is dropped; changes reach the file if `writable`."""
        numpy_dtype = {8: np.int64, 4: np.int32, 2: np.int16}[self.dtype.itemsize]
        mode: Literal["r+", "c"] = "r+" if self.writable else "c"
        mapped = np.memmap(self.path, dtype=numpy_dtype, mode=mode, offset=self.offset, shape=self.shape)
        return torch.from_numpy(mapped[:, :, r.start : r.stop : r.step]).view(self.dtype)


def create_safetensors(path: Path, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, StoredTensor]:
    """The writable tensors of a new safetensors file of zeros, with these shapes and dtypes.

    The format: https://github.com/huggingface/safetensors#format. The file is allocated here, so that a full disk
    raises InvalidInput now, instead of ending a process that writes to mapped memory later. An error leaves the file
    behind: pass a path of `files.replacing`.
    """
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    header, offsets, end = {}, {}, 0
    # The widest dtypes come first, so that every number is aligned.
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
            if end and hasattr(os, "posix_fallocate"):  # missing on macOS, where writing meets a full disk
                os.posix_fallocate(file.fileno(), first, end)
    except OSError as error:
        raise InvalidInput(
            f"output: {first + end:,} bytes cannot be written to {path.parent} ({error.strerror or error}); "
            "give another output.path="
        ) from None
    return {
        name: StoredTensor(path, first + offsets[name], tuple(shape), dtype, writable=True)
        for name, (shape, dtype) in tensors.items()
    }


def read_safetensors(path: Path, names: Collection[str]) -> dict[str, StoredTensor]:
    """The tensors that a safetensors file has under these names. Raises InvalidInput."""
    try:
        with safe_open(path, "pt") as checked:  # checks the header, and that no bytes are missing
            stored_names = list(checked.keys())
    except (SafetensorError, OSError) as error:
        raise InvalidInput(f"input.path={path}: not a whole safetensors file ({error}); write it again") from None
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
        tensors[name] = StoredTensor(path, offset, tuple(header[name]["shape"]), DTYPES[dtype])
    return tensors


def read_npz(path: Path, names: Collection[str]) -> dict[str, StoredTensor]:
    """The arrays that an uncompressed npz file has under these names. Raises InvalidInput.

    Reads the bytes of the arrays once, for their checksums. A safetensors file has no checksums, so that a large file
    opens at once.
    """
    tensors: dict[str, StoredTensor] = {}
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
            _check_member_count(archive, raw)
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name not in names:
                    continue
                if name in tensors:
                    raise InvalidInput(f"input.path={path}: holds {name} twice; write it again with numpy.savez")
                if info.compress_type != zipfile.ZIP_STORED:
                    raise InvalidInput(
                        f"input.path={path}: {name} is compressed and cannot be read by rows; write it with numpy.savez"
                    )
                tensors[name] = _read_member(archive, info, raw, path, name)
    except InvalidInput:
        raise
    except BROKEN_FILE_ERRORS as error:
        problem = str(error).partition("\n")[0][:200] or type(error).__name__
        raise InvalidInput(
            f"input.path={path}: not a whole npz file ({problem}); write it again with numpy.savez"
        ) from None
    return tensors


def _check_member_count(archive: zipfile.ZipFile, raw: BinaryIO) -> None:
    """Raise BadZipFile where the last record of a zip file counts other members than its directory lists.

    zipfile does not compare the numbers. 0xFFFF stands for a number that another record has.
    """
    raw.seek(-(ZIP_END_BYTES + len(archive.comment)), os.SEEK_END)
    on_this_disk, total = struct.unpack("<8xHH", raw.read(12))
    listed = len(archive.infolist())
    if max(on_this_disk, total) < 0xFFFF and {on_this_disk, total} != {listed}:
        raise zipfile.BadZipFile(f"its last record counts {total} members, and {listed} are listed")


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, raw: BinaryIO, path: Path, name: str) -> StoredTensor:
    """An array of an npz file, with its size and checksum verified."""
    if info.compress_size != info.file_size:
        raise zipfile.BadZipFile(
            f"{name} is stored uncompressed, and has two sizes, {info.compress_size} and {info.file_size}"
        )
    with archive.open(info) as member:  # compares the two headers of the member
        shape, dtype = _read_array_header(member, path, name)
        header_bytes = member.tell()
        needed, stored = prod(shape) * dtype.itemsize, info.file_size - header_bytes
        if needed != stored:
            raise InvalidInput(
                f"input.path={path}: {name} with shape {shape} and {dtype.name} is {needed:,} bytes, and the file "
                f"holds {stored:,} bytes of it; write it again with numpy.savez"
            )
        while member.read(READ_BYTES):  # zipfile compares the checksum at the end
            pass
    raw.seek(info.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", raw.read(4))
    offset = info.header_offset + 30 + name_length + extra_length + header_bytes
    return StoredTensor(path, offset, shape, getattr(torch, dtype.name))


def _read_array_header(member: IO[bytes], path: Path, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and dtype of an array in the npy format. Raises InvalidInput, and what numpy raises."""
    version = np.lib.format.read_magic(member)
    if version not in HEADER_READERS:
        raise InvalidInput(
            f"input.path={path}: {name} has version {version[0]}.{version[1]} of the npy format; expected 1.0, 2.0 or "
            "3.0; write it again with numpy.savez"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy warns of headers that Python 2 wrote
        shape, fortran, dtype = HEADER_READERS[version](member)
    if fortran or dtype not in (np.float64, np.float32, np.float16) or not dtype.isnative:
        raise InvalidInput(
            f"input.path={path}: {name} must be a C-ordered array of native float64, float32 or float16; convert it "
            "with numpy.ascontiguousarray"
        )
    if not all(type(n) is int and n >= 0 for n in shape):  # numpy accepts True and -1
        raise InvalidInput(
            f"input.path={path}: {name} has the shape {shape}; expected whole numbers >= 0; write it again with "
            "numpy.savez"
        )
    return shape, dtype
