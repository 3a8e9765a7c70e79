"""Learned sinks and softcap against dense softmaxes in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import Case, dense, errors, make_case, same_lse, solve

import ringattn as ra
from ringattn import InvalidInput, Unsupported
from ringattn.kernels.softmax import merge_, merge_sinks_

B, H, K, N, D = 2, 4, 2, 37, 16
PATTERN = "Causal() & Window(9)"
DISTANCE = torch.arange(N)[:, None] - torch.arange(N)
VISIBLE = (DISTANCE >= 0) & (DISTANCE <= 9)


def make(dtype: torch.dtype) -> tuple[Case, torch.Tensor]:
    """Inputs with cotangents, and sinks."""
    case = make_case(N, H, K, dtype, batch=B, dim=D, lse=True, seed=3)
    sinks = torch.randn(H, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    sinks[1] = -torch.inf  # a sink without weight
    return case, sinks.requires_grad_()


@pytest.mark.parametrize(
    ("ranks", "dtype", "cap", "sinks", "padded", "more"),
    [
        (1, torch.float64, 1.5, True, False, {}),
        (3, torch.float64, None, True, True, {"rotate": "q"}),
        (4, torch.float64, 1.5, False, True, {"rotate": "kv"}),
        (4, torch.float64, None, True, True, {"schedule": "ulysses(2)", "scale": -0.3}),
        (3, torch.float32, 1.5, True, True, {}),
        (2, torch.bfloat16, 3.0, True, False, {}),
    ],
)
def test_equals_dense_softmaxes(
    ranks: int, dtype: torch.dtype, cap: float | None, sinks: bool, padded: bool, more: dict[str, Any]
) -> None:
    case, learned = make(dtype)
    given = learned if sinks else None
    mask = torch.zeros(B, N, dtype=torch.bool)
    # The first rows of element 0 see nothing but a sink, those of head 1 nothing.
    mask[0, :5], mask[1, -4:] = True, True
    options = {"ranks": ranks, "softcap": cap, "sinks": given, "key_padding_mask": mask if padded else None, **more}
    case = replace(case, scale=options.pop("scale", None))
    found = solve(ra.virtual_attention, case, PATTERN, layout="zigzag", **options)
    truth = dense(case, (VISIBLE & ~mask[:, None, None]) if padded else VISIBLE, softcap=cap, sinks=given)
    tolerance = 40 * torch.finfo(dtype).eps
    assert max(errors(found, truth)) <= tolerance
    same_lse(found.lse, truth.lse, tolerance)


def test_streams_and_one_device_agree_with_virtual_ranks() -> None:
    case, sinks = make(torch.float64)
    ways = ({}, {"offload": "host", "chunk": 8})
    found, offloaded = (solve(ra.attention, case, PATTERN, sinks=sinks, softcap=2.0, **way) for way in ways)
    assert max(errors(offloaded, found)) <= 1e-13


@pytest.mark.parametrize(("dtype", "padded"), [(torch.float64, False), (torch.float64, True), (torch.float16, True)])
def test_a_softcap_caps_logits_of_any_size(dtype: torch.dtype, padded: bool) -> None:
    """Padding is what the mask says, however low the logits of other keys are."""
    (q, k, v), mask = make(dtype)[0].inputs, torch.zeros(B, N, dtype=torch.bool)
    q, k = ((x * 1e4).clamp(-6e4, 6e4) for x in (q, k))
    mask[0, :5] = True
    given = {"key_padding_mask": mask} if padded else {}
    out, lse = ra.virtual_attention(q, k, v, PATTERN, ranks=3, softcap=5.0, return_lse=True, **given)
    visible = VISIBLE & ~mask[:, None, None] if padded else VISIBLE
    truth = dense(Case(q, k, v, torch.zeros_like(q)), visible, softcap=5.0)
    torch.testing.assert_close(lse.double(), truth.lse, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.double(), truth.out, atol=20 * torch.finfo(dtype).eps, rtol=0)


def test_a_sink_that_takes_all_weight() -> None:
    case, everything = make(torch.float32)[0], torch.full((H,), torch.inf, requires_grad=True)
    leaves = case.leaves()
    out = ra.virtual_attention(*leaves, PATTERN, ranks=3, sinks=everything)
    for x in (out, *torch.autograd.grad(out, [*leaves, everything], case.grad)):
        assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sinks": torch.zeros(3)}, InvalidInput, r"sinks must be a float tensor \[heads\] = \(4,\).*pattern Sinks"),
        ({"sinks": 4}, InvalidInput, "got int"),
        ({"softcap": 0.0}, InvalidInput, "softcap must be a finite number > 0"),
        ({"softcap": float("nan")}, InvalidInput, "softcap must be a finite number > 0"),
        ({"softcap": 2.0, "kernel": "aten_cpu"}, Unsupported, "aten_cpu has no softcap.*kernel='reference'"),
    ],
)
def test_errors_say_what_to_try(options: dict[str, Any], error: type[Exception], words: str) -> None:
    case, _ = make(torch.float32)
    with pytest.raises(error, match=words):
        ra.virtual_attention(*case.inputs, PATTERN, ranks=2, **options)
    with pytest.raises(error, match=words):
        ra.attention(*case.inputs, PATTERN, **options)


def test_rows_that_saw_no_key_stay_empty() -> None:
    """Merged with each other they are empty, with a partial result they are that result, and -inf sinks add nothing."""
    out, lse = torch.zeros(1, 1, 3, 2), torch.tensor([[[-torch.inf, -torch.inf, 1.0]]])
    part, part_lse = torch.ones(1, 1, 3, 2), torch.tensor([[[-torch.inf, 2.0, -torch.inf]]])
    part[:, :, 0] = 0
    merge_(out, lse, part, part_lse)
    assert out[0, 0, :, 0].tolist() == [0.0, 1.0, 0.0] and lse[0, 0].tolist() == [-torch.inf, 2.0, 1.0]
    merge_sinks_(out, lse, torch.tensor([-torch.inf]))
    assert out[0, 0, :, 0].tolist() == [0.0, 1.0, 0.0] and lse[0, 0].tolist() == [-torch.inf, 2.0, 1.0]
