"""Packed batches under layout="balanced": random ones, their dense fp64 attention, and what each rank must receive."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import ringattn as ra
from ringattn import Causal, Documents, Layout, Pattern, Window

#: Batches of documents.md: lengths by name.
FORTY_THREE = [
    2381, 1747, 4416, 2322, 1076, 3160, 9792, 6381, 880, 448, 969, 2152, 125, 1575, 459, 850, 1065, 1401, 3356, 7155,
    1755, 10555, 921, 3122, 6055, 2292, 839, 677, 1182, 2667, 609, 1593, 1691, 3919, 2649, 3137, 934, 1752, 5246, 12292,
    452, 12598, 2425,
]  # fmt: skip


def lognormal(tokens: int, seed: int, mu: float = 7.5, sigma: float = 1.2) -> list[int]:
    source, lengths = np.random.default_rng(seed), list[int]()
    while sum(lengths) < tokens:
        lengths.append(min(int(source.lognormal(mu, sigma)) + 1, tokens - sum(lengths)))
    return lengths


def half_and_short(tokens: int) -> list[int]:
    source, lengths = np.random.default_rng(7), [tokens // 2]
    while sum(lengths) < tokens:
        lengths.insert(
            int(source.integers(len(lengths) + 1)), min(int(source.integers(50, 1500)), tokens - sum(lengths))
        )
    return lengths


BATCHES: dict[str, list[int]] = {
    "43": FORTY_THREE,
    **{f"lognormal {seed}": lognormal(1 << 17, seed) for seed in range(3)},
    "half": half_and_short(1 << 17),
    "equal": [2048] * 64,
    "a hundred equal": [1310] * 99 + [1382],
    "one": [1 << 17],
    "many of 32": [32] * 4000,
    "empty and single": [0, 1] * 1500 + [20000, 5000] + [1, 0] * 1000 + [31000, 0, 1, 900],
}


class Spread(NamedTuple):
    """Tokens and pairs of the busiest rank over the mean, and the rows that all and that the busiest rank receive."""

    tokens: float
    pairs: float
    received: int
    busiest: int


def spread(lengths: list[int], layout: Layout) -> Spread:
    """Counted row by row: row p of a document attends its p + 1 first rows."""
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    place = np.arange(layout.tokens)
    tokens, pairs, received = [], [], []
    for rank in range(layout.ranks):
        mine = layout.positions(rank)
        ends = np.zeros(
            layout.tokens + 1, dtype=np.int64
        )  # a row needs all rows from the start of its document to itself
        np.add.at(ends, starts[mine], 1)
        np.add.at(ends, mine + 1, -1)
        needed = np.cumsum(ends[:-1]) > 0
        needed[mine] = False
        tokens.append(len(mine))
        pairs.append(int((place - starts + 1)[mine].sum()))
        received.append(int(needed.sum()))
    mean_tokens, mean_pairs = np.mean(tokens), np.mean(pairs)
    return Spread(max(tokens) / mean_tokens, max(pairs) / mean_pairs, sum(received), max(received))


def bound(lengths: list[int], ranks: int, percent: int = 103) -> int:
    """A lower bound of all received rows where no rank has more than `percent` of the mean tokens and pairs.

    Row x of a document is needed by all ranks with later rows of it, and the rows from x on fill at least
    max(pairs / most pairs, tokens / most tokens) ranks, of which one may hold x itself.
    """
    tokens, pairs = sum(lengths), sum(x * (x + 1) // 2 for x in lengths)
    most_tokens, most_pairs = percent * tokens / 100 / ranks, percent * pairs / 100 / ranks
    total = 0
    for length in lengths:
        x = np.arange(length, dtype=np.int64)
        later = length * (length + 1) // 2 - x * (x + 1) // 2
        holders = np.maximum(np.ceil(later / most_pairs - 1e-9), np.ceil((length - x) / most_tokens - 1e-9))
        total += int((holders - 1).sum())
    return total


def draw(seed: int) -> tuple[int, list[Pattern], dict[str, Any]]:
    """(ranks, the masks of a model's layers, arguments of make_layout besides the name)."""
    source = random.Random(seed)
    ranks, tokens, lengths = source.randint(1, 9), source.choice([1, 2, 5, 17, 64, 97, 200, 333]), list[int]()
    while sum(lengths) < tokens:
        length = source.choice([0, 1, 1, 2, 3, 8, 30, 100, int(source.lognormvariate(3, 1.3))])
        lengths.append(min(length, tokens - sum(lengths)))
    documents = Documents([lengths, [tokens]]) if source.random() < 0.2 else Documents(lengths)
    kinds: list[Pattern] = [
        Causal() & documents, documents, Causal() & Window(source.randint(1, 40)) & documents,
        Window(source.randint(1, 20), source.randint(0, 9)) & documents, Causal(), Causal() & Window(7),
    ]  # fmt: skip
    masks = source.sample(kinds, source.randint(1, 3))
    weights = [1, *(source.randint(0, 3) for _ in masks[1:])]
    return ranks, masks, {"tokens": tokens, "patterns": masks, "weights": weights, "heads": 2}


def errors(seed: int, ranks: int | None = None, rank: int = 0) -> list[float]:
    """Largest errors of out and gradients of each mask, on virtual ranks, or on `rank` of real ones."""
    drawn, masks, arguments = draw(seed)
    layout = ra.make_layout("balanced", ranks=ranks or drawn, **arguments)
    positions = np.concatenate([layout.positions(r) for r in range(layout.ranks)])
    assert sorted(positions.tolist()) == list(range(layout.tokens))
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 2, 2, layout.tokens, 4, dtype=torch.float64, generator=source)
    found = []
    for mask in masks:
        rows = [torch.from_numpy((mask if mask.rows is None else mask.row(i)).mask(layout.tokens, 2)) for i in range(2)]
        whole = [t.clone().requires_grad_() for t in x[:3]]
        right = scaled_dot_product_attention(*whole, attn_mask=torch.stack(rows))
        expected = right, *torch.autograd.grad(right, whole, x[3])

        def cut(t: Tensor) -> Tensor:
            return t if ranks is None else layout.shard_tensor(t, rank, dim=2)

        mine = [cut(t.detach()).clone().requires_grad_() for t in whole]
        where: Any = {"ranks": layout.ranks} if ranks is None else {}
        out = (ra.ring_attention if ranks else ra.virtual_attention)(*mine, mask, layout=layout, **where)
        got = out, *torch.autograd.grad(out, mine, cut(x[3]))
        found += [
            float((a - cut(b)).detach().abs().max()) if a.numel() else 0.0 for a, b in zip(got, expected, strict=True)
        ]
    return found


def on_ranks(rank: int, seeds: range) -> float:
    return max(max(errors(seed, dist.get_world_size(), rank)) for seed in seeds)
