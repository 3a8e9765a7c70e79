"""Multihead attention around a core, with the signature and the parameter names of torch.nn.MultiheadAttention."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from ..errors import InvalidInput, Unsupported, did_you_mean
from ..pattern import Pattern
from ..runtime.checkpointing import keep_attention
from . import rotary as rope
from .adaptive import AdaptiveAttention
from .core import RingAttention, dilated

RECOMPUTE = ("none", "projections", "all")
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class MultiheadAttention(nn.Module):
    """Projections around `core`. Without options the parameters, their names and their initial values are those of
    torch.nn.MultiheadAttention, and state dicts load both ways.

    kv_heads: key and value heads, which groups of query heads share; the default is num_heads.
    rotary: True, or a base: rotary embeddings by the global positions of this rank's rows.
    qk_norm: LayerNorm over the projected queries and keys (q_norm, k_norm). layer_norm: LayerNorm between attention
    and the output projection (norm). gamma_init: the initialisation of MAGNETO (Wang et al. 2022), Xavier normal with
    this gain for value and output projection, and gain 1 for query and key.
    recompute: "none"; "projections": the backward computes q, k and v anew, the output of attention is kept and
    nothing is sent again; or "all": projections and attention, communication included.
    Raises InvalidInput for arguments that do not fit, Unsupported for those of torch's that this one cannot honour.
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter
    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        core: RingAttention,
        kv_heads: int | None = None,
        rotary: bool | float = False,
        layer_norm: bool = False,
        qk_norm: bool = False,
        gamma_init: float | None = None,
        recompute: str = "none",
    ) -> None:
        super().__init__()
        kv_heads = num_heads if kv_heads is None else kv_heads
        _check(embed_dim, num_heads, kv_heads, dropout, add_bias_kv, add_zero_attn, core, recompute)
        self.embed_dim, self.num_heads, self.kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        self.kdim, self.vdim = (embed_dim if dim is None else dim for dim in (kdim, vdim))
        self.batch_first, self.gamma_init, self.recompute = batch_first, gamma_init, recompute
        self.base = rope.BASE if rotary is True else float(rotary) if rotary is not False else None
        if self.base is not None:
            rope.check(self.head_dim, self.base)
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self.core = core
        self._widths = (embed_dim, kv_heads * self.head_dim, kv_heads * self.head_dim)
        dims = (embed_dim, self.kdim, self.vdim)
        packed = set(dims) == set(self._widths) == {embed_dim}
        self.register_parameter("in_proj_weight", _empty(3 * embed_dim, embed_dim, **kind) if packed else None)
        for name, width, dim in zip("qkv", self._widths, dims, strict=True):
            self.register_parameter(f"{name}_proj_weight", None if packed else _empty(width, dim, **kind))
        self.register_parameter("in_proj_bias", _empty(sum(self._widths), **kind) if bias else None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **kind)
        self.q_norm = nn.LayerNorm(self._widths[0], **kind) if qk_norm else None
        self.k_norm = nn.LayerNorm(self._widths[1], **kind) if qk_norm else None
        self.norm = nn.LayerNorm(embed_dim, **kind) if layer_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values of the projections: torch's (after those of a fresh out_proj), or MAGNETO's."""
        if self.gamma_init is not None:
            gains = (1.0, 1.0, self.gamma_init, self.gamma_init)
            with torch.no_grad():  # the weights are views of in_proj_weight
                for weight, gain in zip((*self._weights(), self.out_proj.weight), gains, strict=True):
                    nn.init.xavier_normal_(weight, gain)
        else:
            for weight in self._weights() if self.in_proj_weight is None else (self.in_proj_weight,):
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for norm in (self.q_norm, self.k_norm, self.norm):
            if norm is not None:
                norm.reset_parameters()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """(out, None). query [N, B, E], or [B, N, E] with batch_first, or [N, E]; key and value likewise, of the same
        length, with kdim and vdim columns; they default to query and key. On real ranks these are the local shards.

        `key_padding_mask` is bool [B, N] ([N] unbatched), True is padding. `is_causal` adds `& Causal()` to the
        pattern. `need_weights=True` and `attn_mask` raise Unsupported; `average_attn_weights` is only about weights.
        """
        if need_weights:
            raise Unsupported("need_weights=True: the weights are never whole in memory; try need_weights=False")
        if attn_mask is not None:
            raise Unsupported(
                "attn_mask: give a pattern to the constructor, such as Causal() & Window(4096), or is_causal"
            )
        key = query if key is None else key
        value = key if value is None else value
        self._check_inputs(query, key, value)
        unbatched = query.ndim == 2
        if unbatched and isinstance(key_padding_mask, torch.Tensor):
            key_padding_mask = key_padding_mask.unsqueeze(0)
        # One tensor stays one tensor: it is projected by one product.
        q = self._batch_first(query)
        k = q if key is query else self._batch_first(key)
        v = k if value is key else self._batch_first(value)
        out = self._attend(q, k, v, key_padding_mask, is_causal)
        if unbatched:
            return out.squeeze(0), None
        return out if self.batch_first else out.transpose(0, 1), None

    def _batch_first(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        """The output [B, N, E] of inputs [B, N, dim]."""
        inputs = (query, key, value, mask, is_causal)
        if self.recompute != "none" and torch.is_grad_enabled():
            keep: dict[str, Any] = {"context_fn": keep_attention} if self.recompute == "projections" else {}
            mixed = checkpoint(self._mixed, *inputs, use_reentrant=False, **keep)
        else:
            mixed = self._mixed(*inputs)
        return self.out_proj(mixed if self.norm is None else self.norm(mixed))

    def _mixed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        """Projections and attention: the heads' outputs side by side, [B, N, E]."""
        q, k, v = self._project(query, key, value)
        if self.base is not None:
            places = self.core.positions(q, k, v, is_causal=is_causal)
            cos, sin = rope.tables(places, self.head_dim, self.base, q.dtype)
            q, k = rope.apply(q, cos, sin), rope.apply(k, cos, sin)
        out, _ = self.core.attend(q, k, v, is_causal=is_causal, key_padding_mask=mask, return_lse=False)
        return out.transpose(1, 2).flatten(2)

    def _project(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Heads:
        """q [B, H, N, D], k and v [B, K, N, D] of inputs [B, N, dim]."""
        if query is key and key is value and self.in_proj_weight is not None:
            parts = linear(query, self.in_proj_weight, self.in_proj_bias).split(self._widths, -1)
        else:
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(self._widths)
            zipped = zip((query, key, value), self._weights(), biases, strict=True)
            parts = tuple(linear(x, weight, bias) for x, weight, bias in zipped)
        q, k, v = parts
        # Under autocast a LayerNorm answers in fp32.
        q = q if self.q_norm is None else self.q_norm(q).to(v.dtype)
        k = k if self.k_norm is None else self.k_norm(k).to(v.dtype)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        return q, k, v

    def _weights(self) -> tuple[torch.Tensor, ...]:
        if self.in_proj_weight is not None:
            return self.in_proj_weight.split(self._widths)
        return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight

    def _check_inputs(self, query: Any, key: Any, value: Any) -> None:
        wanted = "[N, E] or " + ("[B, N, E]" if self.batch_first else "[N, B, E]")
        for name, x, dim in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if not isinstance(x, torch.Tensor) or x.ndim not in (2, 3) or x.ndim != query.ndim or x.shape[-1] != dim:
                found = f"shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
                raise InvalidInput(f"{name} must be a tensor {wanted} with {dim} columns, as the query is, got {found}")
        if not query.shape[:-1] == key.shape[:-1] == value.shape[:-1]:
            raise InvalidInput(
                f"query, key and value must have one batch and one length, got {tuple(query.shape)}, "
                f"{tuple(key.shape)} and {tuple(value.shape)}: positions of one sequence attend each other here"
            )

    def extra_repr(self) -> str:
        parts = [f"embed_dim={self.embed_dim}", f"num_heads={self.num_heads}"]
        parts += [f"kv_heads={self.kv_heads}"] if self.kv_heads != self.num_heads else []
        parts += [f"{n}={d}" for n, d in (("kdim", self.kdim), ("vdim", self.vdim)) if d != self.embed_dim]
        parts += ["batch_first=True"] if self.batch_first else []
        parts += [f"rotary={self.base:g}"] if self.base is not None else []
        parts += [f"gamma_init={self.gamma_init}"] if self.gamma_init is not None else []
        return ", ".join(parts + ([f"recompute={self.recompute!r}"] if self.recompute != "none" else []))


class MultiheadRingAttention(MultiheadAttention):
    """`MultiheadAttention` around `RingAttention(pattern)`; `options` are those of either."""

    def __init__(self, embed_dim: int, num_heads: int, pattern: Pattern | str, **options: Any) -> None:
        core, rest = split(options, RingAttention)
        super().__init__(embed_dim, num_heads, core=RingAttention(pattern, **core), **rest)


class MultiheadBlockSparseAttention(MultiheadRingAttention):
    """`MultiheadRingAttention` under a block-sparse pattern; any pattern will do."""


class MultiheadDilatedAttention(MultiheadRingAttention):
    """`MultiheadRingAttention` under `Dilated`; `options` are those of `DilatedAttention` or `MultiheadAttention`."""

    def __init__(
        self, embed_dim: int, num_heads: int, segment_lengths: Sequence[int], dilation_rates: Sequence[int],
        **options: Any,
    ) -> None:  # fmt: skip
        shape = {name: options.pop(name) for name in ("mix", "offsets", "causal") if name in options}
        super().__init__(embed_dim, num_heads, dilated(segment_lengths, dilation_rates, **shape), **options)


class MultiheadAdaptiveAttention(MultiheadAttention):
    """`MultiheadAttention` around `AdaptiveAttention`; `options` are those of either."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        core, rest = split(options, AdaptiveAttention)
        core.update((name, rest[name]) for name in ("kv_heads", "device", "dtype") if name in rest)
        scorer = AdaptiveAttention(num_heads, embed_dim // max(num_heads, 1), **core)
        super().__init__(embed_dim, num_heads, core=scorer, **rest)


def split(options: dict[str, Any], core: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options of `core`, options of MultiheadAttention). Raises InvalidInput for an option of neither."""
    own_names = _options(MultiheadAttention) - {"core", "embed_dim", "num_heads"}
    core_names = _options(core) - own_names - {"pattern", "options", "num_heads", "head_dim"}
    for name in options:
        if name not in core_names | own_names:
            names = sorted(core_names | own_names)
            raise InvalidInput(f"unknown option {name!r}; {did_you_mean(name, names)}expected {', '.join(names)}")
    parts = ({n: x for n, x in options.items() if n in names} for names in (core_names, own_names))
    return next(parts), next(parts)


def _options(module: type) -> set[str]:
    """Names that the constructor of `module` and of its base take."""
    bases = [base for base in module.__mro__[:2] if base is not nn.Module]
    return {name for base in bases for name in inspect.signature(base).parameters}


def _empty(*shape: int, **kind: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, **kind))


def _check(
    embed_dim: int, heads: int, kv_heads: int, dropout: float, bias_kv: bool, zero_attn: bool, core: Any, recompute: str
) -> None:
    for name, value in (("embed_dim", embed_dim), ("num_heads", heads), ("kv_heads", kv_heads)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidInput(f"{name} must be an integer, got {value!r}")
    if embed_dim < 1 or heads < 1 or embed_dim % heads:
        raise InvalidInput(f"embed_dim must be a multiple of num_heads, both >= 1, got {embed_dim} and {heads}")
    if kv_heads < 1 or heads % kv_heads:
        raise InvalidInput(f"num_heads must be a multiple of kv_heads >= 1, got {heads} and {kv_heads}")
    if dropout:
        raise Unsupported(
            f"dropout={dropout}: dropping weights would need the same random numbers on every rank and in every "
            "recomputation; try torch.nn.Dropout on the output"
        )
    if bias_kv:
        raise Unsupported(
            "add_bias_kv: a learned key at no position has no place in a pattern or a layout; leave it out"
        )
    if zero_attn:
        raise Unsupported(
            "add_zero_attn: a zero key at no position has no place in a pattern or a layout; leave it out"
        )
    if not isinstance(core, RingAttention):
        raise InvalidInput(f"core must be a ringattn.nn.RingAttention, got {type(core).__name__}")
    if recompute not in RECOMPUTE:
        hint = did_you_mean(recompute, RECOMPUTE)
        raise InvalidInput(f"unknown recompute {recompute!r}; {hint}expected {' or '.join(map(repr, RECOMPUTE))}")
