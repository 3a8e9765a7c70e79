"""Ring attention as functions: on the ranks of a group, on virtual ranks of this process, and on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from .errors import InvalidInput, RingAttentionError
from .kernels.base import positive
from .kernels.pad import check_padding, hide_keys
from .layout.regular import DEFAULT_LAYOUT, Layout
from .pattern import Pattern, as_pattern
from .runtime.autocast import cast_inputs
from .runtime.autograd import AllRanks, Attention, OneRank, Runner, compilable
from .runtime.executor import Job
from .runtime.handshake import Call, agree, check_sinks
from .runtime.options import OPTION_NAMES, check_option_names
from .transport.records import Exchange, Telling
from .transport.torchdist import TorchDist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from .kernels.dropout import Dropout
    from .plan.plan import Plan
    from .runtime.options import AttentionKeywords, RankKeywords, RingKeywords, StreamKeywords, VirtualKeywords
    from .transport.base import Transport


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[RingKeywords],
) -> Tensor: ...


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str,
    *,
    return_lse: Literal[True],
    **options: Unpack[RingKeywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str,
    *,
    return_lse: bool,
    **options: Unpack[RingKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...


@compilable
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str,
    *,
    layout: str | Layout,
    group: ProcessGroup | DeviceMesh | None = None,
    mesh: DeviceMesh | None = None,
    transport: Transport | None = None,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence whose tokens are sharded over ranks. Differentiable; collective.

    q [B, H, n, D], k [B, K, n, D] and v [B, K, n, Dv] are the shards of this rank: its rows by `layout`, in local
    order. H is a multiple of K. q, k and v have one dtype: fp64, fp32, bf16 or fp16. Under autocast q, k and v are
    first cast to autocast's dtype (fp64 stays), as torch's scaled_dot_product_attention does.

    pattern: a Pattern, or its text, such as "Causal() & Window(4095)".
    layout: the Layout by which the sequence was cut into shards, or its name. The rows of a shard do not show how the
        sequence was cut: a wrong layout gives a wrong result and no error, so `layout` has no default. `make_plan` can
        choose a layout before the sequence is cut.
    group, mesh, transport: who the ranks are, at most one of the three: a ProcessGroup (default: the world) or a
        one-dimensional DeviceMesh, such as mesh["cp"], or a Transport.
    key_padding_mask: bool [B, n] for the local shard, on all ranks or on none; True marks padding. No query attends a
        padded key, whatever the key holds. The mask costs 8 more columns of the head dim.
    sinks: [H], on all ranks or on none: the logit of one more key per head, which every row sees and whose value is 0,
        as in gpt-oss. Differentiable; not the pattern `Sinks`, which lets rows see first tokens. Values are not
        checked: -inf is a key without weight, inf takes all weight (out 0, lse 1e30), and NaN makes out NaN.
    return_lse: also return the log-sum-exp of the scaled logits, of the sink's among them.
    options: `schedule`, `kernel`, `machine`, `scale`, `deterministic`, `comm_dtype`, `rotate`, `softcap` and
        `dropout`, see `runtime.options.AttentionOptions`.

    All ranks call with equal arguments and matching shapes. Every call compares a digest of the arguments before the
    first message; new shapes or arguments are compared in full. A rank waits for the others as long as the timeout of
    the group, or of `transport`, allows: where a rank fails after its first message, the others learn it only then.

    Returns out [B, H, n, Dv] in the dtype of q. With `return_lse` returns (out, lse), lse [B, H, n] in fp32 (fp64 for
    fp64); both are differentiable. Rows that see no key have out 0 and lse -inf.
    Raises InvalidInput, Unsupported or Mismatch on every rank before the first message. Any other exception on one rank
    before the first message is a Mismatch on the other ranks. Raises CommFailure if a rank is missing.
    """
    ring = _get_transport(group, mesh, transport)
    with Telling(ring, "call"):
        q, k, v = cast_inputs(q, k, v)
        call = _make_call(q, pattern, layout, options, key_padding_mask, sinks, return_lse)
    scale, floor = 1.0, None

    def prepare() -> tuple[Tensor, Tensor, Tensor]:
        nonlocal q, k, v, scale, floor
        q, k, v, scale, floor = _prepare(q, k, v, key_padding_mask, sinks, call)
        return q, k, v

    plan, kernel, number = agree(ring, call, prepare)
    runner = OneRank(Job(plan, ring.rank, kernel, scale, return_lse, sinks=sinks), ring, number)
    out, lse = _apply(q, k, v, sinks, runner, plan, floor)
    return (out, lse) if return_lse else out


def positions(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str,
    *,
    layout: str | Layout,
    group: ProcessGroup | DeviceMesh | None = None,
    mesh: DeviceMesh | None = None,
    transport: Transport | None = None,
    key_padding_mask: Tensor | None = None,
    error: RingAttentionError | None = None,
    **options: Unpack[AttentionKeywords],
) -> np.ndarray:
    """Global positions of this rank's rows in local order, int64 [n]: what rotary embeddings rotate by. Collective.

    Takes the arguments of `ring_attention`, does its handshake, and raises its errors. `error` is an error that the
    caller has already found: this rank raises `error`, and all other ranks raise a Mismatch.
    """
    ring = _get_transport(group, mesh, transport)
    with Telling(ring, "positions"):
        q, k, v = cast_inputs(q, k, v)
        call = _make_call(q, pattern, layout, options, key_padding_mask)

    def prepare() -> tuple[Tensor, Tensor, Tensor]:
        if error is not None:
            raise error
        call.check(q, k, v)
        check_padding(key_padding_mask, k)
        return q, k, v

    plan, *_ = agree(ring, call, prepare, "positions")
    return plan.layout.base.positions(ring.rank)


def telling(stage: str = "call", **ranks: Unpack[RankKeywords]) -> Telling:
    """A context that reports an exception of its block to all ranks, in their next exchange.

    The context belongs around the local work between two collective calls that all ranks make; `stage` names the first
    exchange of the second call.
    """
    return Telling(_get_transport(**ranks), stage)


def exchange(stage: str, **ranks: Unpack[RankKeywords]) -> Exchange:
    """A context in whose block every rank makes one record, and after which every rank has all records. Collective."""
    return Exchange(_get_transport(**ranks), stage)


@overload
def virtual_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[VirtualKeywords],
) -> Tensor: ...


@overload
def virtual_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str,
    *,
    return_lse: Literal[True],
    **options: Unpack[VirtualKeywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def virtual_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str,
    *,
    return_lse: bool,
    **options: Unpack[VirtualKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...


@compilable
def virtual_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str,
    *,
    ranks: int,
    layout: str | Layout = DEFAULT_LAYOUT,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """`ring_attention` of whole tensors, with all `ranks` computed in this process. Differentiable.

    q [B, H, N, D], k [B, K, N, D] and v [B, K, N, Dv] hold the whole sequence in natural order, and so do the results:
    out [B, H, N, Dv], and with `return_lse` lse [B, H, N]. Plan, executor and kernels are those of real ranks, and the
    results equal those of real ranks bit for bit. `layout` decides which rank computes which rows, and changes the
    result by rounding only; layout="auto" lets the planner choose layout and schedule together. `key_padding_mask` is
    bool [B, N], True for padding. `sinks`, `options`, dtypes and errors are those of `ring_attention`.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int | np.integer):
        raise InvalidInput(f"ranks must be an integer >= 1, got {ranks!r}")
    q, k, v = cast_inputs(q, k, v)
    local = DEFAULT_LAYOUT if layout == "auto" else layout
    call = _make_call(q, pattern, local, options, key_padding_mask, sinks, return_lse)
    q, k, v, scale, floor = _prepare(q, k, v, key_padding_mask, sinks, call)
    kernel = call.check(q, k, v).seeded()
    plan = call.plan(q, k, v, q.shape[2], int(ranks), layout)
    out, lse = _apply(q, k, v, sinks, AllRanks(plan, kernel, scale, return_lse, sinks), plan, floor)
    return (out, lse) if return_lse else out


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[StreamKeywords],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str,
    *,
    return_lse: Literal[True],
    **options: Unpack[StreamKeywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str,
    *,
    return_lse: bool,
    **options: Unpack[StreamKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...


@compilable
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str,
    *,
    kernel: str = "auto",
    scale: float | None = None,
    deterministic: bool = False,
    softcap: float | None = None,
    dropout: float | Dropout = 0.0,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    stream: str | None = None,
    chunk: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`virtual_attention` with one rank: attention of the whole sequence on one device. Differentiable.

    Shapes, dtypes and errors are those of `virtual_attention`.

    stream="host" computes on `device` (default: CUDA if available, else the CPU) a sequence that need not fit there.
    q, k and v are CPU tensors, ordinary, pinned or mapped from a file; out, lse and the gradients are CPU tensors, too.
    Chunks of at most `chunk` rows are virtual ranks that run one after another; `chunk` defaults to a number chosen by
    `runtime.offload.chunk_rows` from the free memory of the device. At any time the device holds the queries and the
    K/V rows of one chunk, and the needed K/V rows of two other chunks: one in computation, one being copied. Device
    memory does not grow with N. dK and dV are summed in host memory in fp32 (fp64 for fp64). A `key_padding_mask` costs
    copies of q, k and v in host memory.
    """
    options: AttentionKeywords = {
        "kernel": kernel,
        "scale": scale,
        "deterministic": deterministic,
        "softcap": softcap,
        "dropout": dropout,
    }
    if stream is None:
        for name, value in (("chunk", chunk), ("device", device)):
            if value is not None:
                raise InvalidInput(
                    f"{name}={value} has a meaning only with stream='host': without a stream the device of the tensors "
                    f"computes everything; leave out {name}=, or add stream='host'"
                )
        return virtual_attention(
            q, k, v, pattern, ranks=1, key_padding_mask=key_padding_mask, sinks=sinks, return_lse=return_lse, **options
        )
    if stream != "host":
        raise InvalidInput(
            f"stream={stream!r}: expected 'host'. Tensors that are mapped from a file are host tensors, too; "
            "`ringattn run stream=disk` reads and writes files"
        )
    q, k, v = cast_inputs(q, k, v)
    options["schedule"] = "direct"
    call = _make_call(q, pattern, "contiguous", options, key_padding_mask, sinks, return_lse)
    out, lse = _stream_from_host(q, k, v, key_padding_mask, sinks, call, chunk, device)
    return (out, lse) if return_lse else out


def _stream_from_host(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, call: Call, chunk: int | None,
    device: torch.device | str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of host tensors, computed in chunks on `device`."""
    from .runtime.offload import check_chunk, get_device, make_stream  # few programs stream

    check_sinks(sinks, q)
    check_chunk(chunk)
    device = get_device(device)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, Tensor) and x.device.type != "cpu":
            raise InvalidInput(
                f"stream='host' copies from host memory, but {name} is on {x.device}; pass {name}.cpu(), or leave out "
                "stream="
            )
    backward = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (q, k, v))
    runner, floor = make_stream(call, q, k, v, chunk=chunk, device=device, backward=backward), None
    if mask is not None:  # make_stream has checked q, k and v; the mask makes them wider
        check_padding(mask, k)
        q, k, v, floor = hide_keys(q, k, v, mask, call.scale)
        runner = make_stream(call, q, k, v, chunk=chunk, device=device, backward=backward)
    return _apply(q, k, v, sinks, runner.of_call(sinks), runner.plan, floor)


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str,
    *,
    layout: str | Layout,
    key_padding_mask: Tensor | None = None,
    **options: Unpack[AttentionKeywords],
) -> None:
    """Raise InvalidInput or Unsupported if `virtual_attention` could not use these arguments."""
    q, k, v = cast_inputs(q, k, v)
    _make_call(q, pattern, layout, options, key_padding_mask).check(q, k, v)
    check_padding(key_padding_mask, k)


def _make_call(
    q: Tensor,
    pattern: Pattern | str,
    layout: str | Layout,
    options: AttentionKeywords,
    mask: Tensor | None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Call:
    """The arguments of a call. Raises InvalidInput for a wrong name or type; `Call.check` checks the rest."""
    check_option_names(options, OPTION_NAMES)
    given: dict[str, Any] = {**options, "return_lse": return_lse}
    given |= {"key_padding_mask": mask is not None, "sinks": sinks is not None}
    if given.get("scale") is None:
        head_dim = q.shape[-1] if isinstance(q, Tensor) and q.ndim == 4 else 1  # `Call.check` reports a wrong q
        given["scale"] = float(max(head_dim, 1) ** -0.5)
    return Call(pattern=as_pattern(pattern), layout=layout, **given)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor, float, float | None]:
    """(q, k, v, scale > 0, floor) with the logits of the call, and padded keys hidden; see `hide_keys` for `floor`."""
    floor = None
    check_sinks(sinks, q)
    if mask is not None or not call.scale > 0:
        call.check(q, k, v)
    if mask is not None:
        check_padding(mask, k)
        q, k, v, floor = hide_keys(q, k, v, mask, call.scale)
    sign, scale = positive(call.scale)
    return (q if sign == 1 else q * sign), k, v, scale, floor


def _apply(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, runner: Runner, plan: Plan, floor: float | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a runner of `plan`; rows with lse < floor have seen padded keys only."""
    layout, scale = plan.layout, plan.pattern.output_scale
    out, lse = Attention.apply(layout.stack(q), layout.stack(k), layout.stack(v), sinks, runner, floor)
    if scale != 1.0:
        # The graph may still need the unscaled output.
        out = out * scale if out.requires_grad else out.mul_(scale)
    return layout.unstack(out), layout.unstack(lse)


#: One transport per process group, so that its handshakes are remembered. An entry ends with its group.
_transports: WeakKeyDictionary[ProcessGroup, TorchDist] = WeakKeyDictionary()


def _get_transport(
    group: ProcessGroup | DeviceMesh | None = None, mesh: DeviceMesh | None = None, transport: Transport | None = None
) -> Transport:
    """The given transport, or the transport of a process group."""
    if transport is not None:
        if group is not None or mesh is not None:
            raise InvalidInput("transport= already says who the ranks are; leave out group= and mesh=")
        return transport
    new = TorchDist(group, mesh=mesh)
    return _transports.setdefault(new.group, new)


__all__ = ["attention", "positions", "ring_attention", "virtual_attention"]
