"""Random generations over a K/V cache, beside the dense oracle; what ranks run is importable here."""

from __future__ import annotations

import os
import pickle
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rank_pool import told_by, wait_for_files
from torch import Tensor

import ringattn as ra
from ringattn import Pattern
from ringattn.transport.base import Transport
from ringattn.transport.records import digest
from ringattn.transport.torchdist import TorchDist

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


class DenseCache:
    """The tokens of each row of a batch, of one layer; `pattern` is asked for its mask of `most` tokens."""

    def __init__(self, pattern: Pattern, heads: int, most: int, batch: int) -> None:
        self.mask = torch.from_numpy(pattern.mask(most, heads)).double()
        self.scale = pattern.bind(heads, most).output_scale
        self.keys: list[list[Tensor]] = [[] for _ in range(batch)]
        self.values: list[list[Tensor]] = [[] for _ in range(batch)]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, padding: Tensor | None = None,
        sinks: Tensor | None = None, softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """out [B, H, T, Dv] in fp64 of new tokens, which are kept; 0 at padding."""
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
        for row in range(len(q)):
            real = [i for i in range(q.shape[2]) if padding is None or not padding[row, i]]
            first = len(self.keys[row])
            self.keys[row] += [k[row, :, i].double() for i in real]
            self.values[row] += [v[row, :, i].double() for i in real]
            if not real:
                continue
            keys, values = torch.stack(self.keys[row], 1), torch.stack(self.values[row], 1)  # [K, n, D]
            shared, number = q.shape[1] // k.shape[1], keys.shape[1]
            for head in range(q.shape[1]):
                weight = self.mask[head, first : first + len(real), :number]
                logits = q[row, head, real].double() @ keys[head // shared].T * scale
                logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
                logits = logits + weight.log()
                extra = torch.full(
                    (len(real), 1), -torch.inf if sinks is None else float(sinks[head]), dtype=torch.float64
                )
                probabilities = torch.cat((logits, extra), 1).softmax(1)[:, :-1].nan_to_num(0.0)
                out[row, head, real] = probabilities @ values[head // shared] * self.scale
        return out

    def crop(self, lengths: list[int]) -> None:
        for row, length in enumerate(lengths):
            del self.keys[row][length:], self.values[row][length:]

    def fork(self, rows: list[int]) -> None:
        self.keys = [[*self.keys[row]] for row in rows]
        self.values = [[*self.values[row]] for row in rows]


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
        self.worst = 0.0
        self.outs: list[tuple[Tensor | None, Tensor]] = []

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.source, dtype=torch.float64).to(self.dtype)

    def new(self, tokens: int) -> list[Tensor]:
        return [self.draw(self.batch, h, tokens, d) for h, d in zip(self.heads, self.dims, strict=True)]

    def note(self, out: Tensor, wanted: Tensor, mine: Tensor | None = None) -> None:
        """Keep a result, of all tokens or of those of this rank, and its error."""
        self.worst = max(self.worst, float((out - wanted).abs().max()) if out.numel() else 0.0)
        self.outs.append((mine, out))

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
            self.note(out.masked_fill(hidden[:, None, mine, None], 0.0), wanted[:, :, mine], mine)

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
        whole = [cache.length - back] + [-back] * (back > 0)
        cache.crop(self.rng.choice([*whole, [n - self.rng.randint(0, back) for n in cache.lengths]]))
        for oracle in self.oracles:
            oracle.crop(cache.lengths)

    def fork(self) -> None:
        rows = [self.rng.randrange(self.batch) for _ in range(self.rng.randint(1, 4))]
        self.cache.fork(rows)
        for oracle in self.oracles:
            oracle.fork(rows)
        self.batch = len(rows)

    def run(self, actions: int) -> None:
        if self.rng.random() < 0.9:
            self.prefill(self.rng.randint(1, 50))
        for _ in range(actions):
            draw = self.rng.random()
            if draw < 0.12 and self.cache.length:
                self.crop()
            elif draw < 0.22 and self.cache.length:
                self.fork()
            elif draw < 0.35:
                self.prefill(self.rng.randint(1, 20))
            else:
                self.step()
        assert self.cache.lengths == [len(row) for row in self.oracles[0].keys]


def equals_virtual(rank: int, seeds: list[int]) -> float:
    return compare_with_virtual(TorchDist(timeout=60), seeds)


def compare_with_virtual(transport: Transport, seeds: list[int]) -> float:
    """Generations on these ranks have the bits of virtual ones, and all ranks the same: the largest error."""
    worst = 0.0
    for seed in seeds:
        dtype = (torch.float64, torch.float32, torch.bfloat16)[seed % 3]
        real, told = Generation(seed, transport.size, transport, dtype=dtype), b""
        real.run(8)
        if transport.rank == (teller := seed % transport.size):  # one rank after the other works for all
            virtual = Generation(seed, transport.size, dtype=dtype)
            virtual.run(8)
            rows = [virtual.cache.rows(0, rank) for rank in range(transport.size)]
            told = pickle.dumps(([whole for _, whole in virtual.outs], rows))
        expected, rows = pickle.loads(transport.gather(told)[teller])
        for (cut, mine), whole in zip(real.outs, expected, strict=True):
            assert torch.equal(mine, whole if cut is None else whole[:, :, cut])
            told = transport.gather(digest(mine.float().numpy().tobytes()))
            assert cut is not None or len({*told}) == 1, "a step has equal bits on all ranks"
        assert real.cache.rows(0) == rows[transport.rank]
        if dtype == torch.float64:
            worst = max(worst, real.worst)
    return worst


def step_counts(rank: int, merge: str, heads: tuple[int, int, int], tokens: int) -> tuple[int, int]:
    return count_step(TorchDist(timeout=60), merge, heads, tokens)


def count_step(transport: Transport, merge: str, heads: tuple[int, int, int], tokens: int) -> tuple[int, int]:
    """(messages, bytes) that this rank sends in a step of one layer."""
    cache = ra.KVCache(ra.Causal(), layers=1, transport=transport, merge=merge)
    query, kv, dim = heads
    new = torch.randn(1, query, tokens, dim), *torch.randn(2, 1, kv, tokens, dim)
    for _ in range(2):
        transport.counters.reset()
        cache.step(0, *new)
    return transport.counters.sent_messages, transport.counters.sent_bytes


def faults_on_every_rank(rank: int) -> list[str]:
    """One wrong cache, prompt or step after another on the last rank; what this rank was told each time."""
    transport = TorchDist(timeout=20)
    odd, told = rank == transport.size - 1, []
    plain: dict[str, Any] = {"layers": 1, "transport": transport}

    def make(**options: Any) -> ra.KVCache:
        """A cache with four tokens."""
        cache = ra.KVCache(ra.Causal(), **{**plain, **options})
        cache.step(0, *torch.zeros(3, 1, 2, 4, 8))
        return cache

    def step(cache: ra.KVCache, shape: tuple[int, ...] = (1, 2, 1, 8), **options: Any) -> None:
        cache.step(0, *torch.zeros(3, *shape), **options)

    def lengths_disagree() -> None:
        cache = make()
        cache.crop(-1 if odd else 4)
        step(cache)

    def other_beams() -> None:
        cache = make()
        cache.fork([0, 0] if odd else [0])
        step(cache, (2 if odd else 1, 2, 1, 8))

    def parts_with_the_prompt() -> None:
        cache = make()
        if odd:
            mine = cache.shard(3)
            cache.prefill(0, *torch.zeros(3, 1, 2, len(mine), 8))
        else:
            step(cache)

    def long_prompt() -> None:
        cache = ra.KVCache(ra.Causal(), **plain, max_tokens=8)
        cache.shard(9)

    def long_answer() -> None:
        cache = make(max_tokens=5)
        step(cache)
        step(cache)

    calls: tuple[Callable[[], Any], ...] = (
        lambda: step(ra.KVCache(ra.Causal(), **plain, page=3 if odd else 64)),
        lambda: step(ra.KVCache(ra.Causal() & ra.Window(4 if odd else 5), **plain)),
        lambda: step(make(), (1, 4 if odd else 2, 1, 8)),
        lambda: step(make(), (1, 2, 2 if odd else 1, 8)),
        lambda: step(make(), note="token 17" if odd else "token 3"),
        lambda: step(make(), scale=2.0 if odd else 1.0),
        lambda: step(make(), sinks=torch.zeros(2) if odd else None),
        lambda: step(make(), schedule="ring"),
        lambda: make().step(1 if odd else 0, *torch.zeros(3, 1, 2, 1, 8)),
        lengths_disagree,
        other_beams,
        parts_with_the_prompt,
        long_prompt,
        long_answer,
        lambda: step(make()),
    )
    for call in calls:
        told.append(told_by(call))
    return told


def rank_is_lost(rank: int, how: str, folder: str) -> None:
    """After three steps the last rank dies, or goes its own way; the others write down what they were told."""
    transport = TorchDist(timeout=2)
    cache = ra.KVCache(ra.Causal(), layers=2, transport=transport)
    last = rank == transport.size - 1
    for number in range(5):
        if last and number == 3:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            break
        try:
            for layer in range(2):
                cache.step(layer, *torch.zeros(3, 1, 2, 1, 8))
        except ra.CommFailure as error:
            assert number == 3
            Path(folder, f"{rank}").write_text(str(error))
            break
    wait_for_files(folder, transport.size - 1)  # a rank that ends is lost, too


def deferred_steps(rank: int) -> tuple[list[int], str]:
    """Records of each step of two layers; and what a step that differs is told where ranks are compared later."""
    transport = TorchDist(timeout=10)
    cache = ra.KVCache(ra.Causal(), layers=2, transport=transport)
    records = []

    def step(tokens: int, check: str) -> None:
        before = transport.events
        for layer in range(2):
            cache.step(layer, *torch.zeros(3, 1, 2, tokens, 8), check=check)
        records.append(transport.events - before)

    for check in ("now", "deferred", "deferred", "now"):
        step(1, check)

    def differ() -> None:
        step(2 if rank else 1, "deferred")
        ra.synchronize()

    return records, told_by(differ)
