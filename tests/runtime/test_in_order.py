"""The textbook ring, without overlap: the same bits, and no visit while a message is on its way."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from oracle import make_case, solve

import ringattn as ra
from ringattn.runtime import ring
from ringattn.transport.base import Compute, Post, Program, Wait

TOKENS, RANKS = 37, 4
PATTERNS = (
    ra.Causal() & (ra.Sinks(2) | ra.Window(7)),
    ra.Causal() & ra.Documents([16, 1, 20]),
    ra.Dilated((8, 32), (1, 3)),
)
turn_in_order = ring.turn_in_order


def watched(*arguments: Any, **options: Any) -> Program[None]:
    """`turn_in_order`, of which no visit may be computed between the post and the wait of a message."""
    flying: list[Any] = []
    turn, reply = turn_in_order(*arguments, **options), None
    while True:
        try:
            request = turn.send(reply)
        except StopIteration:
            return
        assert not (flying and isinstance(request, Compute))
        reply = yield request
        if isinstance(request, Post):
            flying.append(reply)
        elif isinstance(request, Wait):
            flying.remove(request.ticket)


@pytest.mark.parametrize("rotate", ["kv", "q"])
@pytest.mark.parametrize("schedule", ["ring", "direct", "double_ring(2)", "allgather", "ulysses(2, ring)"])
def test_a_ring_in_order_has_the_bits_of_the_overlapped_one(
    schedule: str, rotate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(TOKENS, 4, 2, torch.float32, lse=True)
    for pattern, moved in product(PATTERNS, (False, True) if rotate == "q" else (False,)):
        options = {"ranks": RANKS, "layout": "zigzag", "schedule": schedule, "rotate": rotate}
        options |= {"q_layout": "shifted(zigzag, 0)"} if moved else {}  # the forward rotates as the backward does
        found = []
        for turn in (ring.turn, watched):
            with monkeypatch.context() as patch:
                patch.setattr(ring, "turn", turn)
                found.append(solve(ra.virtual_attention, case, pattern, **options))
        fast, plain = ((x.out, x.lse, *x.grads) for x in found)
        assert all(map(torch.equal, fast, plain))
