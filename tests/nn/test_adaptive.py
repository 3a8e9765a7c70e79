"""Adaptive block-sparse attention: selection, gradients of the scorer, causality, ranks, and that it learns."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from graph_cases import in_graphs
from oracle import error
from torch.utils.checkpoint import checkpoint

from ringattn import InvalidInput
from ringattn.nn import AdaptiveAttention, MultiheadAdaptiveAttention
from ringattn.nn.adaptive import SelectedBlocks


def tensors(
    tokens: int = 60, heads: int = 4, kv_heads: int = 2, batch: int = 2, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    shapes = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(batch, h, tokens, 8, generator=source, dtype=torch.float64).to(dtype) for h in shapes]


def module(**options: Any) -> AdaptiveAttention:
    torch.manual_seed(0)
    given = {"block": 8, "k": 3, "kv_heads": 2, "dtype": torch.float64, **options}
    return AdaptiveAttention(4, 8, **given).eval()


def pooled(x: torch.Tensor, block: int, ends_with_first: bool) -> torch.Tensor:
    """Mean of each block, or of the `block` rows that end with the first of each block."""
    rows = []
    for start in range(0, x.shape[2], block):
        low, high = (max(0, start - block + 1), start + 1) if ends_with_first else (start, start + block)
        rows.append(x[:, :, low:high].mean(2))
    return torch.stack(rows, 2)


def by_hand(attention: AdaptiveAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
    """Dense scores, dense selection, dense bias, one dense softmax."""
    block, tokens = attention.block, q.shape[2]
    a = torch.einsum("bhnd,hdr->bhnr", pooled(q.detach(), block, causal), attention.query)
    b = torch.einsum("bhnd,hdr->bhnr", pooled(k.detach(), block, False), attention.key)
    b = b.repeat_interleave(2, 1)
    bias = a @ b.mT / attention.rank**0.5
    score, count = bias.detach().mean(0), bias.shape[-1]
    chosen = torch.zeros_like(score, dtype=torch.bool)
    for head in range(len(score)):
        for row in range(count):
            allowed = range(row) if causal else range(count)
            best = sorted(allowed, key=lambda j: -float(score[head, row, j]))
            chosen[head, row, ([row] if causal else []) + best[: attention.k - causal]] = True
    if causal:
        bias = bias * ~torch.eye(count, dtype=torch.bool)
    name = torch.arange(tokens) // block
    seen = chosen[:, name][:, :, name]
    if causal:
        seen = seen & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    logits = q @ k.repeat_interleave(2, 1).mT * 8**-0.5 + bias[:, :, name][:, :, :, name]
    return logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1), chosen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [None, 1, 3, 4])
def test_equals_one_dense_softmax(causal: bool, ranks: int | None) -> None:
    """Output, gradients of q, k and v, and of every parameter of the scorer, which are finite and not zero."""
    q, k, v, grad = tensors()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attention = module(causal=causal, ranks=ranks)
    wanted, chosen = by_hand(attention, *leaves, causal)
    found = attention(*leaves)
    assert (attention.blocks == chosen.numpy()).all()
    assert error(found, wanted) < 1e-12
    wrt = (*leaves, attention.query, attention.key)
    for a, b in zip(torch.autograd.grad(found, wrt, grad), torch.autograd.grad(wanted, wrt, grad), strict=True):
        assert error(a, b) < 1e-12
        assert a.isfinite().all() and (a != 0).any()


@pytest.mark.parametrize("training", [False, True])
def test_nothing_depends_on_the_future(training: bool) -> None:
    q, k, v, grad = tensors(64)
    attention = module(causal=True).train(training)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.manual_seed(7)
    before = attention(*leaves)
    grads = torch.autograd.grad(before[:, :, :37], leaves, grad[:, :, :37])
    assert all((g[:, :, 37:] == 0).all() for g in grads)
    changed = [x.detach().clone() for x in leaves]
    for x in changed:
        x[:, :, 37:] = torch.randn_like(x[:, :, 37:]) * 5
    torch.manual_seed(7)
    after = attention(*changed)
    assert (after[:, :, :37] - before[:, :, :37]).abs().max() < 1e-12
    assert (after[:, :, 37:] - before[:, :, 37:]).abs().max() > 0.1


def test_density_odd_lengths_and_gradients_in_16_bit() -> None:
    for tokens in (1, 7, 8, 9, 100):
        q, k, v, _ = tensors(tokens, dtype=torch.bfloat16)
        attention = module(k=None, density=0.25, dtype=torch.float32)
        out = attention(*(x.requires_grad_() for x in (q, k, v)))
        assert out.shape == q.shape and out.dtype == torch.bfloat16
        total = -(-tokens // 8)
        assert attention.blocks is not None
        assert (attention.blocks.sum(-1) == max(1, round(0.25 * total))).all()
        out.float().sum().backward()
        assert attention.query.grad is not None and attention.query.grad.isfinite().all()
    assert module()(*(x[:, :, :0] for x in tensors()[:3])).shape == (2, 4, 0, 8)


def test_selections_are_forgotten() -> None:
    """Nothing keeps the pattern of an earlier call: neither a plan, nor what was worked out from it."""
    attention = module(ranks=3, causal=True).train()
    q, k, v, _ = (x.requires_grad_() for x in tensors())

    def held() -> int:
        gc.collect()
        return sum(type(x) is SelectedBlocks for x in gc.get_objects())

    for _ in range(5):
        attention(q, k, v).sum().backward()
    assert held() == 0


def train_needle(attention: AdaptiveAttention, steps: int) -> list[float]:
    """Recall of the block that holds the needle, over a random half of the steps that follow; queries and needle share
    no direction, so that the raw dot products do not find it."""
    source = torch.Generator().manual_seed(3)
    tokens, dim = attention.block * 16, 8
    optimiser = torch.optim.Adam(attention.parameters(), lr=0.03)

    def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        q, k = (0.3 * torch.randn(1, 4, tokens, dim, generator=source) for _ in range(2))
        v = torch.zeros(1, 2, tokens, dim)
        where = int(torch.randint(16, (1,), generator=source))
        inside = slice(where * attention.block, (where + 1) * attention.block)
        q[..., 0] += 2.0
        k[:, :, inside, 1] += 2.0
        label = torch.randn(dim, generator=source)
        v[:, :, inside] = label
        return q, k[:, :2], v, label, where

    def recall(count: int = 20) -> float:
        hits = []
        attention.eval()
        for _ in range(count):
            q, k, v, _, where = problem()
            attention(q, k, v)
            assert attention.blocks is not None
            hits.append(attention.blocks[:, :, where].mean())
        attention.train()
        return float(np.mean(hits))

    found = [recall()]
    attention.train()
    for _ in range(steps):
        q, k, v, label, _ = problem()
        loss = (attention(q, k, v) - label).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return [*found, recall()]


def test_training_finds_the_needle() -> None:
    torch.manual_seed(1)
    attention = AdaptiveAttention(4, 8, block=8, k=2, kv_heads=2)
    with torch.no_grad():
        for weight in attention.parameters():
            weight.mul_(0.1)
    before, after = train_needle(attention, 150)
    assert before < 0.3 and after > 0.9, (before, after)


@pytest.mark.parametrize("causal", [False, True])
def test_padding(causal: bool) -> None:
    """What padding holds changes nothing, on the left, on the right and in between, and rows without keys are zero."""
    for hidden in (slice(0, 19), slice(33, 48), slice(14, 30)):
        q, k, v, grad = tensors(48)
        mask = torch.zeros(2, 48, dtype=torch.bool)
        mask[0, hidden] = True
        found = []
        for junk in (0.0, 1e3, torch.nan):
            q[0, :, hidden] = 0 if np.isnan(junk) else junk  # padded queries are computed, so NaN would be NaN
            k[0, :, hidden] = v[0, :, hidden] = junk
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            attention = module(causal=causal)
            out = attention(*leaves, key_padding_mask=mask)
            shown = torch.where(mask[:, None, :, None], 0, out)
            wrt = (*leaves, attention.query, attention.key)
            grads = torch.autograd.grad(shown, wrt, torch.where(mask[:, None, :, None], 0, grad))
            assert shown.isfinite().all()
            found.append((shown.detach(), attention.blocks, *grads))
        for other in found[1:]:
            assert (other[1] == found[0][1]).all()
            for a, b in zip(other[2:], found[0][2:], strict=True):
                assert error(a, b) < 1e-12
            assert error(other[0], found[0][0]) < 1e-12


def test_recomputation_selects_the_same() -> None:
    x = torch.randn(2, 40, 32, dtype=torch.float64, requires_grad=True)
    grads = []
    for recompute in ("none", "projections", "all"):
        torch.manual_seed(2)
        layer = MultiheadAdaptiveAttention(
            32, 4, block=8, k=2, kv_heads=2, batch_first=True, dtype=torch.float64, recompute=recompute
        )
        out, _ = layer(x)
        layer(x)  # another call in between
        grads.append(torch.autograd.grad(out.square().sum(), (x, *layer.parameters())))
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, grads[0], strict=True))


@in_graphs
def test_plain_checkpoints_and_compiled_modules() -> None:
    """torch's own checkpoint selects as the forward did, and torch.compile takes the module as one operator."""
    q, k, v, grad = tensors()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attention = module(noise=3.0).train()
    again = partial(checkpoint, attention, use_reentrant=False)
    compiled = torch.compile(lambda *x: again(*x), backend="aot_eager", fullgraph=True)
    grads = []
    for run in (attention, again, compiled):
        torch.manual_seed(5)
        out = run(*leaves)
        attention(*leaves)  # another call in between
        grads.append((out, *torch.autograd.grad(out, (*leaves, attention.query, attention.key), grad)))
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, grads[0], strict=True))


def test_noise_follows_the_generator() -> None:
    q, k, v, _ = tensors()
    attention, tables = module(k=2).train(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        attention(q, k, v)
        assert attention.blocks is not None
        tables.append(attention.blocks.copy())
    assert (tables[0] == tables[1]).all() and (tables[0] != tables[2]).any()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: module(k=None), "give either k or density"),
        (lambda: module(density=0.5), "give either k or density"),
        (lambda: module(k=0), "k=0"),
        (lambda: module(kv_heads=3), "multiple of kv_heads"),
        (lambda: module(rank=0), "rank=0"),
        (lambda: module(noise=-1), "noise=-1"),
        (lambda: module()(*(x[:, :1] for x in tensors()[:3])), "the scorer was made for"),
        (lambda: MultiheadAdaptiveAttention(32, 4, densty=0.5), "did you mean 'density'"),
    ],
)
def test_errors(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        call()
