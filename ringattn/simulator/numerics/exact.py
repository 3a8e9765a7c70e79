"""Oracles for many rows and their gradients, in fp64, over the keys (or queries) that a pattern gives them.

`exact_rows` uses only the inputs: one softmax over all keys of a row, collected from the tiles of the pattern, and dQ
of the row. `exact_keys` gives dK and dV of key rows. It needs the log-sum-exp and the output of every query row that
sees the key, and takes those of the run, which `exact_rows` checks on sampled rows. Neither oracle asks the plan's
schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...pattern import Pattern, Tile
from .source import RowSource

#: Keys, or queries, of a tile that are computed at a time.
AT_A_TIME = 1 << 12


@dataclass(frozen=True)
class ExactRows:
    """Attention of some query rows: out [H, rows, Dv], lse [H, rows], dq [H, rows, D]; fp64."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor


@dataclass(frozen=True)
class ExactQueries:
    """Query rows that were executed, by ascending position: q [H, rows, D], grad [H, rows, Dv] (that of the rows' sums
    before the pattern's scale), lse and delta = rowsum(grad * out) [H, rows]; fp64."""

    positions: np.ndarray
    q: torch.Tensor
    grad: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor


def exact_rows(pattern: Pattern, source: RowSource, rows: Sequence[range], scale: float) -> ExactRows:
    """Attention of the query positions `rows` over all keys that each of them sees, and the gradient of each query."""
    bound = pattern.bind(source.heads, source.tokens)
    q, grad = (torch.cat([source.rows(name, r)[0] for r in rows], 1).double() for name in ("q", "grad"))
    grad = grad * bound.output_scale
    shape = q.shape[:2]
    top, norm = q.new_full(shape, -torch.inf), q.new_zeros(shape)
    # For each row the sums over its keys of p v, p (grad . v) k and p k, where p / norm is the weight of a key.
    values, pulled, mean = torch.zeros_like(grad), torch.zeros_like(q), torch.zeros_like(q)
    first = 0
    for r in rows:
        for tile in bound.tiles(r, range(source.tokens), range(source.heads)):
            heads = torch.tensor(list(tile.heads), device="cpu")[:, None]
            kv = heads[:, 0] // (source.heads // source.kv_heads)
            at = first + (_places(tile.q) - r.start) // r.step
            for part in _parts(tile.k):
                k, v = (source.rows(name, part)[0].double()[kv] for name in ("k", "v"))
                logits = scale * q[heads, at] @ k.mT
                logits.masked_fill_(_hidden(tile, _places(tile.q), _places(part)), -torch.inf)
                before, now = top[heads, at], torch.maximum(top[heads, at], logits.amax(-1))
                base = now.where(now > -torch.inf, 0.0)
                keep, p = (before - base).exp(), (logits - base[..., None]).exp()
                top[heads, at], norm[heads, at] = now, norm[heads, at] * keep + p.sum(-1)
                given = p * (grad[heads, at] @ v.mT)
                for total, more in ((values, p @ v), (pulled, given @ k), (mean, p @ k)):
                    total[heads, at] = total[heads, at] * keep[..., None] + more
        first += len(r)
    share = torch.where(norm > 0, 1 / norm, 0.0)[..., None]
    out = values * share
    delta = (grad * out).sum(-1, keepdim=True)
    return ExactRows(out * bound.output_scale, top + norm.log(), scale * share * (pulled - delta * mean))


def exact_keys(
    pattern: Pattern, source: RowSource, rows: Sequence[range], scale: float, seen_by: ExactQueries
) -> tuple[torch.Tensor, torch.Tensor]:
    """dk [K, rows, D] and dv [K, rows, Dv] of the key positions `rows`, from all queries that see each of them; NaN
    where one of these queries is not among `seen_by`."""
    bound, group = pattern.bind(source.heads, source.tokens), source.heads // source.kv_heads
    k, v = (torch.cat([source.rows(name, r)[0] for r in rows], 1).double() for name in ("k", "v"))
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    first = 0
    for r in rows:
        for tile in bound.tiles(range(source.tokens), r, range(source.heads)):
            heads = torch.tensor(list(tile.heads), device="cpu")
            kv, at = heads // group, first + (_places(tile.k) - r.start) // r.step
            y, z = (x[kv[:, None], at] for x in (k, v))
            for part in _parts(tile.q):
                q, grad, lse, delta = _of_queries(seen_by, part, heads)
                p = (scale * q @ y.mT - lse[..., None]).exp()
                ds = p * (grad @ z.mT - delta[..., None])
                hidden = _hidden(tile, _places(part), _places(tile.k))
                for total, other, x in ((dk, q * scale, ds), (dv, grad, p)):
                    more = x.masked_fill_(hidden, 0.0).mT @ other
                    total.index_put_((kv[:, None], at), more, accumulate=True)
        first += len(r)
    return dk, dv


def _of_queries(known: ExactQueries, part: range, heads: torch.Tensor) -> list[torch.Tensor]:
    """q, grad, lse and delta of the positions `part`; the lse of an unknown position is NaN."""
    place = np.arange(part.start, part.stop, part.step)
    index = np.searchsorted(known.positions, place).clip(max=len(known.positions) - 1)
    some: slice | torch.Tensor = torch.from_numpy(index)
    if (np.diff(index) == 1).all():
        some = slice(int(index[0]), int(index[-1]) + 1)  # a view, where an index would copy
    q, grad, lse, delta = (x[heads][:, some] for x in (known.q, known.grad, known.lse, known.delta))
    missing = torch.from_numpy(known.positions[index] != place)
    return [q, grad, lse.masked_fill(missing, torch.nan), delta]


def _parts(r: range) -> Iterator[range]:
    for start in range(0, len(r), AT_A_TIME):
        yield r[start : start + AT_A_TIME]


def _places(r: range) -> torch.Tensor:
    return torch.arange(r.start, r.stop, r.step, device="cpu")


def _hidden(tile: Tile, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Bool [queries, keys]: the pairs of these rows that are outside the band of the tile."""
    away = q[:, None] - k
    hidden = torch.zeros_like(away, dtype=torch.bool)
    if tile.lo is not None:
        hidden |= away < tile.lo
    if tile.hi is not None:
        hidden |= away > tile.hi
    return hidden
