"""NaN acts as in torch's SDPA: every row that sees a bad number is NaN, in out and in the gradients, on every path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn import Causal, Documents, Full, Pattern, Window, local_window

TOKENS, PLACE = 48, 40
WAYS: tuple[dict[str, Any], ...] = (
    {"ranks": 1, "kernel": "reference"},
    {"ranks": 1},
    {"ranks": 2, "schedule": "ulysses(2)"},
    {"ranks": 4, "layout": "zigzag", "schedule": "direct", "rotate": "kv"},
    {"ranks": 6, "schedule": "ring", "rotate": "q"},
    {"ranks": 6, "schedule": "ring", "rotate": "kv"},
    {"offload": "host", "chunk": 7, "device": "cpu"},
)
PATTERNS: tuple[Pattern, ...] = (Causal(), Full(), Documents([8] * 6), Window(5, 2), local_window(1, blocks=0))


@pytest.mark.parametrize("which", ["q", "k", "v", "grad", "lse"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_every_row_that_sees_a_nan_is_nan(pattern: Pattern, which: str) -> None:
    """`which` is the input that is NaN at PLACE; "lse" is the gradient of lse. The other head stays finite."""
    mask = torch.from_numpy(pattern.mask(TOKENS)[0] > 0)
    rows = mask[:, PLACE] if which in ("k", "v") else torch.arange(TOKENS) == PLACE
    source = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, TOKENS, 16, generator=source) for _ in range(4))
    grad_lse = torch.randn(1, 2, TOKENS, generator=source)
    {"q": q, "k": k, "v": v, "grad": grad, "lse": grad_lse.unsqueeze(-1).expand(-1, -1, -1, 4)}[which][
        0, 1, PLACE, 3
    ] = torch.nan
    for way in WAYS:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        attend: Any = ra.virtual_attention if "ranks" in way else ra.attention
        out, lse = attend(*inputs, pattern, return_lse=True, **way)
        results, cotangents = ((out, lse), (grad, grad_lse)) if which == "lse" else (out, grad)
        dq, dk, dv = torch.autograd.grad(results, inputs, cotangents)
        assert all(x[0, 0].isfinite().all() for x in (out, lse, dq, dk, dv)), "the other head"
        in_out = rows & (which in ("q", "k", "v"))
        for x, wanted in ((out, in_out), (dq, rows), (dk, mask[rows].any(0))):
            assert x[0, 1].isnan().any(-1)[wanted].all(), way


@pytest.mark.parametrize("keys", [1, 3, 15, 16, 17, 520])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("which", ["q", "k"])
def test_rows_whose_logits_are_all_nan(which: str, keys: int, dtype: torch.dtype) -> None:
    """The op for CPUs answers 0 for such a row of few keys; zero logits are no NaN."""
    q, k, v = (
        torch.zeros(2, 1, keys, 8, dtype=dtype),
        torch.zeros(2, 1, keys, 8, dtype=dtype),
        torch.ones(2, 1, keys, 8),
    )
    (q if which == "q" else k)[0] = torch.nan
    out, lse = ra.attention(q, k, v.to(dtype), Full(), return_lse=True)
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert (out[1] == 1).all() and (lse[1] - np.log(keys)).abs().max() <= 1e-6


def test_numbers_that_become_infinite_on_the_way() -> None:
    """Rows of other ranks see infinity for a number that does not fit into the dtype of messages."""
    source = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, TOKENS, 16, generator=source) for _ in range(3))
    v[0, 0, 11, 2] = 3.4e38
    options = {"ranks": 4, "schedule": "ring", "comm_dtype": "bfloat16", "layout": "contiguous"}
    out = ra.virtual_attention(q, k, v, Causal() & Window(9), **options)
    assert not out[0, 0, 12:21].isfinite().all(-1).any(), "ranks hold 12 rows each"
    assert out[0, 0, :11].isfinite().all()


def test_a_bad_query_that_sees_nothing_is_a_row_of_zeros() -> None:
    source = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 1, 32, 8, generator=source) for _ in range(3))
    q[0, 0, 3] = torch.nan
    inputs = [x.requires_grad_() for x in (q, k, v)]
    for ranks in (1, 4):
        pattern = ra.BlockSparse(8, np.array([[False] * 4, *[[True] * 4] * 3])[None])
        out, lse = ra.virtual_attention(*inputs, pattern, ranks=ranks, return_lse=True)
        assert (out[0, 0, :8] == 0).all() and (lse[0, 0, :8] == -torch.inf).all()
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("sign", [1, -1])
def test_padding_hides_nothing_else_in_fp16(sign: int, ranks: int) -> None:
    """Real logits of -1.3e6, and of 1.3e6, beside padded keys, and rows that see padded keys only."""
    q = torch.full((2, 1, 12, 64), 400.0, dtype=torch.float16)
    v = torch.randn(2, 1, 12, 64, generator=torch.Generator().manual_seed(0)).half()
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[0, 8:] = mask[1] = True
    inputs = [x.clone().requires_grad_() for x in (q, q * sign, v)]
    out, lse = ra.virtual_attention(*inputs, Full(), ranks=ranks, key_padding_mask=mask, return_lse=True)
    wanted = v[:1, :, :8].double().mean(2, keepdim=True).expand(1, 1, 12, 64)
    assert (out[:1].double() - wanted).abs().max() <= 1e-3
    assert (lse[0] - sign * 400.0**2 * 8).abs().max() <= 10
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    grads = torch.autograd.grad(out.float().sum(), inputs)
    assert all(x.isfinite().all() for x in grads)
    # An fp32 lse of 1.3e6 is a multiple of 1/8, so that the backward's weights are right to exp(1/16).
    assert (grads[2][0, 0, :8] - 1.5).abs().max() <= 0.1 and (grads[2][0, 0, 8:] == 0).all()
