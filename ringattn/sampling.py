"""Exact rows in fp64, to compare a result with: no tiles, no kernel and no merge of the runtime has a part in it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .pattern import Pattern

#: Sums a float64 tensor over ranks, or takes the maximum where told so; in place.
Reduce = Callable[[torch.Tensor, bool], None]


def sampled_rows(tokens: int, count: int, seed: int = 0) -> list[int]:
    """`count` distinct positions, the first and the last among them."""
    if count <= 0 or not tokens:
        return []
    inner = np.random.default_rng(seed).permutation(tokens)
    return sorted({0, tokens - 1, *inner[: max(count - 2, 0)].tolist()})[:count]


def oracle_rows(
    pattern: Pattern, tokens: int, rows: list[int], scale: float, positions: np.ndarray,
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reduce: Reduce,
) -> torch.Tensor:  # fmt: skip
    """Attention outputs of the query positions `rows`, [B, H, len(rows), Dv] in fp64, over the keys of all ranks.

    q, k, v are this rank's shards, `positions` [n] their global positions. Every rank softmaxes its own keys
    with the pattern's dense mask row; ranks meet in a sum of numerators and denominators under one maximum.
    """
    batch, heads, _, width = q.shape
    group = heads // k.shape[1]
    place = {int(p): i for i, p in enumerate(positions)}
    query = torch.zeros(batch, heads, len(rows), width, dtype=torch.float64)
    for i, row in enumerate(rows):
        if row in place:
            query[:, :, i] = q[:, :, place[row]].double().cpu()
    reduce(query, False)
    weights = torch.zeros(heads, len(rows), len(positions), dtype=torch.float64)
    for h in range(heads):
        for i, row in enumerate(rows):
            weights[h, i] = torch.from_numpy(pattern.row_mask(row, tokens, h, heads)[positions]).double()
    top = torch.full((batch, heads, len(rows)), -torch.inf, dtype=torch.float64)
    total = torch.zeros(batch, heads, len(rows), v.shape[-1] + 1, dtype=torch.float64)
    if len(positions):
        for h in range(heads):
            scores = query[:, h] @ k[:, h // group].double().cpu().mT * scale
            top[:, h] = scores.masked_fill(weights[h] == 0, -torch.inf).amax(-1)
    reduce(top, True)
    if len(positions):
        safe = top.masked_fill(top == -torch.inf, 0.0)
        for h in range(heads):
            scores = query[:, h] @ k[:, h // group].double().cpu().mT * scale - safe[:, h, :, None]
            shares = torch.where(weights[h] == 0, 0.0, scores.exp() * weights[h])
            total[:, h, :, :-1] = shares @ v[:, h // group].double().cpu()
            total[:, h, :, -1] = shares.sum(-1)
    reduce(total, False)
    denominator = total[..., -1:]
    return torch.where(denominator == 0, 0.0, total[..., :-1] / denominator.clamp(min=torch.finfo(torch.float64).tiny))
