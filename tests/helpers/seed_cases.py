"""Acceptance cases of the seeds' test suites: each takes a way to attend, whole tensors in and out, and a sample.

The way to attend is one device, virtual ranks, or real ranks (helpers/seed_ranks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from oracle import dense, error, make_case
from seed_masks import Sample, families, samples
from torch.nn.functional import normalize, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn import (
    BlockSparse,
    Causal,
    Dilated,
    Pattern,
    dilated_blocks,
    global_local,
    hierarchical,
    local_window,
    strided_blocks,
)

Tensor = torch.Tensor
Attend = Callable[..., Any]
BATCH, DIM = 1, 16


def normal(sample: Sample, *, dtype: torch.dtype = torch.float32, seed: int = 0, number: int = 4) -> tuple[Tensor, ...]:
    """q, k, v and a cotangent, [B, H, N, D]."""
    heads, tokens, _ = sample.mask.shape
    source = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(number, BATCH, heads, tokens, DIM, generator=source, dtype=torch.float64).to(dtype))


def equals_the_definition(attend: Attend, sample: Sample) -> None:
    """fp64 output, log-sum-exp and gradients against the dense oracle."""
    heads, tokens, _ = sample.mask.shape
    case = make_case(tokens, heads, heads, torch.float64, batch=BATCH, dim=DIM, lse=True)
    truth = dense(case, sample.mask, sample.factor)
    inputs = case.leaves()
    out, lse = attend(*inputs, sample.pattern, return_lse=True)
    seen = sample.seen.squeeze(-1).expand(lse.shape)
    assert error(out, truth.out) <= 1e-12
    assert error(lse[seen], truth.lse[seen]) <= 1e-12 and (lse[~seen] == -torch.inf).all()
    assert case.grad_lse is not None
    grads = torch.autograd.grad((out, lse), inputs, (case.grad, case.grad_lse))
    for found, wanted in zip(grads, truth.grads, strict=True):
        assert error(found, wanted) <= 1e-12


def saturation(attend: Attend, sample: Sample) -> None:
    """Where every token is by far most like itself, it gets its own value: by large inputs, and by a large scale."""
    q, v, *_ = normal(sample)
    q = normalize(q, dim=-1)
    itself = sample.mask.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) > 0
    assert (itself == sample.seen).all()
    for size, scale in ((100.0, None), (1.0, 100.0)):
        out = attend(q * size, q * size, v, sample.pattern, scale=scale)
        assert error(out, v * itself * sample.factor) <= 1e-5


def large_inputs_stay_finite(attend: Attend, sample: Sample) -> None:
    q, k, v, grad = normal(sample)
    inputs = [(10 * x).requires_grad_() for x in (q, k, v)]
    out = attend(*inputs, sample.pattern)
    grads = torch.autograd.grad(out, inputs, grad)
    assert all(x.isfinite().all() for x in (out, *grads))
    assert not torch.equal(out, torch.zeros_like(out))


def zeros_give_zeros(attend: Attend, sample: Sample) -> None:
    q, k, v, grad = normal(sample)
    for inputs in ([torch.zeros_like(q)] * 3, [q, k, torch.zeros_like(v)]):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attend(*leaves, sample.pattern)
        assert (out == 0).all()
        assert all(x.isfinite().all() for x in torch.autograd.grad(out, leaves, grad))


def weights_sum_to_one(attend: Attend, sample: Sample) -> None:
    """Of values that are all one, every row that sees a key gets exactly the factor; the others get zero."""
    q, k, v, _ = normal(sample)
    out = attend(3 * q, k, torch.ones_like(v), sample.pattern)
    assert error(out, (sample.seen * sample.factor).expand(out.shape).double()) <= 1e-6
    assert (out[~sample.seen.expand(out.shape)] == 0).all()


def equal_scores_give_the_mean(attend: Attend, sample: Sample) -> None:
    """q = k = 1 and v = 0, 1, 2, ...: the mean of the seen keys, each as often as it is counted."""
    heads, tokens, _ = sample.mask.shape
    ones = torch.ones(BATCH, heads, tokens, DIM)
    v = torch.arange(float(tokens)).view(-1, 1).expand(BATCH, heads, tokens, DIM)
    out = attend(ones, ones, v, sample.pattern)
    counts = sample.mask.double()
    means = (counts @ torch.arange(tokens, dtype=torch.float64)) / counts.sum(-1).clamp(min=1)
    assert error(out, (means * sample.factor).unsqueeze(-1).expand(BATCH, -1, -1, DIM)) <= 1e-6
    if sample.causal and sample.factor == 1.0:
        first = sample.seen[:, 0, 0]
        assert torch.equal(out[:, first, 0], v[:, first, 0])


def order_of_equal_keys_is_free(attend: Attend, sample: Sample) -> None:
    """Keys that the same queries see may change places, with their values."""
    q, k, v, _ = normal(sample)
    columns = sample.mask.permute(2, 0, 1).flatten(1)
    _, kind = torch.unique(columns, dim=0, return_inverse=True)
    order = torch.arange(len(kind))
    source = torch.Generator().manual_seed(1)
    for one in kind.unique():
        places = (kind == one).nonzero().squeeze(1)
        order[places] = places[torch.randperm(len(places), generator=source)]
    assert sample.causal or not torch.equal(order, torch.arange(len(kind)))
    out = attend(q, k, v, sample.pattern)
    assert error(attend(q, k[:, :, order], v[:, :, order], sample.pattern), out.double()) <= 1e-5


def nothing_leaks_back(attend: Attend, sample: Sample) -> None:
    """Edits of the second half do not move the first, bit for bit, and no gradient flows against time."""
    if not sample.causal:
        return
    q, k, v, grad = normal(sample)
    other = normal(sample, seed=1)
    half = q.shape[2] // 2
    edited = [torch.cat((x[:, :, :half], 100 * y[:, :, half:]), 2) for x, y in zip((q, k, v), other, strict=False)]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, sample.pattern)
    assert torch.equal(attend(*edited, sample.pattern)[:, :, :half], out[:, :, :half])
    loss = (out[:, :, :half] * grad[:, :, :half]).sum()
    for x in torch.autograd.grad(loss, leaves):
        assert (x[:, :, half:] == 0).all() and (x[:, :, :half] != 0).any()


def checkpoints_change_nothing(attend: Attend, sample: Sample) -> None:
    """A layer with and without checkpointing, and keeping the results of attention: same output and gradients."""
    heads, tokens, _ = sample.mask.shape
    source = torch.Generator().manual_seed(2)
    x, grad = torch.randn(2, BATCH, heads, tokens, DIM, generator=source)
    weight = torch.randn(3, DIM, DIM, generator=source) / DIM**0.5

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (x @ part for part in weight)
        return attend(q, k, v, sample.pattern).tanh()

    results = []
    for options in (None, {}, {"context_fn": ra.keep_attention}):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = layer(*leaves) if options is None else checkpoint(layer, *leaves, use_reentrant=False, **options)
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))


def values_may_be_wider(attend: Attend, sample: Sample) -> None:
    """Shapes, dtypes: out is [B, H, N, Dv] in the dtype of q, lse [B, H, N]; strides do not matter."""
    heads, tokens, _ = sample.mask.shape
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, _ = normal(sample, dtype=dtype)
        # The layout [B, N, H, D] of the seeds, seen as ours.
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
        out, lse = attend(q, k, torch.cat((v, v), -1), sample.pattern, return_lse=True)
        assert out.shape == (BATCH, heads, tokens, 2 * DIM) and out.dtype == dtype
        assert lse.shape == (BATCH, heads, tokens) and lse.dtype == torch.float32
        assert error(out[..., :DIM], out[..., DIM:].double()) <= (1e-6 if dtype == torch.float32 else 2**-7)


CASES = (
    equals_the_definition,
    saturation,
    large_inputs_stay_finite,
    zeros_give_zeros,
    weights_sum_to_one,
    equal_scores_give_the_mean,
    order_of_equal_keys_is_free,
    nothing_leaks_back,
    checkpoints_change_nothing,
    values_may_be_wider,
)


EVEN = samples(48, 4, 8)


RAGGED = samples(41, 5, 7)


def everything(tokens: int, heads: int) -> list[Pattern]:
    """Full attention, as a special case of each kind of pattern."""
    return [
        Dilated((tokens,), (1,)),
        Dilated((3 * tokens,), (1,)),  # a segment that no sequence fills
        Dilated((tokens,), (1,), mix="group"),
        *(p for p, _ in families(tokens, tokens, 1.0) if getattr(p, "density", None) is None),
        *(f(64, density=1.0) for f in (local_window, dilated_blocks, global_local, strided_blocks, hierarchical)),
        BlockSparse(64, [[[1] * (tokens // 64)] * (tokens // 64)] * heads),
    ]


def full_attention_for_every_ring_size(attend: Callable[..., Tensor]) -> None:
    """fp32 against torch's own dense attention, and what permutations of full attention leave alone."""
    tokens, heads = 128, 2
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, tokens, 32, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, heads, tokens, 32)
    order = torch.randperm(tokens)
    q, k, v = (x.detach() for x in inputs)
    for causal in (False, True):
        wide = [x.detach().double().requires_grad_() for x in inputs]
        truth = scaled_dot_product_attention(*wide, is_causal=causal)
        truths = torch.autograd.grad(truth, wide, grad.double())
        for pattern in everything(tokens, heads):
            chosen = pattern & Causal() if causal else pattern
            out = attend(*inputs, chosen)
            assert error(out, truth) <= 1e-6
            for found, wanted in zip(torch.autograd.grad(out, inputs, grad), truths, strict=True):
                assert error(found, wanted) <= 2e-6
            if not causal:
                assert error(attend(q, k[:, :, order], v[:, :, order], pattern), truth) <= 1e-6
                moved = attend(q[:, :, order], k[:, :, order], v[:, :, order], pattern)
                assert error(moved, truth[:, :, order]) <= 1e-6


def no_tokens(attend: Callable[..., Tensor]) -> None:
    patterns = [s.pattern for s in samples(0, 4, 8)]
    for pattern in patterns:
        inputs = [torch.zeros(2, 4, 0, 32, requires_grad=True) for _ in range(3)]
        out, lse = attend(*inputs, pattern, return_lse=True)
        assert out.shape == (2, 4, 0, 32) and lse.shape == (2, 4, 0)
        out.sum().backward()
        assert all(x.grad is not None and x.grad.shape == x.shape for x in inputs)


def equal_scores_of_eight_tokens(attend: Callable[..., Tensor]) -> None:
    """One head, all in one segment: the first causal row is v[0], the last full row the mean."""
    ones = torch.ones(1, 1, 8, 16)
    v = torch.arange(128.0).view(1, 1, 8, 16)
    for mix in ("lse", "group"):
        out = attend(ones, ones, v, Dilated((8,), (1,), causal=True, mix=mix))
        assert torch.equal(out[0, 0, 0], v[0, 0, 0])
        for last in (out[0, 0, -1], attend(ones, ones, v, Dilated((8,), (1,), mix=mix))[0, 0, -1]):
            assert error(last, v[0, 0].mean(0).double()) <= 1e-6


def shapes(attend: Callable[..., Tensor]) -> None:
    """The sizes of both repositories' tests."""
    for heads in (4, 8):
        for segments, rates in (((4,), (1,)), ((2, 4, 8), (1, 2, 4))):
            for mix in ("lse", "group"):
                for causal in (False, True):
                    x = torch.randn(1, heads, 16, 8)
                    assert attend(x, x, x, Dilated(segments, rates, mix=mix, causal=causal)).shape == x.shape
