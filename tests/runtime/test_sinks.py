"""Learned sinks and softcap against dense softmaxes in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringattn as ra
from ringattn import InvalidInput, Unsupported

B, H, K, N, D = 2, 4, 2, 37, 16
PATTERN = "Causal() & Window(9)"
DISTANCE = torch.arange(N)[:, None] - torch.arange(N)
VISIBLE = (DISTANCE >= 0) & (DISTANCE <= 9)


def make(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """(q, k, v and sinks, dO, dlse)."""
    source = torch.Generator().manual_seed(3)
    shapes = [(B, H, N, D), (B, K, N, D), (B, K, N, D), (H,), (B, H, N, D), (B, H, N)]
    *leaves, grad, grad_lse = (torch.randn(s, generator=source, dtype=torch.float64).to(dtype) for s in shapes)
    leaves[3][1] = -torch.inf  # a sink without weight
    return [x.requires_grad_() for x in leaves], grad, grad_lse


def solve(
    leaves: list[torch.Tensor], visible: torch.Tensor, cap: float | None, sinks: bool, scale: float = D**-0.5
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by dense softmaxes over the keys and the sink."""
    q, k, v, sink = leaves
    logits = q @ k.repeat_interleave(H // K, 1).mT * scale
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks:
        logits = torch.cat([logits, sink[:, None, None].expand(B, H, N, 1)], -1)
    empty = logits.isneginf().all(-1)
    logits = logits.masked_fill(empty.unsqueeze(-1), 0.0)  # finite here, struck out below
    weights = logits.softmax(-1)[..., :N].masked_fill(empty.unsqueeze(-1), 0.0)
    return weights @ v.repeat_interleave(H // K, 1), logits.logsumexp(-1).masked_fill(empty, -torch.inf)


@pytest.mark.parametrize(
    ("ranks", "dtype", "cap", "sinks", "padded", "more"),
    [
        (1, torch.float64, 1.5, True, False, {}),
        (3, torch.float64, None, True, True, {"rotate": "queries"}),
        (4, torch.float64, 1.5, False, True, {"rotate": "keys"}),
        (4, torch.float64, None, True, True, {"schedule": "ulysses(2)", "scale": -0.3}),
        (3, torch.float32, 1.5, True, True, {}),
        (2, torch.bfloat16, 3.0, True, False, {}),
    ],
)
def test_equals_dense_softmaxes(
    ranks: int, dtype: torch.dtype, cap: float | None, sinks: bool, padded: bool, more: dict[str, Any]
) -> None:
    leaves, grad, grad_lse = make(dtype)
    mask = torch.zeros(B, N, dtype=torch.bool)
    # The first rows of element 0 see nothing but a sink, those of head 1 nothing.
    mask[0, :5], mask[1, -4:] = True, True
    out, lse = ra.virtual_attention(
        *leaves[:3],
        PATTERN,
        ranks=ranks,
        layout="zigzag",
        softcap=cap,
        sinks=leaves[3] if sinks else None,
        key_padding_mask=mask if padded else None,
        return_lse=True,
        **more,
    )
    exact = [x.detach().double().requires_grad_() for x in leaves]
    visible = VISIBLE & ~mask[:, None, None] if padded else VISIBLE
    truth, true_lse = solve(exact, visible, cap, sinks, more.get("scale", D**-0.5))
    seen = true_lse.detach().isfinite()
    assert torch.equal(lse.isfinite(), seen)
    asked = leaves if sinks else leaves[:3]
    got = torch.autograd.grad((out, lse[seen]), asked, (grad, grad_lse.to(lse.dtype)[seen]))
    expected = torch.autograd.grad(
        (truth, true_lse[seen]), exact[: len(asked)], (grad.double(), grad_lse.double()[seen])
    )
    tolerance = 40 * torch.finfo(dtype).eps
    for ours, theirs in zip((out, lse[seen], *got), (truth, true_lse[seen], *expected), strict=True):
        assert (ours - theirs).abs().max() <= tolerance * max(1.0, float(theirs.detach().abs().max()))


def test_streams_and_one_device_agree_with_virtual_ranks() -> None:
    leaves, grad, _ = make(torch.float64)
    results = []
    for options in ({}, {"stream": "host", "chunk": 8}):
        out = ra.attention(*leaves[:3], PATTERN, sinks=leaves[3], softcap=2.0, **options)
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=0)


@pytest.mark.parametrize(("dtype", "padded"), [(torch.float64, False), (torch.float64, True), (torch.float16, True)])
def test_a_softcap_caps_logits_of_any_size(dtype: torch.dtype, padded: bool) -> None:
    """Padding is what the mask says, however low the logits of other keys are."""
    leaves, _, _ = make(dtype)
    q, k, v, _ = (x.detach() for x in leaves)
    q, mask = (q * 1e4).clamp(-6e4, 6e4), torch.zeros(B, N, dtype=torch.bool)
    k = (k * 1e4).clamp(-6e4, 6e4)
    mask[0, :5] = True
    given = {"key_padding_mask": mask} if padded else {}
    out, lse = ra.virtual_attention(q, k, v, PATTERN, ranks=3, softcap=5.0, return_lse=True, **given)
    visible = VISIBLE & ~mask[:, None, None] if padded else VISIBLE
    truth, true_lse = solve([*(x.double() for x in (q, k, v)), leaves[3]], visible, 5.0, False)
    torch.testing.assert_close(lse.double(), true_lse, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.double(), truth, atol=20 * torch.finfo(dtype).eps, rtol=0)


def test_a_sink_that_takes_all_weight() -> None:
    leaves, grad, _ = make(torch.float32)
    everything = torch.full((H,), torch.inf, requires_grad=True)
    out = ra.virtual_attention(*leaves[:3], PATTERN, ranks=3, sinks=everything)
    for x in (out, *torch.autograd.grad(out, [*leaves[:3], everything], grad)):
        assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sinks": torch.zeros(3)}, InvalidInput, r"sinks must be a float tensor \[heads\] = \(4,\).*pattern Sinks"),
        ({"sinks": 4}, InvalidInput, "got 4"),
        ({"softcap": 0.0}, InvalidInput, "softcap must be a finite number > 0"),
        ({"softcap": float("nan")}, InvalidInput, "softcap must be a finite number > 0"),
        ({"softcap": 2.0, "kernel": "aten_cpu"}, Unsupported, "aten_cpu has no softcap.*kernel='reference'"),
    ],
)
def test_errors_say_what_to_try(options: dict[str, Any], error: type[Exception], words: str) -> None:
    leaves, _, _ = make(torch.float32)
    with pytest.raises(error, match=words):
        ra.virtual_attention(*leaves[:3], PATTERN, ranks=2, **options)
    with pytest.raises(error, match=words):
        ra.attention(*leaves[:3], PATTERN, **options)
