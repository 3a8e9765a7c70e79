"""Ring attention as functions: on real ranks, on one device, and on virtual ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch

from .errors import InvalidInput, RingAttentionError
from .kernels.base import positive
from .kernels.pad import check_padding, hide_keys
from .layout.regular import DEFAULT_LAYOUT, Layout
from .machine.machine import Machine
from .machine.presets import get_machine
from .pattern import Pattern, as_pattern
from .plan.plan import Plan
from .planner import make_plan
from .runtime.autocast import cast_inputs
from .runtime.autograd import AllRanks, Attention, OneRank, Runner
from .runtime.checkpointing import keeping
from .runtime.executor import Job
from .runtime.handshake import Call, agree, describe
from .transport.records import Exchange, Telling
from .transport.torchdist import TorchDist

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """torch.compile breaks its graph here: plans and messages are not for tracing.

    torch.compiler.disable imports the compiler, which takes over a second; a program that has not imported it compiles nothing.
    """
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return cast(F, call)


@uncompiled
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern | str,
    *,
    layout: str | Layout,
    group: Any = None,
    mesh: Any = None,
    transport: Any = None,
    schedule: str = "auto",
    kernel: str = "auto",
    machine: Machine | str | None = None,
    scale: float | None = None,
    key_padding_mask: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    comm_dtype: torch.dtype | str | None = None,
    rotate: str = "auto",
) -> Any:
    """Exact attention over a sequence that is sharded over the ranks of a group. Differentiable; collective.

    q [B, H, n, D], k [B, K, n, D], v [B, K, n, Dv] are this rank's shards, the rows of `layout` in its local order;
    H is a multiple of K. All of one dtype: fp64, fp32, bf16 or fp16. Under autocast all three are first cast to its
    dtype (fp64 stays), as torch's scaled_dot_product_attention does. `scale` defaults to 1 / sqrt(D).

    `pattern` is a Pattern or its text, such as "Causal() & Window(4095)". `layout` is the Layout that cut the sequence
    into the shards, or its name. No rank can see from its rows how they were cut: the result under another layout is
    wrong without an error, so `layout` has no default.

    The ranks are those of `group` (a ProcessGroup, default the world), of `mesh` (a one-dimensional DeviceMesh) or
    of `transport`. All ranks call with the same arguments and matching shapes; this is compared in every call, before
    the first message: by a digest of each rank and, where shapes or arguments are new, by a handshake in full. Ranks
    wait for each other as long as the timeout of the group, or of `transport`, allows.
    schedule="auto" takes the one that the timing model predicts to be fastest on `machine` (a Machine, "cpu" or "cuda";
    default: by the device of the tensors). The layout is chosen before there are shards, by `make_plan`.
    `deterministic=True` makes repeated runs bitwise equal. `comm_dtype` rounds what travels, and `rotate` says what
    does in the backward, see `make_plan`.
    `key_padding_mask` (bool [B, n], the local shard's, on all ranks or on none) is True where a key is padding,
    which nobody attends; whatever the key holds. It costs 8 more columns of the head dim.

    Returns out [B, H, n, Dv] in the dtype of q, and with `return_lse` also the log-sum-exp of the scaled logits
    [B, H, n], fp32 (fp64 for fp64), both differentiable. Rows that see no key are 0, with lse -inf.
    Raises InvalidInput, Unsupported or Mismatch on every rank before the first message; any other exception of one rank
    by then is a Mismatch on the others. CommFailure where a rank is missing.
    """
    transport = _transport(group, mesh, transport)
    q, k, v = cast_inputs(q, k, v)
    call = Call(
        _read(pattern),
        layout,
        schedule,
        kernel,
        _scale(q, scale),
        deterministic,
        comm_dtype,
        machine,
        rotate,
        return_lse,
    )
    floor = None

    def prepare() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        nonlocal q, k, v, floor
        q, k, v, floor = _hidden(q, k, v, key_padding_mask, call)
        return q, k, v

    plan, chosen = agree(transport, call, prepare)
    q, factor = _positive(q, call.scale)
    runner = OneRank(Job(plan, transport.rank, chosen, factor, return_lse), transport, next(transport.calls))
    return _apply(q, k, v, runner, plan, return_lse, floor)


def positions(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern | str,
    *,
    layout: str | Layout,
    group: Any = None,
    mesh: Any = None,
    transport: Any = None,
    schedule: str = "auto",
    kernel: str = "auto",
    machine: Machine | str | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    comm_dtype: torch.dtype | str | None = None,
    rotate: str = "auto",
    key_padding_mask: torch.Tensor | None = None,
    wrong: RingAttentionError | None = None,
) -> np.ndarray:
    """The global positions of this rank's rows in local order, int64 [n]: where rotary embeddings rotate to.

    Takes what `ring_attention` takes, does its handshake, and raises as it does; `wrong` is an error that the
    caller has found already and that all ranks shall hear of.
    """
    transport = _transport(group, mesh, transport)
    q, k, v = cast_inputs(q, k, v)
    call = Call(_read(pattern), layout, schedule, kernel, _scale(q, scale), deterministic, comm_dtype, machine, rotate)

    def prepare() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if wrong is not None:
            raise wrong
        check(q, k, v, call, key_padding_mask)
        return q, k, v

    return agree(transport, call, prepare, "positions")[0].layout.positions(transport.rank)


def telling(stage: str = "call", *, group: Any = None, mesh: Any = None, transport: Any = None) -> Telling:
    """A context that tells all ranks of a ring, in their next exchange, what its block raises on this one.

    It belongs around what a rank does between two collective calls that all ranks make together; `stage` is the first
    exchange of the second one.
    """
    return Telling(_transport(group, mesh, transport), stage)


def exchange(stage: str, *, group: Any = None, mesh: Any = None, transport: Any = None) -> Exchange:
    """A context in which every rank of a ring makes a record, and after which each has those of all. Collective."""
    return Exchange(_transport(group, mesh, transport), stage)


@uncompiled
def virtual_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern | str,
    *,
    ranks: int,
    layout: str | Layout = DEFAULT_LAYOUT,
    schedule: str = "auto",
    kernel: str = "auto",
    machine: Machine | str | None = None,
    scale: float | None = None,
    key_padding_mask: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    comm_dtype: torch.dtype | str | None = None,
    rotate: str = "auto",
) -> Any:
    """`ring_attention` with all `ranks` executed in this process: whole tensors in, the whole result out.

    q [B, H, N, D], k [B, K, N, D], v [B, K, N, Dv] in natural order. The plan, the executor and the kernels are
    those of real ranks, and results equal theirs bit for bit. `layout` changes who computes what, not the result;
    layout="auto" is chosen here, with the schedule. `key_padding_mask` is bool [B, N], True is padding.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int | np.integer):
        raise InvalidInput(f"ranks must be an integer >= 1, got {ranks!r}")
    ranks = int(ranks)
    q, k, v = cast_inputs(q, k, v)
    known = DEFAULT_LAYOUT if layout == "auto" else layout
    call = Call(
        _read(pattern),
        known,
        schedule,
        kernel,
        _scale(q, scale),
        deterministic,
        comm_dtype,
        machine,
        rotate,
        return_lse,
    )
    q, k, v, floor = _hidden(q, k, v, key_padding_mask, call)
    chosen = call.check(q, k, v)
    facts = describe(q, k, v)
    plan = make_plan(
        call.pattern, tokens=q.shape[2], ranks=ranks, layout=layout, schedule=schedule,
        machine=get_machine(machine, q.device.type), comm_dtype=comm_dtype, rotate=rotate, **facts,
    )  # fmt: skip
    q, factor = _positive(q, call.scale)
    return _apply(q, k, v, AllRanks(plan, chosen, factor, return_lse), plan, return_lse, floor)


@uncompiled
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern | str,
    *,
    kernel: str = "auto",
    scale: float | None = None,
    key_padding_mask: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    stream: str | None = None,
    chunk: int | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """`ring_attention` of the whole sequence on one device: a plan with one rank. Shapes as in virtual_attention.

    stream="host" computes on `device` (default: CUDA where there is one, else the CPU) what need not fit there: q, k, v
    are CPU tensors, ordinary, pinned or mapped from a file, and so are out, lse and the gradients. Chunks of at most
    `chunk` rows (default: by `stream.chunk_rows` from the device's free memory) are virtual ranks that run one after
    another; the device holds the queries of one of them, its K/V rows and two blocks of others', one of which is
    computed with while the next is copied, and of these only rows that are needed. Nothing there grows with N. dK and dV
    are summed in host memory in fp32 (fp64). A `key_padding_mask` costs copies of q, k and v in host memory.
    """
    if stream is not None:
        q, k, v = cast_inputs(q, k, v)
        call = Call(
            _read(pattern), "contiguous", "direct", kernel, _scale(q, scale), deterministic, return_lse=return_lse
        )
        return _streamed(q, k, v, call, key_padding_mask, stream, chunk, device)
    for name, value in (("chunk", chunk), ("device", device)):
        if value is not None:
            raise InvalidInput(
                f"{name}={value} belongs to stream='host'; without it the tensors' own device computes all"
            )
    return virtual_attention(
        q, k, v, pattern, ranks=1, kernel=kernel, scale=scale, key_padding_mask=key_padding_mask,
        return_lse=return_lse, deterministic=deterministic,
    )  # fmt: skip


def _streamed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, mask: torch.Tensor | None, stream: str,
    chunk: int | None, device: torch.device | str | None,
) -> Any:  # fmt: skip
    if stream != "host":
        raise InvalidInput(
            f"stream={stream!r}: expected 'host'; tensors mapped from a file are host tensors, too, and "
            "ringattn run stream=disk reads and writes files"
        )
    from .runtime.offload import check_chunk, get_device, make_stream  # most calls stream nothing

    check_chunk(chunk)
    where = get_device(device)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, torch.Tensor) and x.device.type != "cpu":
            raise InvalidInput(f"stream='host' copies from host memory, but {name} is on {x.device}; pass CPU tensors")
    backward = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in (q, k, v))
    runner, floor = make_stream(call, q, k, v, chunk=chunk, device=where, backward=backward), None
    if mask is not None:
        check_padding(mask, k)
        q, k, v, floor = hide_keys(q, k, v, mask, call.scale)
        runner = make_stream(call, q, k, v, chunk=chunk, device=where, backward=backward)
    return _apply(q, k, v, runner, runner.plan, call.return_lse, floor)


def check(q: Any, k: Any, v: Any, call: Call, mask: Any = None) -> None:
    """Raise InvalidInput or Unsupported where the arguments of this rank cannot be used."""
    call.check(q, k, v)
    if mask is not None:
        check_padding(mask, k)


def _hidden(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, call: Call
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float | None]:
    """q, k, v with the padded keys hidden, and the lse below which a row has seen no other; as they are without."""
    if mask is None:
        return q, k, v, None
    check(q, k, v, call, mask)
    return hide_keys(q, k, v, mask, call.scale)


def _apply(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runner: Runner, plan: Plan, return_lse: bool,
    floor: float | None,
) -> Any:  # fmt: skip
    out, lse = Attention.apply(q, k, v, runner, floor)
    if plan.pattern.output_scale != 1.0:
        factor = plan.pattern.output_scale
        held = out.requires_grad or keeping()  # by the graph, or for a recomputation
        out = out * factor if held else out.mul_(factor)
    return (out, lse) if return_lse else out


def _read(pattern: Any) -> Any:
    """The pattern that a text writes; what is none stays as it is, for an error that all ranks hear."""
    try:
        return as_pattern(pattern)
    except InvalidInput:
        return pattern


def _scale(q: Any, scale: Any) -> Any:
    if scale is not None:
        return scale  # checked with the other arguments, where all ranks hear of it
    width = q.shape[-1] if isinstance(q, torch.Tensor) and q.ndim == 4 else 1  # wrong shapes are reported later
    return max(width, 1) ** -0.5


def _positive(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """q and a scale > 0 with the same logits."""
    sign, factor = positive(scale)
    return (q if sign == 1 else q * sign), factor


#: One per process group, gone with the group: a transport does not keep its group alive.
_transports: WeakKeyDictionary[Any, TorchDist] = WeakKeyDictionary()


def _transport(group: Any, mesh: Any, transport: Any = None) -> Any:
    """The transport given, or one per process group, so that its handshakes are remembered."""
    if transport is not None:
        if group is not None or mesh is not None:
            raise InvalidInput("transport= already says who the ranks are; leave out group= and mesh=")
        return transport
    made = TorchDist(group, mesh=mesh)
    return _transports.setdefault(made.group, made)


__all__ = ["attention", "positions", "ring_attention", "virtual_attention"]
