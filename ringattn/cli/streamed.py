"""ringattn run stream=host|disk: one device computes chunk after chunk of what lives in host memory, or in a file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config.overrides import without_meaning
from ..config.schema import RunConfig, parse_size
from ..errors import InvalidInput, plural
from ..files import check_json, check_writable, replacing
from ..kernels.base import wide
from ..pattern import parse_pattern
from ..runtime.handshake import Call
from ..runtime.host import Storage
from ..runtime.offload import HostTensors, check_chunk, get_device, make_stream
from .inputs import NAMES, File, open_source, random_source
from .run_job import Measured, Run, check_memory, save
from .stored import Stored, create_safetensors


@dataclass(frozen=True)
class _Files:
    """Storage in files: inputs are mapped as they are read, results as they are written."""

    source: File
    results: dict[str, Stored]
    output_scale: float

    def rows(self, name: str, r: range) -> torch.Tensor:
        if name in self.results:
            return self.results[name].rows(r)
        x = self.source.view(name, r)
        return x * self.output_scale if name == "dout" and self.output_scale != 1 else x


class StreamedRun(Run):
    """One process with one device."""

    moved = "copied"
    storage: Storage

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.ending = ExitStack()

    def run(self) -> None:
        with self.ending:
            super().run()

    def open(self) -> None:
        c = self.config
        if c.stream not in ("host", "disk"):
            raise InvalidInput(f"stream={c.stream}: expected host or disk")
        plain = RunConfig()  # an experiment may have set what `prepare` refuses
        for name in ("ranks", "comm_dtype", "rotate"):
            if getattr(c, name) != getattr(plain, name):
                raise without_meaning(f"{name}={getattr(c, name)}", c.stream)
        if c.transport.spec != "gloo":
            raise without_meaning(f"transport={c.transport.spec}", c.stream)
        chunk = None if c.chunk is None else parse_size(c.chunk, "chunk")
        check_chunk(chunk)
        self.device = get_device(c.device)
        self.source = open_source(c)
        shape = self.source.shape
        shapes = ((shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.value_dim))
        q, k, v = (
            torch.empty((), dtype=shape.dtype, device="cpu").expand(shape.batch, heads, shape.tokens, width)
            for heads, width in shapes
        )
        call = Call(
            pattern=parse_pattern(c.pattern.spec), layout="contiguous", schedule="direct", kernel=c.kernel.spec,
            scale=shape.head_dim**-0.5 if c.scale is None else c.scale, deterministic=c.deterministic, return_lse=True,
        )  # fmt: skip
        self.stream = make_stream(call, q, k, v, chunk=chunk, device=self.device, backward=c.backward)
        self.plan, self.ranks = self.stream.plan, self.stream.plan.ranks
        if c.output.path:
            check_writable(Path(c.output.path))
        check_json(c.output.report)
        results: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "out": ((*q.shape[:3], v.shape[3]), q.dtype), "lse": (q.shape[:3], wide(q.dtype))
        }  # fmt: skip
        if c.backward:
            results |= {name: (tuple(x.shape), wide(q.dtype)) for name, x in (("dq", q), ("dk", k), ("dv", v))}
        (self._on_disk if c.stream == "disk" else self._in_memory)(results)

    def _in_memory(self, results: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        check_memory(self.plan, self.plan.tokens)
        whole, shape = range(self.plan.tokens), self.source.shape
        tensors = {name: self.source.rows(name, whole) for name in NAMES}
        if self.config.backward:
            noise = random_source(replace(shape, kv_heads=shape.heads), self.config.input.seed + 1)
            tensors["dout"] = noise.rows("v", whole).mul_(self.plan.pattern.output_scale)
        self.inputs = tuple(tensors[name] for name in NAMES)
        tensors |= {name: torch.empty(size, dtype=dtype, device="cpu") for name, (size, dtype) in results.items()}
        self.storage = HostTensors(tensors)

    def _on_disk(self, results: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        c = self.config
        if not isinstance(self.source, File):
            raise InvalidInput(
                f"stream=disk reads input=file input.path=..., not input={c.input.name}; try stream=host"
            )
        if not c.output.path:
            raise InvalidInput("stream=disk writes its results to a file as they are made; name it with output.path=")
        if c.backward and "dout" not in self.source.tensors:
            raise InvalidInput(
                f"backward=true with stream=disk: {c.input.path} has no tensor 'dout', the gradient of the output; add "
                "it, or try stream=host, which makes a random one"
            )
        if c.backward:
            (shape, dtype), stored = results["out"], self.source.tensors["dout"]
            if (stored.shape, stored.dtype) != (tuple(shape), dtype):
                raise InvalidInput(
                    f"{c.input.path}: dout must be {dtype} {tuple(shape)} as out is, but is {stored.dtype} {stored.shape}"
                )
        temporary = self.ending.enter_context(replacing(Path(c.output.path)))
        made = create_safetensors(temporary, results)
        self.storage = _Files(self.source, made, self.plan.pattern.output_scale)
        self.inputs = tuple(self.source.view(name, range(self.plan.tokens)) for name in NAMES)

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.stream.compute(self.storage)
        whole = range(self.plan.tokens)
        return self.storage.rows("out", whole), self.storage.rows("lse", whole)

    def backward(self, out: torch.Tensor) -> Callable[[], Any]:
        return partial(self.stream.differentiate, self.storage)

    def measure(self) -> tuple[torch.Tensor, torch.Tensor, Measured]:
        result = super().measure()
        if self.plan.pattern.output_scale != 1:  # of what the backward reads, the output without it
            for rank in range(self.ranks):
                for rows in self.plan.layout.shard(rank):
                    self.storage.rows("out", rows).mul_(self.plan.pattern.output_scale)
        return result

    def barrier(self) -> None:
        pass

    def counted(self) -> int:
        counters = self.stream.counters
        copied = counters.sent_bytes + counters.received_bytes
        counters.reset()
        return copied

    def collect(self, seen: Measured) -> list[Measured]:
        return [seen]

    def compare(self, out: torch.Tensor) -> float | None:
        return self.sampled(lambda x, top: None, np.arange(self.plan.tokens), out)

    def write(self, path: Path, out: torch.Tensor, lse: torch.Tensor) -> None:
        if self.config.stream == "host":
            save(path, out, lse)

    def where(self) -> str:
        rows = max(map(self.plan.layout.rows, range(self.ranks)))
        home = "host memory" if self.config.stream == "host" else str(self.config.input.path)
        parts = f"{plural(self.ranks, 'chunk')} of at most {plural(rows, 'row')}"
        return f"streamed from {home} in {parts} on {self.device}"

    def process(self, rank: int) -> str:
        return "of the process"
