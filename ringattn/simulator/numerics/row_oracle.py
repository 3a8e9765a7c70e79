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

    q, k, v are this rank's shards, `positions` [n] their global positions. Under one maximum for all ranks, every
    rank sums exp(logit - maximum) v and exp(logit - maximum) over its own keys, by the pattern's dense mask row; the
    ranks then add these sums.
    """
    batch, heads, _, width = q.shape
    group = heads // k.shape[1]
    place = places(rows, positions)
    query = torch.zeros(batch, heads, len(rows), width, dtype=torch.float64, device="cpu")
    for i, row in enumerate(rows):
        if row in place:
            query[:, :, i] = q[:, :, place[row]].double().cpu()
    reduce(query, False)
    top = torch.full((batch, heads, len(rows)), -torch.inf, dtype=torch.float64, device="cpu")
    total = torch.zeros(batch, heads, len(rows), v.shape[-1] + 1, dtype=torch.float64, device="cpu")
    parts = [slice(first, first + KEYS) for first in range(0, len(positions), KEYS)]

    def seen(h: int) -> torch.Tensor:
        """How often each row of head h sees each local key."""
        return torch.from_numpy(np.stack([pattern.row_mask(row, tokens, h, heads)[positions] for row in rows]))

    def scores(h: int, part: slice) -> torch.Tensor:
        return query[:, h] @ k[:, h // group, part].double().cpu().mT * scale

    for h in range(heads if parts else 0):
        weights = seen(h)
        for part in parts:
            highest = scores(h, part).masked_fill(weights[:, part] == 0, -torch.inf).amax(-1)
            top[:, h] = torch.maximum(top[:, h], highest)
    reduce(top, True)
    safe = top.masked_fill(top == -torch.inf, 0.0)
    for h in range(heads if parts else 0):
        weights = seen(h)
        for part in parts:
            shares = (scores(h, part) - safe[:, h, :, None]).exp() * weights[:, part].double()
            shares = torch.where(weights[:, part] == 0, 0.0, shares)
            total[:, h, :, :-1] += shares @ v[:, h // group, part].double().cpu()
            total[:, h, :, -1] += shares.sum(-1)
    reduce(total, False)
    denominator = total[..., -1:]
    return torch.where(denominator == 0, 0.0, total[..., :-1] / denominator.clamp(min=torch.finfo(torch.float64).tiny))


def oracle_rows_alone(
    pattern: Pattern, rows: list[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """As `oracle_rows`, of whole tensors in one process, with the scale of outputs that the pattern has."""
    _, heads, tokens, head_dim = q.shape
    bound = pattern.bind(heads, tokens)
    exact = oracle_rows(bound, tokens, rows, head_dim**-0.5, np.arange(tokens), q, k, v, lambda x, most: None)
    return exact * bound.output_scale
