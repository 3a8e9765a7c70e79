"""Padded keys: as if they were not there, whatever they hold, forward and backward."""

from __future__ import annotations

import pytest
import torch
from oracle import Case, Result, dense, error, errors, make_case, same_lse, single_device, solve

import ringattn as ra
from ringattn import Causal, Dilated, Full, InvalidInput, Pattern, Unsupported, Window

TOKENS = 61
PATTERNS: tuple[Pattern, ...] = (
    Causal(),
    Dilated((8, 30), (1, 3)),
    Dilated((16, 61), (1, 2), causal=True, mix="group"),
    Window(7),
)


def test_rows_that_see_padding_only_have_no_gradient_under_ulysses() -> None:
    """In bf16 their dq was NaN: the backward of a group took an lse in which they were not hidden."""
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 60, 8, generator=source).bfloat16().requires_grad_() for _ in range(3))
    mask = torch.rand(1, 60, generator=source) < 0.5
    mask[:, :9] = True
    for schedule in ("ring", "ulysses(2)"):
        out = ra.virtual_attention(q, k, v, Causal(), ranks=2, schedule=schedule, key_padding_mask=mask)
        grads = torch.autograd.grad(out.float().sum(), (q, k, v))
        assert all(x.isfinite().all() for x in grads) and not grads[0][:, :, :9].any(), schedule


def padding(batch: int = 4, tokens: int = TOKENS) -> torch.Tensor:
    """Element 0 has no padding, 1 at the end, 2 everywhere, 3 at the start and here and there."""
    mask = torch.zeros(batch, tokens, dtype=torch.bool)
    mask[1, tokens - tokens // 4 :] = True
    mask[2] = True
    mask[3, :5] = True
    mask[3, 9::7] = True
    return mask


def wanted(case: Case, pattern: Pattern, mask: torch.Tensor, oracle=dense) -> Result:  # type: ignore[no-untyped-def]
    """The oracle of each batch element with its own mask."""
    heads, tokens = case.q.shape[1:3]
    seen = torch.from_numpy(pattern.mask(tokens, heads)) * ~mask[:, None, None]
    return oracle(case, seen, pattern.bind(heads, tokens).output_scale)


def run(case: Case, pattern: Pattern, mask: torch.Tensor, **options) -> Result:  # type: ignore[no-untyped-def]
    return solve(ra.virtual_attention, case, pattern, key_padding_mask=mask, **{"ranks": 1, **options})


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize(("ranks", "layout"), [(1, "contiguous"), (2, "zigzag"), (3, "striped"), (5, "zigzag")])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_equals_the_oracle(pattern: Pattern, ranks: int, layout: str, lse: bool) -> None:
    case, mask = make_case(TOKENS, 4, 2, torch.float64, batch=4, dim=8, lse=lse), padding()
    truth = wanted(case, pattern, mask)
    for schedule, rotate in (("ring", "kv"), ("direct", "q"), ("allgather", "kv"), ("ring", "q")):
        found = run(case, pattern, mask, ranks=ranks, layout=layout, schedule=schedule, rotate=rotate)
        assert max(errors(found, truth)) <= 1e-12
        same_lse(found.lse, truth.lse, 1e-12)
        assert (found.out[2] == 0).all() and all((grad[2] == 0).all() for grad in found.grads)
        for grad in found.grads[1:]:  # a padded key has no gradient
            assert (grad.transpose(1, 2)[mask] == 0).all()


@pytest.mark.parametrize("kernel", ["aten_cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_no_worse_than_one_call(pattern: Pattern, dtype: torch.dtype, kernel: str) -> None:
    case, mask = make_case(TOKENS, 4, 4, dtype, batch=4, dim=16), padding()
    truth = wanted(case, pattern, mask)
    base = errors(wanted(case, pattern, mask, single_device), truth)
    for ranks in (1, 4):
        found = run(case, pattern, mask, ranks=ranks, kernel=kernel)
        assert all(a <= 2 * b + 1e-6 for a, b in zip(errors(found, truth), base, strict=True))
        same_lse(found.lse, truth.lse, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_padding_holds_does_not_matter(dtype: torch.dtype, ranks: int) -> None:
    case, mask = make_case(TOKENS, 2, 2, dtype, batch=4, dim=8, lse=True), padding()
    clean = run(case, Full(), mask, ranks=ranks)
    dirty = [x.clone() for x in case.inputs[1:]]
    dirty[0].transpose(1, 2)[mask] = torch.nan
    dirty[1].transpose(1, 2)[mask] = torch.inf
    found = run(Case(case.q, *dirty, case.grad, case.grad_lse), Full(), mask, ranks=ranks)
    for a, b in zip((found.out, found.lse, *found.grads), (clean.out, clean.lse, *clean.grads), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("scale", [-0.3, 1e-3, 20.0])
def test_scales(scale: float) -> None:
    source = make_case(TOKENS, 2, 1, torch.float64, batch=4, dim=8)
    case, mask = Case(*source.inputs, source.grad, scale=scale), padding()
    assert max(errors(run(case, Window(7), mask, ranks=2), wanted(case, Window(7), mask))) <= 1e-12


def test_padding_travels_in_a_narrower_dtype() -> None:
    """The largest numbers of fp16 become infinite by way of bf16; the columns that hide a key do not."""
    case, mask = make_case(TOKENS, 2, 1, torch.float16, batch=4, dim=8), padding()
    found, whole = (run(case, Causal(), mask, ranks=2, comm_dtype=x) for x in ("bfloat16", None))
    assert max(errors(found, whole)) <= 2e-2


def test_long_rows_and_bands_of_the_cpu_kernel() -> None:
    """Longer than a masked call of aten_cpu, so that its blocks of all-padded keys meet whole calls."""
    case = make_case(700, 1, 1, torch.float32, batch=2, dim=8)
    mask = torch.zeros(2, 700, dtype=torch.bool)
    mask[0, :400], mask[1, 300:] = True, True
    for pattern in (Causal(), Window(100, 50)):
        truth = wanted(case, pattern, mask)
        assert max(errors(run(case, pattern, mask, ranks=2, layout="zigzag"), truth)) <= 1e-5


def test_no_padding_changes_nothing_and_nan_cotangents_of_empty_rows_are_ignored() -> None:
    case, mask = make_case(40, 2, 2, torch.float64, batch=2, dim=8), torch.zeros(2, 40, dtype=torch.bool)
    inputs = case.leaves()
    found, plain = ra.attention(*inputs, Causal(), key_padding_mask=mask), ra.attention(*inputs, Causal())
    assert error(found, plain.detach()) <= 1e-15
    mask[0] = True
    grad = case.grad.clone()
    grad[0] = torch.nan
    out = ra.attention(*inputs, Causal(), key_padding_mask=mask)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out, inputs, grad))


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.zeros(2, 9), "must be a bool tensor, True where a key is padding, got torch.float32"),
        ([False], "got list"),
        (torch.zeros(9, 2, dtype=torch.bool), "[batch, tokens] = (2, 9), the keys of this call, got (9, 2)"),
        (torch.zeros(2, 9, dtype=torch.bool, device="meta"), "key_padding_mask is on meta"),
    ],
)
def test_errors(mask: torch.Tensor, words: str) -> None:
    x = torch.zeros(2, 1, 9, 8)
    with pytest.raises(InvalidInput) as caught:
        ra.virtual_attention(x, x, x, Full(), ranks=2, key_padding_mask=mask)
    assert words in str(caught.value)


@pytest.mark.parametrize(("scale", "dtype"), [(0.0, torch.float32), (0.0, torch.float64), (1e-5, torch.float16)])
def test_scales_that_hide_nothing(scale: float, dtype: torch.dtype) -> None:
    x = torch.zeros(2, 1, 9, 8, dtype=dtype)
    with pytest.raises(Unsupported, match="the number that hides a key overflows"):
        ra.attention(x, x, x, Full(), scale=scale, key_padding_mask=torch.zeros(2, 9, dtype=torch.bool))
