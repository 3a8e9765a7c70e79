"""Modules by name: every name and every code sample of the reports that the project grew out of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import error

import ringattn as ra
from ringattn import Causal, Dilated, InvalidInput, local_window
from ringattn.nn.factories import FAMILIES, ONE_DEVICE, PRESETS, RING

TOKENS = 200


def tensors(heads: int = 8, dim: int = 8) -> list[torch.Tensor]:
    """[B, N, H, D], as the originals had them."""
    source = torch.Generator().manual_seed(0)
    return [torch.randn(2, TOKENS, heads, dim, generator=source, dtype=torch.float64) for _ in range(3)]


def functional(pattern: ra.Pattern, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ra.attention(*(x.transpose(1, 2) for x in (q, k, v)), pattern).transpose(1, 2)


@pytest.mark.parametrize("name", [*ONE_DEVICE, *RING, "auto"])
def test_dilated_names(name: str) -> None:
    ring = {"ring_size": 3} if name not in ONE_DEVICE else {}
    module = ra.create_dilated_attention(name, segment_lengths=[32, 64], dilation_rates=[1, 2], **ring)
    wanted = functional(Dilated((32, 64), (1, 2), mix="group"), *tensors())
    assert error(module(*tensors()), wanted) < 1e-12
    wanted = functional(Dilated((32, 64), (1, 2), mix="group") & Causal(), *tensors())
    assert error(module(*tensors(), is_causal=True), wanted) < 1e-12


SAMPLES: list[tuple[Any, dict[str, Any], ra.Pattern]] = [
    (
        lambda **o: ra.create_dilated_attention("improved", **o),
        {"segment_lengths": [16384, 32768, 65536], "dilation_rates": [1, 2, 4]},
        Dilated((16384, 32768, 65536), (1, 2, 4), mix="group"),
    ),
    (
        lambda **o: ra.create_dilated_attention("ring", **o),
        {"segment_lengths": [32768, 65536, 131072], "dilation_rates": [1, 2, 4], "ring_size": 8},
        Dilated((32768, 65536, 131072), (1, 2, 4), mix="group"),
    ),
    (
        ra.create_block_sparse_attention,
        {"variant": "base", "segment_lengths": [4096], "dilation_rates": [1], "density": 0.01},
        local_window(128, density=0.01) | Dilated((4096,), (1,), mix="union"),
    ),
    (
        ra.create_block_sparse_attention,
        {"variant": "base", "segment_lengths": [2048, 4096], "dilation_rates": [1, 2], "density": 0.01},
        local_window(128, density=0.01) | Dilated((2048, 4096), (1, 2), mix="union"),
    ),
]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("sample", range(len(SAMPLES)))
def test_code_samples(sample: int, old: bool) -> None:
    make, options, pattern = SAMPLES[sample]
    if old and "density" in options:
        options = {**options, "sparsity_ratio": options["density"]}
        del options["density"]
        with pytest.warns(FutureWarning, match="density=0.01"):
            module = make(**options)
    else:
        module = make(**options)
    assert error(module(*tensors()), functional(pattern, *tensors())) < 1e-12


def test_the_multihead_and_adaptive_samples() -> None:
    x = torch.randn(2, TOKENS, 512)
    options: dict[str, Any] = {"embed_dim": 512, "num_heads": 8, "segment_lengths": [8192], "dilation_rates": [1]}
    with pytest.warns(FutureWarning, match="density=0.05"):
        old = ra.create_multihead_block_sparse(**options, sparsity_ratio=0.05)
    new = ra.create_multihead_block_sparse(**options, density=0.05)
    new.load_state_dict(old.state_dict())
    reference = torch.nn.MultiheadAttention(512, 8, batch_first=True)
    reference.load_state_dict(old.state_dict())
    out, weights = old(x)
    assert weights is None and torch.equal(out, new(x)[0])
    assert error(out, reference(x, x, x, need_weights=False)[0].double()) < 1e-5  # a segment of 8192 holds all

    adaptive = ra.BlockSparseAdaptive(segment_lengths=[4096], dilation_rates=[1], num_heads=8, head_dim=64)
    q = torch.randn(2, TOKENS, 8, 64)
    assert adaptive(q, q, q).shape == q.shape
    assert 0 < adaptive.achieved_density(TOKENS) <= 1


@pytest.mark.parametrize("family", [*FAMILIES, *PRESETS])
def test_families_and_presets(family: str) -> None:
    options: dict[str, Any] = {"density": 0.25, "block": 16} if family in FAMILIES else {}
    module = ra.create_block_sparse_attention(pattern=family, causal=True, **options)
    pattern = FAMILIES[family](16, density=0.25) if family in FAMILIES else ra.get_block_sparse_preset(family)
    assert error(module(*tensors()), functional(pattern & Causal(), *tensors())) < 1e-12
    if family in FAMILIES and family != "hierarchical":
        whole = ra.create_block_sparse_attention(pattern=family, **options)
        assert abs(whole.achieved_density(1600, 2) - 0.25) <= 1 / 100  # one block of 100


def test_variants() -> None:
    x, (q, k, v) = torch.randn(1, TOKENS, 64), tensors(4)
    for variant in ("base", "hierarchical"):
        module = ra.create_block_sparse_attention(variant, density=0.3, block=16, ring_size=3)
        kind = "hierarchical" if variant == "hierarchical" else "local_window"
        assert error(module(q, k, v), functional(FAMILIES[kind](16, density=0.3), q, k, v)) < 1e-12
    multihead = ra.create_block_sparse_attention("multihead", embed_dim=64, num_heads=4, density=0.3, kv_heads=2)
    assert multihead(x)[0].shape == x.shape
    adaptive = ra.create_block_sparse_attention("adaptive", num_heads=4, head_dim=8, k=2, block=16, dtype=torch.float64)
    assert adaptive(q, k, v).shape == q.shape and adaptive.blocks.sum(-1).max() == 2
    learned = ra.create_multihead_block_sparse(64, 4, adaptive=True, density=0.5, block=16)
    assert learned(x)[0].shape == x.shape
    heads = ra.create_multihead_dilated_attention(
        "ring", embed_dim=64, num_heads=4, segment_lengths=[32, 64], dilation_rates=[1, 2], ring_size=2, layer_norm=True
    )
    assert heads(x)[0].shape == x.shape
    dilated = ra.create_dilated_attention(
        "block_sparse", segment_lengths=[32], dilation_rates=[2], density=0.2, block=16, order="BHND"
    )
    wanted = functional(local_window(16, density=0.2) | Dilated((32,), (2,), mix="union"), q, k, v)
    assert error(dilated(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2), wanted) < 1e-12


SEGMENTS: dict[str, Any] = {"segment_lengths": [4], "dilation_rates": [1]}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ra.create_dilated_attention("improvd", **SEGMENTS), "did you mean 'improved'"),
        (lambda: ra.create_dilated_attention("standard", ring_size=4, **SEGMENTS), "try the name 'ring'"),
        (lambda: ra.create_dilated_attention("standard", sgment=4, **SEGMENTS), "unknown option 'sgment'"),
        (lambda: ra.create_dilated_attention("ring", segment_lengths=[4, 8], dilation_rates=[1]), "give equally many"),
        (lambda: ra.create_dilated_attention("ring", ring_size=2, dropout=1.5, **SEGMENTS), "0 <= p < 1"),
        (lambda: ra.create_block_sparse_attention("bas"), "did you mean 'base'"),
        (lambda: ra.create_block_sparse_attention(pattern="locl_window"), "did you mean 'local_window'"),
        (lambda: ra.create_block_sparse_attention(denisty=0.1), "did you mean"),
        (lambda: ra.create_block_sparse_attention(density=0.1, sparsity_ratio=0.1), "give density only"),
        (lambda: ra.create_block_sparse_attention(density=1.5), "0 < density <= 1"),
        (lambda: ra.create_block_sparse_attention("adaptive"), "needs num_heads and head_dim"),
        (lambda: ra.create_block_sparse_attention("multihead", num_heads=4), "needs embed_dim"),
        (lambda: ra.create_block_sparse_attention(pattern="local", density=0.1), "has its own blocks and density"),
        (lambda: ra.create_block_sparse_attention(pattern="local", block=64), "has its own blocks and density"),
        (
            lambda: ra.create_block_sparse_attention("adaptive", num_heads=4, head_dim=8, pattern="local_window"),
            "learns its pattern",
        ),
        (lambda: ra.create_block_sparse_attention("hierarchical", pattern="local_window"), "a pattern of its own"),
        (lambda: ra.get_block_sparse_preset("lokal"), "did you mean 'local'"),
    ],
)
def test_errors(make: Any, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        make()
    assert words in str(caught.value)
