"""Random generations over a K/V cache, beside the dense oracle; what ranks run is importable here."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from cache_oracle import DenseCache
from torch import Tensor

import ringattn as ra
from ringattn import Pattern
from ringattn.transport.base import Transport

MOST = 160
PATTERNS: tuple[Pattern, ...] = (
    ra.Causal(),
    ra.Causal() & ra.Window(9),
    ra.Causal() & (ra.Sinks(2) | ra.Window(7)),
    ra.Causal() & ra.Documents([30, 1, 40, 89]),
    ra.mix(ra.Causal() & ra.Window(5), ra.Causal() & ra.Strided(3)),
    ra.Dilated((8, 16), (1, 2), causal=True),
    ra.Dilated((8, 16), (1, 2), causal=True, mix="group"),
    ra.Causal() & ra.Strided(4),
    ra.Causal() & ra.local_window(8, blocks=2),
    ra.Causal() & ra.global_local(8, globals=1, blocks=1),
    ra.Causal() & ra.local_window(8, density=0.2),
)


@dataclass
class Generation:
    """A cache of two layers and its oracles; every method is one random action, drawn alike on all ranks."""

    seed: int
    size: int
    transport: Transport | None = None
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.source = torch.Generator().manual_seed(self.seed)
        self.patterns = rng.choice(PATTERNS), rng.choice(PATTERNS)
        kv = rng.choice([1, 2])
        self.heads, self.dims = (kv * rng.choice([1, 2]), kv, kv), (8, 8, rng.choice([8, 4, 12]))
        who: dict[str, Any] = {"ranks": self.size} if self.transport is None else {"transport": self.transport}
        self.cache = ra.KVCache(
            self.patterns,
            layers=2,
            page=rng.choice([1, 3, 4, 16]),
            max_tokens=MOST,
            merge=rng.choice(["auto", "gather", "scatter"]),
            windows=rng.choice(["shard", "copy"]),
            layout=rng.choice(["zigzag", "contiguous", "striped", "striped(2)"]),
            **who,
        )
        self.batch = rng.choice([1, 1, 2, 3])
        self.oracles = [DenseCache(pattern, self.heads[0], MOST, self.batch) for pattern in self.patterns]
        self.options = {"scale": rng.choice([0.3, -0.4]), "softcap": rng.choice([None, None, 2.0])}
        self.sinks = self.draw(self.heads[0]) if rng.random() < 0.3 else None
        self.worst, self.outs = 0.0, []

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.source, dtype=torch.float64).to(self.dtype)

    def new(self, tokens: int) -> list[Tensor]:
        return [self.draw(self.batch, h, tokens, d) for h, d in zip(self.heads, self.dims, strict=True)]

    def note(self, out: Tensor, wanted: Tensor) -> None:
        self.worst = max(self.worst, float((out - wanted).abs().max()) if out.numel() else 0.0)
        self.outs.append(out)

    def prefill(self, tokens: int) -> None:
        cache, padding, first = self.cache, None, self.cache.length
        if self.rng.random() < 0.3:
            left = torch.tensor([self.rng.randrange(tokens) for _ in range(self.batch)])
            padding = torch.arange(tokens)[None] < left[:, None]
        mine = cache.shard(tokens, padding) - first
        for layer, oracle in enumerate(self.oracles):
            whole = self.new(tokens)
            out = cache.prefill(layer, *(x[:, :, mine] for x in whole), sinks=self.sinks, **self.options)
            wanted = oracle.attend(*whole, padding=padding, sinks=self.sinks, **self.options)
            hidden = torch.zeros(self.batch, tokens, dtype=torch.bool) if padding is None else padding
            self.note(out.masked_fill(hidden[:, None, mine, None], 0.0), wanted[:, :, mine])

    def step(self) -> None:
        tokens = self.rng.randint(1, 4)
        for layer in self.rng.sample([0, 1], 2):
            new = self.new(tokens)
            out = self.cache.step(layer, *new, sinks=self.sinks, **self.options)
            self.note(out, self.oracles[layer].attend(*new, sinks=self.sinks, **self.options))

    def crop(self) -> None:
        cache = self.cache
        back = min(self.rng.randint(0, 3), min(cache.lengths) - 1, cache.length - cache.least - 1)
        if back < 0:
            return
        whole = [-back, cache.length - back]
        cache.crop(self.rng.choice([*whole, [n - self.rng.randint(0, back) for n in cache.lengths]]))
        for oracle in self.oracles:
            oracle.crop(cache.lengths)

    def fork(self) -> None:
        rows = [self.rng.randrange(self.batch) for _ in range(self.rng.randint(1, 4))]
        self.cache.fork(rows)
        for oracle in self.oracles:
            oracle.fork(rows)
        self.batch = len(rows)

    def run(self, actions: int, *, chunks: bool) -> None:
        if self.rng.random() < 0.9:
            self.prefill(self.rng.randint(1, 50))
        for _ in range(actions):
            draw = self.rng.random()
            if draw < 0.12 and self.cache.length:
                self.crop()
            elif draw < 0.22 and self.cache.length:
                self.fork()
            elif draw < 0.35 and chunks:
                self.prefill(self.rng.randint(1, 20))
            else:
                self.step()
        assert self.cache.lengths == [len(row) for row in self.oracles[0].keys]
