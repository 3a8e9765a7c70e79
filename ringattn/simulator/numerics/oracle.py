"""The oracle: attention of single rows over all their keys, in fp64, without a schedule, an executor or merges.

For generated inputs, `exact_rows` and `exact_keys` take the visible pairs from the pattern's tiles, and
`count_mask_errors` checks the tiles against the dense mask of one row. For given tensors, `oracle_rows` uses dense
masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...pattern import Pattern, Tile
from .source import RAMP, RowSource, chunks

#: (head, key) pairs of one row that are compared with its mask.
MASK_CELLS = 1 << 20
#: Keys converted to fp64 at a time.
KEYS = 1 << 16

#: Reduces a float64 tensor over all ranks in place: the maximum if the flag is True, else the sum.
Reduce = Callable[[torch.Tensor, bool], None]
#: Keys (or queries) of a tile computed at a time.
AT_A_TIME = 1 << 12


@dataclass(frozen=True)
class ExactRows:
    """Exact results of some query rows: out [H, rows, Dv], lse [H, rows], dq [H, rows, D]; fp64."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor


@dataclass(frozen=True)
class ExactQueries:
    """Query rows in ascending order of position: q [H, rows, D], grad [H, rows, Dv] (of the output before the pattern's
    output scale), lse and delta = rowsum(grad * out) [H, rows]; fp64."""

    positions: np.ndarray
    q: torch.Tensor
    grad: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor


def exact_rows(pattern: Pattern, source: RowSource, rows: Sequence[range], scale: float) -> ExactRows:
    """Compute exact attention and dq of the query positions `rows`, over all keys that they see.

    In this module `pattern` is already bound to the heads and positions.
    """
    q, grad = (source.join(name, rows)[0].double() for name in ("q", "grad"))
    grad = grad * pattern.output_scale
    shape = q.shape[:2]
    top, norm = q.new_full(shape, -torch.inf), q.new_zeros(shape)
    # For each row: the sums over its keys of p v, p (grad . v) k and p k, where p / norm is the weight of a key.
    values, pulled, mean = torch.zeros_like(grad), torch.zeros_like(q), torch.zeros_like(q)
    first = 0
    for r in rows:
        for tile in (tile for keys in source.keys for tile in pattern.tiles(r, keys, range(source.heads))):
            heads = torch.tensor(list(tile.heads), device="cpu")[:, None]
            kv = heads[:, 0] // (source.heads // source.kv_heads)
            at = first + (_places(tile.q) - r.start) // r.step
            for part, times, total in _classes(tile, source.period):
                k, v = (source.rows(name, part)[0].double()[kv] for name in ("k", "v"))
                logits = scale * q[heads, at] @ k.mT
                logits.masked_fill_(times == 0, -torch.inf)
                before, now = top[heads, at], torch.maximum(top[heads, at], logits.amax(-1))
                base = now.where(now > -torch.inf, 0.0)
                keep, p = (before - base).exp(), (logits - base[..., None]).exp()
                more = p * times
                top[heads, at], norm[heads, at] = now, norm[heads, at] * keep + more.sum(-1)
                value = more @ v
                value[..., RAMP] = (p * total).sum(-1) * source.unit  # v[..., RAMP] holds positions
                given = more * (grad[heads, at] @ v.mT)
                for sums, x in ((values, value), (pulled, given @ k), (mean, more @ k)):
                    sums[heads, at] = sums[heads, at] * keep[..., None] + x
        first += len(r)
    share = torch.where(norm > 0, 1 / norm, 0.0)[..., None]
    out = values * share
    delta = (grad * out).sum(-1, keepdim=True)
    return ExactRows(out * pattern.output_scale, top + norm.log(), scale * share * (pulled - delta * mean))


def exact_keys(
    pattern: Pattern, source: RowSource, rows: Sequence[range], scale: float, seen_by: ExactQueries
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the exact gradients of the key positions `rows`: (dk [K, rows, D], dv [K, rows, Dv]).

    They are sums over all queries that see a key; NaN for a key that a query outside `seen_by` sees.
    """
    group = source.heads // source.kv_heads
    k, v = (source.join(name, rows)[0].double() for name in ("k", "v"))
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    first = 0
    for r in rows:
        for tile in (tile for q in source.queries for tile in pattern.tiles(q, r, range(source.heads))):
            heads = torch.tensor(list(tile.heads), device="cpu")
            kv, at = heads // group, first + (_places(tile.k) - r.start) // r.step
            y, z = (x[kv[:, None], at] for x in (k, v))
            for part in chunks(tile.q, AT_A_TIME):
                q, grad, lse, delta = _of_queries(seen_by, part, heads)
                p = (scale * q @ y.mT - lse[..., None]).exp()
                ds = p * (grad @ z.mT - delta[..., None])
                away = _places(part)[:, None] - _places(tile.k)
                hidden = torch.zeros_like(away, dtype=torch.bool)
                if tile.lo is not None:
                    hidden |= away < tile.lo
                if tile.hi is not None:
                    hidden |= away > tile.hi
                for total, other, x in ((dk, q * scale, ds), (dv, grad, p)):
                    more = x.masked_fill_(hidden, 0.0).mT @ other
                    total.index_put_((kv[:, None], at), more, accumulate=True)
        first += len(r)
    return dk, dv


def _of_queries(known: ExactQueries, part: range, heads: torch.Tensor) -> list[torch.Tensor]:
    """[q, grad, lse, delta] of the positions `part`; lse is NaN for positions that are not in `known`."""
    place = np.arange(part.start, part.stop, part.step)
    index = np.searchsorted(known.positions, place).clip(max=len(known.positions) - 1)
    some: slice | torch.Tensor = torch.from_numpy(index)
    if (np.diff(index) == 1).all():
        some = slice(int(index[0]), int(index[-1]) + 1)  # a view instead of a copy
    q, grad, lse, delta = (x[heads][:, some] for x in (known.q, known.grad, known.lse, known.delta))
    missing = torch.from_numpy(known.positions[index] != place)
    return [q, grad, lse.masked_fill(missing, torch.nan), delta]


def _classes(tile: Tile, period: int | None) -> Iterator[tuple[range, torch.Tensor, torch.Tensor]]:
    """Yield (keys, number of keys like each that a row sees, sum of their positions), the last two [rows, keys].

    Two keys are alike if their indices in the tile are equal modulo the period; without a period, no two are.
    """
    rows = _places(tile.q)[:, None]
    for part in chunks(tile.k, AT_A_TIME) if period is None else [tile.k]:
        # Row x sees indices low .. high - 1 of `part`: the keys y with lo <= x - y <= hi.
        low, high = torch.zeros_like(rows), torch.full_like(rows, len(part))
        if tile.hi is not None:
            low = (-((part.start + tile.hi - rows) // part.step)).clamp(min=0)
        if tile.lo is not None:
            high = ((rows - tile.lo - part.start) // part.step + 1).clamp(max=len(part))
        count = min(len(part), period or len(part))
        place = torch.arange(count, device="cpu")
        first = low + (place - low) % count
        times = (-((first - high) // count)).clamp(min=0)
        total = times * (part.start + part.step * first) + part.step * count * (times * (times - 1) // 2)
        yield part[:count], times.double(), total.double()


def _places(r: range) -> torch.Tensor:
    return torch.arange(r.start, r.stop, r.step, device="cpu")


def count_mask_errors(pattern: Pattern, source: RowSource, position: int, seed: int = 0) -> tuple[int, int]:
    """For one query row in all heads: (keys compared, keys for which `tiles` and `visible` disagree)."""
    heads, end = source.heads, source.end
    per_head = max(MASK_CELLS // heads, 1)
    random = np.random.default_rng(seed)
    compared = wrong = 0
    for head in range(heads):
        row, one = range(position, position + 1), range(head, head + 1)
        tiles = (tile for run in source.keys for tile in pattern.tiles(row, run, one))
        seen = [part.k for tile in tiles for part in tile.refine()]  # a position occurs once per branch
        if end <= per_head:
            keys = np.arange(end)
        else:
            ends = np.array([end for r in seen[:per_head] for end in (r.start, r[-1])], dtype=np.int64)
            beside = (ends[:, None] + np.arange(-2, 3)).ravel()
            keys = np.unique(np.concatenate([beside.clip(0, end - 1), random.integers(end, size=per_head)]))
        keys = keys[_count_ranges(source.keys, keys) > 0]
        by_mask = np.asarray(pattern.visible(np.array([position]), keys, head, end)).astype(np.int64)
        wrong += int((np.broadcast_to(by_mask, keys.shape) != _count_ranges(seen, keys)).sum())
        compared += len(keys)
    return compared, wrong


def _count_ranges(ranges: Sequence[range], keys: np.ndarray) -> np.ndarray:
    """The number of ranges that contain each key, int64 [keys]."""
    runs = [r for r in ranges if r.step == 1]
    starts = np.sort(np.array([r.start for r in runs], dtype=np.int64))
    stops = np.sort(np.array([r.stop for r in runs], dtype=np.int64))
    times = np.searchsorted(starts, keys, "right") - np.searchsorted(stops, keys, "right")
    for r in ranges:
        if r.step > 1:
            times += (keys >= r.start) & (keys < r.stop) & ((keys - r.start) % r.step == 0)
    return times


def sampled_rows(tokens: int, count: int) -> list[int]:
    """`count` distinct positions, including the first and the last."""
    if count <= 0 or not tokens:
        return []
    inner = np.random.default_rng(0).permutation(tokens)
    return sorted({0, tokens - 1, *inner[: max(count - 2, 0)].tolist()})[:count]


def places(rows: list[int], positions: np.ndarray) -> dict[int, int]:
    """For each of `rows` that occurs in `positions`, its index there, as a dict."""
    return {int(positions[i]): int(i) for i in np.flatnonzero(np.isin(positions, rows))}


def oracle_rows(
    pattern: Pattern, tokens: int, rows: list[int], scale: float, positions: np.ndarray,
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reduce: Reduce,
) -> torch.Tensor:  # fmt: skip
    """Compute attention of the query positions `rows` over the keys of all ranks: fp64 [B, H, len(rows), Dv].

    q, k, v are this rank's shards, and `positions` [n] their global positions. Each rank attends its own keys with rows
    of the dense mask; then the outputs of all ranks are summed, weighted by their log-sum-exps, with `reduce`.
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
    """Compute attention of the query positions `rows` from whole tensors in one process, see `oracle_rows`.

    Unlike there, the pattern's output scale is applied.
    """
    _, heads, tokens, head_dim = q.shape
    bound = pattern.bind(heads, tokens)
    exact = oracle_rows(bound, tokens, rows, head_dim**-0.5, np.arange(tokens), q, k, v, lambda x, most: None)
    return exact * bound.output_scale
