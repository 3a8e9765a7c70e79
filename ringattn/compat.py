"""Attention modules by name, as the projects that ringattn grew out of made them; tensors are [B, N, H, D]."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from .errors import InvalidInput, did_you_mean
from .nn import (
    AdaptiveAttention,
    BlockSparseAttention,
    DilatedAttention,
    MultiheadAdaptiveAttention,
    MultiheadAttention,
    MultiheadBlockSparseAttention,
    MultiheadDilatedAttention,
    RingAttention,
)
from .nn.adaptive import AdaptiveKeywords
from .nn.core import CoreKeywords, DilatedKeywords
from .pattern import (
    Causal,
    Dilated,
    Pattern,
    dilated_blocks,
    global_local,
    hierarchical,
    local_window,
    parse_pattern,
    strided_blocks,
)
from .runtime.options import check_option_names

#: Block-sparse patterns by name; each takes block and density.
FAMILIES: dict[str, Callable[..., Pattern]] = {
    "local_window": local_window,
    "dilated_blocks": dilated_blocks,
    "dilated_sparse": dilated_blocks,  # the name that the originals used
    "global_local": global_local,
    "strided_blocks": strided_blocks,
    "hierarchical": hierarchical,
}
#: Ready-made patterns, of any length.
PRESETS: dict[str, Pattern] = {
    "local": local_window(64, blocks=4),
    "dilated": dilated_blocks(64, offsets=(1, 2, 4)),
    "global_local": global_local(64, globals=1, blocks=4),
    "ultra_sparse": local_window(128, density=0.01),
    "fine_grained": hierarchical(64, levels=((1, 2), (4, 8))),
    "long_range": hierarchical(128, levels=((1, 1), (32, -1))),
}
#: What runs for a name: one device, or a ring. The variants of the originals compute the same here.
DILATED = {
    "standard": False, "improved": False, "DilatedAttention": False, "ImprovedDilatedAttention": False,
    "ring": True, "distributed": True, "improved_distributed": True, "RingDilatedAttention": True,
    "RingDilatedAttentionV2": True, "RingDilatedAttentionProduction": True, "v2": True, "production": True,
}  # fmt: skip
BLOCK_SPARSE = ("block_sparse", "block_sparse_ring", "BlockSparseRingDilatedAttention")
VARIANTS = ("base", "multihead", "adaptive", "hierarchical")


def create_dilated_attention(
    name: str = "auto",
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    ring_size: int | None = None,
    **options: Any,
) -> RingAttention:
    """Dilated attention of q, k, v [B, N, H, D] under the head-grouped convention (mix="lse" for LongNet's).

    "standard" and "improved": one device. "ring" (and "distributed"): the process group where torch.distributed is
    initialised, whose size `ring_size` must then be and whose ranks pass their shards, cut as `layout=` must say; else
    `ring_size` virtual ranks in this process. "block_sparse": `create_block_sparse_attention`. "auto": "ring" where `ring_size` or a
    process group is there, else "standard". `options` are those of `ringattn.nn.DilatedAttention`, and `order`.
    """
    if name in BLOCK_SPARSE:
        return create_block_sparse_attention(
            segment_lengths=segment_lengths, dilation_rates=dilation_rates, ring_size=ring_size, **options
        )
    where = _where(name, ring_size)
    check_option_names(options, DilatedKeywords.__annotations__)
    return DilatedAttention(segment_lengths, dilation_rates, **{"order": "BNHD", "mix": "group", **where, **options})


def create_multihead_dilated_attention(
    name: str = "auto",
    *,
    embed_dim: int,
    num_heads: int,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    ring_size: int | None = None,
    **options: Any,
) -> MultiheadAttention:
    """The multihead form of `create_dilated_attention`, batch first; `options` of `MultiheadDilatedAttention`.

    "block_sparse": `create_block_sparse_attention("multihead")`, with its options.
    """
    if name in BLOCK_SPARSE:
        multihead: MultiheadAttention = create_block_sparse_attention(
            "multihead", embed_dim=embed_dim, num_heads=num_heads, segment_lengths=segment_lengths,
            dilation_rates=dilation_rates, ring_size=ring_size, **options,
        )  # fmt: skip
        return multihead
    where = _where(name, ring_size)
    given = {"mix": "group", "batch_first": True, **where, **options}
    return MultiheadDilatedAttention(embed_dim, num_heads, segment_lengths, dilation_rates, **given)


def create_block_sparse_attention(
    variant: str = "base",
    *,
    pattern: str | Pattern | None = None,
    density: float | None = None,
    block: int | None = None,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    causal: bool = False,
    ring_size: int | None = None,
    **options: Any,
) -> Any:
    """Block-sparse attention, the one softmax over all keys that a query sees.

    variant "base": a module on q, k, v [B, N, H, D]. "hierarchical": the same with pattern="hierarchical".
    "multihead": needs embed_dim and num_heads, takes [B, N, E]. "adaptive": learned, needs num_heads and head_dim.

    `pattern` is a Pattern or its text, a preset or a family (default local_window); `density` (default 0.1) is the fraction of
    key blocks (of `block` tokens, default 128) that a row keeps. With segment_lengths and dilation_rates the keys of
    dilated attention are added (each pair once): the achieved density is then larger,
    `module.achieved_density(tokens, heads)` counts it. `ring_size` is as in `create_dilated_attention`; `options` are
    those of the module.
    """
    density = _old_spelling(options, density)
    if variant not in VARIANTS:
        raise InvalidInput(f"variant={variant!r}: {did_you_mean(variant, VARIANTS)}expected {', '.join(VARIANTS)}")
    where = _where("auto", ring_size)
    if variant == "adaptive":
        check_option_names(options, {*AdaptiveKeywords.__annotations__, "num_heads", "head_dim"})
        _require(options, "num_heads", "head_dim")
        if segment_lengths is not None and any(rate != 1 for rate in dilation_rates or ()):
            raise InvalidInput("the adaptive variant chooses its own blocks: leave out dilation_rates above 1")
        if pattern is not None:
            raise InvalidInput(f"the adaptive variant learns its pattern: leave out pattern={pattern!r}")
        given = {
            "block": block or 128,
            "causal": causal,
            "order": "BNHD",
            **_size(options, density),
            **where,
            **options,
        }
        return AdaptiveAttention(**given)
    if variant == "hierarchical":
        if pattern not in (None, "hierarchical"):
            raise InvalidInput(f"variant='hierarchical' is a pattern of its own: leave out pattern={pattern!r}")
        pattern = "hierarchical"
    chosen = _pattern("local_window" if pattern is None else pattern, density, block)
    if segment_lengths is not None or dilation_rates is not None:
        chosen = chosen | Dilated(tuple(segment_lengths or ()), tuple(dilation_rates or ()), mix="union")
    chosen = chosen & Causal() if causal else chosen
    if variant == "multihead":
        _require(options, "embed_dim", "num_heads")
        return MultiheadBlockSparseAttention(pattern=chosen, **{"batch_first": True, **where, **options})
    check_option_names(options, CoreKeywords.__annotations__)
    return BlockSparseAttention(chosen, **{"order": "BNHD", **where, **options})


def create_multihead_block_sparse(embed_dim: int, num_heads: int, **options: Any) -> Any:
    """`create_block_sparse_attention(variant="multihead", ...)`; adaptive=True for `MultiheadAdaptiveAttention`."""
    if options.pop("adaptive", False):
        density = _old_spelling(options, options.pop("density", None))
        where = _where("auto", options.pop("ring_size", None))
        given = {"batch_first": True, **_size(options, density), **where, **options}
        return MultiheadAdaptiveAttention(embed_dim, num_heads, **given)
    return create_block_sparse_attention("multihead", embed_dim=embed_dim, num_heads=num_heads, **options)


def BlockSparseAdaptive(
    segment_lengths: Sequence[int] | None = None, dilation_rates: Sequence[int] | None = None, **options: Any
) -> AdaptiveAttention:
    """`create_block_sparse_attention(variant="adaptive", ...)`. The scorer looks at the whole sequence: segments
    are accepted as the original has them, and change nothing."""
    module: AdaptiveAttention = create_block_sparse_attention(
        "adaptive", segment_lengths=segment_lengths, dilation_rates=dilation_rates, **options
    )
    return module


def get_block_sparse_preset(name: str) -> Pattern:
    """A ready-made block-sparse pattern, one of PRESETS, for `create_block_sparse_attention(pattern=...)`."""
    if name not in PRESETS:
        raise InvalidInput(f"preset {name!r}: {did_you_mean(name, PRESETS)}expected one of {', '.join(PRESETS)}")
    return PRESETS[name]


def _size(options: dict[str, Any], density: float | None) -> dict[str, Any]:
    """The density of an adaptive module, where it is given or nothing else says how many blocks it takes."""
    return {"density": 0.1 if density is None else density} if density is not None or "k" not in options else {}


def _pattern(pattern: str | Pattern, density: float | None, block: int | None) -> Pattern:
    """A pattern, a preset (where nothing else is asked for) or a family of a density."""
    if isinstance(pattern, str) and "(" in pattern:
        pattern = parse_pattern(pattern)
    preset = PRESETS.get(pattern) if isinstance(pattern, str) else pattern
    if preset is not None and density is None and block is None:
        return preset
    if not isinstance(pattern, str) or (preset is not None and pattern not in FAMILIES):
        raise InvalidInput(f"pattern={pattern!r} has its own blocks and density; leave out block= and density=")
    if pattern not in FAMILIES:
        names = [*FAMILIES, *PRESETS]
        raise InvalidInput(f"pattern={pattern!r}: {did_you_mean(pattern, names)}expected one of {', '.join(names)}")
    return FAMILIES[pattern](block or 128, density=0.1 if density is None else density)


def _where(name: str, ring_size: int | None) -> dict[str, Any]:
    """Where a module of this name runs, as options of `RingAttention`."""
    if name not in (*DILATED, "auto"):
        names = [*DILATED, "auto", *BLOCK_SPARSE]
        raise InvalidInput(f"unknown attention {name!r}; {did_you_mean(name, names)}expected {', '.join(names)}")
    joined = dist.is_available() and dist.is_initialized()
    if name == "auto" and ring_size is None and not joined:
        return {}
    if not DILATED.get(name, True):
        if ring_size not in (None, 1):
            raise InvalidInput(f"ring_size={ring_size}: {name!r} runs on one device; try the name 'ring'")
        return {}
    if joined:
        world = dist.get_world_size()
        if ring_size not in (None, world):
            raise InvalidInput(f"ring_size={ring_size}, but the process group has {world} ranks; leave it out")
        return {"group": dist.group.WORLD}
    return {"ranks": 1 if ring_size is None else ring_size}


def _old_spelling(options: dict[str, Any], density: float | None) -> float | None:
    """`sparsity_ratio` of the originals, which here was always the fraction that is kept."""
    if "sparsity_ratio" not in options:
        return density
    if density is not None:
        raise InvalidInput("sparsity_ratio is the old name of density; give density only")
    found: float = options.pop("sparsity_ratio")
    warnings.warn(
        f"sparsity_ratio is called density here, the fraction of key blocks that a row keeps: read as density={found}",
        FutureWarning, stacklevel=3,
    )  # fmt: skip
    return found


def _require(options: dict[str, Any], *names: str) -> None:
    missing = [name for name in names if name not in options]
    if missing:
        raise InvalidInput(f"this variant needs {' and '.join(missing)}; give {'=, '.join(missing)}=")
