"""Multihead attention around a core, with the signature and parameter names of torch.nn.MultiheadAttention, and rotary
position embeddings (Su et al., RoFormer, 2021) in the rotate-half form, exact at positions in the billions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from ..call.arguments import check_option_names
from ..errors import InvalidInput, Unsupported
from ..kernels.base import wide
from ..pattern import Pattern
from ..text import did_you_mean
from .adaptive import AdaptiveAttention
from .core import DilatedAttention, RingAttention, check_heads, option_names

if TYPE_CHECKING:
    from ..kernels.dropout import Dropout

#: The base of the original paper on rotary embeddings.
BASE = 10000.0
#: Values of `recompute=`: what the backward computes again, see `MultiheadAttention`.
RECOMPUTE = ("none", "projections", "all")


class MultiheadAttention(nn.Module):
    """Projections around `core`, with the signature of torch.nn.MultiheadAttention.

    By default parameters have the names, shapes and initial values of torch.nn.MultiheadAttention, and state dicts load
    in both directions.

    embed_dim, num_heads, bias, kdim, vdim, batch_first, device, dtype: as in torch.nn.MultiheadAttention.
    add_bias_kv, add_zero_attn: only for torch's signature; values other than the defaults raise Unsupported.
    core: the `RingAttention` that attends over the projected heads.
    dropout: must equal that of the core; active in training mode. The subclasses pass it to the core they make.
    kv_heads: heads of keys and values, each shared by num_heads / kv_heads query heads; default num_heads.
    rotary: True or a base, for rotary embeddings at the global positions of this rank's rows.
    qk_norm: LayerNorm over the projected queries and over the projected keys (q_norm, k_norm).
    layer_norm: LayerNorm between attention and the output projection (norm).
    gamma_init: initialisation of MAGNETO (Wang et al., 2022): Xavier normal, with this gain for the projections of
        value and output, and gain 1 for query and key.
    sinks: learn the logits `sinks` [num_heads] of an extra key per head, with value 0, which every row sees.
    recompute: "none"; "projections": the backward computes q, k and v again, but saves the output of attention, which
        is neither computed nor sent again; "all": the backward repeats projections, attention and communication.

    Raises InvalidInput for arguments that contradict each other.
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter
    in_proj_bias: nn.Parameter | None
    sinks: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float | Dropout = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        core: RingAttention,
        kv_heads: int | None = None,
        rotary: bool | float = False,
        layer_norm: bool = False,
        qk_norm: bool = False,
        gamma_init: float | None = None,
        sinks: bool = False,
        recompute: str = "none",
    ) -> None:
        super().__init__()
        kv_heads = num_heads if kv_heads is None else kv_heads
        for name, value, kind in (("add_bias_kv", add_bias_kv, "learned"), ("add_zero_attn", add_zero_attn, "zero")):
            if value:
                raise Unsupported(f"{name}: a {kind} key has no position in patterns or layouts; leave out {name}")
        check_heads(num_heads, kv_heads, embed_dim=embed_dim)
        if embed_dim % num_heads:
            raise InvalidInput(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        if not isinstance(core, RingAttention):
            raise InvalidInput(f"core must be a ringattn.nn.RingAttention, got {type(core).__name__}")
        if dropout and dropout != core.options.dropout:
            raise InvalidInput(
                f"dropout={dropout}, but the core has dropout={core.options.dropout}; give dropout= to the core, which "
                "drops attention weights"
            )
        if recompute not in RECOMPUTE:
            names = " or ".join(map(repr, RECOMPUTE))
            raise InvalidInput(f"unknown recompute {recompute!r}; {did_you_mean(recompute, RECOMPUTE)}expected {names}")
        self.embed_dim, self.num_heads, self.kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        self.kdim, self.vdim = (embed_dim if dim is None else dim for dim in (kdim, vdim))
        self.batch_first, self.gamma_init, self.recompute = batch_first, gamma_init, recompute
        #: Base of the rotary embeddings; None without rotary embeddings.
        self.base = BASE if rotary is True else float(rotary) if rotary is not False else None
        if self.base is not None:
            check_rotary(self.head_dim, self.base)
        self.core = core
        self.register_parameter("sinks", _empty(num_heads, device=device, dtype=dtype) if sinks else None)
        self._make_parameters(bias, qk_norm, layer_norm, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def _make_parameters(self, bias: bool, qk_norm: bool, layer_norm: bool, factory: dict[str, Any]) -> None:
        """Register all parameters, uninitialized; `reset_parameters` sets their values."""
        embed_dim, kv_width = self.embed_dim, self.kv_heads * self.head_dim
        self._widths = widths = (embed_dim, kv_width, kv_width)
        dims = (embed_dim, self.kdim, self.vdim)
        packed = set(dims) == set(widths) == {embed_dim}
        self.register_parameter("in_proj_weight", _empty(3 * embed_dim, embed_dim, **factory) if packed else None)
        for name, width, dim in zip("qkv", widths, dims, strict=True):
            self.register_parameter(f"{name}_proj_weight", None if packed else _empty(width, dim, **factory))
        self.register_parameter("in_proj_bias", _empty(sum(widths), **factory) if bias else None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.q_norm = nn.LayerNorm(embed_dim, **factory) if qk_norm else None
        self.k_norm = nn.LayerNorm(kv_width, **factory) if qk_norm else None
        self.norm = nn.LayerNorm(embed_dim, **factory) if layer_norm else None

    def reset_parameters(self) -> None:
        """Set the initial values of torch.nn.MultiheadAttention, or with `gamma_init` those of MAGNETO.

        Leaves out_proj.weight as nn.Linear initialised it, unless `gamma_init` is given.
        """
        if self.gamma_init is not None:
            gains = (1.0, 1.0, self.gamma_init, self.gamma_init)
            with torch.no_grad():  # the weights are views of in_proj_weight
                for weight, gain in zip((*self._weights(), self.out_proj.weight), gains, strict=True):
                    nn.init.xavier_normal_(weight, gain)
        else:
            for weight in self._weights() if self.in_proj_weight is None else (self.in_proj_weight,):
                nn.init.xavier_uniform_(weight)
        for zeros in (self.in_proj_bias, self.out_proj.bias, self.sinks):
            if zeros is not None:
                nn.init.zeros_(zeros)
        for norm in (self.q_norm, self.k_norm, self.norm):
            if norm is not None:
                norm.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """(out, None), with out in the shape and dtype of query. On real ranks all tensors are the local shards.

        query: [N, B, E], [B, N, E] with batch_first, or [N, E] without a batch.
        key, value: of the same batch and length, with kdim and vdim columns; default: query for key, key for value.
        key_padding_mask: bool [B, N], or [N] without a batch; True is padding.
        is_causal: attend `pattern & Causal()`.
        need_weights, attn_mask: values other than the defaults raise Unsupported. average_attn_weights has no effect.
        """
        if need_weights:
            raise Unsupported("need_weights=True: attention weights are never whole in memory; try need_weights=False")
        if attn_mask is not None:
            raise Unsupported(
                "attn_mask: there is no N x N mask here; give a pattern to the constructor, such as Causal() & "
                "Window(4096), or pass is_causal=True"
            )
        key = query if key is None else key
        value = key if value is None else value
        self._check_inputs(query, key, value)
        unbatched = query.ndim == 2
        if unbatched and isinstance(key_padding_mask, Tensor):
            key_padding_mask = key_padding_mask.unsqueeze(0)
        # Identical inputs stay one tensor, so that one matrix product projects all of them.
        q = self._to_batch_first(query)
        k = q if key is query else self._to_batch_first(key)
        v = k if value is key else self._to_batch_first(value)
        inputs = (q, k, v, key_padding_mask, is_causal)
        if self.recompute != "none" and torch.is_grad_enabled():
            from ..call.graph_op import keep_attention  # import here: it registers operators that few programs need

            keep: dict[str, Any] = {"context_fn": keep_attention} if self.recompute == "projections" else {}
            heads = checkpoint(self._attend, *inputs, use_reentrant=False, **keep)
        else:
            heads = self._attend(*inputs)
        out = self.out_proj(heads if self.norm is None else self.norm(heads))
        if unbatched:
            return out.squeeze(0), None
        return out if self.batch_first else out.transpose(0, 1), None

    def _to_batch_first(self, x: Tensor) -> Tensor:
        """An input as [B, N, dim]."""
        if x.ndim == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """The outputs of all heads, concatenated to [B, N, E], before the output projection."""
        q, k, v = self._project(query, key, value)
        if self.base is not None:
            positions = self.core.positions(q, k, v, is_causal=is_causal)
            cos, sin = rotation_tables(positions, self.head_dim, self.base, q.dtype)
            q, k = rotate_by(q, cos, sin), rotate_by(k, cos, sin)
        out, _ = self.core.attend(
            q, k, v, is_causal=is_causal, key_padding_mask=mask, sinks=self.sinks, return_lse=False
        )
        return out.transpose(1, 2).flatten(2)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, N, D], k and v [B, K, N, D] of inputs [B, N, dim]."""
        if query is key and key is value and self.in_proj_weight is not None:
            q, k, v = linear(query, self.in_proj_weight, self.in_proj_bias).split(self._widths, -1)
        else:
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(self._widths)
            projections = zip((query, key, value), self._weights(), biases, strict=True)
            q, k, v = (linear(x, weight, bias) for x, weight, bias in projections)
        # Under autocast a LayerNorm returns fp32.
        q = q if self.q_norm is None else self.q_norm(q).to(v.dtype)
        k = k if self.k_norm is None else self.k_norm(k).to(v.dtype)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        return q, k, v

    def _weights(self) -> tuple[Tensor, ...]:
        """The weights that project query, key and value."""
        if self.in_proj_weight is not None:
            return self.in_proj_weight.split(self._widths)
        return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise InvalidInput for inputs of wrong shapes."""
        shapes = "[N, E] or " + ("[B, N, E]" if self.batch_first else "[N, B, E]")
        for name, x, dim in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if not isinstance(x, Tensor) or x.ndim not in (2, 3) or x.ndim != query.ndim or x.shape[-1] != dim:
                actual = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise InvalidInput(
                    f"{name} must be a tensor {shapes} with {dim} columns and the query's number of dims, got {actual}"
                )
        if not query.shape[:-1] == key.shape[:-1] == value.shape[:-1]:
            raise InvalidInput(
                f"query, key and value must have the same batch and length, got {tuple(query.shape)}, "
                f"{tuple(key.shape)} and {tuple(value.shape)}: all three must belong to one sequence"
            )

    def extra_repr(self) -> str:
        parts = [f"embed_dim={self.embed_dim}", f"num_heads={self.num_heads}"]
        parts += [f"kv_heads={self.kv_heads}"] if self.kv_heads != self.num_heads else []
        parts += [f"{n}={d}" for n, d in (("kdim", self.kdim), ("vdim", self.vdim)) if d != self.embed_dim]
        parts += ["batch_first=True"] if self.batch_first else []
        parts += [f"rotary={self.base:g}"] if self.base is not None else []
        parts += [f"gamma_init={self.gamma_init}"] if self.gamma_init is not None else []
        parts += ["sinks=True"] if self.sinks is not None else []
        return ", ".join(parts + ([f"recompute={self.recompute!r}"] if self.recompute != "none" else []))


class MultiheadRingAttention(MultiheadAttention):
    """`MultiheadAttention` around `RingAttention(pattern)`; `options` are those of both."""

    def __init__(self, embed_dim: int, num_heads: int, pattern: Pattern | str, **options: Any) -> None:
        projection, core = _split_options(options, RingAttention)
        super().__init__(embed_dim, num_heads, core=RingAttention(pattern, **core), **projection)


class MultiheadBlockSparseAttention(MultiheadRingAttention):
    """A `MultiheadRingAttention` for any pattern, under another name: the block-sparse factory functions create it."""


class MultiheadDilatedAttention(MultiheadAttention):
    """`MultiheadAttention` around `DilatedAttention(segment_lengths, dilation_rates)`; `options` are those of both."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        **options: Any,
    ) -> None:
        projection, core = _split_options(options, DilatedAttention)
        super().__init__(
            embed_dim, num_heads, core=DilatedAttention(segment_lengths, dilation_rates, **core), **projection
        )


class MultiheadAdaptiveAttention(MultiheadAttention):
    """`MultiheadAttention` around `AdaptiveAttention`; `options` are those of both."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        projection, core = _split_options(options, AdaptiveAttention)
        check_heads(num_heads, embed_dim=embed_dim)
        scorer = AdaptiveAttention(num_heads, embed_dim // num_heads, **core)
        super().__init__(embed_dim, num_heads, core=scorer, **projection)


def _split_options(options: dict[str, Any], core: type[RingAttention]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options of `MultiheadAttention`, options of `core`); an option of both goes to both.

    Raises InvalidInput for any other option.
    """
    taken = option_names(MultiheadAttention), option_names(core)
    check_option_names(options, set.union(*taken))
    projection, of_core = ({name: options[name] for name in options if name in names} for names in taken)
    return projection, of_core


def _empty(*shape: int, **factory: Any) -> nn.Parameter:
    """An uninitialized parameter."""
    return nn.Parameter(torch.empty(shape, **factory))


def check_rotary(head_dim: int, base: float) -> None:
    """Raise InvalidInput for an odd head dim, or a base that is not a finite number > 0."""
    if head_dim % 2:
        raise InvalidInput(
            f"rotary embeddings rotate pairs of columns, but head_dim={head_dim} is odd; try an even head_dim"
        )
    if not (math.isfinite(base) and base > 0):
        raise InvalidInput(f"the base of rotary embeddings must be a finite number > 0, got {base}; try rotary=True")


def rotation_tables(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) of the rotary angles at `positions` int64 [n], each [n, head_dim / 2].

    The tables are fp32, or fp64 if `dtype` is fp64. Angles are computed in fp64, because at position 1e9 an fp32 angle
    would be off by whole turns.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.double()[:, None] * base**-exponents
    return angles.cos().to(wide(dtype)), angles.sin().to(wide(dtype))


def rotate(x: Tensor, positions: Tensor, base: float = BASE) -> Tensor:
    """x [..., n, D] rotated by the global `positions` int64 [n] of its rows, in the dtype of x.

    Computed in fp32 (fp64 for fp64). Columns i and i + D / 2 are a pair, rotated by the angle
    position * base ** (-2 i / D). Raises InvalidInput for odd D.
    """
    check_rotary(x.shape[-1], base)
    cos, sin = rotation_tables(positions, x.shape[-1], base, x.dtype)
    return rotate_by(x, cos, sin)


def rotate_by(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., n, D] rotated by `rotation_tables` [n, D / 2], in the dtype of x."""
    left, right = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)
