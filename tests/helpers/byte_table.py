"""The fractions of a full ring's bytes that the project set out to reach, at 512 tokens on 8 ranks."""

from __future__ import annotations

import numpy as np
import torch

import ringattn as ra
from ringattn import BlockSparse, Causal, Dilated, Documents, Pattern, Plan, Window, make_plan
from ringattn.transport.base import Transport

TOKENS, RANKS, DIM = 512, 8, 4

_source = np.random.default_rng(0)
_cuts = np.sort(_source.choice(np.arange(1, TOKENS), 15, replace=False))
DOCUMENTS = Documents(np.diff([0, *_cuts, TOKENS]).tolist()) & Causal()
BLOCKS = BlockSparse(16, _source.random((32, 32)) < 0.12)
WINDOW = Causal() & Window(31)
LONGNET = Dilated((32, 64, 128), (1, 2, 4))

#: Pattern, layout, schedule, heads, the most that may be sent.
ROWS: tuple[tuple[Pattern, str, str, int, float], ...] = (
    (Causal(), "contiguous", "ring", 1, 0.50),
    (Causal(), "zigzag", "ring", 1, 0.75),
    (WINDOW, "contiguous", "ring", 1, 0.061),
    (WINDOW, "zigzag", "ring", 1, 0.48),
    (WINDOW, "zigzag", "direct", 1, 0.122),
    (DOCUMENTS, "contiguous", "ring", 1, 0.08),
    (DOCUMENTS, "zigzag", "ring", 1, 0.31),
    (DOCUMENTS, "zigzag", "direct", 1, 0.13),
    (LONGNET, "contiguous", "direct", 8, 0.15),
    (BLOCKS, "contiguous", "ring", 1, 0.7),
    (BLOCKS, "contiguous", "direct", 1, 0.4),
    (BLOCKS, "zigzag", "ring", 1, 0.7),
    (BLOCKS, "zigzag", "direct", 1, 0.4),
)


def plans() -> list[Plan]:
    """The plan of every row."""
    return [
        make_plan(pattern, tokens=TOKENS, ranks=RANKS, layout=layout, schedule=schedule, heads=heads, head_dim=DIM)
        for pattern, layout, schedule, heads, _ in ROWS
    ]


def count(transport: Transport) -> list[int]:
    """Bytes that this rank really sends in the forward of every row."""
    sent = []
    for pattern, layout, schedule, heads, _ in ROWS:
        x = ra.make_layout(layout, tokens=TOKENS, ranks=RANKS).shard_tensor(
            torch.zeros(1, heads, TOKENS, DIM), transport.rank
        )
        transport.counters.reset()
        ra.ring_attention(x, x, x, pattern, transport=transport, layout=layout, schedule=schedule)
        sent.append(transport.counters.sent_bytes)
    return sent


def check(counted: list[list[int]]) -> None:
    """What every rank counted is what was planned, and all together no more than the table allows."""
    for row, (plan, (*_, most)) in enumerate(zip(plans(), ROWS, strict=True)):
        found = [rank[row] for rank in counted]
        assert found == [plan.bytes_sent(rank) for rank in range(RANKS)]
        assert 0 < sum(found) <= most * plan.full_ring_bytes(), plan
