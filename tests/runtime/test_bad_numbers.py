"""NaN and infinities go by rows: out, lse and gradients are NaN in the same rows whatever the ranks, tiling and
kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn import Causal, Documents, Full, Pattern, Window, local_window
from ringattn.kernels import base

TOKENS, PLACE = 48, 40
WAYS: tuple[dict[str, Any], ...] = (
    {"ranks": 1, "kernel": "reference"},
    {"ranks": 1},
    {"ranks": 2, "schedule": "ulysses(2)"},
    {"ranks": 4, "layout": "zigzag", "schedule": "direct", "rotate": "keys"},
    {"ranks": 6, "schedule": "ring", "rotate": "queries"},
    {"ranks": 6, "schedule": "ring", "rotate": "keys"},
    {"stream": "host", "chunk": 7, "device": "cpu"},
)


PATTERNS: tuple[Pattern, ...] = (
    Causal(),
    Full(),
    Documents([8] * 6),
    Window(5, 2),
    local_window(1, blocks=0),
)


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing looks at the numbers, as off the CPU, where looking would wait for the device."""
    monkeypatch.setattr(base, "finite", lambda *tensors: False)
    monkeypatch.setattr(base, "none", lambda flags: False)


def check_bad_rows(pattern: Pattern, which: str, bad: float, ways: tuple[dict[str, Any], ...]) -> None:
    """`which` is the input that is bad at PLACE; "lse" is the gradient of lse."""
    mask = torch.from_numpy(pattern.mask(TOKENS)[0] > 0)
    rows = mask[:, PLACE] if which in ("k", "v") else torch.arange(TOKENS) == PLACE
    keys = mask[rows].any(0)
    source = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, TOKENS, 16, generator=source) for _ in range(4))
    grad_lse = torch.randn(1, 2, TOKENS, generator=source)
    {"q": q, "k": k, "v": v, "grad": grad, "lse": grad_lse.unsqueeze(-1).expand(-1, -1, -1, 4)}[which][
        0, 1, PLACE, 3
    ] = bad
    for way in ways:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        attend: Any = ra.virtual_attention if "ranks" in way else ra.attention
        out, lse = attend(*inputs, pattern, return_lse=True, **way)
        results, cotangents = ((out, lse), (grad, grad_lse)) if which == "lse" else (out, grad)
        dq, dk, dv = torch.autograd.grad(results, inputs, cotangents)
        in_out = rows & (which in ("q", "k", "v"))
        for x, wanted in ((out, in_out), (lse.unsqueeze(-1), in_out), (dq, rows), (dk, keys), (dv, keys)):
            assert x[0, 0].isfinite().all(), "the other head"
            assert torch.equal(x[0, 1].isnan().all(-1), wanted), (way, x.shape)
            assert torch.equal(x[0, 1].isfinite().all(-1), ~wanted), (way, x.shape)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_the_rows_that_are_nan(pattern: Pattern, which: str, bad: float) -> None:
    """In every way for NaN, in every other way for each infinity."""
    check_bad_rows(pattern, which, bad, WAYS if bad != bad else WAYS[int(bad > 0) :: 2])


@pytest.mark.parametrize("which", ["q", "k", "v", "grad", "lse"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_the_rows_that_are_nan_where_nothing_looks(unseen: None, pattern: Pattern, which: str) -> None:
    check_bad_rows(pattern, which, torch.nan, WAYS[1:])


@pytest.mark.parametrize("which", ["grad", "lse"])
def test_bad_cotangents(which: str) -> None:
    for pattern in PATTERNS:
        check_bad_rows(pattern, which, torch.inf, WAYS[3:6])


@pytest.mark.parametrize("rotate", ["keys", "queries"])
def test_numbers_that_become_infinite_on_the_way(rotate: str) -> None:
    """Rows of other ranks see a key that does not fit into the dtype of messages as a bad key; no other row does."""
    pattern = Causal() & Window(9)
    source = torch.Generator().manual_seed(3)
    inputs = [torch.randn(1, 1, TOKENS, 16, generator=source) for _ in range(3)]
    inputs[2][0, 0, 11, 2] = 3.4e38
    inputs = [x.requires_grad_() for x in inputs]
    options = {"ranks": 4, "schedule": "ring", "comm_dtype": "bfloat16", "rotate": rotate, "layout": "contiguous"}
    out = ra.virtual_attention(*inputs, pattern, **options)
    rows = torch.arange(TOKENS)
    assert torch.equal(out[0, 0].isnan().any(-1), (rows >= 12) & (rows <= 20)), "ranks hold 12 rows each"
    dq, dk, dv = torch.autograd.grad(out.sum(), inputs)
    assert torch.equal(dq[0, 0].isnan().all(-1), (rows >= 12) & (rows <= 20))
    assert all(torch.equal(x[0, 0].isnan().all(-1), (rows >= 3) & (rows <= 20)) for x in (dk, dv))


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_the_dense_oracle_says(which: str) -> None:
    """A NaN in q or k: exactly the rows of fp64 autograd. One in v makes NaN more entries of a row, but no other
    row."""
    pattern = Causal() & Window(9)
    hidden = torch.from_numpy(pattern.mask(TOKENS)[0] == 0)
    source = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(1, 1, TOKENS, 8, generator=source, dtype=torch.float64) for _ in range(4))
    {"q": q, "k": k, "v": v}[which][0, 0, 20, 3] = torch.nan
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = []
    for row in range(TOKENS):  # by rows, as 0 * NaN is NaN
        seen = (~hidden[row]).nonzero().flatten()
        x, y, z = (t[:, :, i] for t, i in zip(inputs, ([row], seen, seen), strict=True))
        out.append((x @ y.mT * 8**-0.5).softmax(-1) @ z)
    whole = torch.cat(out, 2)
    truth = (whole, *torch.autograd.grad(whole, inputs, grad))
    found = ra.virtual_attention(*inputs, pattern, ranks=3)
    for a, b in zip((found, *torch.autograd.grad(found, inputs, grad)), truth, strict=True):
        bad = a.isnan().any(-1)
        if which == "v":
            assert bad[b.isnan().any(-1)].all()
        else:
            assert torch.equal(bad, b.isnan().any(-1))
        assert (a[~bad] - b[~bad]).abs().max() <= 1e-12


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
