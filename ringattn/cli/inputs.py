"""Inputs of `ringattn run`: each rank makes or reads only its own rows of q, k and v."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ..config.schema import RunConfig
from ..errors import InvalidInput
from ..files import check_readable
from ..layout.regular import Layout
from ..nn import rotary
from ..numerics.counter_random import counter_normal
from .stored import DTYPES, Stored, read_npz, read_safetensors

NAMES = ("q", "k", "v")
#: What is read of a file: the gradient of the output, too, where it is there.
STORED = (*NAMES, "dout")
#: Width of the byte embedding of a text.
EMBEDDING = 64
#: Rows made at a time, so that temporary memory does not grow with the shard.
CHUNK = 1 << 14


@dataclass(frozen=True)
class InputShape:
    """Sizes of a whole input: q [batch, heads, tokens, head_dim], k [.., kv_heads, ..], v [.., value_dim]."""

    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype


class Input(Protocol):
    """An input that can be read by rows."""

    @property
    def shape(self) -> InputShape: ...

    def rows(self, name: str, r: range) -> torch.Tensor:
        """Rows `r` of q, k or v: [batch, heads, len(r), dim]."""


def open_source(config: RunConfig) -> Input:
    """The input that a config names, checked as far as can be without reading its numbers."""
    if config.input.name == "file":
        if config.input.path is None:
            raise InvalidInput("input=file needs input.path=..., a .safetensors or .npz file with q, k and v")
        return _open_file(Path(config.input.path))
    shape = _asked(config)
    if config.input.name == "text":
        return _Text(shape, _read_text(config.input.path, shape.tokens), config.input.seed)
    return _Random(shape, config.input.seed)


def shards(source: Input, layout: Layout, rank: int) -> tuple[torch.Tensor, ...]:
    """(q, k, v) of one rank, in the local order of its shard."""
    result = []
    for name in NAMES:
        parts = [source.rows(name, r) for r in layout.shard(rank)]
        result.append(torch.cat(parts, 2) if parts else source.rows(name, range(0)))
    return tuple(result)


def _asked(config: RunConfig) -> InputShape:
    kv_heads = config.heads if config.kv_heads is None else config.kv_heads
    dtype: Any = getattr(torch, config.dtype, None)
    if dtype not in DTYPES.values():
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES.values())
        raise InvalidInput(f"dtype={config.dtype}: not supported; expected one of {names}")
    return InputShape(config.batch, config.heads, kv_heads, config.size(), config.head_dim, config.head_dim, dtype)


def _by_chunks(r: range) -> Iterator[range]:
    for first in range(0, len(r), CHUNK):
        yield r[first : first + CHUNK]


# -- text -----------------------------------------------------------------------------------------------------


def _read_text(path: str | None, tokens: int) -> np.ndarray:
    if path is None:
        spec = importlib.util.find_spec("pydoc_data.topics")
        if spec is None or spec.origin is None:
            raise InvalidInput("this Python ships no pydoc_data/topics.py; name a text with input.path=")
        path = spec.origin
    check_readable(Path(path), "input.path")
    held = Path(path).stat().st_size
    if held < tokens:
        raise InvalidInput(
            f"tokens={tokens:,}: the text {path} has only {held:,} bytes; try tokens={held}, a longer text with "
            "input.path=, or input=random"
        )
    return np.fromfile(path, dtype=np.uint8, count=tokens)


@dataclass(frozen=True)
class _Text:
    """Bytes through an embedding and projections that a seed fixes, with rotary positions on q and k."""

    shape: InputShape
    data: np.ndarray
    seed: int

    def rows(self, name: str, r: range) -> torch.Tensor:
        heads = self.shape.heads if name == "q" else self.shape.kv_heads
        # A byte has 256 values, so project the embedding once, not the text: rows do not depend on the shard.
        generator = torch.Generator().manual_seed(self.seed * 4 + NAMES.index(name) + 1)
        table = torch.randn(256, EMBEDDING, generator=torch.Generator().manual_seed(self.seed * 4), device="cpu")
        weights = torch.randn(EMBEDDING, heads * self.shape.head_dim, generator=generator, device="cpu") / math.sqrt(
            EMBEDDING
        )
        projected = (table.double() @ weights.double()).float()
        out = torch.empty(self.shape.batch, heads, len(r), self.shape.head_dim, dtype=self.shape.dtype, device="cpu")
        first = 0
        for part in _by_chunks(r):
            index = torch.from_numpy(self.data[part.start : part.stop : part.step].astype(np.int64))
            x = projected[index].view(len(part), heads, self.shape.head_dim).transpose(0, 1)
            if name != "v":
                x = rotate(x, torch.arange(part.start, part.stop, part.step, device="cpu"))
            out[:, :, first : first + len(part)] = x
            first += len(part)
        return out


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`nn.rotary.rotate` of x [..., n, D] at global `positions` [n]; an odd last column is left as it is."""
    even = x.shape[-1] // 2 * 2
    return torch.cat((rotary.rotate(x[..., :even], positions), x[..., even:]), -1)


# -- random ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Random:
    """Standard normal numbers, each a pure function of (seed, tensor, batch, head, position, column)."""

    shape: InputShape
    seed: int

    def rows(self, name: str, r: range) -> torch.Tensor:
        s = self.shape
        heads, width = (s.heads if name == "q" else s.kv_heads), (s.value_dim if name == "v" else s.head_dim)
        out = torch.empty(s.batch, heads, len(r), width, dtype=s.dtype, device="cpu")
        column = torch.arange(width, device="cpu")
        first = 0
        for part in _by_chunks(r):
            position = torch.arange(part.start, part.stop, part.step, device="cpu")[:, None] * width + column
            for b in range(s.batch):
                for h in range(heads):
                    stream = ((self.seed * 3 + NAMES.index(name)) * s.batch + b) * heads + h
                    out[b, h, first : first + len(part)] = counter_normal(stream, position)
            first += len(part)
        return out


def random_source(shape: InputShape, seed: int) -> Input:
    """Standard normal inputs of any shape."""
    return _Random(shape, seed)


# -- files ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """q, k and v in a file, and dout where it has that."""

    shape: InputShape
    tensors: dict[str, Stored]

    def rows(self, name: str, r: range) -> torch.Tensor:
        return self.view(name, r).clone()

    def view(self, name: str, r: range) -> torch.Tensor:
        """Rows of q, k, v or dout, mapped: only what is read comes into memory."""
        return self.tensors[name].rows(r)


def _open_file(path: Path) -> File:
    check_readable(path, "input.path")
    if path.suffix == ".safetensors":
        found = read_safetensors(path, STORED)
    elif path.suffix == ".npz":
        found = read_npz(path, STORED)
    else:
        raise InvalidInput(f"input.path={path}: expected a .safetensors or .npz file with q, k and v")
    for name in NAMES:
        if name not in found:
            raise InvalidInput(f"input.path={path}: has no tensor {name!r}, only {', '.join(sorted(found)) or 'none'}")
        if len(found[name].shape) != 4:
            raise InvalidInput(f"input.path={path}: {name} must be [B, H, N, D], has shape {found[name].shape}")
    q, k, v = (found[name] for name in NAMES)
    if not (q.dtype == k.dtype == v.dtype):
        raise InvalidInput(f"input.path={path}: q, k and v must have one dtype, have {q.dtype}, {k.dtype}, {v.dtype}")
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if k.shape[:3] != v.shape[:3] or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise InvalidInput(f"input.path={path}: q, k and v do not fit each other: {shapes}")
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        raise InvalidInput(f"input.path={path}: an empty tensor: {shapes}")
    shape = InputShape(q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.shape[3], v.shape[3], q.dtype)
    return File(shape, found)
