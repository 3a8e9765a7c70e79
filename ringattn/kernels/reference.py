"""Attention by plain matrix products in fp32 (fp64 for fp64 inputs): the oracle for all other kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..plan.work import Work
from .base import Kernel, band, wide
from .pad import LEAST

#: Query rows per call, which bounds the memory of the scores of a long block.
ROWS = 1024


class Reference(Kernel):
    """softmax(scale * q k^T) v, written out; with `softcap` c, c * tanh(s / c) takes the place of the scaled logits s.

    Any dtype, any head dims, any device. Logits of padded keys (see `pad.hide_keys`) are not capped, which takes every
    logit below -LEAST / 2 for padding.
    """

    name = "reference"

    def __init__(self, softcap: float | None = None) -> None:
        self.softcap = softcap

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        pass

    def split(self, work: Work) -> Iterator[Work]:
        for batch in work.batches(ROWS // len(work.q)):
            for first in range(0, len(batch.q), ROWS):
                yield batch.narrow((first, min(first + ROWS, len(batch.q))), (0, batch.keys))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores, _ = self._masked_scores(q, k, work, scale)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        return weights @ _expand_heads(v, q.shape[1]), lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        work: Work,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grad, out = grad.to(wide(grad.dtype)), out.to(wide(out.dtype))
        scores, slope = self._masked_scores(q, k, work, scale)
        weights = (scores - lse.unsqueeze(-1)).exp()
        delta = (grad * out).sum(-1, keepdim=True)
        score_grad = weights * (grad @ _expand_heads(v, q.shape[1]).mT - delta) * scale
        if slope is not None:
            score_grad *= slope
        dq = score_grad @ _expand_heads(k, q.shape[1])
        dk, dv = score_grad.mT @ q.to(wide(q.dtype)), weights.mT @ grad
        kv_heads = k.shape[1]
        return dq, dk.unflatten(1, (kv_heads, -1)).sum(2), dv.unflatten(1, (kv_heads, -1)).sum(2)

    def _masked_scores(
        self, q: torch.Tensor, k: torch.Tensor, work: Work, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(logits, slope), each [B, H, rows, keys]; a logit is -inf where the band of the work hides the key.

        slope is the derivative of the capped logit by the scaled logit; None without a softcap.
        """
        scores, slope = q.to(wide(q.dtype)) @ _expand_heads(k, q.shape[1]).mT * scale, None
        if self.softcap is not None:
            ratio = (scores / self.softcap).tanh_()
            scores = torch.where(scores < -LEAST / 2, scores, ratio * self.softcap)
            slope = 1 - ratio.square_()
        if not work.dense:
            scores = scores.masked_fill_(~band(len(work.q), work.keys, work.lo, work.hi, q.device), -torch.inf)
        return scores, slope


def _expand_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """x [B, K, n, D] with each key/value head repeated for its query heads, [B, H, n, D], in fp32 or fp64."""
    return x.to(wide(x.dtype)).repeat_interleave(heads // x.shape[1], 1)
