"""Keys that tokens of a cache choose by content: chunks, padding, steps, crops and forks against a dense oracle."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from rank_pool import told_by
from torch import Tensor
from torch.nn.functional import pad

import ringattn as ra
import ringattn.inference.cache
from ringattn.inference import choice
from ringattn.inference.choice import Chooser

BATCH, HEADS, COUNT, INNER = 2, 6, 5, 4


class Conversation:
    """A cache on virtual ranks whose two layers have one choice, and everything that it was given."""

    def __init__(self, seed: int) -> None:
        self.pick, self.source = random.Random(seed), torch.Generator().manual_seed(seed)
        self.groups, self.kv = self.pick.choice(((1, 1), (2, 3), (3, 1), (1, 6), (6, 2)))
        self.once, self.softcap = self.pick.random() < 0.5, self.pick.choice((None, 3.0))
        self.sinks = self.pick.choice((None, self.draw(HEADS)))
        layout = self.pick.choice(("zigzag", "striped"))
        self.cache = ra.KVCache("Causal()", layers=2, ranks=1 + seed % 4, page=4, layout=layout)
        shapes = (self.kv, 0, 8), (self.kv, 0, 8), (1, 0, INNER)
        self.held = [torch.zeros(BATCH, *shape, dtype=torch.float64) for shape in shapes]
        self.real = torch.zeros(BATCH, 0, dtype=torch.bool)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.source, dtype=torch.float64)

    def add(self, tokens: int, padding: Tensor | None, *, step: bool) -> float:
        """The largest difference from the oracle of new tokens in both layers; infinity for another choice."""
        q, k, v = (self.draw(BATCH, heads, tokens, 8) for heads in (HEADS, self.kv, self.kv))
        v = k if self.once else v
        # Small integers: most rows have ties at the last place, and scores of 0.
        shapes = (BATCH, self.groups, tokens, INNER), (BATCH, 1, tokens, INNER)
        of_q, of_k = (torch.randint(-2, 3, shape, generator=self.source).double() for shape in shapes)
        self.held = [torch.cat(pair, 2) for pair in zip(self.held, (k, v, of_k), strict=True)]
        new = torch.ones(BATCH, tokens, dtype=torch.bool) if padding is None else ~padding
        self.real = torch.cat([self.real, new], 1)

        def score(keys: Tensor, part: slice) -> Tensor:
            return (of_q[:, :, part] @ keys.mT).relu()

        chooser = Chooser(of_k, score, torch.zeros(BATCH, self.groups, tokens, COUNT, dtype=torch.int32))
        options: dict[str, Any] = {"softcap": self.softcap, "sinks": self.sinks}
        if not step:
            self.cache.shard(tokens, padding)
        far = 0.0
        choices: tuple[Chooser | Tensor, ...] = chooser, chooser.chosen
        for layer, chosen in enumerate(choices):
            call = self.cache.step if step else self.cache.prefill
            found = call(layer, q, k, None if self.once else v, chosen=chosen, **options)
            wanted, marks = self.expect(q, of_q)
            rows = self.real[:, -tokens:]
            if not torch.equal(chooser.chosen.transpose(1, 2)[rows], marks.transpose(1, 2)[rows]):
                return float("inf")
            far = max(far, float((found - wanted).transpose(1, 2)[rows].abs().max())) if rows.any() else far
        return far

    def expect(self, q: Tensor, of_q: Tensor) -> tuple[Tensor, Tensor]:
        k, v, of_k = self.held
        tokens, every = q.shape[2], k.shape[2]
        seen = (torch.arange(every) <= torch.arange(every - tokens, every)[:, None]) & self.real[:, None]
        scores = (of_q @ of_k.mT).relu().masked_fill(~seen[:, None], -torch.inf)
        best = scores.sort(dim=-1, descending=True, stable=True)
        marks = torch.where(best.values == -torch.inf, -1, best.indices)[..., :COUNT]
        marks = pad(marks, (0, COUNT - marks.shape[-1]), value=-1).int()
        mask = torch.zeros(*marks.shape[:3], every + 1, dtype=torch.bool)
        mask = mask.scatter_(-1, torch.where(marks < 0, every, marks).long(), True)[..., :-1]
        mask = mask.repeat_interleave(HEADS // self.groups, 1)
        logits = q @ k.repeat_interleave(HEADS // self.kv, 1).mT * 8**-0.5
        logits = logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()
        logits = logits.masked_fill(~mask, -torch.inf)
        if self.sinks is not None:
            logits = torch.cat([logits, self.sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
        weights = logits.softmax(-1)[..., :every]
        return weights @ v.repeat_interleave(HEADS // self.kv, 1), marks

    def move(self) -> None:
        """Remove some tokens, or reorder the batch."""
        length = self.cache.length
        if self.pick.random() < 0.5 and length > 3:
            kept = length - self.pick.randint(1, 3)
            self.cache.crop(kept)
            self.held, self.real = [x[:, :, :kept] for x in self.held], self.real[:, :kept]
        else:
            rows = [self.pick.randrange(BATCH) for _ in range(BATCH)]
            self.cache.fork(rows)
            self.held, self.real = [x[rows] for x in self.held], self.real[rows]


@pytest.mark.parametrize("seed", range(16))
def test_tokens_of_a_cache_choose_their_keys(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:
        monkeypatch.setattr(ringattn.inference.cache, "SHARED_ROWS", 3)
        monkeypatch.setattr(choice, "SCORE_BYTES", 400)
    talk = Conversation(seed)
    first = talk.pick.randint(9, 19)
    padding = torch.arange(first) < torch.tensor([[talk.pick.randint(0, 5)], [0]])
    assert talk.add(first, padding if seed % 3 else None, step=False) < 1e-12
    for _ in range(8):
        if talk.pick.random() < 0.3:
            talk.move()
        step = talk.pick.random() < 0.7
        assert talk.add(talk.pick.randint(1, 3) if step else talk.pick.randint(4, 9), None, step=step) < 1e-12


def test_a_step_sends_candidates_and_no_row() -> None:
    """Each rank sends to each other (score, slot) of its best tokens, 8 bytes each, and its partial result."""
    ranks, tokens, count = 4, 64, 8
    cache = ra.KVCache("Causal()", layers=1, ranks=ranks, merge="gather")
    for new in (tokens, 1):
        chosen = torch.zeros(1, 1, new, count, dtype=torch.int32)
        chooser = Chooser(torch.randn(1, 1, new, 16), lambda keys, part: keys.sum(-1).unsqueeze(2), chosen)
        rows, q = torch.randn(1, 1, new, 32), torch.randn(1, 4, new, 32)
        before = [x.sent_bytes for x in cache.transport.counters]  # type: ignore[union-attr]
        (cache.prefill if new > 1 else cache.step)(0, q, rows, chosen=chooser)
    sent = [x.sent_bytes - y for x, y in zip(cache.transport.counters, before, strict=True)]  # type: ignore[arg-type]
    assert sent == [(ranks - 1) * (8 * count + 4 * 4 * (32 + 1))] * ranks
    assert cache.nbytes == ranks * 64 * (32 + 16) * 4  # a page on each rank


def test_what_is_refused() -> None:
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 1, 3, 8)
    chosen = torch.zeros(1, 1, 3, 2, dtype=torch.int32)
    chooser = Chooser(torch.randn(1, 1, 3, 4), lambda keys, part: keys.sum(-1).unsqueeze(2), chosen)
    cache = ra.KVCache("Causal()", layers=1, ranks=2)
    short = Chooser(chooser.keys[:, :, 1:], chooser.score, chosen)
    copies = ra.KVCache("Causal() & Window(4)", layers=1, ranks=2, windows="copy")
    assert "keys of a Chooser must be" in told_by(lambda: cache.step(0, q, k, chosen=short))
    assert "windows='copy' takes no chosen keys" in told_by(lambda: copies.step(0, q, k, chosen=chooser))
    assert "does not fit the queries" in told_by(lambda: cache.step(0, q, k, chosen=chosen[:, :, 1:]))
    cache.step(0, q, k, chosen=chooser)
    assert "is held" in told_by(lambda: cache.step(0, q, k))
    cache.crop(0)
    cache.step(0, q, k)
    assert "is missing" in told_by(lambda: cache.step(0, q, k, chosen=chooser))


def refusing(rank: int) -> list[str]:
    """What is said where the choosers of two ranks differ, where one has none, and refuses its own in a later layer."""
    said = []
    for layer, kind in ((0, "count"), (0, "none"), (1, "short")):
        short = kind == "short"
        cache = ra.KVCache("Causal()", layers=2)
        rows = len(cache.shard(8))
        for this in range(layer + 1):
            last = this == layer
            count, known = 3 + (rank if kind == "count" else 0), rows - (rank if last and short else 0)
            chosen = torch.zeros(1, 1, rows, count, dtype=torch.int32)
            chooser: Any = Chooser(torch.randn(1, 1, known, 4), lambda keys, part: keys.sum(-1).unsqueeze(2), chosen)
            chooser = chosen if kind == "none" and rank else chooser
            call = partial(cache.prefill, this, *torch.randn(2, 1, 2, rows, 8), chosen=chooser)
            if last:
                said.append(told_by(call))
            else:
                call()
    return said


def test_ranks_hear_of_what_differs(run_ranks: Callable[..., list[Any]]) -> None:
    (first, none, told), (other, also_none, refused) = run_ranks(refusing, 2, timeout=60)
    assert all("Mismatch" in text and "chosen keys" in text for text in (first, other))
    assert all("Mismatch" in text and "keys of its Chooser" in text for text in (none, also_none))
    assert "rank 1 cannot take part: keys of a Chooser" in told and refused.startswith(
        "InvalidInput: keys of a Chooser"
    )
