"""On the slowest fabric there can be, buffers of messages live and stay as they are from their post to their wait."""

from __future__ import annotations

from itertools import product
from typing import Any

import late
import pytest
import torch
from posts import planned_posts

import ringattn as ra
from ringattn.kernels.aten_cpu import AtenCpu
from ringattn.runtime.message_buffers import StepMessages
from ringattn.transport.base import Message, Post, Program, Wait

TOKENS, RANKS = 37, 4
PATTERNS = (
    ra.Full(),
    ra.Causal(),
    ra.Causal() & (ra.Sinks(2) | ra.Window(7)),
    ra.Causal() & ra.Documents([16, 1, 20]),
    ra.Dilated((8, 32), (1, 3)),
)
SCHEDULES = ("ring", "direct", "double_ring(2)", "allgather", "ulysses(2, ring)")
LAYOUTS = ("contiguous", "zigzag")


def call(pattern: ra.Pattern, **options: Any) -> tuple[torch.Tensor, ...]:
    """out, dq, dk and dv of four virtual ranks."""
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, TOKENS, 8, generator=source).requires_grad_() for heads in (4, 2, 2))
    out = ra.virtual_attention(q, k, v, pattern, ranks=RANKS, **options)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), torch.randn(out.shape, generator=source)))


def test_late_messages_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, forward and backward; and the executor posts what is planned."""
    for index, pattern in enumerate(PATTERNS):
        for number, (schedule, layout) in enumerate(product(SCHEDULES, LAYOUTS)):
            rotate, comm_dtype = ("keys", "queries")[(index + number // 2) % 2], (None, "bfloat16")[index % 2]
            options = {"layout": layout, "schedule": schedule, "rotate": rotate, "comm_dtype": comm_dtype}
            wanted = call(pattern, **options)
            with monkeypatch.context() as patch:
                late.use(patch)
                found = call(pattern, **options)
                runs = list(late.LateVirtual.runs)
            assert all(map(torch.equal, found, wanted)), (pattern, options)
            plan = ra.make_plan(pattern, tokens=TOKENS, ranks=RANKS, heads=4, kv_heads=2, head_dim=8, **options)
            for run, backward in zip(runs, (False, True), strict=True):
                planned = [planned_posts(plan, rank, backward=backward) for rank in range(RANKS)]
                assert run == [[set(batch) for batch in batches] for batches in planned], (pattern, options)


def test_a_write_to_a_sent_block_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = AtenCpu.forward

    def scribble(kernel: Any, q: Any, k: torch.Tensor, *more: Any) -> Any:
        result = honest(kernel, q, k, *more)
        k.zero_()
        return result

    late.use(monkeypatch)
    monkeypatch.setattr(AtenCpu, "forward", scribble)
    with pytest.raises(AssertionError, match="written to while in flight"):
        call(ra.Full())


def test_a_buffer_freed_before_the_wait_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = StepMessages._post

    def hasty(self: StepMessages, *arguments: Any) -> Any:
        post = honest(self, *arguments)
        for buffer, parts in self._open[-1].sent:
            while parts:
                self.recorder.drop(buffer, parts.pop())
        return post

    late.use(monkeypatch)
    monkeypatch.setattr(StepMessages, "_post", hasty)
    with pytest.raises(AssertionError, match="written to while in flight"):
        call(ra.Window(23, 5))  # no other test has this plan, which caches the hasty program


@pytest.mark.parametrize("mistake", ["frees what it sends", "writes where it receives", "never waits", None])
def test_mistakes_of_a_program_are_caught(mistake: str | None) -> None:
    def program(rank: int) -> Program[torch.Tensor]:
        sent, received = (torch.full((8,), value, dtype=torch.uint8) for value in (rank, 7))
        ticket = yield Post((Message(1 - rank, 0, sent),), (Message(1 - rank, 0, received),), "step 0")
        assert received.eq(late.POISON).all()
        if mistake == "frees what it sends":
            del sent
        elif mistake == "writes where it receives":
            received[3] = 0
        if mistake != "never waits":
            yield Wait(ticket)
        return received

    transport = late.LateVirtual(2)
    if mistake is None:
        assert [x.tolist() for x in transport.run([program(0), program(1)])] == [[1] * 8, [0] * 8]
        return
    with pytest.raises(AssertionError, match=r"freed while in flight|written to while in flight|never waited for"):
        transport.run([program(0), program(1)])
