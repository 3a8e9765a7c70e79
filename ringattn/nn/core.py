"""Attention cores: modules that hold a pattern and where attention runs, without parameters of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..call.arguments import AttentionKeywords, AttentionOptions, cast_inputs, check_option_names
from ..call.autograd import compilable
from ..call.compile import compile_call
from ..call.functional import get_transport, positions, ring_attention, virtual_attention
from ..call.planner import make_plan
from ..errors import InvalidInput
from ..layout.regular import DEFAULT_LAYOUT, Layout
from ..pattern import Causal, Dilated, Pattern, as_pattern
from ..pattern.base import check_integer
from ..text import did_you_mean, shown
from ..transport.records import ErrorReport
from ..transport.torchdist import WeakGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from ..transport.base import Transport

#: Orders of the dimensions of q, k, v and out.
ORDERS = ("BHND", "BNHD")
#: Options about how ranks share the work, which mean nothing on one device.
SHARING = ("schedule", "machine", "comm_dtype", "rotate", "check")


class CoreKeywords(AttentionKeywords, total=False):
    """The keyword arguments shared by `RingAttention` and every other core of a multi-head attention module."""

    group: ProcessGroup | DeviceMesh | None
    mesh: DeviceMesh | None
    transport: Transport | None
    ranks: int | None
    layout: str | Layout | None
    order: str


def option_names(module: type[nn.Module]) -> set[str]:
    """The optional keyword arguments of a module's constructor, including those of its bases and `AttentionOptions`."""
    names = set(CoreKeywords.__annotations__) if issubclass(module, RingAttention) else set()
    return names | {name for name, one in signature(module).parameters.items() if one.default is not one.empty}


def check_heads(num_heads: int, kv_heads: int = 1, **sizes: int) -> None:
    """Raise InvalidInput unless all are sizes that a parameter can have, and `kv_heads` divides `num_heads`."""
    for name, value in {"num_heads": num_heads, "kv_heads": kv_heads, **sizes}.items():
        if check_integer(value, name, 1, f"{name}=8") >= 1 << 31:
            raise InvalidInput(f"{name}={shown(value)} is too large for a parameter; try {name}=8")
    if num_heads % kv_heads:
        raise InvalidInput(f"num_heads must be a multiple of kv_heads, got {num_heads} and {kv_heads}")


class _Place:
    """The group, mesh or transport of a module. Copies of the module share it: a process group cannot be copied.

    It keeps neither the process group alive, see `WeakGroup`, nor the mesh, which refers to groups.
    """

    def __init__(
        self, group: ProcessGroup | DeviceMesh | None, mesh: DeviceMesh | None, transport: Transport | None
    ) -> None:
        arguments = {"group": group, "mesh": mesh, "transport": transport}
        #: Parts of the repr, as "name=value".
        self.shown = [f"{name}={value!r}" for name, value in arguments.items() if value is not None]
        if transport is not None and len(self.shown) > 1:
            raise InvalidInput("transport= already defines the ranks; leave out group= and mesh=")
        self._transport = transport
        self._group = None if group is None and mesh is None else WeakGroup(group, mesh=mesh)

    def __deepcopy__(self, memo: object) -> _Place:
        return self

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments for `ring_attention` that say which ranks take part.

        Raises InvalidInput if the group was destroyed.
        """
        return {"transport": self._transport} if self._group is None else {"group": self._group.group}


class RingAttention(nn.Module):
    """A module that calls `ring_attention` with a fixed pattern (a Pattern or its text).

    group, mesh, transport: real ranks. Tensors are this rank's shards, calls are collective, and `layout` is required:
        it states how the sequence was cut into shards.
    ranks: number of virtual ranks in this process, on whole tensors. Without it and without real ranks, attention runs
        on one device.
    layout: the Layout, or its name. For virtual ranks the default is "contiguous".
    order: the order of dimensions of q, k, v and out: "BHND" is [B, H, N, D], "BNHD" is [B, N, H, D]. lse is always
        [B, H, N].
    options: `schedule`, `kernel`, `machine`, `scale`, `deterministic`, `comm_dtype`, `rotate`, `softcap` and `dropout`,
        see `call.arguments.AttentionOptions`. Dropout is active in training mode. A seed, `Dropout(p, seed)`, drops the
        same weights in every call; without one each call draws its own.

    Raises InvalidInput for arguments that contradict each other, and for a layout or a schedule on one device.
    """

    def __init__(
        self,
        pattern: Pattern | str,
        *,
        group: ProcessGroup | DeviceMesh | None = None,
        mesh: DeviceMesh | None = None,
        transport: Transport | None = None,
        ranks: int | None = None,
        layout: str | Layout | None = None,
        order: str = "BHND",
        **options: Unpack[AttentionKeywords],
    ) -> None:
        super().__init__()
        pattern = as_pattern(pattern)
        if order not in ORDERS:
            raise InvalidInput(f"unknown order {order!r}; {did_you_mean(order, ORDERS)}expected {' or '.join(ORDERS)}")
        check_option_names(options, CoreKeywords.__annotations__)
        self.options = AttentionOptions(**options)
        sharded = any(argument is not None for argument in (group, mesh, transport))
        if sharded and ranks is None and layout is None:
            raise InvalidInput(
                "layout is missing: on the ranks of a group, attention gets shards and cannot see how the sequence was "
                "cut; give layout='zigzag' or another name, or the Layout that cut it"
            )
        self._place = _Place(group, mesh, transport)
        if sharded and ranks is not None:
            raise InvalidInput(
                f"ranks={ranks} asks for virtual ranks, {self._place.shown[0].split('=')[0]}= for real ones; leave out "
                "one of them"
            )
        if not sharded and ranks is None:
            _check_one_device(layout, self.options)
        self.sharded, self.ranks = sharded, ranks
        self.pattern, self.order = pattern, order
        self.layout = DEFAULT_LAYOUT if layout is None else layout
        self._causal: Pattern | None = None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool = False,
        q_layout: str | Layout | None = None,
        key_padding_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """The attention output, with dimensions in the order of q; with `return_lse` (out, lse [B, H, N]).

        `is_causal` uses the pattern `pattern & Causal()`. `q_layout` is the layout of the queries, if it differs from
        that of the keys. `key_padding_mask` is bool [B, N], True for padding. `sinks`, shapes, dtypes and errors are as
        in `ring_attention`.
        """
        transposed = self.order == "BNHD"
        if transposed:
            q, k, v = _transpose(q), _transpose(k), _transpose(v)
        out, lse = self.attend(
            q, k, v,
            is_causal=is_causal, q_layout=q_layout, key_padding_mask=key_padding_mask, sinks=sinks,
            return_lse=return_lse,
        )  # fmt: skip
        out = out.transpose(1, 2) if transposed else out
        return (out, lse) if return_lse else out

    @compilable
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool = False,
        q_layout: str | Layout | None = None,
        key_padding_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """(out [B, H, N, Dv], lse [B, H, N]) for tensors [B, H, N, D] in this order, whatever the module's `order` is.

        lse is None with return_lse=False.
        """
        out, *lse = self._run(
            q, k, v, self._pattern(is_causal), self._call_options(),
            q_layout=q_layout, key_padding_mask=key_padding_mask, sinks=sinks, return_lse=return_lse,
        )  # fmt: skip
        return out, lse[0] if lse else None

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, options: AttentionOptions, **inputs: Any
    ) -> tuple[Tensor, ...]:
        """(out, lse), or (out,) with return_lse=False, of the functional call; `inputs` are its other arguments."""
        shared: dict[str, Any] = {"return_lse": True, "layout": self.layout, **options.keywords(), **inputs}
        if self.sharded:
            result = ring_attention(q, k, v, pattern, **self._place.keywords, **shared)
        else:
            result = virtual_attention(q, k, v, pattern, ranks=1 if self.ranks is None else self.ranks, **shared)
        return result if isinstance(result, tuple) else (result,)

    def achieved_density(self, tokens: int, heads: int = 1) -> float:
        """Fraction of (query, key) pairs that are computed, as in a plan: a pair in two branches counts twice."""
        return make_plan(self.pattern, tokens=tokens, ranks=1, heads=heads).density

    @compilable
    def positions(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """The global position of each row of q [B, H, N, D]: int64 [N] on the device of q.

        Collective on real ranks. Checks the arguments and raises the same errors as `attend`.
        """
        pattern, options = self._pattern(is_causal), self._call_options().keywords()
        shared: dict[str, Any] = {"layout": self.layout, "key_padding_mask": key_padding_mask}
        if self.sharded:
            found = positions(q, k, v, pattern, **shared, **self._place.keywords, **options)
            return torch.from_numpy(found).to(q.device)
        q, k, v = cast_inputs(q, k, v)
        compile_call(q, k, v, pattern, options=options, **shared)  # for its errors
        return torch.arange(q.shape[2], device=q.device)

    def report_errors(self, stage: str = "call") -> AbstractContextManager[object]:
        """A context that reports an exception in its block to all ranks; for local work before a collective call.

        `stage` names that call, so that the other ranks raise the error there. Does nothing without real ranks.
        """
        return ErrorReport(get_transport(**self._place.keywords), stage) if self.sharded else nullcontext()

    def _call_options(self) -> AttentionOptions:
        """The options of a call: those of the module, without dropout in eval mode."""
        return self.options if self.training or not self.options.dropout else replace(self.options, dropout=0.0)

    def _pattern(self, is_causal: bool) -> Pattern:
        """The pattern of a call; `pattern & Causal()` is made once."""
        if not is_causal:
            return self.pattern
        if self._causal is None:
            self._causal = self.pattern & Causal()
        return self._causal

    def extra_repr(self) -> str:
        parts = [repr(self.pattern), *self._place.shown]
        if self.ranks is not None:
            parts.append(f"ranks={self.ranks}")
        shared = self.sharded or self.ranks is not None
        if shared:
            name = self.layout if isinstance(self.layout, str) else self.layout.name
            parts += [f"layout={name!r}", f"schedule={self.options.schedule!r}"]
        for option in fields(self.options):
            value = getattr(self.options, option.name)
            if value != option.default and option.name != "schedule":
                parts.append(f"{option.name}={value!r}")
        return ", ".join(parts if self.order == ORDERS[0] else [*parts, f"order={self.order!r}"])


def _check_one_device(layout: str | Layout | None, options: AttentionOptions) -> None:
    """Raise InvalidInput if a layout, or an option about sharing work, is given for one device."""
    plain = AttentionOptions()
    for name in ("layout", *SHARING):
        value, default = (layout, None) if name == "layout" else (getattr(options, name), getattr(plain, name))
        if value != default:
            raise InvalidInput(
                f"{name}={value!r} is about how ranks share work, but this attention runs on one device; give ranks=, "
                f"group=, mesh= or transport=, or leave out {name}="
            )


class DilatedAttention(RingAttention):
    """`RingAttention` under `Dilated(segment_lengths, dilation_rates, ...)`; `options` are those of `RingAttention`."""

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        mix: str = "lse",
        offsets: str | None = None,
        causal: bool = False,
        **options: Unpack[CoreKeywords],
    ) -> None:
        pattern = Dilated(segment_lengths, dilation_rates, causal=causal, mix=mix, offsets=offsets)
        super().__init__(pattern, **options)


class BlockSparseAttention(RingAttention):
    """A `RingAttention` for any pattern, under another name: the block-sparse factory functions create it."""


def _transpose(x: Tensor) -> Tensor:
    """x [B, N, H, D] as [B, H, N, D]. An invalid x stays unchanged, and the call reports it to all ranks."""
    return x.transpose(1, 2) if isinstance(x, Tensor) and x.ndim == 4 else x
