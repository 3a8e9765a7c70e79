"""Factory functions of the projects that preceded ringattn, under their old names; tensors are [B, N, H, D].

B is the batch, N the tokens, H the heads, D the head dimension. All functions raise InvalidInput for an unknown name,
variant, preset or option, with a hint for a misspelled name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ..call.arguments import check_option_names
from ..errors import InvalidInput
from ..pattern import (
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
from ..text import did_you_mean, shown
from .adaptive import AdaptiveAttention
from .core import BlockSparseAttention, DilatedAttention, RingAttention, option_names
from .multihead import (
    MultiheadAdaptiveAttention,
    MultiheadAttention,
    MultiheadBlockSparseAttention,
    MultiheadDilatedAttention,
)

#: Block-sparse patterns by name, each called with block and density.
FAMILIES: dict[str, Callable[..., Pattern]] = {
    "local_window": local_window,
    "dilated_blocks": dilated_blocks,
    "dilated_sparse": dilated_blocks,  # the name in the preceding projects
    "global_local": global_local,
    "strided_blocks": strided_blocks,
    "hierarchical": hierarchical,
}
#: Patterns by name, for sequences of any length.
PRESETS: dict[str, Pattern] = {
    "local": local_window(64, blocks=4),
    "dilated": dilated_blocks(64, offsets=(1, 2, 4)),
    "global_local": global_local(64, globals=1, blocks=4),
    "ultra_sparse": local_window(128, density=0.01),
    "fine_grained": hierarchical(64, levels=((1, 2), (4, 8))),
    "long_range": hierarchical(128, levels=((1, 1), (32, -1))),
}
#: Names of dilated attention on one device, and of a ring. The preceding projects had one implementation per name; here
#: all names of a kind compute the same thing.
ONE_DEVICE = ("standard", "improved", "DilatedAttention", "ImprovedDilatedAttention")
RING = (
    "ring",
    "distributed",
    "improved_distributed",
    "RingDilatedAttention",
    "RingDilatedAttentionV2",
    "RingDilatedAttentionProduction",
    "v2",
    "production",
)
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
    """A module of dilated attention on q, k, v [B, N, H, D]: `Dilated(segment_lengths, dilation_rates, mix="group")`.

    `name` decides where the module runs:
    - "standard", "improved": on one device.
    - "ring", "distributed": on the ranks of the default process group if torch.distributed is initialized; each rank
      passes its shard, `layout=` must say how the sequence was sharded, and `ring_size`, if given, must be the size of
      the group. Otherwise on `ring_size` virtual ranks in this process.
    - "auto": as "ring" if `ring_size` is given or a process group is initialized, else as "standard".
    - "block_sparse": see `create_block_sparse_attention`.

    `options` are those of `ringattn.nn.DilatedAttention`, among them mix="lse" for LongNet's mixing, and `order`, the
    order of dims.
    """
    if name in BLOCK_SPARSE:
        return create_block_sparse_attention(
            segment_lengths=segment_lengths, dilation_rates=dilation_rates, ring_size=ring_size, **options
        )
    place = _place(name, ring_size)
    check_option_names(options, option_names(DilatedAttention))
    return DilatedAttention(segment_lengths, dilation_rates, **{"order": "BNHD", "mix": "group", **place, **options})


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
    """A module of dilated multihead attention on [B, N, embed_dim]; see `create_dilated_attention` for `name`.

    `options` are those of `MultiheadDilatedAttention`. "block_sparse" is `create_block_sparse_attention("multihead")`,
    with its options.
    """
    if name in BLOCK_SPARSE:
        return create_block_sparse_attention(
            "multihead",
            embed_dim=embed_dim,
            num_heads=num_heads,
            segment_lengths=segment_lengths,
            dilation_rates=dilation_rates,
            ring_size=ring_size,
            **options,
        )
    arguments = {"mix": "group", "batch_first": True, **_place(name, ring_size), **options}
    return MultiheadDilatedAttention(embed_dim, num_heads, segment_lengths, dilation_rates, **arguments)


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
    """A module of block-sparse attention: one softmax over all keys that a query attends.

    `variant` is one of
    - "base": on q, k, v [B, N, H, D];
    - "hierarchical": "base" with pattern="hierarchical";
    - "multihead": on [B, N, embed_dim]; needs embed_dim= and num_heads=;
    - "adaptive": on q, k, v, with learned blocks; needs num_heads= and head_dim=, and takes no pattern. With embed_dim=
      in place of head_dim= it is on [B, N, embed_dim].

    `pattern` is a Pattern or its text, a name of PRESETS, or a name of FAMILIES (default "local_window"). A family
    takes `block`, the tokens of a block (default 128), and `density`, the fraction of the key blocks that a query block
    keeps (default 0.1). With `segment_lengths` and `dilation_rates` the keys of dilated attention are added, each
    (query, key) pair counting once; the density then grows, and `module.achieved_density(tokens, heads)` counts it.
    `causal` hides later keys. `ring_size` is as in `create_dilated_attention`; `options` are those of the module.
    """
    density = _read_density(options, density)
    if variant not in VARIANTS:
        raise InvalidInput(f"variant={shown(variant)}: {did_you_mean(variant, VARIANTS)}expected {', '.join(VARIANTS)}")
    place = _place("auto", ring_size)
    if variant == "adaptive":
        if density is not None or "k" not in options:
            options["density"] = 0.1 if density is None else density
        if segment_lengths is not None and any(rate != 1 for rate in dilation_rates or ()):
            raise InvalidInput("the adaptive variant chooses its own blocks: leave out dilation_rates, or set all to 1")
        if pattern is not None:
            raise InvalidInput(f"the adaptive variant learns its pattern: leave out pattern={pattern!r}")
        options = {"block": block or 128, "causal": causal, **place, **options}
        if "embed_dim" in options:
            return MultiheadAdaptiveAttention(**{"batch_first": True, **options})
        check_option_names(options, option_names(AdaptiveAttention) | {"num_heads", "head_dim"})
        _require_options(options, "num_heads", "head_dim")
        return AdaptiveAttention(**{"order": "BNHD", **options})
    if variant == "hierarchical":
        if pattern not in (None, "hierarchical"):
            raise InvalidInput(f"variant='hierarchical' is a pattern of its own: leave out pattern={pattern!r}")
        pattern = "hierarchical"
    chosen = _find_pattern("local_window" if pattern is None else pattern, density, block)
    if segment_lengths is not None or dilation_rates is not None:
        chosen = chosen | Dilated(segment_lengths or (), dilation_rates or (), mix="union")
    chosen = chosen & Causal() if causal else chosen
    if variant == "multihead":
        _require_options(options, "embed_dim", "num_heads")
        return MultiheadBlockSparseAttention(pattern=chosen, **{"batch_first": True, **place, **options})
    check_option_names(options, option_names(BlockSparseAttention))
    return BlockSparseAttention(chosen, **{"order": "BNHD", **place, **options})


def create_multihead_block_sparse(
    embed_dim: int, num_heads: int, *, adaptive: bool = False, **options: Any
) -> MultiheadAttention:
    """A module of block-sparse multihead attention on [B, N, embed_dim].

    The same as `create_block_sparse_attention("multihead", ...)`. With adaptive=True, a `MultiheadAdaptiveAttention`;
    its density is 0.1 unless k= is given.
    """
    variant = "adaptive" if adaptive else "multihead"
    return create_block_sparse_attention(variant, embed_dim=embed_dim, num_heads=num_heads, **options)


def BlockSparseAdaptive(
    segment_lengths: Sequence[int] | None = None, dilation_rates: Sequence[int] | None = None, **options: Any
) -> AdaptiveAttention:
    """The same as `create_block_sparse_attention("adaptive", ...)`, under the name of a class in earlier projects.

    `segment_lengths` are accepted for compatibility and have no effect, because the learned scores cover the whole
    sequence.
    """
    return create_block_sparse_attention(
        "adaptive", segment_lengths=segment_lengths, dilation_rates=dilation_rates, **options
    )


def get_block_sparse_preset(name: str) -> Pattern:
    """The pattern called `name` in PRESETS, for `create_block_sparse_attention(pattern=...)`."""
    if not isinstance(name, str) or name not in PRESETS:
        raise InvalidInput(f"preset {shown(name)}: {did_you_mean(name, PRESETS)}expected one of {', '.join(PRESETS)}")
    return PRESETS[name]


def _find_pattern(pattern: str | Pattern, density: float | None, block: int | None) -> Pattern:
    """The Pattern for `pattern`: a Pattern, its text, a preset, or a family with `density` and `block`.

    Raises InvalidInput for an unknown name, and for density or block given with a pattern that has its own.
    """
    if isinstance(pattern, str) and "(" in pattern:
        pattern = parse_pattern(pattern)
    preset = PRESETS.get(pattern) if isinstance(pattern, str) else pattern
    if preset is not None and density is None and block is None:
        return preset
    if not isinstance(pattern, str) or (preset is not None and pattern not in FAMILIES):
        raise InvalidInput(f"pattern={shown(pattern)} has its own blocks and density; leave out block= and density=")
    if pattern not in FAMILIES:
        names = [*FAMILIES, *PRESETS]
        raise InvalidInput(f"pattern={pattern!r}: {did_you_mean(pattern, names)}expected one of {', '.join(names)}")
    return FAMILIES[pattern](block or 128, density=0.1 if density is None else density)


def _place(name: str, ring_size: int | None) -> dict[str, Any]:
    """The options of `RingAttention` that decide where a module of this name runs: group=, ranks= or none."""
    if name not in (*ONE_DEVICE, *RING, "auto"):
        names = [*ONE_DEVICE, *RING, "auto", *BLOCK_SPARSE]
        raise InvalidInput(f"unknown attention {shown(name)}; {did_you_mean(name, names)}expected {', '.join(names)}")
    distributed = dist.is_available() and dist.is_initialized()
    if name in ONE_DEVICE and ring_size not in (None, 1):
        raise InvalidInput(f"ring_size={ring_size}: {name!r} runs on one device; try the name 'ring'")
    if name in ONE_DEVICE or (name == "auto" and ring_size is None and not distributed):
        return {}
    if distributed:
        world = dist.get_world_size()
        if ring_size not in (None, world):
            raise InvalidInput(f"ring_size={ring_size}, but the process group has {world} ranks; leave ring_size out")
        return {"group": dist.group.WORLD}
    return {"ranks": 1 if ring_size is None else ring_size}


def _read_density(options: dict[str, Any], density: float | None) -> float | None:
    """`density`, or its old name `sparsity_ratio` in `options`, with a warning. It is the same fraction."""
    if "sparsity_ratio" not in options:
        return density
    if density is not None:
        raise InvalidInput("sparsity_ratio is the old name of density; give density only")
    ratio: float = options.pop("sparsity_ratio")
    warnings.warn(
        f"sparsity_ratio is called density here, the fraction of key blocks that a row keeps: read as density={ratio}",
        FutureWarning,
        stacklevel=3,
    )
    return ratio


def _require_options(options: dict[str, Any], *names: str) -> None:
    missing = [name for name in names if name not in options]
    if missing:
        raise InvalidInput(f"this variant needs {' and '.join(missing)}; give {'=, '.join(missing)}=")
