"""Attention over a sequence that does not fit on the device: chunks of it, in host storage, are virtual ranks.

The ranks of an ordinary plan run one after another, with the ordinary executor. Rows that a rank receives are copied
from storage; gradients that a rank sends are added to storage. `runtime.host` makes the copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..cache import Cache, cached
from ..dtypes import ITEM_BYTES, ROW_BYTES
from ..errors import InvalidInput, OutOfMemory, Unsupported
from ..kernels.base import wide
from ..kernels.contract import Tensors
from ..kernels.expand import CHUNK_BYTES
from ..kernels.memory import differentiable, empty, wide_zeros
from ..pattern.base import check_integer
from ..plan.plan import Plan
from ..plan.schedules.direct import PullSchedule
from ..plan.steps import Hop, Kind, PlanSizes, RankPlan, Step
from ..runtime.host import Host, Storage, stored_names
from ..runtime.passes import backward, forward
from ..runtime.peak_memory import available
from ..runtime.ring import ForwardResult, Job
from ..transport.base import Counters
from .autograd import Runner
from .compile import CompiledCall
from .planner import PLANS, make_plan

#: The share of the device's free memory for a chunk whose size is chosen here. Kernels need the rest for workspaces.
SHARE = 0.5
#: A chosen chunk is a multiple of this many rows, unless it is shorter.
MULTIPLE = 128
#: The bytes of keys and values that are expanded at a time, with their gradients.
EXPANDED = 4 * CHUNK_BYTES
#: The bytes of steps that a plan caches. Few, because each chunk runs once per pass.
STEPS = 1 << 22


class StreamedPlan(Plan):
    """A plan for offloading: its ranks run one after another on one device and copy rows instead of sending messages.

    A rank reads rows of other ranks from host storage, and writes its gradients for them to host storage.
    """

    @cached_property
    def cache(self) -> Cache:
        return Cache(STEPS)

    def forward_steps(self, rank: int) -> tuple[Step, ...]:
        return self.for_rank(rank).forward

    @cached
    def plan_rank(self, rank: int) -> RankPlan:
        schedule = PullSchedule(self.demand)
        return RankPlan(rank, schedule.forward(rank), schedule.backward(rank))

    def _sends(self, rank: int | None, backward: bool) -> list[Hop]:
        """All copies between host storage and a rank (None: all ranks), which count as messages."""
        return [hop for step in self._steps(rank, backward) for hop in (*step.sends, *step.recvs)]


@dataclass(frozen=True)
class HostTensors:
    """A `Storage` of whole tensors in host memory; they may be mapped from a file. `scale` is the factor of dout."""

    tensors: dict[str, Tensor]
    scale: float = 1.0

    def rows(self, name: str, r: range) -> Tensor:
        x = self.tensors[name][:, :, r.start : r.stop]
        return x * self.scale if name == "dout" and self.scale != 1 else x


@dataclass(frozen=True, kw_only=True)
class OffloadRunner(Runner):
    """Runs the ranks of a plan one after another on one device; inputs and results are in host storage.

    `counters` count the copies that replace messages, but not the copies of a rank's own q, k, v, out, lse and
    gradients.
    """

    plan: StreamedPlan
    device: torch.device
    counters: Counters = field(default_factory=Counters, compare=False)

    def of_call(self, rows: Any, sinks: Tensor | None, chosen: Tensor | None) -> OffloadRunner:
        """A copy of this runner for one call, whose keys are k or Rows, with a seed if the call has dropout."""
        sinks, chosen = (None if x is None else x.to(self.device) for x in (sinks, chosen))
        kernel, _ = self.call.expanding(self.plan, self.kernel.seeded(), rows, [])
        return replace(self, kernel=kernel, sinks=sinks, chosen=chosen)

    @cached_property
    def names(self) -> dict[Kind, tuple[str, ...]]:
        """The names of the stored tensors of blocks and of their gradients."""
        return stored_names(self.plan)

    def job(self, rank: int, tensors: Tensors = ()) -> Job:
        return replace(super().job(rank, tensors), lse=False, cast_grads=False)

    def forward(self, q: Tensor, tensors: Tensors, save: bool) -> ForwardResult:
        """out [B, H, N, Dv] and lse [B, H, N] in host memory. Nothing stays on the device."""
        batch, heads, tokens, _ = q.shape
        out = empty((batch, tokens, heads, self.plan.value_dim), q.dtype, q.device).transpose(1, 2)
        lse = empty((batch, heads, tokens), wide(q.dtype), q.device)
        self.compute(HostTensors({"q": q, **self._name(tensors), "out": out, "lse": lse}), tensors[self.count :])
        return ForwardResult(out, lse, ())

    def _name(self, tensors: Tensors) -> dict[str, Tensor]:
        """The tensors of a block, which come before its weights, by their names in storage."""
        return dict(zip(self.names["kv"], tensors, strict=False))

    def backward(
        self, grad: Tensor, grad_lse: Tensor | None, q: Tensor, tensors: Tensors, result: ForwardResult
    ) -> Tensors:
        """dq, dk, dv in host memory. dk and dv are summed in fp32 (fp64 for fp64 inputs) and cast at the end."""
        dq, block = torch.empty_like(q), differentiable(tensors[: self.count])
        sums = [empty(x.shape, wide(x.dtype), x.device) for x in block]
        stored = {"q": q, **self._name(tensors), "out": result.out, "lse": result.lse, "dout": grad, "dq": dq}
        if grad_lse is not None:
            stored["dlse"] = grad_lse
        stored |= zip(self.names["grad"], sums, strict=True)
        of_weights = self.differentiate(HostTensors(stored), tensors[self.count :], lse=grad_lse is not None)
        del stored
        # One after another: an fp32 sum is freed before the next one is cast.
        return dq, *(sums.pop(0).to(x.dtype) for x in block), *of_weights

    def compute(self, storage: Storage, weights: Tensors = ()) -> None:
        """Read q, k and v, or what `weights` expand, from storage, and write out and lse to storage."""
        host = Host(self.plan, storage, self.device, self.counters)
        sign, weights = self.call.sign, self._move(weights)
        for rank, rows in self._shards():
            q, *block = host.load(("q", *self.names["kv"]), rows)
            target = storage.rows("out", rows)
            direct = target if target.device == self.device else None  # on a CPU the executor writes to storage
            job = self.job(rank, (*block, *weights))
            program = forward(job, q if sign == 1 else q * sign, tuple(block), save=False, out=direct)
            result = host.run(program, self.plan.for_rank(rank).forward)
            written = {"lse": result.lse} if direct is not None else {"lse": result.lse, "out": result.out}
            host.store(rows, written)
        host.finish()

    def differentiate(self, storage: Storage, weights: Tensors = (), *, lse: bool = False) -> Tensors:
        """Run the backward: read inputs, results and output gradients from storage, and write dq, dk and dv to it.

        Reads q, k, v, out, lse, dout, and with lse=True also dlse. dk and dv are summed in storage, in fp32 (fp64 for
        fp64 inputs). Returns the gradients of those of the weights that require one, in host memory.
        """
        host = Host(self.plan, storage, self.device, self.counters)
        sign, weights, names = self.call.sign, self._move(weights), self.names
        of_weights = [wide_zeros(x) for x in weights if x.requires_grad]
        for _, rows in self._shards():
            for name in names["grad"]:
                storage.rows(name, rows).zero_()
        for rank, rows in self._shards():
            given = ("q", "out", "lse", "dout", *(("dlse",) if lse else ()))
            q, out, total, grad, *grad_lse = host.load(given, rows)
            block = tuple(host.load(names["kv"], rows))
            q = q if sign == 1 else q * sign
            job, result = self.job(rank, (*block, *weights)), ForwardResult(out, total, ())
            program = backward(job, grad, grad_lse[0] if lse else None, q, block, result)
            dq, *others = host.run(program, self.plan.for_rank(rank).backward)
            host.store(rows, {"dq": dq if sign == 1 else dq * sign})
            host.store(rows, dict(zip(names["grad"], others, strict=False)), add=True)
            for total, part in zip(of_weights, others[len(names["grad"]) :], strict=True):
                total += part
        host.finish()
        return tuple(x.cpu() for x in of_weights)

    def _move(self, weights: Tensors) -> Tensors:
        """The weights on the device."""
        return tuple(x.detach().to(self.device).requires_grad_(x.requires_grad) for x in weights)

    def _shards(self) -> list[tuple[int, range]]:
        """(rank, rows) of every rank that has rows; empty for an empty batch."""
        layout = self.plan.layout
        if not self.plan.batch:
            return []
        return [(rank, rows) for rank in range(layout.ranks) for rows in layout.shard(rank)]


def make_offload(call: CompiledCall, *, chunk: int | None, backward: bool) -> OffloadRunner:
    """The runner that computes `call` on its device.

    `chunk` is the number of rows on the device at a time; None: the most that fit into free memory, with room for the
    backward if `backward`. Raises Unsupported or OutOfMemory.
    """
    if call.pattern.rows is not None:
        raise Unsupported(
            "offload='host' takes one pattern for all rows of the batch; compute row by row, "
            "attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], pattern.row(i), offload='host')"
        )
    sizes, tokens, device = call.sizes, call.rows, call.device
    rows = chunk_rows(tokens, device=device, backward=backward, **sizes) if chunk is None else chunk

    def make() -> StreamedPlan:
        """Make the plan, with one rank for each chunk."""
        options: dict[str, Any] = {"layout": "contiguous", "schedule": "direct", "rotate": "kv"}
        ranks = max(1, -(-tokens // rows))
        plan = make_plan(call.pattern, tokens=tokens, ranks=ranks, **options, **sizes)
        return StreamedPlan(**{entry.name: getattr(plan, entry.name) for entry in fields(plan)})

    key = call.pattern, tokens, rows, *sizes.items()
    plan = make() if call.pattern.transient else _plans.answer(key, make)
    return OffloadRunner(call=call, plan=plan, kernel=call.kernel, device=device)


#: The plans of recent offloaded calls.
_plans = Cache(PLANS, lambda plan: int(plan.kept_bytes), grows=True)


def check_chunk(chunk: object) -> None:
    """Raise InvalidInput unless `chunk` is None or a positive number of rows."""
    if chunk is not None:
        check_integer(chunk, "chunk", 1, "chunk=4096, a number of rows; without it, the free memory decides")


def get_device(device: torch.device | str | None) -> torch.device:
    """The device to compute on; None: the current CUDA device if there is one, else the CPU.

    Raises InvalidInput for a name that torch does not know, a device of another type, or a missing CUDA device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidInput(f"device={device!r} is not a device; expected cpu, cuda or cuda:1") from None
    if parsed.type not in ("cpu", "cuda"):
        raise InvalidInput(f"device={device}: offload= computes on cpu or cuda; try device=cpu")
    if parsed.type == "cpu":
        return parsed
    if not torch.cuda.is_available() or (parsed.index or 0) >= torch.cuda.device_count():
        raise InvalidInput(f"device={device}: there is no such CUDA device (ringattn doctor says why); try device=cpu")
    return torch.device("cuda", torch.cuda.current_device() if parsed.index is None else parsed.index)


def row_bytes(
    *, heads: int, head_dim: int, value_dim: int, dtype: str, batch: int, backward: bool, **named: Any
) -> tuple[int, int]:
    """(device bytes for each row of a chunk, host bytes for each row of the results).

    Let e be the bytes of a number and w = max(e, 4). The device holds in the forward:
    - with e bytes per number: q, out, the chunk's own keys and values, and two buffers for keys and values of other
      chunks;
    - with w bytes per number: the sums of out, the output of one visit and, if the kernel computes in fp32, fp32 copies
      of q and of one block of keys and values;
    - lse and its partial results.
    The device holds in the backward:
    - with e bytes per number: q, out, dO, and the chunk's own keys and values;
    - with w bytes per number: dq, dk, dv, the gradients of two visits, four buffers for keys and values or their
      gradients and, if the kernel computes in fp32, fp32 copies of q, out, dO, and the chunk's own keys and values;
    - lse.
    Rows that are expanded count instead of keys and values; a chunk of these comes on top, see `chunk_rows`.
    """
    sizes = PlanSizes(heads=heads, head_dim=head_dim, value_dim=value_dim, dtype=dtype, **named)
    item, w = ITEM_BYTES[dtype], max(ITEM_BYTES[dtype], 4)
    pair, sums = (sum(n * width * ROW_BYTES[of] for n, width, of in sizes.tensors(kind)) for kind in ("kv", "grad"))
    results = heads * (value_dim * item + w)
    if backward:
        results += heads * head_dim * item + sums + pair
        size = heads * ((head_dim + 2 * value_dim) * (item + w) + 3 * head_dim * w) + pair + 8 * sums
    else:
        size = heads * (head_dim + value_dim) * item + 3 * pair + heads * (head_dim + 2 * value_dim) * w + sums
    return batch * (size + 16 * heads), batch * results


def chunk_rows(tokens: int, *, device: torch.device, backward: bool, **sizes: Any) -> int:
    """The largest number of rows for a chunk that takes at most half of the device's free memory.

    A multiple of 128, if at least 128 rows fit. `row_bytes` gives the bytes of a row; `sizes` are the keyword arguments
    in `CompiledCall.sizes`. On the CPU, the results take the same memory, so their bytes are subtracted first. Patterns
    whose heads see different numbers of keys need more buffers in the backward; pass a smaller chunk= for these. Raises
    OutOfMemory if one row does not fit.
    """
    per_row, result_bytes = row_bytes(backward=backward, **sizes)
    expanded = EXPANDED if "block" in sizes else 0
    if device.type == "cuda":
        # The driver does not count memory that torch's allocator has reserved but not used; it is free for us.
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free, where = torch.cuda.mem_get_info(device)[0] + idle - expanded, str(device)
    else:
        free, where = available() - tokens * result_bytes - expanded, "host memory"
    rows = int(free * SHARE) // max(per_row, 1)
    if rows < 1 and tokens:
        raise OutOfMemory(
            f"a chunk of one row takes {per_row:,} bytes on {device}, and {where} has {max(free, 0):,} left; free "
            "memory, or give chunk= to try anyway"
        )
    return max(1, min(tokens, rows // MULTIPLE * MULTIPLE or rows))
