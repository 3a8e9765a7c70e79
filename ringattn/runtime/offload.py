"""One device computes a sequence that it cannot hold: chunks are virtual ranks that live in host storage.

The ranks of an ordinary plan run one after another, with the ordinary executor; what they receive is copied from
storage, and the gradients that they send home are added there. `transport.host` has the copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch

from ..cache import Cache
from ..dtypes import ITEM_BYTES
from ..errors import InvalidInput, OutOfMemory
from ..kernels.base import Kernel, positive, wide
from ..pattern import Pattern
from ..plan.plan import Plan
from ..plan.schedules.pull import PullSchedule
from ..plan.steps import Hop, RankPlan, Step
from ..planner import PLANS, make_plan
from ..reporting.peak_memory import available
from ..transport.base import Counters
from .executor import Forward, Job, backward, forward
from .handshake import Call, describe
from .host import Host, Storage
from .memory_pool import empty

#: The share of the device's free memory that chunks are chosen to take: kernels need workspaces, too.
SHARE = 0.5
#: Chosen chunks are multiples of this many rows, where they are that long.
MULTIPLE = 128
#: Bytes of what a plan keeps of the chunks: each of them runs once in a pass.
STEPS = 1 << 22


class StreamedPlan(Plan):
    """A plan whose ranks run alone. Their hops are copies: rows come from storage, gradients go there."""

    @cached_property
    def cache(self) -> Cache:
        return Cache(STEPS)

    def forward_steps(self, rank: int) -> tuple[Step, ...]:
        return self.for_rank(rank).forward

    def plan_rank(self, rank: int) -> RankPlan:
        return PullSchedule(self.demand).steps(rank)

    def bytes_sent(self, rank: int | None = None, *, backward: bool = False) -> int:
        """Bytes of the hops of a rank (None: of all), in both directions. Counted."""
        hops = (hop for step in self._steps(rank, backward) for hop in _hops(step))
        return sum(self.part_bytes(part) for hop in hops for part in hop.parts)

    def messages(self, rank: int | None = None, *, backward: bool = False) -> int:
        """Hops of a rank (None: of all), in both directions. Counted."""
        return sum(len(_hops(step)) for step in self._steps(rank, backward))


def _hops(step: Step) -> tuple[Hop, ...]:
    return (*step.sends, *step.recvs)


@dataclass(frozen=True)
class HostTensors:
    """Storage of whole tensors in host memory (which may be mapped from a file)."""

    tensors: dict[str, torch.Tensor]

    def rows(self, name: str, r: range) -> torch.Tensor:
        return self.tensors[name][:, :, r.start : r.stop]


@dataclass(frozen=True)
class HostStream:
    """Runs the ranks of a plan on one device, from and to host storage. A runner of `autograd.Attention`.

    `counters` hold the bytes of all hops so far. A rank's own q, k, v, out, lse and gradients cross once besides.
    """

    plan: StreamedPlan
    kernel: Kernel
    scale: float
    device: torch.device
    counters: Counters = field(default_factory=Counters, compare=False)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: bool) -> Forward:
        """out [B, H, N, Dv] and lse [B, H, N] in host memory; nothing is kept on the device."""
        batch, heads, tokens, _ = q.shape
        out = empty((batch, tokens, heads, v.shape[-1]), q.dtype, q.device).transpose(1, 2)
        lse = empty((batch, heads, tokens), wide(q.dtype), q.device)
        self.compute(HostTensors({"q": q, "k": k, "v": v, "out": out, "lse": lse}))
        return Forward(out, lse, ())

    def backward(
        self, grad: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        result: Forward,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """dq, dk, dv in host memory. dk and dv are summed in fp32 (fp64 for fp64 inputs), and rounded at the end."""
        dq = torch.empty_like(q)
        dk, dv = (empty(x.shape, wide(x.dtype), x.device) for x in (k, v))
        given = {"q": q, "k": k, "v": v, "out": result.out, "lse": result.lse, "dout": grad}
        extra = {} if grad_lse is None else {"dlse": grad_lse}
        self.differentiate(HostTensors({**given, **extra, "dq": dq, "dk": dk, "dv": dv}), lse=grad_lse is not None)
        dk = dk.to(k.dtype)  # one after the other: the first sum is gone before the second is rounded
        dv = dv.to(v.dtype)
        return dq, dk, dv

    def compute(self, storage: Storage) -> None:
        """Read q, k and v from storage, and write out and lse there."""
        host = Host(self.plan, storage, self.device, self.counters)
        sign, _ = positive(self.scale)
        for rank, rows in self._shards():
            q, k, v = (self._here(storage, name, rows) for name in ("q", "k", "v"))
            target = storage.rows("out", rows)
            direct = target if target.device == self.device else None  # on a CPU rows are written where they stay
            program = forward(self._job(rank), q if sign == 1 else q * sign, k, v, keep=False, out=direct)
            result = host.run(program, self.plan.for_rank(rank).forward)
            if direct is None:
                target.copy_(result.out)
            storage.rows("lse", rows).copy_(result.lse)

    def differentiate(self, storage: Storage, *, lse: bool = False) -> None:
        """Read q, k, v, out, lse, dout (and dlse), write dq, and gather dk and dv in storage, in fp32 or fp64 there."""
        host = Host(self.plan, storage, self.device, self.counters)
        sign, _ = positive(self.scale)
        for _, rows in self._shards():
            for name in ("dk", "dv"):
                storage.rows(name, rows).zero_()
        for rank, rows in self._shards():
            names = ("q", "k", "v", "out", "lse", "dout", *(("dlse",) if lse else ()))
            q, k, v, out, total, grad, *grad_lse = (self._here(storage, name, rows) for name in names)
            q = q if sign == 1 else q * sign
            program = backward(
                self._job(rank), grad, grad_lse[0] if lse else None, q, k, v, Forward(out, total, ())
            )  # fmt: skip
            dq, dk, dv = host.run(program, self.plan.for_rank(rank).backward)
            storage.rows("dq", rows).copy_(dq if sign == 1 else dq * sign)
            for name, x in (("dk", dk), ("dv", dv)):
                storage.rows(name, rows).add_(x.cpu())

    def _shards(self) -> list[tuple[int, range]]:
        layout = self.plan.layout
        if not self.plan.batch:
            return []
        return [(rank, rows) for rank in range(layout.ranks) for rows in layout.shard(rank)]

    def _job(self, rank: int) -> Job:
        return Job(self.plan, rank, self.kernel, positive(self.scale)[1], cast_grads=False)

    def _here(self, storage: Storage, name: str, rows: range) -> torch.Tensor:
        return storage.rows(name, rows).to(self.device)


def make_stream(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, chunk: int | None, device: torch.device,
    backward: bool,
) -> HostStream:  # fmt: skip
    """The stream that computes `call` for tensors of these shapes and dtypes; their numbers are not looked at.

    `backward`: a chunk that is not given shall leave room for the backward. Raises InvalidInput, Unsupported or
    OutOfMemory.
    """
    kernel = call.check(*(stand_in(x, device) for x in (q, k, v)))
    facts, tokens = describe(q, k, v), q.shape[2]
    size = chunk_rows(tokens, device=device, backward=backward, **facts) if chunk is None else chunk

    def make() -> StreamedPlan:
        return _streamed(call.pattern, tokens, size, facts)

    key = call.pattern, tokens, size, *facts.items()
    return HostStream(make() if call.pattern.transient else _streams.answer(key, make), kernel, call.scale, device)


def _streamed(pattern: Pattern, tokens: int, chunk: int, facts: dict[str, Any]) -> StreamedPlan:
    plan = make_plan(
        pattern, tokens=tokens, ranks=max(1, -(-tokens // chunk)), layout="contiguous", schedule="direct", rotate="keys",
        **facts,
    )  # fmt: skip
    return StreamedPlan(**{entry.name: getattr(plan, entry.name) for entry in fields(plan)})


#: Plans streamed lately.
_streams = Cache(PLANS, lambda plan: int(plan.kept_bytes), grows=True)


def stand_in(x: Any, device: torch.device) -> Any:
    """A tensor on `device` with the shape and dtype of x, that takes no memory; x itself where it is no tensor."""
    return torch.empty((), dtype=x.dtype, device=device).expand(x.shape) if isinstance(x, torch.Tensor) else x


def check_chunk(chunk: object) -> None:
    """Raise InvalidInput where `chunk` is neither None nor a number of rows."""
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise InvalidInput(
            f"chunk={chunk!r} must be an integer >= 1, the most rows of q, k and v that the device holds at a time; "
            "leave it out to have it chosen by the free memory"
        )


def get_device(device: torch.device | str | None) -> torch.device:
    """The device that computes: by default the current CUDA device where there is one, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidInput(f"device={device!r} is no device; expected cpu, cuda or cuda:1") from None
    if found.type not in ("cpu", "cuda"):
        raise InvalidInput(f"device={device}: attention is streamed to cpu or cuda")
    if found.type == "cuda":
        if not torch.cuda.is_available() or (found.index or 0) >= torch.cuda.device_count():
            raise InvalidInput(
                f"device={device}: there is no such CUDA device (ringattn doctor tells why); try device=cpu"
            )
        found = torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
    return found


def row_bytes(
    *, heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: str, batch: int, backward: bool
) -> int:
    """Bytes on the device per row of a chunk. With e bytes per number, w = max(e, 4), D = head_dim, Dv = value_dim:

    forward: q and out, the chunk's own K/V block and two that take turns, in e; sums of out and one visit's output, in w;
    q and a K/V block again in w, for kernels that compute in fp32; lse and its partials.
    backward: q, out, dO and the own K/V block in e, and again in w for such kernels; dq, dk, dv and those of two
    visits in w; four buffers of K/V or dK/dV size that take turns, in w; lse.
    """
    item = ITEM_BYTES[dtype]
    w, pair = max(item, 4), kv_heads * (head_dim + value_dim)
    if backward:
        mine = heads * (head_dim + 2 * value_dim) + pair
        numbers = mine * (item + w) + (3 * (heads * head_dim + pair) + 4 * pair) * w
    else:
        numbers = (heads * (head_dim + value_dim) + 3 * pair) * item + (heads * (head_dim + 2 * value_dim) + pair) * w
    return batch * (numbers + 16 * heads)


def chunk_rows(tokens: int, *, device: torch.device, backward: bool, **facts: Any) -> int:
    """The rows of a chunk that fit: half of the free memory of the device over `row_bytes`, in multiples of 128.

    Where the device is the CPU, what storage will hold of the results is not free. Patterns that give heads different
    numbers of rows need more buffers in the backward: then give a smaller chunk.
    """
    per_row = row_bytes(backward=backward, **facts)
    if device.type == "cuda":
        free, where = torch.cuda.mem_get_info(device)[0], str(device)
    else:
        free, where = available() - tokens * _result_bytes(backward=backward, **facts), "host memory"
    rows = int(free * SHARE) // max(per_row, 1)
    if rows < 1 and tokens:
        raise OutOfMemory(
            f"a chunk of one row takes {per_row:,} bytes on {device}, and {where} has {max(free, 0):,} left; free memory, "
            "or give chunk= to try all the same"
        )
    return max(1, min(tokens, rows // MULTIPLE * MULTIPLE or rows))


def _result_bytes(
    *, heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: str, batch: int, backward: bool
) -> int:
    """Bytes of the results per token, in storage."""
    item = ITEM_BYTES[dtype]
    w = max(item, 4)
    found = heads * (value_dim * item + w)
    if backward:
        found += heads * head_dim * item + kv_heads * (head_dim + value_dim) * (w + item)
    return batch * found
