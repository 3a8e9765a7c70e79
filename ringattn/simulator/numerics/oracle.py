"""Oracles without a schedule, an executor or a merge: one softmax over all keys of a row, in fp64 or wider.

The tiles of the pattern tell which keys one row sees (`exact_row`), or its dense mask tells it for all rows
(`exact_ranks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...kernels.base import Kernel
from ...layout.regular import Layout
from ...pattern import Pattern
from ...plan.work import Work
from .source import RAMP, RowSource

#: The most keys of a row that `one_call` copies into one tensor.
GATHERED = 1 << 20
#: Pairs of a head and a key that are compared with the mask of a row.
MASK_CELLS = 1 << 20
#: Rows of the largest dense mask.
DENSE = 8192


@dataclass(frozen=True)
class Row:
    """Attention of one query position: out [H, Dv] and lse [H], fp64."""

    out: np.ndarray
    lse: np.ndarray


def exact_row(pattern: Pattern, source: RowSource, position: int, scale: float) -> Row:
    """Attention of one row over all keys that it sees; where K and V are periodic, over one period with
    multiplicities."""
    bound = pattern.bind(source.heads, source.tokens)
    query = _numbers(source.rows("q", range(position, position + 1)))[:, 0]
    group = source.heads // source.kv_heads
    out = np.zeros((source.heads, source.value_dim))
    lse = np.full(source.heads, -np.inf)
    for head in range(source.heads):
        seen = _keys(bound, position, source.tokens, head)
        if not seen:
            continue
        k, v, count, total = _read_keys(source, seen, head // group)
        logits = k @ query[head] * np.longdouble(scale)
        top = logits.max()
        shares = np.exp(logits - top)
        norm = (shares * count).sum()
        values = (shares * count) @ v
        values[RAMP] = (shares * total).sum() * np.longdouble(source.unit)
        out[head], lse[head] = values / norm, top + np.log(norm)
    return Row(out * bound.output_scale, lse)


def exact_gradients(
    pattern: Pattern, source: RowSource, rows: Sequence[int], keys: Sequence[int], scale: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dq [H, rows, D] of query positions, and dk [K, keys, D], dv [K, keys, Dv] of key positions, where rows outside
    `rows` have a cotangent of 0. From dS = P * (dO V^T - delta), delta = rowsum(dO * O)."""
    bound, group = pattern.bind(source.heads, source.tokens), source.heads // source.kv_heads
    dq = np.zeros((source.heads, len(rows), source.head_dim))
    dk, dv = (np.zeros((source.kv_heads, len(keys), n)) for n in (source.head_dim, source.value_dim))
    some = [{name: _numbers(source.rows(name, range(p, p + 1)))[:, 0] for name in ("k", "v")} for p in keys]
    for i, row in enumerate(rows):
        truth = exact_row(pattern, source, row, scale)
        query, grad = (_numbers(source.rows(name, range(row, row + 1)))[:, 0] for name in ("q", "grad"))
        for head in range(source.heads):
            seen, kv = _keys(bound, row, source.tokens, head), head // group
            if not seen:
                continue
            k, v, count, _ = _read_keys(source, seen, kv)
            g = grad[head] * bound.output_scale
            delta = (grad[head] * truth.out[head]).sum()
            shares = np.exp(k @ query[head] * np.longdouble(scale) - truth.lse[head])
            dq[head, i] = scale * ((shares * count * (v @ g - delta)) @ k)
            times = bound.visible(np.array([[row]]), np.array([keys]), head, source.tokens)
            times = np.broadcast_to(np.asarray(times), (1, len(keys)))[0]
            for j, one in enumerate(some):
                share = times[j] * np.exp(one["k"][kv] @ query[head] * np.longdouble(scale) - truth.lse[head])
                dk[kv, j] += scale * share * (one["v"][kv] @ g - delta) * query[head]
                dv[kv, j] += share * g
    return dq, dk, dv


def _keys(bound: Pattern, position: int, tokens: int, head: int) -> list[range]:
    """The key positions that a row sees; a position occurs once per branch."""
    row, heads = range(position, position + 1), range(head, head + 1)
    return [part.k for tile in bound.tiles(row, range(tokens), heads) for part in tile.refine()]


def count_mask_errors(pattern: Pattern, tokens: int, heads: int, position: int, seed: int = 0) -> tuple[int, int]:
    """(compared keys, keys that the tiles and `visible` count differently) of one row, over all heads.

    All keys are compared where heads * tokens is at most MASK_CELLS; else the keys beside each end of a run of
    adjacent keys, and random ones.
    """
    bound = pattern.bind(heads, tokens)
    per_head = max(MASK_CELLS // max(heads, 1), 1)
    random = np.random.default_rng(seed)
    compared = wrong = 0
    for head in range(heads):
        seen = _keys(bound, position, tokens, head)
        if tokens <= per_head:
            keys = np.arange(tokens)
        else:
            ends = np.array([end for r in seen[:per_head] for end in (r.start, r[-1])], dtype=np.int64)
            beside = (ends[:, None] + np.arange(-2, 3)).ravel()
            keys = np.unique(np.concatenate([beside.clip(0, tokens - 1), random.integers(tokens, size=per_head)]))
        by_mask = np.asarray(bound.visible(np.array([position]), keys, head, tokens)).astype(np.int64)
        wrong += int((np.broadcast_to(by_mask, keys.shape) != _count_ranges(seen, keys)).sum())
        compared += len(keys)
    return compared, wrong


def _count_ranges(ranges: Sequence[range], keys: np.ndarray) -> np.ndarray:
    """In how many of the ranges each key is, int64 [keys]."""
    runs = [r for r in ranges if r.step == 1]
    starts = np.sort(np.array([r.start for r in runs], dtype=np.int64))
    stops = np.sort(np.array([r.stop for r in runs], dtype=np.int64))
    times = np.searchsorted(starts, keys, "right") - np.searchsorted(stops, keys, "right")
    for r in ranges:
        if r.step > 1:
            times += (keys >= r.start) & (keys < r.stop) & ((keys - r.start) % r.step == 0)
    return times


def _read_keys(source: RowSource, seen: Sequence[range], head: int) -> tuple[np.ndarray, ...]:
    """(k, v, multiplicity, sum of positions) of keys: one entry per key, or per class of positions modulo the period
    where there are more keys than that."""
    period = source.period
    if period is None or sum(map(len, seen)) <= period:
        k, v = (np.concatenate([_numbers(source.rows(name, r))[head] for r in seen]) for name in ("k", "v"))
        place = np.concatenate([np.arange(r.start, r.stop, r.step) for r in seen])
        return k, v, np.ones(len(k), dtype=np.longdouble), place.astype(np.longdouble)
    k, v = (_numbers(source.rows(name, range(period)))[head] for name in ("k", "v"))
    count, total = np.zeros(period, dtype=np.int64), np.zeros(period, dtype=np.int64)
    for r in seen:
        # Members i, i + period, .. of an arithmetic progression fall into one class.
        i = np.arange(min(period, len(r)))
        turns = (len(r) - 1 - i) // period + 1
        place = (r.start + i * r.step) % period
        sums = turns * (r.start + i * r.step) + r.step * period * (turns * (turns - 1) // 2)
        np.add.at(count, place, turns)
        np.add.at(total, place, sums)
    return k, v, count.astype(np.longdouble), total.astype(np.longdouble)


def _numbers(x: torch.Tensor) -> np.ndarray:
    return x[0].double().numpy().astype(np.longdouble)


def one_call(kernel: Kernel, pattern: Pattern, source: RowSource, position: int, scale: float) -> torch.Tensor | None:
    """out [H, Dv] of one row by one kernel call per head, in the dtype of the source, as a single device computes it.
    None where the row sees no key, or more than `GATHERED`."""
    bound, outs = pattern.bind(source.heads, source.tokens), []
    query = source.rows("q", range(position, position + 1))
    for head in range(source.heads):
        seen, kv = _keys(bound, position, source.tokens, head), head * source.kv_heads // source.heads
        if not 0 < sum(map(len, seen)) <= GATHERED:
            return None
        k, v = (torch.cat([source.rows(name, r)[:, kv : kv + 1] for r in seen], 2) for name in ("k", "v"))
        work = Work(range(1), range(1), range(1), (range(k.shape[2]),))
        outs.append(kernel.forward(query[:, head : head + 1], k, v, work, scale)[0][0, :, 0])
    return torch.cat(outs) * bound.output_scale


def exact_ranks(
    pattern: Pattern, source: RowSource, layout: Layout, ranks: Sequence[int], scale: float
) -> tuple[np.ndarray, torch.Tensor, tuple[torch.Tensor, ...]]:
    """(positions, out, (dq, dk, dv)) of ranks that see only each other, in the order of the ranks: dense fp64 attention
    under the mask of the pattern, by autograd, with the cotangent of the source."""
    places = np.concatenate([layout.positions(rank) for rank in ranks])
    runs = [r for rank in ranks for r in layout.shard(rank)]
    q, k, v, grad = (
        torch.cat([source.rows(name, r) for r in runs], 2).double() for name in ("q", "k", "v", "grad")
    )  # fmt: skip
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    bound, group = pattern.bind(source.heads, source.tokens), source.heads // source.kv_heads
    outs = []
    for head in range(source.heads):
        seen = np.asarray(bound.visible(places[:, None], places[None, :], head, source.tokens))
        mask = torch.from_numpy(np.broadcast_to(seen, (len(places), len(places))).astype(np.float64))
        some = mask.sum(-1, keepdim=True) > 0
        bias = mask.log().where(some, torch.zeros((), dtype=torch.float64, device="cpu"))
        weights = (q[0, head] @ k[0, head // group].T * scale + bias).softmax(-1) * some
        outs.append(weights @ v[0, head // group])
    out = torch.stack(outs)[None] * bound.output_scale
    grads = torch.autograd.grad((out * grad).sum(), (q, k, v))
    return places, out.detach(), grads
