"""Dilated attention as the seeds define it, as loops over heads, branches and segments."""

from __future__ import annotations

from collections.abc import Callable

import torch
from seed_masks import blocks, families, head_groups, members
from torch.nn.functional import scaled_dot_product_attention

from ringattn import Dilated, Pattern

Tensor = torch.Tensor
Attend = Callable[..., Tensor]
CONFIGURATIONS = [
    (16, 4, (4,), (1,)),
    (16, 8, (2, 4, 8), (1, 2, 4)),
    (512, 8, (128, 256), (1, 2)),
    (64, 12, (8, 16, 32, 64), (1, 2, 4, 6)),
]


def one_branch(
    q: Tensor, k: Tensor, v: Tensor, segment: int, rate: int, offset: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """(out [B, N, D], lse [B, N]) of one head in one branch, segment after segment; 0 and -inf where it takes no
    part."""
    tokens = q.shape[-2]
    lower = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
    for chosen in members(tokens, segment, rate, offset):
        if not chosen.any():
            continue
        seen = (chosen & lower if causal else chosen.expand(tokens, -1))[chosen]
        scores = (q[:, chosen] @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        places = chosen.nonzero().squeeze(1)
        out = out.index_add(1, places, scores.softmax(-1) @ v)
        lse = lse.index_copy(1, places, scores.logsumexp(-1))
    return out, lse


def grouped(q: Tensor, k: Tensor, v: Tensor, segments: tuple[int, ...], rates: tuple[int, ...], causal: bool) -> Tensor:
    """The heads dealt to the branches; a branch has one offset; divided by the number of branches."""
    heads = []
    for head, i in enumerate(head_groups(q.shape[1], len(segments))):
        parts = q[:, head], k[:, head], v[:, head]
        heads.append(one_branch(*parts, segments[i], rates[i], i % rates[i], causal)[0] / len(segments))
    return torch.stack(heads, 1)


def mixed(branches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Branches weighted by their shares of the softmax denominator; 0 where none takes part."""
    outs, lses = (torch.stack(x) for x in zip(*branches, strict=True))
    none = (lses == -torch.inf).all(0)
    return (lses.masked_fill(none, 0.0).softmax(0).unsqueeze(-1) * outs).sum(0)


def longnet(q: Tensor, k: Tensor, v: Tensor, segments: tuple[int, ...], rates: tuple[int, ...], causal: bool) -> Tensor:
    """Every head runs every branch, at the offset of its own number."""
    heads = []
    for j in range(q.shape[1]):
        parts = q[:, j], k[:, j], v[:, j]
        heads.append(mixed([one_branch(*parts, s, r, j % r, causal) for s, r in zip(segments, rates, strict=True)]))
    return torch.stack(heads, 1)


def fast_equals_reference(attends: list[Attend], causal: bool) -> None:
    """The case that the seeds' own fast implementation fails, in fp32, and far inside its tolerance of 1e-3; then the
    same shape under every block-sparse family, against dense attention with the mask of its block indices."""
    torch.manual_seed(42)
    q, k, v = torch.randn(3, 2, 8, 1024, 64)
    references: list[tuple[Pattern, Tensor]] = []
    for mix, definition in (("lse", longnet), ("group", grouped)):
        pattern = Dilated((256, 512), (1, 2), causal=causal, mix=mix)
        references.append((pattern, definition(q, k, v, (256, 512), (1, 2), causal)))
    for pattern, rule in families(64, 1024, 0.35):
        sample = blocks(pattern, rule, 64, 1024, 1, causal)
        references.append((sample.pattern, scaled_dot_product_attention(q, k, v, attn_mask=sample.mask[0] > 0)))
    for place, (pattern, reference) in enumerate(references):
        # Dilated attention in every way, block-sparse families in one way each.
        for attend in attends if isinstance(pattern, Dilated) else attends[place % len(attends) :][:1]:
            torch.testing.assert_close(attend(q, k, v, pattern), reference, rtol=1e-4, atol=1e-5)
