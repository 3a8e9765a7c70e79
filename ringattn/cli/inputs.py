"""Inputs of `ringattn run`: each rank generates or reads only its own rows of q, k and v."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..dtypes import dtype_name
from ..errors import InvalidInput
from ..files import check_readable
from ..layout.regular import Layout
from ..nn import rotate
from ..simulator.numerics.source import CHUNK, chunks, normal_rows
from .config.groups import check_file
from .config.schema import RunConfig
from .tensor_files import map_safetensors, read_npz

NAMES = ("q", "k", "v")
#: The tensors read from a file; dout, the gradient of the output, is optional.
FILE_NAMES = (*NAMES, "dout")
#: Width of the byte embedding of a text.
EMBEDDING = 64


@dataclass(frozen=True)
class InputShape:
    """Sizes of the whole input: q [batch, heads, tokens, head_dim], k [.., kv_heads, ..], v [.., value_dim]."""

    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype


def open_source(config: RunConfig) -> InputSource:
    """The input of a configuration, checked without reading its numbers. Raises InvalidInput."""
    if config.input.name == "file":
        check_file("input", "file", config.input.path, "a .safetensors or .npz file with q, k and v")
        return _open_file(Path(str(config.input.path)))
    kv_heads = config.heads if config.kv_heads is None else config.kv_heads
    width = config.head_dim
    dtype = getattr(torch, dtype_name(config.dtype))
    shape = InputShape(config.batch, config.heads, kv_heads, config.size(), width, width, dtype)
    if config.input.name == "text":
        return TextSource(shape, _read_text(config.input.path, shape.tokens), config.input.seed)
    return RandomSource(shape, config.input.seed)


def read_shard(source: InputSource, layout: Layout, rank: int) -> tuple[torch.Tensor, ...]:
    """(q, k, v) of one rank, rows in the local order of its shard."""
    tensors = []
    for name in NAMES:
        parts = [source.rows(name, r) for r in layout.shard(rank)]
        tensors.append(torch.cat(parts, 2) if parts else source.rows(name, range(0)))
    return tuple(tensors)


def _read_text(path: str | None, tokens: int) -> np.ndarray:
    """The first `tokens` bytes of a text file (default: pydoc's help topics). Raises InvalidInput."""
    if path is None:
        spec = importlib.util.find_spec("pydoc_data.topics")
        if spec is None or spec.origin is None:
            raise InvalidInput(
                "input=text reads pydoc_data/topics.py of the Python installation, which this one lacks; give a text "
                "with input.path="
            )
        path = spec.origin
    check_readable(Path(path), "input.path")
    text_bytes = Path(path).stat().st_size
    if text_bytes < tokens:
        raise InvalidInput(
            f"tokens={tokens:,}: the text {path} has only {text_bytes:,} bytes; try tokens={text_bytes}, a longer text "
            "with input.path=, or input=random"
        )
    return np.fromfile(path, dtype=np.uint8, count=tokens)


@dataclass(frozen=True)
class TextSource:
    """q, k and v computed from a text: its bytes are embedded and projected with random weights drawn from `seed`.

    q and k have rotary position embeddings.
    """

    shape: InputShape
    data: np.ndarray
    seed: int

    def rows(self, name: str, r: range) -> torch.Tensor:
        """Rows `r` of q, k or v: [batch, heads, len(r), dim]."""
        heads, dim = (self.shape.heads if name == "q" else self.shape.kv_heads), self.shape.head_dim
        # A byte has 256 values: project the embedding table, not the text. Rows then do not depend on the shard.
        generator = torch.Generator().manual_seed(self.seed * 4 + NAMES.index(name) + 1)
        table = torch.randn(256, EMBEDDING, generator=torch.Generator().manual_seed(self.seed * 4), device="cpu")
        weights = torch.randn(EMBEDDING, heads * dim, generator=generator, device="cpu") / math.sqrt(EMBEDDING)
        projected = (table.double() @ weights.double()).float()
        out = torch.empty(self.shape.batch, heads, len(r), dim, dtype=self.shape.dtype, device="cpu")
        for rows, part in zip(out.split(CHUNK, 2), chunks(r), strict=False):
            index = torch.from_numpy(self.data[part.start : part.stop : part.step].astype(np.int64))
            x = projected[index].view(len(part), heads, dim).transpose(0, 1)
            if name != "v":
                x = rotate_pairs(x, torch.arange(part.start, part.stop, part.step, device="cpu"))
            rows[:] = x
        return out


def rotate_pairs(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of x [..., n, D] at global `positions` [n]; an odd last column is unchanged."""
    paired = x.shape[-1] // 2 * 2
    if not paired:
        return x
    return torch.cat((rotate(x[..., :paired], positions), x[..., paired:]), -1)


@dataclass(frozen=True)
class RandomSource:
    """Standard normal numbers, each a pure function of (seed, tensor, batch, head, position, column)."""

    shape: InputShape
    seed: int

    def rows(self, name: str, r: range) -> torch.Tensor:
        """Rows `r` of q, k or v: [batch, heads, len(r), dim]."""
        s = self.shape
        heads, width = (s.heads if name == "q" else s.kv_heads), (s.value_dim if name == "v" else s.head_dim)
        first = (self.seed * 3 + NAMES.index(name)) * s.batch * heads
        numbers = normal_rows(range(first, first + s.batch * heads), r, width, s.dtype)
        return numbers.unflatten(0, (s.batch, heads))


@dataclass(frozen=True)
class FileSource:
    """q, k and v of a file, and dout if the file has it."""

    shape: InputShape
    tensors: Mapping[str, torch.Tensor]

    def rows(self, name: str, r: range) -> torch.Tensor:
        """A copy of rows `r` of q, k, v or dout: [batch, heads, len(r), dim]."""
        return self.tensors[name][:, :, r.start : r.stop : r.step].clone()


#: Any input that can be read by rows.
InputSource = TextSource | RandomSource | FileSource


def _open_file(path: Path) -> FileSource:
    """The tensors of a file. Raises InvalidInput if q, k or v is missing, or if their shapes or dtypes do not match."""
    check_readable(path, "input.path")
    if path.suffix not in (".safetensors", ".npz"):
        raise InvalidInput(
            f"input.path={path}: expected a .safetensors or .npz file with q, k and v; write it with numpy.savez"
        )
    tensors = read_npz(path, FILE_NAMES) if path.suffix == ".npz" else map_safetensors(path, FILE_NAMES)
    for name in NAMES:
        if name not in tensors:
            names = ", ".join(sorted(tensors)) or "none of q, k, v and dout"
            raise InvalidInput(f"input.path={path}: tensor {name!r} is missing, found only {names}; add it")
    q, k, v = (tensors[name] for name in NAMES)
    shapes = ", ".join(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}" for name in NAMES)
    fits = {len(x.shape) for x in (q, k, v)} == {4} and all((*q.shape, *k.shape, *v.shape))
    fits = fits and k.shape[:3] == v.shape[:3] and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
    if not fits or not q.dtype == k.dtype == v.dtype:
        raise InvalidInput(
            f"input.path={path}: q, k and v do not match: {shapes}; expected q [B, H, N, D], k [B, K, N, D] "
            "and v [B, K, N, any] of one dtype, with at least one token"
        )
    shape = InputShape(q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.shape[3], v.shape[3], q.dtype)
    return FileSource(shape, tensors)
