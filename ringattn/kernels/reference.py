"""Plain matrix products in fp32 (fp64 for fp64 inputs): runs everywhere, and says what is right."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..plan.work import Work
from .base import Kernel, band

#: Query rows per call, so that the scores of a long block do not have to exist at once.
ROWS = 1024


class Reference(Kernel):
    """softmax(scale * q k^T) v, written out. Any dtype, any head dims, any device."""

    name = "reference"

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        pass

    def split(self, work: Work) -> Iterator[Work]:
        for few in work.batches(ROWS // len(work.q)):
            for first in range(0, len(few.q), ROWS):
                yield few.narrow((first, min(first + ROWS, len(few.q))), (0, few.keys))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = _scores(q, k, work, scale)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        return weights @ _expand(v, q.shape[1]), lse

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
        grad, out = _wide(grad), _wide(out)
        weights = (_scores(q, k, work, scale) - lse.unsqueeze(-1)).exp()
        delta = (grad * out).sum(-1, keepdim=True)
        scores = weights * (grad @ _expand(v, q.shape[1]).mT - delta) * scale
        dq = scores @ _expand(k, q.shape[1])
        dk, dv = scores.mT @ _wide(q), weights.mT @ grad
        kv_heads = k.shape[1]
        return dq, dk.unflatten(1, (kv_heads, -1)).sum(2), dv.unflatten(1, (kv_heads, -1)).sum(2)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _expand(x: torch.Tensor, heads: int) -> torch.Tensor:
    return _wide(x).repeat_interleave(heads // x.shape[1], 1)


def _scores(q: torch.Tensor, k: torch.Tensor, work: Work, scale: float) -> torch.Tensor:
    scores = _wide(q) @ _expand(k, q.shape[1]).mT * scale
    if work.dense:
        return scores
    return scores.masked_fill(~band(len(work.q), work.keys, work.lo, work.hi, q.device), -torch.inf)
