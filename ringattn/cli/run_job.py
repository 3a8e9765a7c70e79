"""One run of `ringattn run`: warm up, time, count, compare with the oracle, write, report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from .. import __version__
from ..config.build import asked_plan
from ..config.schema import RunConfig
from ..dtypes import ITEM_BYTES
from ..errors import InvalidInput, plural
from ..files import STDOUT, check_json, check_writable, write_json, writing
from ..numerics.row_oracle import Reduce, oracle_rows, places, sampled_rows
from ..plan.plan import Plan
from ..reporting import peak_memory as memory
from ..reporting.console import Number, choice_data, shape, show, show_choice
from ..text import duration, rate, size
from .inputs import Input, open_source


def plan_of(config: RunConfig, source: Input, ranks: int) -> Plan:
    """The plan of a configuration over what an input holds, which has sizes of its own."""
    shape = source.shape
    cuda = config.transport.spec == "nccl" or config.transport.gpu_aware
    return asked_plan(
        config, config.machine.made("cuda" if cuda else "cpu", ranks), tokens=shape.tokens, ranks=ranks, heads=shape.heads,
        kv_heads=shape.kv_heads, head_dim=shape.head_dim, value_dim=shape.value_dim, dtype=shape.dtype, batch=shape.batch,
    )  # fmt: skip


def check_memory(plan: Plan, rows: int) -> None:
    """Raise InvalidInput where q, k, v and the output of `rows` rows do not fit into the free memory of this machine."""
    item = ITEM_BYTES[plan.dtype]
    per_row = (plan.heads + plan.kv_heads) * (plan.head_dim + plan.value_dim) * item + plan.heads * max(item, 4)
    needed, left = plan.batch * rows * per_row, memory.free()
    if left is not None and needed > left:
        raise InvalidInput(
            f"q, k, v and the output of {plural(rows, 'token')} (batch {plan.batch:,}, {plan.heads:,} heads, head_dim {plan.head_dim:,}) "
            f"take {size(needed)} here, and this machine has {size(left)} free; try fewer tokens=, ringattn simulate, or "
            "stream=disk with input=file"
        )


@dataclass
class Measured:
    """What one rank saw."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    before: int = 0


class Run:
    """The steps that real and virtual ranks share: warm up, time, count, compare, write, report."""

    ranks: int
    rank = 0
    #: What happens to the bytes that are counted.
    moved = "sent"

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = torch.device("cpu")
        self.cotangent: torch.Tensor | None = None

    def run(self) -> None:
        self.open()
        out, lse, seen = self.measure()
        worst = self.compare(out)
        if self.config.output.path:
            self.write(Path(self.config.output.path), out, lse)
        everyone = self.collect(seen)
        if self.rank == 0:
            self.report(everyone, worst)

    # What differs between real and virtual ranks:
    def open(self) -> None: ...
    def attend(self) -> tuple[torch.Tensor, torch.Tensor]: ...  # type: ignore[empty-body]
    def barrier(self) -> None: ...
    def collect(self, seen: Measured) -> list[Measured]: ...  # type: ignore[empty-body]
    def compare(self, out: torch.Tensor) -> float | None: ...
    def write(self, path: Path, out: torch.Tensor, lse: torch.Tensor) -> None: ...
    def counted(self) -> int: ...  # type: ignore[empty-body]

    def make(self) -> None:
        """Open the input, plan, and load this process's rows into `inputs`."""
        self.source = open_source(self.config)
        self.plan = plan_of(self.config, self.source, self.ranks)
        check_memory(self.plan, self.rows())
        if self.config.output.path and self.rank == 0:
            check_writable(Path(self.config.output.path))
        if self.rank == 0:
            check_json(self.config.output.report)
        self.inputs = tuple(x.to(self.device) for x in self.load())
        if self.config.backward:
            self.inputs = tuple(x.requires_grad_() for x in self.inputs)

    def load(self) -> tuple[torch.Tensor, ...]: ...  # type: ignore[empty-body]

    def rows(self) -> int:
        """Rows of the sequence that this process holds."""
        return self.plan.layout.rows(self.rank)

    def options(self) -> dict[str, Any]:
        c = self.config
        # The plan's: `auto` has been resolved.
        return {
            "layout": self.plan.layout, "schedule": self.plan.schedule, "kernel": c.kernel.spec, "scale": c.scale,
            "return_lse": True, "deterministic": c.deterministic, "comm_dtype": c.comm_dtype,
            "rotate": c.rotate,
        }  # fmt: skip

    def measure(self) -> tuple[torch.Tensor, torch.Tensor, Measured]:
        """One warm-up and `repeat` timed runs; the peak is that of the first timed run."""
        seen = Measured()
        for run in range(self.config.repeat + 1):
            if run == 1:
                seen.before = memory.resident()
                memory.reset_peak()
            out, lse = self._timed(seen.forward, "forward", self.attend)
            seen.sent["forward"] = self.counted()
            if self.config.backward:
                self._timed(seen.backward, "backward", self.backward(out))
                seen.sent["backward"] = self.counted()
            if run == 1:
                seen.peak = memory.peak()
        seen.forward, seen.backward = seen.forward[1:], seen.backward[1:]
        return out.detach(), lse.detach(), seen

    def backward(self, out: torch.Tensor) -> Callable[[], Any]:
        """What is timed as the backward: of a random cotangent, the same in every run."""
        if self.cotangent is None:
            self.cotangent = torch.randn_like(out)
        return partial(torch.autograd.grad, out, self.inputs, self.cotangent)

    def _timed(self, times: list[float], name: str, call: Any) -> Any:
        self.barrier()
        start = time.perf_counter()
        result = call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.barrier()
        times.append(time.perf_counter() - start)
        return result

    def report(self, everyone: list[Measured], worst: float | None) -> None:
        """Print what all ranks saw, and write it as JSON where asked."""
        found = self.data(everyone, worst)
        path = self.config.output.report
        if path != STDOUT:
            self._print(found)
        if path:
            write_json(path, found)

    def data(self, everyone: list[Measured], worst: float | None) -> dict[str, Any]:
        """What all ranks saw, as plain data: seconds, bytes, and the error relative to the largest output."""
        plan, c = self.plan, self.config
        passes: dict[str, Any] = {}
        for name in ("forward", "backward"):
            times: list[float] = getattr(everyone[0], name)
            if not times:
                continue
            back, middle = name == "backward", median(times)
            sent = [m.sent[name] for m in everyone]
            passes[name] = {
                "seconds": times, "median": middle, "tokens_per_second": plan.tokens / middle, "kind": "measured",
                f"bytes_{self.moved}": sent, "planned_bytes": plan.bytes_sent(backward=back),
                "full_ring_bytes": plan.full_ring_bytes(backward=back),
            }  # fmt: skip
        return {
            "plan": json.loads(plan.to_json()),
            "where": self.where(),
            "input": c.input.name,
            "threads": torch.get_num_threads(),
            "versions": {"ringattn": __version__, "torch": torch.__version__},
            "pairs": plan.pairs(),
            "imbalance": plan.imbalance,
            "passes": passes,
            "processes": [
                {"name": self.process(rank), "peak_bytes": m.peak, "start_bytes": m.before}
                for rank, m in enumerate(everyone)
            ],
            "error": worst,
            "sampled_rows": 0 if worst is None else len(sampled_rows(plan.tokens, c.sample)),
            "output": c.output.path,
            "choice": choice_data(plan.choice),
        }

    def _print(self, found: dict[str, Any]) -> None:
        plan = self.plan
        title = f"{plan.pattern!r}, {plan.tokens:,} tokens, {found['where']}"
        numbers = [
            Number("input", f"{found['input']}, {shape(plan)}, {found['threads']} threads per process"),
            Number("pairs", f"{found['pairs']:,}, imbalance {found['imbalance']:.3f}", "counted"),
        ]
        for name, one in found["passes"].items():
            times, sent = one["seconds"], sum(one[f"bytes_{self.moved}"])
            spread = f"{duration(min(times))} .. {duration(max(times))} over {plural(len(times), 'run')}"
            planned = one["planned_bytes"]
            share = sent / (one["full_ring_bytes"] or 1)
            same = "as planned" if sent == planned else f"NOT AS PLANNED: {planned:,}"
            numbers += [
                Number(f"{name} time", f"{duration(one['median'])} median ({spread})", "measured"),
                Number(f"{name} rate", rate(one["tokens_per_second"], "tokens/s"), "measured"),
                Number(f"{name} bytes {self.moved}", f"{sent:,} = {size(sent)} ({same}; {share:.3f} of a full ring)", "counted"),
            ]  # fmt: skip
        for one in found["processes"]:
            rise = max(one["peak_bytes"] - one["start_bytes"], 0)
            text = f"{size(one['peak_bytes'])} resident at most, {size(rise)} above the start of the call"
            numbers.append(Number(f"peak memory {one['name']}", text, "measured"))
        if found["error"] is not None:
            rows = found["sampled_rows"]
            text = f"{found['error']:.2e} of the largest output, {rows} sampled rows x all heads against fp64"
            numbers.append(Number("error", text, "measured"))
        if found["output"]:
            numbers.append(Number("output", found["output"]))
        show(title, numbers)
        if plan.choice is not None:
            show_choice(plan.choice)

    def where(self) -> str:
        """Which ranks compute, for the title."""
        return f"{self.plan.layout.name} on {self.plan.ranks} {self.config.transport.spec} ranks"

    def process(self, rank: int) -> str:
        return f"rank {rank}"

    def sampled(self, reduce: Reduce, positions: np.ndarray, out: torch.Tensor) -> float | None:
        """Largest error of the sampled rows that this rank holds, relative to the largest oracle output."""
        rows = sampled_rows(self.plan.tokens, self.config.sample)
        if not rows or not out.shape[0]:
            return None
        scale = self.plan.head_dim**-0.5 if self.config.scale is None else self.config.scale
        tensors = [x.detach() for x in self.inputs]
        q, k, v = tensors
        truth = oracle_rows(self.plan.pattern, self.plan.tokens, rows, scale, positions, q, k, v, reduce)
        truth *= self.plan.pattern.output_scale
        place = places(rows, positions)
        mine = [(i, place[row]) for i, row in enumerate(rows) if row in place]
        gaps = [(out[:, :, local].double().cpu() - truth[:, :, i]).abs().max() for i, local in mine]
        worst = torch.stack(gaps).max() if gaps else torch.zeros((), dtype=torch.float64, device="cpu")
        worst = worst.reshape(1)
        reduce(worst, True)
        return float(worst) / max(float(truth.abs().max()), torch.finfo(torch.float64).tiny)


def save(path: Path, out: torch.Tensor, lse: torch.Tensor) -> None:
    with writing(path, SafetensorError) as temporary:
        save_file({"out": out.contiguous(), "lse": lse.contiguous()}, temporary)
