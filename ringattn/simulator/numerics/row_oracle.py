"""Oracle of some output rows in fp64, without tiles, kernels or merges of the runtime."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...pattern import Pattern

#: Keys that are converted to fp64 at a time.
KEYS = 1 << 16

#: Reduces a float64 tensor over the ranks in place: the maximum where the flag is True, else the sum.
Reduce = Callable[[torch.Tensor, bool], None]


def sampled_rows(tokens: int, count: int, seed: int = 0) -> list[int]:
    """`count` distinct positions, the first and the last position among them."""
    if count <= 0 or not tokens:
        return []
    inner = np.random.default_rng(seed).permutation(tokens)
    return sorted({0, tokens - 1, *inner[: max(count - 2, 0)].tolist()})[:count]


def places(rows: list[int], positions: np.ndarray) -> dict[int, int]:
    """For each of `rows` that is among `positions`, its index there."""
    return {int(positions[i]): int(i) for i in np.flatnonzero(np.isin(positions, rows))}


def oracle_rows(
    pattern: Pattern, tokens: int, rows: list[int], scale: float, positions: np.ndarray,
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reduce: Reduce,
) -> torch.Tensor:  # fmt: skip
    """Attention outputs of the query positions `rows`, [B, H, len(rows), Dv] in fp64, over the keys of all ranks.

    q, k, v are this rank's shards, `positions` [n] their global positions. Every rank attends its own keys by the
    pattern's dense mask row; the ranks then add their outputs, weighted by their log-sum-exps.
    """
    batch, heads, _, width = q.shape
    place, group = places(rows, positions), heads // k.shape[1]
    query = torch.zeros(batch, heads, len(rows), width, dtype=torch.float64, device="cpu")
    for i, row in enumerate(rows):
        if row in place:
            query[:, :, i] = q[:, :, place[row]].double().cpu()
    reduce(query, False)
    out = query.new_zeros(*query.shape[:3], v.shape[-1])
    lse = query.new_full(query.shape[:3], -torch.inf)
    for h in range(heads if len(positions) else 0):
        times = torch.from_numpy(np.stack([pattern.row_mask(row, tokens, h, heads)[positions] for row in rows]))
        for first in range(0, len(positions), KEYS):
            part = slice(first, first + KEYS)
            keys, values = (x[:, h // group, part].double().cpu() for x in (k, v))
            logits = query[:, h] @ keys.mT * scale + times[:, part].double().log()
            before, now = lse[:, h], torch.logaddexp(lse[:, h], logits.logsumexp(-1))
            base = now.where(now > -torch.inf, 0.0)[..., None]
            out[:, h] = out[:, h] * (before[..., None] - base).exp() + (logits - base).exp() @ values
            lse[:, h] = now
    top = lse.clone()
    reduce(top, True)
    share = (lse - top.where(top > -torch.inf, 0.0)).exp()[..., None]
    total = torch.cat((out * share, share), -1)
    reduce(total, False)
    return total[..., :-1] / total[..., -1:].clamp(min=torch.finfo(torch.float64).tiny)


def oracle_rows_alone(
    pattern: Pattern, rows: list[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """As `oracle_rows`, of whole tensors in one process, with the scale of outputs that the pattern has."""
    _, heads, tokens, head_dim = q.shape
    bound = pattern.bind(heads, tokens)
    exact = oracle_rows(bound, tokens, rows, head_dim**-0.5, np.arange(tokens), q, k, v, lambda x, most: None)
    return exact * bound.output_scale
