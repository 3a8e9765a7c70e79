"""The steps shared by all kinds of `ringattn run`: warm up, time, count, compare with the oracle, write, report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import save_file

from .. import __version__
from ..call.functional import virtual_attention
from ..dtypes import ITEM_BYTES
from ..errors import InvalidInput
from ..files import STDOUT, check_json, check_writable, write_json, writing
from ..plan.choice import choice_record
from ..plan.plan import Plan
from ..runtime import peak_memory as memory
from ..simulator.numerics.oracle import oracle_rows, places, sampled_rows
from ..simulator.progress import Listener
from ..simulator.reporting.console import Number, describe_sizes, print_choice, print_numbers, show_progress
from ..simulator.reporting.trace import write_trace
from ..text import duration, plural, rate, size
from ..transport.launcher import progress_stream
from ..transport.trace import Span, Trace, end_on_arrival
from .config.build import plan_from_config
from .config.schema import RunConfig
from .inputs import NAMES, InputSource, open_source

T = TypeVar("T")
#: Ranks whose steps are counted to estimate the total for the progress display.
SAMPLED_RANKS = 16


def plan_run(config: RunConfig, source: InputSource, ranks: int) -> Plan:
    """The plan of `config` for the sizes of `source`, on the device that its transport uses. Raises InvalidInput."""
    device = "cuda" if config.transport.spec == "nccl" or config.transport.gpu_aware else "cpu"
    plan = plan_from_config(config, config.machine.made(device, ranks), ranks=ranks, **vars(source.shape))
    if plan.layout.stacked > 1:
        raise InvalidInput(
            f"pattern={plan.pattern.unstacked!r}: in ringattn run, all sequences of a batch share one pattern; try "
            "ringattn plan, or ringattn.virtual_attention in a program"
        )
    return plan


def check_memory(plan: Plan, rows: int) -> None:
    """Raise InvalidInput if q, k, v and the output of `rows` rows do not fit into the free memory."""
    item = ITEM_BYTES[plan.dtype]
    row_bytes = (plan.heads + plan.kv_heads) * (plan.head_dim + plan.value_dim) * item + plan.heads * max(item, 4)
    needed, free = plan.batch * rows * row_bytes, memory.free()
    if free is not None and needed > free:
        raise InvalidInput(
            f"q, k, v and the output of {plural(rows, 'token')} (batch {plan.batch:,}, {plan.heads:,} heads, head_dim "
            f"{plan.head_dim:,}) take {size(needed)} here, but this machine has {size(free)} free; try fewer tokens=, "
            "ringattn simulate, or offload=disk with input=file"
        )


@dataclass
class RankMeasurements:
    """What one process measured: seconds of each timed run and bytes sent, both by pass, and memory in bytes."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    #: At the start and at the peak: resident bytes of the host, bytes of tensors on the CUDA device (None: no CUDA).
    memory: dict[str, int | None] = field(default_factory=dict)
    #: The spans of the last run, in seconds from its start; only filled if a trace is requested.
    spans: list[Span] = field(default_factory=list)


class Run:
    """A run of attention on virtual ranks in one process, with the whole input.

    Subclasses run on several processes, or offloaded.
    """

    rank = 0
    plan: Plan
    inputs: tuple[torch.Tensor, ...]
    #: The verb for the counted bytes in the report.
    bytes_verb = "sent"
    #: Progress callback: called with (units done, units in total, noun).
    tell: Listener

    def __init__(self, config: RunConfig, plan: Plan | None = None) -> None:
        self.config, self.ranks, self.made_plan = config, config.ranks, plan
        self.device = torch.device("cpu")
        self.cotangent: torch.Tensor | None = None

    def run(self) -> dict[str, Any] | None:
        """Run all steps of the command; returns the report on rank 0.

        Opens the input, measures, compares the output with the oracle, writes the output, and prints the report.
        """
        with show_progress(Console(file=progress_stream()), shown=self.rank == 0) as self.tell:
            self.open()
            out, lse, measurements = self.measure()
            error = self.compare(out)
            if self.config.output.path is not None:
                self.write(Path(self.config.output.path), out, lse)
            processes = self.collect(measurements)
        return self.report(processes, error) if self.rank == 0 else None

    def open(self) -> None:
        """Open the input, make the plan, and load the rows of this process into `inputs`. Raises InvalidInput."""
        source = open_source(self.config)
        self.plan = self.made_plan or plan_run(self.config, source, self.ranks)
        check_memory(self.plan, sum(map(self.plan.layout.rows, self.executed_ranks())))
        if self.rank == 0:
            check_outputs(self.config)
        self.inputs = tuple(x.to(self.device) for x in self.load(source))
        if self.config.backward:
            self.inputs = tuple(x.requires_grad_() for x in self.inputs)

    def load(self, source: InputSource) -> tuple[torch.Tensor, ...]:
        """(q, k, v) of this process."""
        return tuple(source.rows(name, range(self.plan.tokens)) for name in NAMES)

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a forward; returns (out, lse)."""
        q, k, v = self.inputs
        out, lse = virtual_attention(q, k, v, self.plan.pattern, ranks=self.ranks, **self.options())
        return out, lse

    def backward(self, out: torch.Tensor) -> object:
        """Run a backward, always with the same random cotangent."""
        if self.cotangent is None:
            self.cotangent = torch.randn_like(out)
        return torch.autograd.grad(out, self.inputs, self.cotangent)

    def count_bytes(self, *, backward: bool) -> int:
        """The bytes that this process sent in the pass that just ended."""
        return self.plan.bytes_sent(backward=backward)  # virtual messages are exactly the planned ones

    def barrier(self) -> None:
        """Wait for all processes."""

    def collect(self, measurements: RankMeasurements) -> list[RankMeasurements]:
        """The measurements of every process, in rank order."""
        return [measurements]

    def positions(self) -> np.ndarray:
        """The positions of the rows of this process."""
        return np.arange(self.plan.tokens)

    def reduce(self, x: torch.Tensor, top: bool) -> None:
        """Reduce a float64 tensor over all processes in place: the sum, or with `top` the maximum."""

    def write(self, path: Path, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write the output and the log-sum-exp of the whole sequence."""
        save_output(path, out, lse)

    def where(self) -> str:
        """The layout and the ranks, for the title of the report."""
        return f"{self.plan.layout.name} on {self.plan.ranks} {self.config.transport.spec} ranks"

    def options(self) -> dict[str, Any]:
        """Options of the attention call; layout and schedule come from the plan, which resolved "auto"."""
        return {
            "layout": self.plan.layout,
            "schedule": self.plan.schedule,
            "kernel": self.config.kernel.spec,
            "scale": self.config.scale,
            "return_lse": True,
            "deterministic": self.config.deterministic,
            "comm_dtype": self.config.comm_dtype,
            "rotate": self.config.rotate,
            "reproducible": self.config.reproducible,
        }

    def measure(self) -> tuple[torch.Tensor, torch.Tensor, RankMeasurements]:
        """(out, lse, measurements) of `repeat` timed runs after one warm-up.

        Peak memory is that of the first timed run.
        """
        steps, total = count(1), self._count_posts() * (self.config.repeat + 1)
        measurements = RankMeasurements()
        found = measurements.memory
        with Trace(lambda rank: self.tell(min(next(steps), total), total, "steps")) as trace:
            for run in range(self.config.repeat + 1):
                trace.spans.clear()
                if run == 1:
                    found |= {"start_bytes": memory.resident(), "device_start_bytes": None, "device_peak_bytes": None}
                    memory.reset_peak()
                    if self.device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats(self.device)
                        found["device_start_bytes"] = torch.cuda.memory_allocated(self.device)
                out, lse = self._time(measurements, "forward", self.attend)
                begun = self._begun
                if self.config.backward:
                    self._time(measurements, "backward", partial(self.backward, out))
                if run == 1:
                    found["peak_bytes"] = memory.peak()
                    if self.device.type == "cuda":
                        found["device_peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        if self.config.trace is not None:
            measurements.spans = [span._replace(start=span.start - begun, end=span.end - begun) for span in trace.spans]
        for seconds in measurements.seconds.values():
            del seconds[0]
        return out.detach(), lse.detach(), measurements

    def _count_posts(self) -> int:
        """Estimated number of message steps of this process in one run: a forward and, if timed, a backward."""
        ranks = self.executed_ranks()
        sample = ranks[:: -(-len(ranks) // SAMPLED_RANKS)]
        plans = [self.plan.for_rank(rank) for rank in sample]
        steps = [s for p in plans for s in (*p.forward, *(p.backward if self.config.backward else ()))]
        return max(1, sum(len(step.posts) for step in steps) * len(ranks) // len(sample))

    def executed_ranks(self) -> range:
        """The ranks that this process executes."""
        return range(self.plan.ranks)

    def _time(self, measurements: RankMeasurements, name: str, call: Callable[[], T]) -> T:
        """Run a pass and return its result; `measurements` gets its bytes, and its seconds until all processes end."""
        self.barrier()
        self._begun = start = time.perf_counter()
        result = call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.barrier()
        measurements.seconds.setdefault(name, []).append(time.perf_counter() - start)
        measurements.sent[name] = self.count_bytes(backward=name == "backward")
        return result

    def compare(self, out: torch.Tensor) -> float | None:
        """The largest error of the sampled output rows, divided by the largest exact value; None without sampled rows.

        Exact values are computed in fp64.
        """
        positions, rows = self.positions(), sampled_rows(self.plan.tokens, self.config.sample)
        if not rows or not out.shape[0]:
            return None
        scale = self.plan.head_dim**-0.5 if self.config.scale is None else self.config.scale
        q, k, v = (x.detach() for x in self.inputs)
        truth = oracle_rows(self.plan.pattern, self.plan.tokens, rows, scale, positions, q, k, v, self.reduce)
        truth *= self.plan.pattern.output_scale
        local_rows = places(rows, positions)
        errors = [
            (out[:, :, local_rows[row]].double().cpu() - truth[:, :, i]).abs().max()
            for i, row in enumerate(rows)
            if row in local_rows
        ]
        largest = torch.stack(errors).max() if errors else torch.zeros((), dtype=torch.float64, device="cpu")
        largest = largest.reshape(1)
        self.reduce(largest, True)
        return float(largest) / max(float(truth.abs().max()), torch.finfo(torch.float64).tiny)

    def report(self, processes: list[RankMeasurements], error: float | None) -> dict[str, Any]:
        """Print and return the measurements of all processes; write them as JSON if a path is given."""
        if self.config.trace is not None:
            spans = end_on_arrival(span for process in processes for span in process.spans)
            write_trace(self.config.trace, "measured", spans)
        record = self.record(processes, error)
        path = self.config.output.report
        if path != STDOUT:
            self._print(record)
        if path is not None:
            write_json(path, record)
        return record

    def record(self, processes: list[RankMeasurements], error: float | None) -> dict[str, Any]:
        """The measurements of all processes as plain data: seconds, bytes, and the relative error."""
        plan, config = self.plan, self.config
        passes = {
            name: {
                "seconds": times,
                "median": median(times),
                "tokens_per_second": plan.tokens / median(times),
                "kind": "measured",
                f"bytes_{self.bytes_verb}": [process.sent[name] for process in processes],
                "planned_bytes": plan.bytes_sent(backward=name == "backward"),
                "full_ring_bytes": plan.full_ring_bytes(backward=name == "backward"),
            }
            for name, times in processes[0].seconds.items()
        }
        return {
            "plan": json.loads(plan.to_json()),
            "where": self.where(),
            "input": config.input.name,
            "threads": torch.get_num_threads(),
            "versions": {"ringattn": __version__, "torch": torch.__version__},
            "pairs": plan.pairs(),
            "imbalance": plan.imbalance,
            "passes": passes,
            "processes": [
                {"name": f"rank {rank}" if len(processes) > 1 else "process", **process.memory}
                for rank, process in enumerate(processes)
            ],
            "error": error,
            "sampled_rows": 0 if error is None else len(sampled_rows(plan.tokens, config.sample)),
            "output": config.output.path,
            "choice": choice_record(plan.choice),
        }

    def _print(self, record: dict[str, Any]) -> None:
        """Print a record as tables."""
        plan = self.plan
        threads = plural(record["threads"], "thread")
        numbers = [
            Number("input", f"{record['input']}, {describe_sizes(plan)}, {threads} per process"),
            Number("pairs", f"{record['pairs']:,}, imbalance {record['imbalance']:.3f}", "counted"),
        ]
        for name, timed in record["passes"].items():
            numbers += self._pass_numbers(name, timed)
        for process in record["processes"]:
            numbers += _memory_numbers(process)
        if record["error"] is not None:
            rows = plural(record["sampled_rows"], "sampled row")
            text = f"{record['error']:.2e} of the largest output, {rows} x all heads against fp64"
            numbers.append(Number("error", text, "measured"))
        if record["output"] is not None:
            numbers.append(Number("output", record["output"]))
        print_numbers(f"{plan.pattern!r}, {plural(plan.tokens, 'token')}, {record['where']}", numbers)
        if plan.choice is not None:
            print_choice(plan.choice)

    def _pass_numbers(self, name: str, timed: dict[str, Any]) -> list[Number]:
        """The numbers of a forward or a backward: time, rate, and bytes compared with the planned bytes."""
        times, sent, planned = timed["seconds"], sum(timed[f"bytes_{self.bytes_verb}"]), timed["planned_bytes"]
        spread = f"{duration(min(times))} .. {duration(max(times))} over {plural(len(times), 'run')}"
        comparison = "as planned" if sent == planned else f"NOT AS PLANNED: {planned:,}"
        share = sent / (timed["full_ring_bytes"] or 1)
        text = f"{sent:,} = {size(sent)} ({comparison}; {share:.3f} of a full ring)"
        return [
            Number(f"{name} time", f"{duration(timed['median'])} median ({spread})", "measured"),
            Number(f"{name} rate", rate(timed["tokens_per_second"], "tokens/s"), "measured"),
            Number(f"{name} bytes {self.bytes_verb}", text, "counted"),
        ]


def _memory_numbers(process: dict[str, Any]) -> list[Number]:
    """Peak memory of the host; on a CUDA device, preceded by the peak of PyTorch's allocations there."""
    kinds = [("peak memory", "", "resident")]
    if process["device_peak_bytes"] is not None:
        kinds = [("peak device memory", "device_", "allocated"), ("peak host memory", "", "resident")]
    numbers, owner = [], process["name"].replace("process", "of the process")
    for label, prefix, what in kinds:
        peak = process[f"{prefix}peak_bytes"]
        rise = max(peak - process[f"{prefix}start_bytes"], 0)
        text = f"{size(peak)} {what} at most, {size(rise)} above the start of the call"
        numbers.append(Number(f"{label} {owner}", text, "measured"))
    return numbers


def check_outputs(config: RunConfig) -> None:
    """Raise InvalidInput if an output file of a run cannot be written."""
    if config.output.path is not None:
        check_writable(Path(config.output.path))
    check_json(config.output.report)
    check_json(config.trace)


def save_output(path: Path, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write out and lse to a safetensors file atomically."""
    with writing(path, SafetensorError) as temporary:
        save_file({"out": out.contiguous(), "lse": lse.contiguous()}, temporary)
