"""Random rectangles: queries and keys at different positions, cut by two layouts; and the truth about them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import torch
from oracle import Case, Result, dense, errors, same_lse, solve

import ringattn as ra
from ringattn import Causal, Dilated, Documents, Full, Pattern, Sinks, Strided, Window

PATTERNS: tuple[Pattern, ...] = (
    *(Full(), Causal(), Window(7), Window(2, 5), Causal() & (Sinks(3) | Window(5)), Strided(3), Strided(2) & Causal()),
    *(ra.local_window(4, blocks=1), ra.strided_blocks(3, 2), ra.global_local(4, globals=1, blocks=1)),
    *(Dilated((8, 16), (1, 2)), ra.mix(Causal(), Window(4))),
)


@dataclass(frozen=True)
class Rectangle:
    """Queries `first` .. `first` + `queries` - 1 and keys 0 .. `keys` - 1, and how ranks attend them."""

    pattern: Pattern
    keys: int
    queries: int
    first: int
    ranks: int
    heads: tuple[int, int]
    options: dict[str, Any]

    @property
    def end(self) -> int:
        return max(self.keys, self.first + self.queries)

    def mask(self) -> torch.Tensor:
        """How often each query sees each key, int64 [H, queries, keys], by the definition that no planner reads."""
        q, k = np.arange(self.first, self.first + self.queries)[:, None], np.arange(self.keys)[None, :]
        bound, shape = self.pattern.bind(self.heads[0], self.end), (self.queries, self.keys)
        masks = [bound.visible(q, k, head, self.end) for head in range(self.heads[0])]
        return torch.from_numpy(np.stack([np.broadcast_to(mask, shape).astype(np.int64) for mask in masks]))

    def case(self, seed: int, dtype: torch.dtype = torch.float64, *, batch: int = 2, lse: bool = True) -> Case:
        """Random inputs and cotangents."""
        source = torch.Generator().manual_seed(seed)

        def draw(heads: int, rows: int, *width: int) -> torch.Tensor:
            return torch.randn(batch, heads, rows, *width, generator=source, dtype=torch.float64).to(dtype)

        (h, kv), dv = self.heads, (8, 5)[seed % 2]
        q, k, v = draw(h, self.queries, 8), draw(kv, self.keys, 8), draw(kv, self.keys, dv)
        return Case(q, k, v, draw(h, self.queries, dv), draw(h, self.queries).double() if lse else None)

    def plan(self, **sizes: Any) -> ra.Plan:
        return ra.make_plan(
            self.pattern, tokens=self.keys, q_tokens=self.queries, ranks=self.ranks,
            heads=self.heads[0], kv_heads=self.heads[1], **self.options, **sizes,
        )  # fmt: skip

    def solve(self, case: Case, **options: Any) -> Result:
        return solve(ra.virtual_attention, case, self.pattern, ranks=self.ranks, **self.options, **options)

    def worst_error(self, seed: int) -> float:
        """The largest error of out, lse and all gradients in fp64."""
        case = self.case(seed, lse=seed % 3 > 0)
        sinks = (
            torch.linspace(-1.0, 1.0, self.heads[0], dtype=torch.float64).requires_grad_() if seed % 4 == 0 else None
        )
        truth, found = dense(case, self.mask(), sinks=sinks), self.solve(case, sinks=sinks)
        same_lse(found.lse, truth.lse, 1e-12)
        return max(errors(found, truth))


def name_layout(rng: random.Random, tokens: int, ranks: int, first: int = 0, *, nested: bool = True) -> str:
    """The name of a random layout of `tokens` positions from `first` on."""
    kinds = ["contiguous", "zigzag", "striped", "striped(3)", "striped(4)"]
    cuts = [0, *sorted(rng.randint(0, tokens) for _ in range(ranks - 1)), tokens]
    kinds.append(f"rows({', '.join(str(b - a) for a, b in pairwise(cuts))})")
    name = rng.choice([*kinds, "joined", "joined"] if nested else kinds)
    if name == "joined":
        cut = rng.randint(0, tokens)
        one = name_layout(rng, cut, ranks, nested=False)
        two = name_layout(rng, tokens - cut, ranks, cut, nested=False)
        name = f"joined({one}[{cut}], {two}[{tokens - cut}])"
    return f"shifted({name}, {first})" if first else name


def draw_rectangle(seed: int, *, cross: bool = False) -> Rectangle:
    """A random rectangle; `cross`: of documents with other numbers of queries than keys."""
    rng = random.Random(seed)
    ranks, heads = rng.randint(1, 5), rng.choice([(1, 1), (4, 2), (2, 2), (6, 3)])
    if cross:
        documents = rng.randint(1, 6)
        lengths, q_lengths = (
            [rng.choice(sizes) for _ in range(documents)] for sizes in ((0, 1, 3, 9, 17), (0, 1, 2, 13))
        )
        pattern: Pattern = Documents(lengths, q_lengths=q_lengths)
        keys, queries, first = sum(lengths), sum(q_lengths), 0
    else:
        keys, queries = rng.randint(0, 50), rng.randint(0, 50)
        first = rng.choice([0, 0, keys, max(keys - queries, 0), rng.randint(0, 40)])
        pattern = rng.choice(PATTERNS)
    nodes = [f"double_ring({n})" for n in range(1, ranks) if ranks % n == 0]
    size = gcd(ranks, heads[1])
    ulysses = [f"ulysses({size}, ring)", f"ulysses({size}, direct)"] if size > 1 else []
    options = {
        "layout": name_layout(rng, keys, ranks),
        "q_layout": name_layout(rng, queries, ranks, first),
        "schedule": rng.choice(["ring", "direct", "allgather", *nodes, *ulysses]),
        "rotate": rng.choice(["kv", "q", "q, kv", "kv, q"]),
    }
    return Rectangle(pattern, keys, queries, first, ranks, heads, options)
