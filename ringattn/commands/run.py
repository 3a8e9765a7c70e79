"""ringattn run: attention over one input, timed, counted, and compared with the oracle."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import Progress
from safetensors.torch import save_file

from .. import memory
from ..config import RunConfig
from ..data import Source, open_source, shards
from ..errors import InvalidInput, LaunchFailure, Mismatch, RingAttentionError
from ..files import check_writable, replacing
from ..functional import ring_attention, virtual_attention
from ..launcher import Launch, detect, init_process_group, run_local
from ..pattern import parse_pattern
from ..plan import Plan, make_plan
from ..report import Number, console, show, size
from ..sampling import Reduce, oracle_rows, sampled_rows
from ..transport.torchdist import TorchDist

TRANSPORTS = ("gloo", "nccl", "virtual")


def main(config: RunConfig) -> None:
    """Run on virtual ranks, as one rank of a launched job, or on local ranks started here."""
    launch = detect()
    if config.transport.spec not in TRANSPORTS:
        raise InvalidInput(f"transport={config.transport.spec}: expected one of {', '.join(TRANSPORTS)}")
    for name, value, least in (("repeat", config.repeat, 1), ("ranks", config.ranks, 1), ("sample", config.sample, 0)):
        if value < least:
            raise InvalidInput(f"{name}={value}: must be at least {least}")
    if config.transport.spec == "virtual":
        _set_threads(config.threads or os.cpu_count() or 1)
        _Virtual(config).run()
    elif launch.kind != "none":
        from torch.distributed.elastic.multiprocessing.errors import record

        record(_launched)(launch, config)
    else:
        _local(config)


def _local(config: RunConfig) -> None:
    if config.transport.spec == "nccl":
        raise InvalidInput(
            "transport=nccl needs one process per GPU; start with torchrun --nproc-per-node N -m ringattn run "
            "transport=nccl"
        )
    _plan(config, open_source(config), config.ranks)  # all that can be wrong is said here, once, before a rank starts
    if config.output.path:
        check_writable(Path(config.output.path))
    threads = config.threads or max(1, (os.cpu_count() or 1) // config.ranks)
    try:
        run_local(
            _started, config.ranks, config, timeout=math.inf, group_timeout=config.timeout, threads=threads,
            passthrough=(0,),
        )  # fmt: skip
    except LaunchFailure as error:
        raise RingAttentionError(str(error)) from None


def _launched(launch: Launch, config: RunConfig) -> None:
    _set_threads(config.threads or int(os.environ.get("OMP_NUM_THREADS", "1")))
    init_process_group(launch, backend=config.transport.spec, timeout=config.timeout)
    if config.transport.spec == "nccl":
        torch.cuda.set_device(launch.local_rank)
    try:
        _worker(launch.rank, config)
    finally:
        dist.destroy_process_group()


def _started(rank: int, config: RunConfig) -> None:
    """A rank that `_local` started: a wrong call is told in one line, which the parent repeats."""
    try:
        _worker(rank, config)
    except RingAttentionError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


def _worker(rank: int, config: RunConfig) -> None:
    _Ranks(config, rank).run()


def _set_threads(count: int) -> None:
    torch.set_num_threads(count)


def _plan(config: RunConfig, source: Source, ranks: int) -> Plan:
    shape = source.shape
    return make_plan(
        parse_pattern(config.pattern.spec), tokens=shape.tokens, ranks=ranks, layout=config.layout.spec,
        schedule=config.schedule.spec, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        value_dim=shape.value_dim, dtype=shape.dtype, batch=shape.batch,
    )  # fmt: skip


@dataclass
class _Measured:
    """What one rank saw."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    before: int = 0


class _Job:
    """The steps that real and virtual ranks share: warm up, time, count, compare, write, report."""

    ranks: int
    rank = 0

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = torch.device("cpu")

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
    def collect(self, seen: _Measured) -> list[_Measured]: ...  # type: ignore[empty-body]
    def compare(self, out: torch.Tensor) -> float | None: ...
    def write(self, path: Path, out: torch.Tensor, lse: torch.Tensor) -> None: ...
    def counted(self) -> int: ...  # type: ignore[empty-body]

    def make(self) -> None:
        """Open the input, plan, and load this process's rows into `inputs`."""
        self.source = open_source(self.config)
        self.plan = _plan(self.config, self.source, self.ranks)
        if self.config.output.path and self.rank == 0:
            check_writable(Path(self.config.output.path))
        self.inputs = tuple(x.to(self.device) for x in self.load())
        if self.config.backward:
            self.inputs = tuple(x.requires_grad_() for x in self.inputs)

    def load(self) -> tuple[torch.Tensor, ...]: ...  # type: ignore[empty-body]

    def options(self) -> dict[str, Any]:
        c = self.config
        return {
            "layout": c.layout.spec, "schedule": c.schedule.spec, "kernel": c.kernel.spec, "scale": c.scale,
            "return_lse": True, "deterministic": c.deterministic,
        }  # fmt: skip

    def measure(self) -> tuple[torch.Tensor, torch.Tensor, _Measured]:
        """One warm-up and `repeat` timed runs; the peak is that of the first timed run."""
        seen = _Measured()
        cotangent = torch.ones(())
        for run in range(self.config.repeat + 1):
            if run == 1:
                seen.before = memory.resident()
                memory.reset_peak()
            out, lse = self._timed(seen.forward, "forward", self.attend)
            seen.sent["forward"] = self.counted()
            if self.config.backward:
                cotangent = cotangent if run else torch.randn_like(out)
                start = cotangent

                def backward(out: torch.Tensor = out, start: torch.Tensor = start) -> Any:
                    return torch.autograd.grad(out, self.inputs, start)

                self._timed(seen.backward, "backward", backward)
                seen.sent["backward"] = self.counted()
            if run == 1:
                seen.peak = memory.peak()
        seen.forward, seen.backward = seen.forward[1:], seen.backward[1:]
        return out.detach(), lse.detach(), seen

    def _timed(self, times: list[float], name: str, call: Any) -> Any:
        self.barrier()
        start = time.perf_counter()
        result = call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.barrier()
        times.append(time.perf_counter() - start)
        return result

    def report(self, everyone: list[_Measured], worst: float | None) -> None:
        plan, c = self.plan, self.config
        title = f"{plan.pattern!r}, {plan.tokens:,} tokens, {plan.layout.name} on {plan.ranks} {c.transport.spec} ranks"
        numbers = [
            Number("input", f"{c.input.name}, B={plan.batch} H={plan.heads} K={plan.kv_heads} D={plan.head_dim} "
                   f"{plan.dtype}, {torch.get_num_threads()} threads per process"),
            Number("pairs", f"{plan.pairs():,}, imbalance {plan.imbalance:.3f}", "counted"),
        ]  # fmt: skip
        for name in ("forward", "backward"):
            times: list[float] = getattr(everyone[0], name)
            if not times:
                continue
            mid = median(times)
            spread = f"{min(times):.4f} .. {max(times):.4f} s over {len(times)} runs"
            back = name == "backward"
            sent, planned = [m.sent[name] for m in everyone], plan.bytes_sent(backward=back)
            share = sum(sent) / (plan.full_ring_bytes(backward=back) or 1)
            same = "as planned" if sum(sent) == planned else f"NOT AS PLANNED: {planned:,}"
            numbers += [
                Number(f"{name} time", f"{mid:.4f} s median ({spread})", "measured"),
                Number(f"{name} tokens/s", f"{plan.tokens / mid:,.0f}", "measured"),
                Number(f"{name} bytes sent", f"{sum(sent):,} = {size(sum(sent))} ({same}; {share:.3f} of a full ring)",
                       "counted"),
            ]  # fmt: skip
        for rank, m in enumerate(everyone):
            rise = f"{size(m.peak)} resident at most, {size(max(m.peak - m.before, 0))} above the start of the call"
            numbers.append(Number(f"peak memory {self.process(rank)}", rise, "measured"))
        if worst is not None:
            rows = len(sampled_rows(plan.tokens, c.sample))
            numbers.append(
                Number(
                    "error",
                    f"{worst:.2e} of the largest output, {rows} sampled rows x all heads against fp64",
                    "measured",
                )
            )
        if c.output.path:
            numbers.append(Number("output", str(c.output.path)))
        show(title, numbers)

    def process(self, rank: int) -> str:
        return f"rank {rank}"

    def sampled(self, reduce: Reduce, positions: np.ndarray, out: torch.Tensor) -> float | None:
        """Largest error of the sampled rows that this rank holds, relative to the largest oracle output."""
        rows = sampled_rows(self.plan.tokens, self.config.sample)
        if not rows:
            return None
        scale = self.plan.head_dim**-0.5 if self.config.scale is None else self.config.scale
        tensors = [x.detach() for x in self.inputs]
        q, k, v = tensors
        truth = oracle_rows(self.plan.pattern, self.plan.tokens, rows, scale, positions, q, k, v, reduce)
        place = {int(p): i for i, p in enumerate(positions)}
        mine = [(i, place[row]) for i, row in enumerate(rows) if row in place]
        gaps = [(out[:, :, local].double().cpu() - truth[:, :, i]).abs().max() for i, local in mine]
        worst = torch.stack(gaps).max() if gaps else torch.zeros((), dtype=torch.float64)
        worst = worst.reshape(1)
        reduce(worst, True)
        return float(worst) / max(float(truth.abs().max()), torch.finfo(torch.float64).tiny)


class _Virtual(_Job):
    """All ranks in this process."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.ranks = config.ranks

    def open(self) -> None:
        self.make()

    def load(self) -> tuple[torch.Tensor, ...]:
        whole = range(self.plan.tokens)
        return tuple(self.source.rows(name, whole) for name in ("q", "k", "v"))

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.inputs
        out, lse = virtual_attention(q, k, v, self.plan.pattern, ranks=self.ranks, **self.options())
        return out, lse

    def counted(self) -> int:
        return 0

    def collect(self, seen: _Measured) -> list[_Measured]:
        # Virtual messages are the planned ones, one for one: nothing is lost by counting them on the plan.
        seen.sent = {"forward": self.plan.bytes_sent(), "backward": self.plan.bytes_sent(backward=True)}
        return [seen]

    def compare(self, out: torch.Tensor) -> float | None:
        return self.sampled(lambda x, top: None, np.arange(self.plan.tokens), out)

    def write(self, path: Path, out: torch.Tensor, lse: torch.Tensor) -> None:
        _save(path, out, lse)

    def process(self, rank: int) -> str:
        return "of the process"


class _Watched:
    """A transport that moves a progress bar at every wait."""

    def __init__(self, inner: TorchDist, advance: Any) -> None:
        self._inner, self._advance = inner, advance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def wait(self, ticket: Any) -> None:
        self._inner.wait(ticket)
        self._advance()


class _Ranks(_Job):
    """This process is one rank of a process group."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        super().__init__(config)
        self.rank, self.ranks = rank, dist.get_world_size()
        self.transport = TorchDist(timeout=config.timeout)
        if config.transport.spec == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())

    def open(self) -> None:
        error: RingAttentionError | None = None
        try:
            self.make()
        except RingAttentionError as caught:
            error = caught
        told = self.transport.gather(json.dumps(str(error)[:1500] if error else None).encode())
        if error is not None:
            raise error
        for rank, text in enumerate(map(json.loads, told)):
            if text is not None:
                raise Mismatch(f"rank {rank} cannot take part: {text}")

    def load(self) -> tuple[torch.Tensor, ...]:
        return shards(self.source, self.plan.layout, self.rank)

    def measure(self) -> tuple[torch.Tensor, torch.Tensor, _Measured]:
        with self._progress():
            return super().measure()

    @contextmanager
    def _progress(self) -> Iterator[None]:
        wanted = sys.stdout.isatty() if self.config.progress is None else self.config.progress
        self.watched: Any = self.transport
        if self.rank or not wanted:
            yield
            return
        mine = self.plan.for_rank(0)
        lists = [mine.forward, *([mine.backward] if self.config.backward else [])]
        waits = sum(bool(step.sends or step.recvs) for steps in lists for step in steps)
        with Progress(console=console(), transient=True) as bar:
            task = bar.add_task("steps", total=waits * (self.config.repeat + 1))
            self.watched = _Watched(self.transport, lambda: bar.advance(task))
            yield

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.inputs
        out, lse = ring_attention(q, k, v, self.plan.pattern, transport=self.watched, **self.options())
        return out, lse

    def barrier(self) -> None:
        dist.barrier()

    def counted(self) -> int:
        sent = self.transport.counters.sent_bytes
        self.transport.counters.reset()
        return sent

    def collect(self, seen: _Measured) -> list[_Measured]:
        everyone: list[Any] = [None] * self.ranks
        dist.all_gather_object(everyone, seen)
        return everyone

    def _reduce(self, x: torch.Tensor, top: bool) -> None:
        moved = x.to(self.device)
        dist.all_reduce(moved, dist.ReduceOp.MAX if top else dist.ReduceOp.SUM)
        x.copy_(moved)

    def compare(self, out: torch.Tensor) -> float | None:
        return self.sampled(self._reduce, self.plan.layout.positions(self.rank), out)

    def write(self, path: Path, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Rank 0 gathers shard after shard; it holds the whole output, the others only theirs."""
        layout = self.plan.layout
        wholes = []
        for x in (out.contiguous(), lse.unsqueeze(-1).contiguous()):
            pieces = [x]
            if self.rank:
                if x.numel():
                    dist.send(x, 0)
                continue
            for rank in range(1, self.ranks):
                piece = x.new_empty((*x.shape[:2], layout.rows(rank), x.shape[3]))
                if piece.numel():
                    dist.recv(piece, rank)
                pieces.append(piece)
            wholes.append(layout.unshard_tensor(pieces).cpu())
        error: RingAttentionError | None = None
        if self.rank == 0:
            try:
                _save(path, wholes[0], wholes[1].squeeze(-1))
            except RingAttentionError as caught:
                error = caught
        told = self.transport.gather(json.dumps(str(error) if error else None).encode())
        if json.loads(told[0]) is not None:
            raise error or Mismatch(f"rank 0 could not write the output: {json.loads(told[0])}")


def _save(path: Path, out: torch.Tensor, lse: torch.Tensor) -> None:
    with replacing(path) as temporary:
        try:
            save_file({"out": out.contiguous(), "lse": lse.contiguous()}, temporary)
        except OSError as error:
            raise InvalidInput(f"output {path}: {error.strerror or error}; nothing was written") from None
