"""Attention cores: a pattern and where it runs, as modules without parameters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..errors import InvalidInput, RingAttentionError, did_you_mean
from ..functional import attention, check, positions, ring_attention, telling, uncompiled, virtual_attention
from ..layout.regular import DEFAULT_LAYOUT, Layout
from ..pattern import Causal, Dilated, Pattern, as_pattern
from ..planner import make_plan
from ..runtime.autocast import cast_inputs
from ..runtime.handshake import Call
from ..transport.torchdist import WeakGroup

ORDERS = ("BHND", "BNHD")


class _Place:
    """Where a module runs. A copy of the module runs there, too: process groups have no copies.

    A module does not keep its process group alive, see `WeakGroup`, nor its mesh, which refers to groups.
    """

    def __init__(self, group: Any = None, mesh: Any = None, transport: Any = None) -> None:
        given = {"group": group, "mesh": mesh, "transport": transport}
        self.written = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        if transport is not None and len(self.written) > 1:
            raise InvalidInput("transport= already says who the ranks are; leave out group= and mesh=")
        self._transport = transport
        self._group = None if group is None and mesh is None else WeakGroup(group, mesh=mesh)

    def __bool__(self) -> bool:
        return bool(self.written)

    def __deepcopy__(self, memo: Any) -> _Place:
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The argument that says who the ranks of a call are. Raises InvalidInput where the group was destroyed."""
        return {"transport": self._transport} if self._group is None else {"group": self._group.group}


class RingAttention(nn.Module):
    """`ring_attention` under a pattern (or its text), as a module.

    With `group`, `mesh` or `transport` the tensors are this rank's shards and the call is collective; `layout` must
    then say how the sequence was cut into them. With `ranks` the tensors are whole and `ranks` virtual ranks compute
    them here; with neither, one device does. `layout` and `schedule` say how ranks share the work: one device has no
    use for them, and raises InvalidInput.
    order="BNHD" takes and returns [B, N, H, D] (lse stays [B, H, N]). The rest is as in `ring_attention`.
    """

    def __init__(
        self,
        pattern: Pattern | str,
        *,
        group: Any = None,
        mesh: Any = None,
        transport: Any = None,
        ranks: int | None = None,
        layout: str | Layout | None = None,
        schedule: str = "auto",
        kernel: str = "auto",
        scale: float | None = None,
        deterministic: bool = False,
        comm_dtype: torch.dtype | str | None = None,
        rotate: str = "auto",
        order: str = "BHND",
    ) -> None:
        super().__init__()
        pattern = as_pattern(pattern)
        if order not in ORDERS:
            hint = did_you_mean(order, ORDERS)
            raise InvalidInput(f"unknown order {order!r}; {hint}expected {' or '.join(ORDERS)}")
        sharded = any(where is not None for where in (group, mesh, transport))
        if sharded and ranks is None and layout is None:
            raise InvalidInput(
                "this attention runs on the ranks of a group and gets their shards: say how the sequence was cut, with "
                "layout='zigzag' or another name, or with the Layout that cut it; no rank can see it from its rows"
            )
        self._where = _Place(group, mesh, transport)
        if self._where and ranks is not None:
            raise InvalidInput(
                f"ranks={ranks} asks for virtual ranks and {self._where.written[0].split('=')[0]}= for real ones; give one of "
                "them"
            )
        self.sharded, self.ranks = bool(self._where), ranks
        if not self.sharded and ranks is None:
            for name, value, default in (("layout", layout, None), ("schedule", schedule, "auto")):
                if value != default:
                    raise InvalidInput(
                        f"{name}={value!r} says how ranks share the work, but this attention runs on one device; "
                        "give ranks=, group=, mesh= or transport=, or leave it out"
                    )
        self.pattern, self.order = pattern, order
        self._sharing: dict[str, Any] = {
            "layout": DEFAULT_LAYOUT if layout is None else layout, "schedule": schedule, "comm_dtype": comm_dtype, "rotate": rotate,
        }  # fmt: skip
        self.options: dict[str, Any] = {"kernel": kernel, "scale": scale, "deterministic": deterministic}
        self._causal: Pattern | None = None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        is_causal: bool = False,
        key_padding_mask: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """out in the order of the inputs, and with `return_lse` also lse [B, H, N]. Raises as `ring_attention`.

        `is_causal` attends `pattern & Causal()`; `key_padding_mask` is bool [B, N], True is padding.
        """
        swap = self.order == "BNHD"
        if swap:
            q, k, v = _swapped(q), _swapped(k), _swapped(v)
        out, lse = self.attend(q, k, v, is_causal=is_causal, key_padding_mask=key_padding_mask, return_lse=return_lse)
        out = out.transpose(1, 2) if swap else out
        return (out, lse) if return_lse else out

    @uncompiled
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False,
        key_padding_mask: torch.Tensor | None = None, return_lse: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """(out, lse) of tensors [B, H, N, D], whatever `order` is; (out, None) without `return_lse`."""
        pattern = self._pattern(is_causal)
        found = self._run(q, k, v, pattern, key_padding_mask=key_padding_mask, return_lse=return_lse)
        return found if return_lse else (found, None)

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern, **more: Any) -> Any:
        options: dict[str, Any] = {**self.options, "return_lse": True, **more}
        if self.sharded:
            return ring_attention(q, k, v, pattern, **self._where.options, **self._sharing, **options)
        if self.ranks is not None:
            return virtual_attention(q, k, v, pattern, ranks=self.ranks, **self._sharing, **options)
        return attention(q, k, v, pattern, **options)

    def achieved_density(self, tokens: int, heads: int = 1) -> float:
        """Counted: the fraction of all (query, key) pairs of a sequence that is computed, each as often as it is."""
        return make_plan(self.pattern, tokens=tokens, ranks=1, heads=heads).density

    @uncompiled
    def positions(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False,
        key_padding_mask: torch.Tensor | None = None, wrong: RingAttentionError | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Global positions int64 [N] of the rows of q [B, H, N, D], on its device. Checks the arguments, and is
        collective, where `attend` does and is; `wrong` is an error that the caller has found already."""
        pattern = self._pattern(is_causal)
        if self.sharded:
            rows = positions(
                q, k, v, pattern, **self._where.options, **self._sharing, **self.options,
                key_padding_mask=key_padding_mask, wrong=wrong,
            )  # fmt: skip
            return torch.from_numpy(rows).to(q.device)
        if wrong is not None:
            raise wrong
        q, k, v = cast_inputs(q, k, v)
        options = {"scale": 1.0, **{name: x for name, x in self.options.items() if x is not None}}
        check(q, k, v, Call(pattern, DEFAULT_LAYOUT, "auto", **options), key_padding_mask)
        return torch.arange(q.shape[2], device=q.device)

    def telling(self) -> AbstractContextManager[Any]:
        """A context for what comes between two collective calls: what its block raises on one rank, all ranks hear."""
        return telling(**self._where.options) if self.sharded else nullcontext()

    def _pattern(self, is_causal: bool) -> Pattern:
        if not is_causal:
            return self.pattern
        if self._causal is None:
            self._causal = self.pattern & Causal()
        return self._causal

    def extra_repr(self) -> str:
        parts = [repr(self.pattern)]
        if self.sharded:
            parts += self._where.written
        if self.ranks is not None:
            parts.append(f"ranks={self.ranks}")
        if self.sharded or self.ranks is not None:
            layout = self._sharing["layout"]
            name = layout if isinstance(layout, str) else layout.name
            parts += [f"layout={name!r}", f"schedule={self._sharing['schedule']!r}"]
        parts += [f"{name}={value!r}" for name, value in self.options.items() if value not in ("auto", None, False)]
        return ", ".join(parts if self.order == ORDERS[0] else [*parts, f"order={self.order!r}"])


class DilatedAttention(RingAttention):
    """`RingAttention` under `Dilated(segment_lengths, dilation_rates, ...)`; the options are those of both."""

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        mix: str = "lse",
        offsets: str | None = None,
        causal: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(dilated(segment_lengths, dilation_rates, mix=mix, offsets=offsets, causal=causal), **options)


class BlockSparseAttention(RingAttention):
    """`RingAttention` under a block-sparse pattern; any pattern will do."""

    def __init__(self, pattern: Pattern | str, **options: Any) -> None:
        super().__init__(pattern, **options)


def dilated(
    segments: Sequence[int], rates: Sequence[int], *, mix: str = "lse", offsets: str | None = None, causal: bool = False
) -> Dilated:
    """The pattern of dilated attention, from any sequences of numbers. Raises InvalidInput as `Dilated` does."""
    return Dilated(tuple(segments), tuple(rates), causal=causal, mix=mix, offsets=offsets)


def _swapped(x: Any) -> Any:
    """x [B, N, H, D] as [B, H, N, D]. What is no such tensor goes on as it is, to an error that all ranks hear."""
    return x.transpose(1, 2) if isinstance(x, torch.Tensor) and x.ndim == 4 else x
