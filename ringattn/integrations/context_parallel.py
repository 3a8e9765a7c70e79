"""Drop-in context parallelism: `context_parallel` replaces the one in torch.distributed.tensor.experimental.

with ringattn.context_parallel(mesh["cp"], buffers=[tokens, labels, model.freqs_cis], buffer_seq_dims=[1, 1, 0]):
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    loss.backward()
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxOutput, BlockMask, flex_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint

from ..call.functional import get_transport, ring_attention
from ..errors import InvalidInput, Unsupported
from ..layout.regular import Layout, make_layout
from ..pattern import Causal, Full, Pattern, from_block_mask
from ..transport.records import ErrorReport
from ..transport.torchdist import WeakGroup, check_group
from .ranks import compare_inputs, gather_logits

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.attention.flex_attention import AuxRequest
    from typing_extensions import Unpack

    from ..call.arguments import AttentionKeywords

#: The function that contexts replace in every module that holds it under this name.
SDPA = F.scaled_dot_product_attention
#: The attribute of a BlockMask that holds its pattern; torch.compile reads it instead of the mask's values.
PATTERN = "ring_pattern"
#: The arguments of `ring_attention` of each open context, innermost last, with the "number" of its layout.
_entered: list[dict[str, Any]] = []
#: The buffers of all open contexts.
_held: list[Tensor] = []


@contextmanager
def context_parallel(
    mesh: DeviceMesh | ProcessGroup,
    *,
    buffers: Sequence[Tensor | BlockMask] = (),
    buffer_seq_dims: Sequence[int | None] = (),
    no_restore_buffers: Collection[Tensor] = (),
    layout: str | Layout = "zigzag",
    **options: Unpack[AttentionKeywords],
) -> Iterator[None]:
    """A context in which torch's attention runs over the ranks of `mesh`, and `buffers` hold only this rank's rows.

    mesh: one axis of a DeviceMesh, such as mesh["cp"], or a ProcessGroup.
    buffers: tensors of whole sequences, equal on all ranks, such as tokens, labels and position tables. Each becomes
        this rank's rows, in place, and is whole again after the context. The first one sets the length; from a longer
        table only the first rows are used. A BlockMask stays whole, and must be listed only if compiled code uses it.
    buffer_seq_dims: the dim of the sequence in each buffer; None for a BlockMask.
    no_restore_buffers: buffers that keep this rank's rows afterwards. For a backward after the context, list all
        buffers that autograd saves, such as tokens; otherwise torch reports tensors that were changed in place.
    layout: the Layout that cuts sequences, or its name. "zigzag" is torch's order. Any length works.
    options: `schedule`, `kernel` and others, see `call.arguments.AttentionOptions`; not `scale` or `dropout`.

    `scaled_dot_product_attention` takes q [B, H, n, D], k and v [B, K, n, D] of this rank's rows; its `attn_mask` may
    be padding, bool [B or 1, 1, 1, n], True for a token. `flex_attention` takes the BlockMask of whole sequences, see
    `from_block_mask`. Code that torch.utils.checkpoint runs again later runs in this context, too. Within the context,
    DistributedDataParallel does not broadcast the model's buffers. Other attention functions, and
    scaled_dot_product_attention under another name, are not replaced.

    Raises Mismatch if the ranks' buffers differ, InvalidInput for buffers that do not fit or if no attention ran over
    the ranks, Unsupported for other masks, score_mod and max_scores, and what `ring_attention` raises.
    """
    group = WeakGroup(mesh).group
    ring = get_transport(group)
    held = [x for x in buffers if not isinstance(x, BlockMask)]
    if any(x is other for x in held for other in _held):
        raise InvalidInput("a buffer is cut already, by a context around this one; give it to one context only")
    compare_inputs(held, group)
    if len(buffers) != len(buffer_seq_dims):
        raise InvalidInput(f"{len(buffers)} buffers have {len(buffer_seq_dims)} buffer_seq_dims; give one per buffer")
    swaps: list[tuple[Tensor, Tensor]] = []
    for x, dim in zip(buffers, buffer_seq_dims, strict=True):
        if isinstance(x, BlockMask):
            read_mask(x)
            continue
        assert dim is not None
        layout = layout if swaps else make_layout(layout, tokens=x.shape[dim], ranks=ring.size)
        assert isinstance(layout, Layout)
        if x.shape[dim] < layout.tokens:
            raise InvalidInput(
                f"a buffer has {x.shape[dim]:,} rows along dim {dim}, but the sequence {layout.tokens:,} tokens; all "
                "buffers must hold the same sequence, and the first of them its tokens"
            )
        rows = layout.shard_tensor(x.detach().narrow(dim, 0, layout.tokens), ring.rank, dim)
        swaps.append((x, rows.clone(memory_format=torch.contiguous_format)))
    for x, rows in swaps:
        if any(x is kept for kept in no_restore_buffers):
            _set(x, rows)
    swaps = [pair for pair in swaps if not any(pair[0] is kept for kept in no_restore_buffers)]
    events = ring.events
    _held.extend(held)
    try:
        number = torch.tensor(layout.number, device="cpu") if isinstance(layout, Layout) else None
        with _context({"group": group, "layout": layout, "number": number, **options}, swaps):
            yield
    finally:
        del _held[len(_held) - len(held) :]
    if ring.size > 1 and ring.events == events:
        raise InvalidInput(
            "no attention ran over the ranks, so each rank saw only its own rows; let the model call flex_attention or "
            "torch.nn.functional.scaled_dot_product_attention, or leave out the context if nothing attends"
        )


@contextmanager
def _context(ring: dict[str, Any], swaps: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """The context itself, for arguments of `ring_attention` and pairs (buffer, its rows on this rank)."""

    def inside(run: Callable[..., Any]) -> Callable[..., Any]:
        def again(*args: Any) -> Any:
            with _context(ring, swaps):
                return run(*args)

        return again

    frame, function = checkpoint._CheckpointFrame, checkpoint.CheckpointFunction
    replaced: list[tuple[Any, str, Any]] = [
        (checkpoint, "_CheckpointFrame", lambda run, *rest: frame(inside(run), *rest)),
        (checkpoint, "CheckpointFunction", SimpleNamespace(apply=lambda run, *x: function.apply(inside(run), *x))),
        (flex_attention, "__code__", attend_by_mask.__code__),  # models may hold it under other names, or compiled
        (torch.backends.mha, "_is_fastpath_enabled", False),
        (DistributedDataParallel, "will_sync_module_buffers", lambda _: False),  # each rank holds its own rows
    ]
    for module in [*sys.modules.values()]:
        if getattr(module, "__dict__", {}).get(SDPA.__name__) is SDPA:
            replaced.append((module, SDPA.__name__, attend_rows))
    with ExitStack() as stack:
        if not any(ring is other for other in _entered):
            for x, rows in swaps:
                stack.callback(_set, x, x.detach())
                _set(x, rows)
            for owner, name, value in replaced:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
        _entered.append(ring)
        stack.callback(_entered.pop)
        yield


def options_here() -> dict[str, Any]:
    """The arguments of `ring_attention` that the innermost active `context_parallel` sets."""
    options = dict(_entered[-1])
    number = options.pop("number")
    if number is not None and torch.compiler.is_compiling():  # a tensor, as a graph treats a global int as constant
        options["layout"] = number
    return options


@torch.no_grad()
def _set(x: Tensor, value: Tensor) -> None:
    """Give x the memory and shape of `value`; autograd counts this as a change of x."""
    x.set_(value)  # type: ignore[call-overload]


def context_parallel_unshard(
    mesh: DeviceMesh | ProcessGroup,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    *,
    layout: str | Layout = "zigzag",
) -> list[Tensor]:
    """Gather whole sequences from the rows of all ranks, on every rank. Collective, not differentiable.

    Each buffer holds this rank's rows along its dim in `seq_dims`; `layout` is the one with which `context_parallel`
    sharded it. Raises Mismatch if other dims differ between ranks.
    """
    check_group(mesh)  # None would mean all ranks
    whole = []
    for x, dim in zip(buffers, seq_dims, strict=True):
        by_rows = x.movedim(dim, 0)
        rows = by_rows.reshape(1, len(by_rows), by_rows.shape[1:].numel())
        found = gather_logits(rows, mesh, layout=layout)
        whole.append(found.reshape(-1, *by_rows.shape[1:]).movedim(0, dim))
    return whole


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The function that replaces `scaled_dot_product_attention` in `context_parallel`; the arguments are torch's."""
    from torch.distributed.tensor import DTensor, Shard  # takes a second to load

    if isinstance(query, DTensor) and isinstance(key, DTensor) and isinstance(value, DTensor):
        kinds = {query.placements, key.placements, value.placements}
        if len(kinds) > 1 or Shard(2) in query.placements:
            raise Unsupported(f"DTensors of {kinds}: shard query, key and value alike, by heads and not by rows")
        q, k, v = query.to_local(), key.to_local(), value.to_local()
        rows = attend_rows(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return DTensor.from_local(rows, query.device_mesh, query.placements)
    padding = None
    if attn_mask is not None:
        shapes = [(rows, 1, 1, key.shape[-2]) for rows in (1, len(key))]
        if attn_mask.dtype != torch.bool or tuple(attn_mask.shape) not in shapes:
            with ErrorReport(get_transport(_entered[-1]["group"]), "call"):
                raise Unsupported(
                    f"attn_mask {attn_mask.dtype} {tuple(attn_mask.shape)}: only padding is read, bool [batch, 1, 1, "
                    "tokens of this rank]; use is_causal=True, or flex_attention with a BlockMask of whole sequences"
                )
        padding = ~attn_mask[:, 0, 0].expand(len(key), -1)
    pattern = Causal() if is_causal else Full()
    return ring_attention(
        query, key, value, pattern, key_padding_mask=padding, scale=scale, dropout=dropout_p, **options_here()
    )


def attend_by_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """The function that replaces `flex_attention` in `context_parallel`; the arguments are torch's.

    `kernel_options` have no effect.
    """
    # torch's function runs this code with its own globals.
    from ringattn.call.functional import ring_attention
    from ringattn.errors import Unsupported
    from ringattn.integrations.context_parallel import options_here, read_mask
    from ringattn.pattern import Full

    if score_mod is not None or (return_aux is not None and return_aux.max_scores):
        raise Unsupported(
            "score_mod and max_scores of flex_attention are not supported; for a soft cap, pass softcap= to "
            "context_parallel"
        )
    lse = return_lse or (return_aux is not None and return_aux.lse)
    pattern = Full() if block_mask is None else read_mask(block_mask)
    result = ring_attention(query, key, value, pattern, scale=scale, return_lse=lse, **options_here())
    if return_aux is None:
        return result
    return (result[0], AuxOutput(lse=result[1])) if lse else (result, AuxOutput())


def read_mask(mask: BlockMask) -> Pattern:
    """The pattern that a BlockMask of whole sequences describes; each mask is converted only once.

    Raises what `from_block_mask` raises.
    """
    if not hasattr(mask, PATTERN):
        if torch.compiler.is_compiling():
            raise Unsupported("torch.compile cannot read this BlockMask; name it in buffers= of the context")
        setattr(mask, PATTERN, from_block_mask(mask))
    return getattr(mask, PATTERN)


__all__ = ["context_parallel", "context_parallel_unshard"]
