"""The textbook ring of the executor, without overlap: the same bits, and no visit while a message is on its way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from oracle import make_case, solve

import ringattn as ra
from ringattn.runtime import executor
from ringattn.runtime.program import Visit
from ringattn.transport.base import Post, Program

TOKENS, RANKS = 37, 4
PATTERNS = (
    ra.Causal() & (ra.Sinks(2) | ra.Window(7)),
    ra.Causal() & ra.Documents([16, 1, 20]),
    ra.Dilated((8, 32), (1, 3)),
)
in_order = executor.in_order


def watched(job: Any, program: Any, run: Any, name: str, compute: Callable[[Visit], None]) -> Program[None]:
    """`in_order`, of which no visit may be computed between the post and the wait of a message."""
    flying: list[Any] = []

    def check(visit: Visit) -> None:
        assert not flying
        compute(visit)

    ring, reply = in_order(job, program, run, name, check), None
    while True:
        try:
            request = ring.send(reply)
        except StopIteration:
            return
        reply = yield request
        flying.append(reply) if isinstance(request, Post) else flying.remove(request.ticket)


@pytest.mark.parametrize("rotate", ["kv", "q"])
@pytest.mark.parametrize("schedule", ["ring", "direct", "double_ring(2)", "allgather", "ulysses(2, ring)"])
def test_a_ring_in_order_has_the_bits_of_the_executor(
    schedule: str, rotate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(TOKENS, 4, 2, torch.float32, lse=True)
    for pattern, moved in product(PATTERNS, (False, True) if rotate == "q" else (False,)):
        options = {"ranks": RANKS, "layout": "zigzag", "schedule": schedule, "rotate": rotate}
        options |= {"q_layout": "shifted(zigzag, 0)"} if moved else {}  # the forward rotates as the backward does
        found = []
        for loop in (executor.overlapped, watched):
            with monkeypatch.context() as patch:
                patch.setattr(executor, "overlapped", loop)
                found.append(solve(ra.virtual_attention, case, pattern, **options))
        fast, plain = ((x.out, x.lse, *x.grads) for x in found)
        assert all(map(torch.equal, fast, plain))
