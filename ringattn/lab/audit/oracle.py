"""The oracle of the audit: dense attention of the whole sequence, without any of the library's plans or kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .cases import Case

Tensor = torch.Tensor
#: Names of the tensors that are compared.
NAMES = ("out", "dq", "dk", "dv")


def see(case: Case) -> Tensor:
    """bool [tokens, tokens]: which keys (columns) each query (row) attends."""
    mask, place = case.mask, torch.arange(case.tokens, device="cpu")
    distance = place[:, None] - place
    seen = torch.ones(case.tokens, case.tokens, dtype=torch.bool, device="cpu")
    if mask.get("causal"):
        seen &= distance >= 0
    if (window := mask.get("window")) is not None:
        near = distance <= window
        seen &= near | (place < mask["sinks"]) if mask.get("sinks") else near
    if mask.get("documents"):
        lengths = torch.tensor(mask["documents"], device="cpu")
        number = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths)
        seen &= number[:, None] == number
    return seen & case.is_real(place)


def attend(case: Case, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Exact attention: (out [B, H, N, D], lse [B, H, N]) of q [B, H, N, D] and k, v [B, K, N, D], in their dtype.

    Rows that see no key have out 0. `keep` [B, H, N, N] is 1 / (1 - p) for weights that dropout kept, and 0 for dropped
    ones.
    """
    group, seen = case.heads // case.kv_heads, see(case).to(q.device)
    scores = q @ k.repeat_interleave(group, 1).mT * (case.mask.get("scale") or case.head_dim**-0.5)
    if cap := case.mask.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if case.mask.get("sink_logits"):
        sink = make_sink_logits(case).to(q)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()[..., : case.tokens]
    weights = weights if keep is None else weights * keep
    return weights @ v.repeat_interleave(group, 1), lse


def make_sink_logits(case: Case) -> Tensor:
    """The learned sink logits of a case, [H]: for each query head, the logit of an extra key."""
    return torch.linspace(-1.0, 1.0, case.heads, device="cpu")


def make_inputs(case: Case) -> list[Tensor]:
    """q, k, v and the gradient of out for the whole sequence, in fp64, rounded to the dtype of the case.

    With dropout, v is the unit matrix, so that out contains every attention weight. The gradient is 0 for padding.
    """
    source = torch.Generator().manual_seed(case.tokens)
    wide = (case.batch, case.heads, case.tokens, case.head_dim)
    narrow = (case.batch, case.kv_heads, case.tokens, case.head_dim)
    shapes = (wide, narrow, narrow, wide)
    made: Any = {"dtype": torch.float64, "device": "cpu"}
    q, k, v, grad = (torch.randn(shape, generator=source, **made) for shape in shapes)
    if case.mask.get("dropout"):
        v = torch.eye(case.tokens, **made).expand(narrow).clone()
    first, end = case.real
    grad[:, :, :first] = grad[:, :, end:] = 0.0
    dtype = getattr(torch, case.dtype)
    return [x.to(dtype).double() for x in (q, k, v, grad)]


def solve(case: Case, dtype: torch.dtype, keep: Tensor | None = None) -> list[Tensor]:
    """Exact out, dq, dk and dv of a case, computed in `dtype` and returned as fp64."""
    *qkv, grad = (x.to(dtype) for x in make_inputs(case))
    leaves = [x.requires_grad_() for x in qkv]
    out, _ = attend(case, leaves[0], leaves[1], leaves[2], None if keep is None else keep.to(dtype))
    out = out.masked_fill(~see(case).any(-1)[:, None], 0.0)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, grad))]
