"""Attention by plain matrix products in fp32 (fp64 for fp64 inputs): the reference that checks all other kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..plan.work import Work
from .base import Kernel, band, expand_heads, wide
from .pad import EXTRA

#: Query rows per call, which bounds the memory of the scores of a long block.
ROWS = 1024


class Reference(Kernel):
    """softmax(scale * q k^T) v, written out; with `softcap` c, c * tanh(s / c) replaces the scaled logits s.

    Any dtype, any head dims, any device. `dropout` changes the weights with which out sums v, but not lse.
    """

    name = "reference"
    features = ("softcap", "dropout", "chosen", "reproducible")

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        pass

    def split(self, work: Work) -> Iterator[Work]:
        for batch in work.repetitions(ROWS // len(work.q)):
            for first in range(0, len(batch.q), ROWS):
                yield batch.narrow((first, min(first + ROWS, len(batch.q))), (0, batch.keys))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work, scale: float) -> tuple[Tensor, Tensor]:
        scores, _ = self._masked_scores(q, k, work, scale)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        factors = self._weight_factors(weights.dtype)
        return (weights if factors is None else weights.mul_(factors)) @ _wide_heads(v, q.shape[1]), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, work: Work, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, out = grad.to(wide(grad.dtype)), out.to(wide(out.dtype))
        scores, slope = self._masked_scores(q, k, work, scale)
        weights = (scores - lse.unsqueeze(-1)).exp()
        delta = (grad * out).sum(-1, keepdim=True)
        weight_grad, factors = grad @ _wide_heads(v, q.shape[1]).mT, self._weight_factors(weights.dtype)
        if factors is not None:
            weight_grad *= factors
        score_grad = weights * (weight_grad - delta) * scale
        if slope is not None:
            score_grad *= slope
        dq = score_grad @ _wide_heads(k, q.shape[1])
        weights = weights if factors is None else weights.mul_(factors)
        dk, dv = score_grad.mT @ q.to(wide(q.dtype)), weights.mT @ grad
        kv_heads = k.shape[1]
        return dq, dk.unflatten(1, (kv_heads, -1)).sum(2), dv.unflatten(1, (kv_heads, -1)).sum(2)

    def _weight_factors(self, dtype: torch.dtype) -> Tensor | None:
        """The factors of the call's attention weights, [B, H, rows, keys]; None without dropout."""
        if self.dropout is None:
            return None
        from .dropout import weight_factors  # few calls drop weights

        assert self.numbers is not None, "a kernel with dropout is given the numbers of each call"
        return weight_factors(self.dropout.p, *self.numbers, dtype)

    def _masked_scores(self, q: Tensor, k: Tensor, work: Work, scale: float) -> tuple[Tensor, Tensor | None]:
        """(logits, slope), each [B, H, rows, keys]; a logit is -inf where the band of the work hides the key.

        slope is the derivative of the capped logit with respect to the scaled logit; None without a softcap.
        """
        q, k, slope = q.to(wide(q.dtype)), _wide_heads(k, q.shape[1]), None
        if self.softcap is None:
            scores = q @ k.mT * scale
        else:
            first = EXTRA if self.padded else 0
            ratio = (q[..., first:] @ k[..., first:].mT * (scale / self.softcap)).tanh_()
            scores = ratio * self.softcap
            if first:
                scores += q[..., :first] @ k[..., :first].mT * scale
            slope = 1 - ratio.square_()
        if self.hidden is not None:
            scores = scores.masked_fill_(self.hidden, -torch.inf)
        elif not work.dense:
            scores = scores.masked_fill_(~band(len(work.q), work.keys, work.lo, work.hi, q.device), -torch.inf)
        return scores, slope


def _wide_heads(x: Tensor, heads: int) -> Tensor:
    """As `expand_heads`, in fp32 or fp64."""
    return expand_heads(x.to(wide(x.dtype)), heads)
