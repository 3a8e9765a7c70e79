"""The definitions that the seeds' systems go by, as loops over heads, branches and segments; and torchscale's
LongNet."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from oracle import error
from seed_definitions import CONFIGURATIONS, fast_equals_reference, grouped, longnet, mixed
from seed_masks import families

import ringattn as ra
from ringattn import Dilated, make_plan

Tensor = torch.Tensor
Attend = Callable[..., Tensor]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mix", ["lse", "group"])
@pytest.mark.parametrize(("tokens", "heads", "segments", "rates"), CONFIGURATIONS)
def test_dilated_attention_as_defined(
    tokens: int, heads: int, segments: tuple[int, ...], rates: tuple[int, ...], mix: str, causal: bool
) -> None:
    """fp64: output and gradients, on one device and a ring of three."""
    torch.manual_seed(42)
    inputs = [torch.randn(1, heads, tokens, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, heads, tokens, 8, dtype=torch.float64)
    truth = (grouped if mix == "group" else longnet)(*inputs, segments, rates, causal)
    truths = torch.autograd.grad(truth, inputs, grad)
    pattern = Dilated(segments, rates, causal=causal, mix=mix)
    for out in (ra.attention(*inputs, pattern), ra.virtual_attention(*inputs, pattern, ranks=3, layout="zigzag")):
        assert error(out, truth) <= 1e-12
        for found, wanted in zip(torch.autograd.grad(out, inputs, grad), truths, strict=True):
            assert error(found, wanted) <= 1e-12


@pytest.mark.parametrize("causal", [False, True])
def test_fast_equals_reference(causal: bool) -> None:
    on_ring = [partial(ra.virtual_attention, ranks=r, layout=m) for r, m in ((3 + causal, "zigzag"), (5, "contiguous"))]
    fast_equals_reference([ra.attention, *on_ring], causal)


@pytest.mark.parametrize("tokens", [512, 501])
@pytest.mark.parametrize("density", [0.05, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_the_density_that_was_asked_for(tokens: int, density: float) -> None:
    """Within one block per row; the rows of global blocks, which see everything, come on top."""
    block = 16 if density > 0.06 else 8  # room for a global and a local block
    total = -(-tokens // block)
    for pattern, _ in families(block, tokens, density):
        if getattr(pattern, "density", None) is None:
            continue
        extra = getattr(pattern, "globals", 0) or 0
        plan = make_plan(pattern, tokens=tokens, ranks=2)
        missed = (plan.density - density) * tokens / block
        assert -1 <= missed <= 1 + extra * (1 - density), pattern
        mask = pattern.mask(tokens)[0, ::block, ::block]
        if not repr(pattern).startswith("hierarchical"):
            assert (abs(mask[extra:].sum(1) - density * total) <= 1).all(), pattern


def flash(q: Tensor, k: Tensor, v: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    """(out [b, l, h, d], lse [b, h, l]): what torchscale expects of flash attention, which has no CPU version."""
    _dropout, _bias, scale, causal = others
    assert scale is None
    scores = torch.einsum("blhd,bmhd->bhlm", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize(
    ("tokens", "heads", "segments", "rates", "causal"),
    [
        (128, 4, (128,), (1,), False),
        (128, 4, (32, 64), (1, 2), False),
        (128, 8, (16, 32, 128), (1, 2, 4), False),
        (128, 8, (16, 32, 128), (1, 2, 4), True),
        (96, 6, (12, 48, 96), (1, 3, 2), False),
        (101, 8, (16, 32, 64), (1, 2, 4), True),
        (77, 6, (12, 24, 48), (2, 3, 6), True),
        (64, 4, (32, 256), (2, 4), True),
    ],
)
def test_torchscale_agrees_where_it_is_right(
    tokens: int, heads: int, segments: tuple[int, ...], rates: tuple[int, ...], causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its padding is never seen where lengths divide, or where it lies in the future.

    Not a dependency. PyPI's torchscale 0.3.0 lacks the module; `pip install --no-deps --target DIR torchscale-gml
    einops` and PYTHONPATH=DIR provide it.
    """
    module = pytest.importorskip(
        "torchscale.component.dilated_attention", reason="torchscale with its dilated attention is not installed"
    )
    monkeypatch.setattr("torchscale.component.multihead_attention.flash_attn_func", flash)
    args = SimpleNamespace(
        multiway=False, xpos_rel_pos=False, flash_attention=True, seq_parallel=False, layernorm_eps=1e-5,
        segment_length=list(segments), dilated_ratio=list(rates),
    )  # fmt: skip
    dim = 16
    theirs = module.DilatedAttention(args, heads * dim, heads, self_attention=True)
    for projection in (theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.out_proj):
        torch.nn.init.eye_(projection.weight)
        torch.nn.init.zeros_(projection.bias)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, heads, tokens, dim)
    with torch.no_grad():
        flat = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
        wanted = theirs(*flat, is_causal=causal)[0].unflatten(2, (heads, dim)).transpose(1, 2).double()

    # Their head t has the offset t // (H / r), ours j the offset j mod r. Branch by branch, a permutation of the heads
    # lines them up; all branches at once, only those heads t for which one j has all the offsets.
    branches = []
    for segment, rate in zip(segments, rates, strict=True):
        ours = sorted(range(heads), key=lambda j, rate=rate: (j % rate, j))
        back = torch.tensor(ours).argsort()
        assert all(j % rate == t // (heads // rate) for t, j in enumerate(ours))
        pattern = Dilated((segment,), (rate,), causal=causal)
        out, lse = ra.attention(q[:, back], k[:, back], v[:, back], pattern, return_lse=True)
        branches.append((out[:, ours], lse[:, ours]))
    found = {"by branches": error(mixed(branches), wanted)}

    period = math.lcm(*rates)
    slots: dict[int, int] = {}
    for t in range(heads):
        fits = [j for j in range(period) if all(j % r == t // (heads // r) for r in rates)]
        if fits:
            slots[fits[0] + period * t] = t  # a head of ours of the same residues, for each of theirs
    spread = [torch.zeros(2, period * heads, tokens, dim) for _ in range(3)]
    for x, whole in zip((q, k, v), spread, strict=True):
        whole[:, list(slots)] = x[:, list(slots.values())]
    for ranks in (1, 3):
        out = ra.virtual_attention(*spread, Dilated(segments, rates, causal=causal), ranks=ranks)
        found[f"{len(slots)} heads, {ranks} ranks"] = error(out[:, list(slots)], wanted[:, list(slots.values())])
    assert slots and max(found.values()) <= 1e-5, found
    print(tokens, heads, segments, rates, causal, found)
