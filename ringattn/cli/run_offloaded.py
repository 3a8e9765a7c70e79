"""ringattn run offload=host|disk: one device computes chunk by chunk, with tensors in host memory or in a file."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..call.compile import compile_call
from ..call.offload import HostTensors, check_chunk, get_device, make_offload
from ..errors import InvalidInput
from ..files import replacing
from ..kernels.base import wide
from ..pattern import parse_pattern
from ..text import plural
from .config.groups import check_choice
from .config.schema import RunConfig, parse_size
from .inputs import NAMES, FileSource, InputSource, RandomSource, open_source
from .run_job import RankMeasurements, Run, check_memory, check_outputs, save_output
from .tensor_files import create_safetensors

#: The shape and dtype of each result, by name.
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


class OffloadedRun(Run):
    """A run in one process, whose device holds one chunk of the sequence at a time."""

    bytes_verb = "copied"
    storage: HostTensors

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.stack = ExitStack()

    def run(self) -> dict[str, Any] | None:
        with self.stack:  # on an error, removes the unfinished output
            return super().run()

    def open(self) -> None:
        config = self.config
        check_choice("offload", str(config.offload), ("host", "disk"))
        chunk = None if config.chunk is None else parse_size(config.chunk, "chunk")
        check_chunk(chunk)
        self.device = get_device(config.device)
        source = open_source(config)
        q, k, v = _unallocated_inputs(source)
        options = {"schedule": "direct", "kernel": config.kernel.spec, "deterministic": config.deterministic}
        call = compile_call(
            q,
            k,
            v,
            parse_pattern(config.pattern.spec),
            "contiguous",
            {**options, "scale": config.scale},
            return_lse=True,
            device=self.device,
        )
        self.runner = make_offload(call, chunk=chunk, backward=config.backward)
        self.plan, self.ranks = self.runner.plan, self.runner.plan.ranks
        check_outputs(config)
        results: Shapes = {"out": ((*q.shape[:3], v.shape[3]), q.dtype), "lse": (tuple(q.shape[:3]), wide(q.dtype))}
        if config.backward:
            results |= {name: (tuple(x.shape), wide(q.dtype)) for name, x in (("dq", q), ("dk", k), ("dv", v))}
        tensors = (self._open_files if config.offload == "disk" else self._open_memory)(source, results)
        self.inputs = tuple(tensors[name] for name in NAMES)
        self.storage = HostTensors(tensors, self.plan.pattern.output_scale)

    def _open_memory(self, source: InputSource, results: Shapes) -> dict[str, torch.Tensor]:
        """Read the inputs into host memory and allocate the results there."""
        check_memory(self.plan, self.plan.tokens)
        sequence, shape = range(self.plan.tokens), source.shape
        tensors = {name: source.rows(name, sequence) for name in NAMES}
        if self.config.backward:
            cotangent = RandomSource(replace(shape, kv_heads=shape.heads), self.config.input.seed + 1)
            tensors["dout"] = cotangent.rows("v", sequence)
        return tensors | {name: torch.empty(size, dtype=dtype, device="cpu") for name, (size, dtype) in results.items()}

    def _open_files(self, source: InputSource, results: Shapes) -> dict[str, torch.Tensor]:
        """Map the inputs from their file and create the file for the results."""
        config = self.config
        if not isinstance(source, FileSource):
            raise InvalidInput(
                f"offload=disk reads input=file input.path=..., not input={config.input.name}; try offload=host"
            )
        if config.output.path is None:
            raise InvalidInput("offload=disk writes its results directly to a file; give its path with output.path=")
        if config.backward:
            if "dout" not in source.tensors:
                raise InvalidInput(
                    f"backward=true with offload=disk: {config.input.path} has no tensor 'dout', the gradient of the "
                    "output; add it, or try offload=host, which uses a random one"
                )
            (shape, dtype), dout = results["out"], source.tensors["dout"]
            found = tuple(dout.shape)
            if (found, dout.dtype) != (shape, dtype):
                raise InvalidInput(
                    f"{config.input.path}: dout must be {dtype} {shape} like out, but is {dout.dtype} {found}"
                )
        temporary = self.stack.enter_context(replacing(Path(config.output.path)))
        return {**source.tensors, **create_safetensors(temporary, results)}

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.runner.compute(self.storage)
        return self.storage.tensors["out"], self.storage.tensors["lse"]

    def backward(self, out: torch.Tensor) -> object:
        self.runner.differentiate(self.storage)
        return None

    def measure(self) -> tuple[torch.Tensor, torch.Tensor, RankMeasurements]:
        measured = super().measure()
        if self.plan.pattern.output_scale != 1:  # scale only now: the backward needs the unscaled output
            self.storage.tensors["out"].mul_(self.plan.pattern.output_scale)
        return measured

    def count_bytes(self, *, backward: bool) -> int:
        counters = self.runner.counters
        copied = counters.sent_bytes + counters.received_bytes
        counters.reset()
        return copied

    def write(self, path: Path, out: torch.Tensor, lse: torch.Tensor) -> None:
        if self.config.offload == "host":  # offload=disk has already written its results
            save_output(path, out, lse)

    def where(self) -> str:
        rows = max(map(self.plan.layout.rows, range(self.ranks)))
        home = "host memory" if self.config.offload == "host" else self.config.input.path
        chunks = f"{plural(self.ranks, 'chunk')} of at most {plural(rows, 'row')}"
        return f"offloaded, from {home} in {chunks} on {self.device}"


def _unallocated_inputs(source: InputSource) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v) with the shapes of an input, but with memory for only one number each."""
    shape = source.shape
    number = torch.empty((), dtype=shape.dtype, device="cpu")
    q = number.expand(shape.batch, shape.heads, shape.tokens, shape.head_dim)
    k = number.expand(shape.batch, shape.kv_heads, shape.tokens, shape.head_dim)
    v = number.expand(shape.batch, shape.kv_heads, shape.tokens, shape.value_dim)
    return q, k, v
