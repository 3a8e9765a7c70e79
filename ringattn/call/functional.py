"""Ring attention as functions: on the ranks of a group, on virtual ranks of this process, and on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import RLock, current_thread
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from ..errors import InvalidInput, Unsupported
from ..layout.leafwise import round_layout
from ..layout.regular import DEFAULT_LAYOUT, Layout
from ..pattern.base import check_integer
from ..text import shown
from ..transport.base import Program, drive
from ..transport.records import ErrorReport
from ..transport.virtual import VirtualRanks
from .arguments import cast_inputs
from .autograd import Runner, compilable
from .compile import compile_call
from .handshake import agree, announce, announces
from .rows import Rows, read_arguments

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from ..kernels.dropout import Dropout
    from ..transport.base import Transport
    from ..transport.torchdist import TorchDist
    from .arguments import AttentionKeywords

T = TypeVar("T")


@compilable
def ring_attention(
    q: Tensor,
    k: Tensor | Rows,
    v: Any = None,
    pattern: Any = None,
    *,
    layout: str | Layout,
    q_layout: str | Layout | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    mesh: DeviceMesh | None = None,
    transport: Transport | None = None,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    chosen: Tensor | None = None,
    block: int = 1,
    return_lse: bool = False,
    **options: Unpack[AttentionKeywords],
) -> Any:
    """Exact attention over a sequence whose tokens are sharded over ranks. Differentiable; collective.

    q [B, H, n, D], k [B, K, n, D] and v [B, K, n, Dv] are the shards of this rank: its rows by `layout`, in local
    order. H is a multiple of K. q, k and v have one dtype: fp64, fp32, bf16 or fp16. Under autocast q, k and v are
    first cast to autocast's dtype (fp64 stays), as torch's scaled_dot_product_attention does. `Rows` may take the place
    of k and v, `ring_attention(q, rows, pattern, layout=...)`: tensors that travel, and are expanded at the visit.

    pattern: a Pattern, or its text, such as "Causal() & Window(4095)".
    layout: the Layout by which the sequence was cut into shards, or its name. The rows of a shard do not show how the
        sequence was cut: a wrong layout gives a wrong result and no error, so `layout` has no default. `make_plan` can
        choose a layout before the sequence is cut. "rows": the shards follow each other in rank order, each as long as
        the rank's tensors.
    q_layout: the Layout of the queries, or its name, if they are at other positions than the keys: a chunk of a prompt
        after a cache ("shifted(zigzag, 1000)": from position 1000 on), or the queries of cross-attention. q [B, H, m,
        D] then has rows of its own, and `layout` describes the keys. None: the keys' layout.
    group, mesh, transport: the ranks, as at most one of a ProcessGroup (default: the world), a one-dimensional
        DeviceMesh, such as mesh["cp"], and a Transport.
    key_padding_mask: bool [B, n] for the local shard, on all ranks or on none; True marks padding. No query attends a
        padded key, whatever the key holds. A mask makes the head dim 8 columns wider.
    sinks: [H], on all ranks or on none: per head, the logit of an extra key with value 0 that every row sees, as in
        gpt-oss. Differentiable. The pattern `Sinks` is something else: it lets rows see the first tokens. Values are
        not checked: -inf gives the key no weight, inf gives it all weight (out 0, lse 1e30), NaN makes out NaN.
    chosen: the keys to which each query attends, among those that it sees by the pattern: positions, int32 or int64
        [B, groups, n, k], -1 for none, on all ranks or on none; `ringattn.top_keys` chooses them. With `block`, the
        numbers of blocks of that many positions. Each group is as many adjacent query heads. Computed by kernels
        "aten_cpu" and "reference" and pass-KV, not with ulysses.
    return_lse: also return the log-sum-exp of the scaled logits, including the sink's.
    options: `schedule`, `kernel`, `machine`, `scale`, `deterministic`, `comm_dtype`, `rotate`, `softcap`,
        `dropout`, `check` and `reproducible`, see `call.arguments.AttentionOptions`.

    All ranks call with equal arguments and matching shapes. Ranks compare digests of their arguments before the first
    message or, with check="deferred", while messages travel: trust such results only after `synchronize`. A rank waits
    for the others until the timeout of the group, or of `transport`.

    Returns out [B, H, n, Dv] in the dtype of q. With `return_lse` returns (out, lse), lse [B, H, n] in fp32 (fp64 for
    fp64); both are differentiable. Rows that see no key have out 0 and lse -inf.
    Raises InvalidInput, Unsupported or Mismatch on every rank before the first message, or with check="deferred" in
    `synchronize` at the latest. Any other exception on one rank raises Mismatch on the other ranks; after the first
    message, or with check="deferred", the group can then make no more calls. Raises CommFailure if a rank is missing.
    """
    ring = get_transport(group, mesh, transport)
    with one_thread(report := ErrorReport(ring, "call", deferred=ring.defers(options.get("check")))):
        with report:
            k, v, pattern = read_arguments(k, v, pattern)
            q, k, v = cast_inputs(q, k, v)
            call = compile_call(
                q, k, v, pattern, layout, options,
                q_layout=q_layout, key_padding_mask=key_padding_mask, sinks=sinks, chosen=chosen, block=block,
                return_lse=return_lse,
            )  # fmt: skip
            ring.check(call.device)
            q, *tensors = call.prepare(q, k, v, key_padding_mask)
        deferred = announces(ring, call)
        with ErrorReport(ring, "call", deferred=True) if deferred else nullcontext():
            plan, kernel, number = announce(ring, call) if deferred else agree(ring, call)
            if isinstance(k, Rows):
                with nullcontext() if deferred else ErrorReport(ring, "call", deferred=True):  # `expand` may fail
                    kernel, tensors = call.expanding(plan, kernel, k, tensors)
            runner = Runner(call, plan, kernel, sinks, ring, number, deferred, chosen)
        result = runner.run(q, *tensors)
        if deferred and not call.requires_grad:  # no optimizer will wait for the comparison
            ring.synchronize()
    return result


@contextmanager
def one_thread(report: ErrorReport) -> Iterator[None]:
    """A context for the call of one thread: that of another thread waits for it, and then raises under its `report`."""
    lock = _locks.get(report.transport) or _locks.setdefault(report.transport, RLock())
    taken = not lock.acquire(blocking=False)
    if taken:
        lock.acquire()
    try:
        if taken:
            with report:
                raise InvalidInput(
                    f"thread {current_thread().name!r} calls while another thread is in a call of the same group; make "
                    "a group for each thread with dist.new_group, in the same order on all ranks"
                )
        yield
    finally:
        lock.release()


def positions(
    q: Tensor,
    k: Tensor | Rows,
    v: Any = None,
    pattern: Any = None,
    *,
    layout: str | Layout,
    group: ProcessGroup | DeviceMesh | None = None,
    mesh: DeviceMesh | None = None,
    transport: Transport | None = None,
    key_padding_mask: Tensor | None = None,
    **options: Unpack[AttentionKeywords],
) -> np.ndarray:
    """Global positions of this rank's rows in local order, int64 [n], for example for rotary embeddings. Collective.

    Takes the arguments of `ring_attention`, does its handshake, and raises its errors.
    """
    ring = get_transport(group, mesh, transport)
    with ErrorReport(ring, "positions"):
        k, v, pattern = read_arguments(k, v, pattern)
        q, k, v = cast_inputs(q, k, v)
        call = compile_call(q, k, v, pattern, layout, options, key_padding_mask=key_padding_mask)
        ring.check(call.device)
    plan, *_ = agree(ring, call, "positions")
    return plan.layout.base.positions(ring.rank)


def synchronize(
    group: ProcessGroup | DeviceMesh | None = None, mesh: DeviceMesh | None = None, transport: Transport | None = None
) -> None:
    """Wait until all calls with check="deferred" are known to match on all ranks, or raise their error. Collective.

    With this option, ranks compare their calls while messages travel, so a result may come before an error. torch's
    optimizers synchronize before each step, and a call that records no gradient synchronizes before it returns; for any
    other use of a result, call `synchronize` first. An error is final: the group can make no more calls.
    """
    get_transport(group, mesh, transport).synchronize()


@compilable
def virtual_attention(
    q: Tensor,
    k: Tensor | Rows,
    v: Any = None,
    pattern: Any = None,
    *,
    ranks: int,
    layout: str | Layout = DEFAULT_LAYOUT,
    q_layout: str | Layout | None = None,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    chosen: Tensor | None = None,
    block: int = 1,
    return_lse: bool = False,
    **options: Unpack[AttentionKeywords],
) -> Any:
    """Compute ring attention in a single process, on `ranks` virtual ranks and whole tensors. Differentiable.

    q [B, H, N, D], k [B, K, N, D] and v [B, K, N, Dv] hold the whole sequence in natural order, and so do the results:
    out [B, H, N, Dv], and with `return_lse` lse [B, H, N]. The same plan, executor and kernels run as on real ranks, so
    the results are equal bit for bit. `layout` decides which rank computes which rows, and changes the result by
    rounding only; layout="auto" lets the planner choose layout and schedule together. With a `q_layout` q [B, H, M, D]
    holds the queries, k and v the keys, each in ascending order of their positions. `key_padding_mask` is bool [B, N],
    True for padding. `sinks`, `options`, dtypes and errors are as in `ring_attention`.
    """
    ranks = check_integer(ranks, "ranks", 1, "ranks=4")
    k, v, pattern = read_arguments(k, v, pattern)
    q, k, v = cast_inputs(q, k, v)
    layout = round_layout(layout, options.get("reproducible"))
    cut = DEFAULT_LAYOUT if layout == "auto" else layout
    call = compile_call(
        q, k, v, pattern, cut, options,
        q_layout=q_layout, key_padding_mask=key_padding_mask, sinks=sinks, chosen=chosen, block=block,
        return_lse=return_lse,
    )  # fmt: skip
    if call.options.check is not None:
        raise InvalidInput(
            f"check={call.options.check!r}: virtual ranks share one process and have nothing to compare; leave check "
            "out"
        )
    q, *tensors = call.prepare(q, k, v, key_padding_mask)
    # A q_layout such as "shifted(auto, 0)" follows the layout that is chosen.
    layouts = ("auto", q_layout) if layout == "auto" else (layout, call.q_layout)
    plan = call.plan(call.rows, call.q_rows, int(ranks), *layouts)
    kernel, tensors = call.expanding(plan, call.kernel.seeded(), k, tensors)
    return Runner(call, plan, kernel, sinks, chosen=chosen).run(q, *tensors)


@compilable
def attention(
    q: Tensor,
    k: Tensor | Rows,
    v: Any = None,
    pattern: Any = None,
    *,
    kernel: str = "auto",
    scale: float | None = None,
    deterministic: bool = False,
    softcap: float | None = None,
    dropout: float | Dropout = 0.0,
    reproducible: int | None = None,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    chosen: Tensor | None = None,
    block: int = 1,
    return_lse: bool = False,
    first: int | None = None,
    offload: str | None = None,
    chunk: int | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Compute attention over a whole sequence on one device, without a ring. Differentiable.

    The same as `virtual_attention` with one rank; shapes, dtypes and errors are the same, too. With `first`, the
    position of the first query, there may be more or fewer queries than keys; the keys start at position 0.

    offload="host" computes on `device` (default: CUDA if available, else the CPU) a sequence that need not fit there.
    q, k and v, or Rows, are CPU tensors, ordinary, pinned or mapped from a file; out, lse and the gradients are CPU
    tensors, too. Chunks of at most `chunk` rows are virtual ranks that run one after another; by default
    `call.offload.chunk_rows` chooses `chunk` from the free memory of the device. At any time the device holds the
    queries and the K/V rows of one chunk, and two buffers for the K/V rows of others that these queries see: one in
    use, one being filled. Device memory does not grow with N. dK and dV are summed in host memory in fp32 (fp64 for
    fp64). A `key_padding_mask` costs copies of q, k and v in host memory.
    """
    options: AttentionKeywords = {
        "kernel": kernel,
        "scale": scale,
        "deterministic": deterministic,
        "softcap": softcap,
        "dropout": dropout,
        "reproducible": reproducible,
    }
    first = None if first is None else check_integer(first, "first", 0, "first=1000")
    q_layout = None if first is None else f"shifted(contiguous, {first})"
    if offload is None:
        for name, value in (("chunk", chunk), ("device", device)):
            if value is not None:
                raise InvalidInput(
                    f"{name}={shown(value)} needs offload='host': without it, attention is computed on the device of "
                    f"the tensors; leave out {name}=, or add offload='host'"
                )
        return virtual_attention(
            q, k, v, pattern,
            ranks=1, q_layout=q_layout, key_padding_mask=key_padding_mask, sinks=sinks, chosen=chosen, block=block,
            return_lse=return_lse, **options,
        )  # fmt: skip
    if first is not None:
        raise InvalidInput(f"first={first}: with offload= the queries are at the positions of the keys; leave out one")
    if offload != "host":
        raise InvalidInput(
            f"offload={shown(offload)}: expected 'host'. Tensors that are mapped from a file are host tensors, too; "
            "`ringattn run offload=disk` reads and writes files"
        )
    from .offload import check_chunk, get_device, make_offload  # few programs offload

    k, v, pattern = read_arguments(k, v, pattern)
    if reproducible is not None:
        raise Unsupported(f"offload='host' cuts by memory, not by leaves; leave out reproducible={reproducible}")
    check_chunk(chunk)
    where = get_device(device)
    tensors = (("k", k), ("v", v)) if not isinstance(k, Rows) else [("a tensor of Rows", x) for x in k.tensors]
    for name, x in (("q", q), *tensors):
        if isinstance(x, Tensor) and x.device.type != "cpu":
            raise InvalidInput(
                f"offload='host' copies from host memory, but {name} is on {x.device}; pass its cpu(), or leave out "
                "offload="
            )
    q, k, v = cast_inputs(q, k, v)
    options["schedule"] = "direct"
    call = compile_call(
        q, k, v, pattern, "contiguous", options,
        key_padding_mask=key_padding_mask, sinks=sinks, chosen=chosen, block=block, return_lse=return_lse, device=where,
    )  # fmt: skip
    runner = make_offload(call, chunk=chunk, backward=call.requires_grad)
    runner = runner.of_call(k, sinks, chosen)
    return runner.run(*call.hide(q, k, v, key_padding_mask))


#: One transport per process group. An entry ends with its group.
_transports: WeakKeyDictionary[ProcessGroup, TorchDist] = WeakKeyDictionary()
#: The lock that a thread holds during a call, by transport.
_locks: WeakKeyDictionary[Transport, Any] = WeakKeyDictionary()


def get_transport(
    group: ProcessGroup | DeviceMesh | None = None, mesh: DeviceMesh | None = None, transport: Transport | None = None
) -> Transport:
    """The given transport, or the transport of a process group."""
    if transport is not None:
        if group is not None or mesh is not None:
            raise InvalidInput("transport= already gives the ranks; leave out group= and mesh=")
        if not hasattr(transport, "rank"):  # transports of other packages need no common base
            raise InvalidInput(f"transport={shown(transport)}: expected a Transport; try group=, or leave it out")
        return transport
    from ..transport.torchdist import TorchDist, find_group  # virtual ranks have no process group

    found = find_group(group, mesh).group
    return _transports.get(found) or _transports.setdefault(found, TorchDist(found))


def find_ranks(
    group: ProcessGroup | DeviceMesh | None = None,
    mesh: DeviceMesh | None = None,
    transport: Transport | None = None,
    ranks: int | None = None,
) -> tuple[Transport | VirtualRanks, range]:
    """Return the transport or the virtual ranks of a call, and the range of ranks that this process computes.

    Given `ranks`, all of them are virtual ranks in this process; otherwise, this process is one rank of the transport.
    """
    if ranks is None:
        ring = get_transport(group, mesh, transport)
        return ring, range(ring.rank, ring.rank + 1)
    if any(who is not None for who in (group, mesh, transport)):
        raise InvalidInput(
            f"ranks={ranks} asks for virtual ranks, group=, mesh= or transport= for real ones; leave out one of them"
        )
    return VirtualRanks(check_integer(ranks, "ranks", 1, "ranks=4")), range(ranks)


def run_programs(programs: Sequence[Program[T]], where: Transport | VirtualRanks) -> list[T]:
    """Run one program for each rank in this process, and return the results of the programs."""
    return where.run(programs) if isinstance(where, VirtualRanks) else [drive(programs[0], where, where.rank)]


__all__ = ["attention", "positions", "ring_attention", "synchronize", "virtual_attention"]
