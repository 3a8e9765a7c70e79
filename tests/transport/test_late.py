"""On the slowest fabric there can be, buffers of messages live and stay as they are from their post to their wait."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, ClassVar, NamedTuple
from weakref import ref

import pytest
import torch
from posts import planned_posts

import ringattn as ra
from ringattn.call import autograd
from ringattn.kernels.aten_cpu import AtenCpu
from ringattn.runtime import tensors
from ringattn.runtime.buffers import StepMessages
from ringattn.transport.base import Message, Post, Program
from ringattn.transport.virtual import in_turns

#: All bits set: NaN in every floating dtype.
POISON = 255
#: Sender, receiver and tag.
Key = tuple[int, int, int]


class Side(NamedTuple):
    """One side of a message from its post to its wait. Only the program keeps the buffer alive."""

    key: Key
    sends: bool
    name: str
    buffer: Callable[[], torch.Tensor | None]
    bytes: torch.Tensor

    def land(self) -> torch.Tensor:
        """The buffer, which must be alive and as it was posted."""
        buffer = self.buffer()
        assert buffer is not None, f"{self.name}: freed while in flight"
        assert torch.equal(buffer, self.bytes), f"{self.name}: written to while in flight"
        return buffer


class Ticket:
    """The messages of one request."""

    def __init__(self, sides: list[Side], posted: set[tuple[Key, bool]]) -> None:
        self.sides, self._posted = sides, posted

    @property
    def ready(self) -> bool:
        """Whether the other side of every message is posted."""
        return all((side.key, not side.sends) in self._posted for side in self.sides)


class LateVirtual:
    """`VirtualRanks`, but what is sent is read, and what is received is written, at the wait of each side.

    The messages of one wait land in random order. `runs` are the shapes of all messages of all runs: sends and
    receives by peer, tag and bytes, for each rank and request.
    """

    runs: ClassVar[list[list[list[set[tuple[bool, int, int, int]]]]]] = []

    def __init__(self, size: int) -> None:
        self._random = random.Random(0)
        self._posted: set[tuple[Key, bool]] = set()
        self._sent: dict[Key, torch.Tensor] = {}
        self._flying: dict[tuple[Key, bool], str] = {}
        self._requests: list[list[set[tuple[bool, int, int, int]]]] = [[] for _ in range(size)]

    def run(self, programs: Sequence[Program[Any]]) -> list[Any]:
        """Run one program per rank to the end, in turns, and return their results in rank order."""
        results = in_turns(programs, self._post, lambda ticket: ticket.ready, self._name_unmatched, self._land)
        assert not self._flying, f"never waited for: {sorted(self._flying.values())}"
        LateVirtual.runs.append(self._requests)
        return results

    def _post(self, rank: int, post: Post) -> Ticket:
        for message in post.recvs:
            message.data.fill_(POISON)
        sides = [self._fly(rank, message, post.label, sends=False) for message in post.recvs]
        sides += [self._fly(rank, message, post.label, sends=True) for message in post.sends]
        self._requests[rank].append({(s.sends, *s.key[s.sends : s.sends + 1], s.key[2], len(s.bytes)) for s in sides})
        return Ticket(sides, self._posted)

    def _fly(self, rank: int, message: Message, label: str, *, sends: bool) -> Side:
        key = (rank, message.peer, message.tag) if sends else (message.peer, rank, message.tag)
        side = Side(key, sends, f"rank {rank}, {label}, {key}", ref(message.data), message.data.clone())
        assert (key, sends) not in self._posted, side.name
        self._posted.add((key, sends))
        self._flying[key, sends] = side.name
        if sends:
            self._sent[key] = side.bytes
        return side

    def _land(self, ticket: Ticket) -> None:
        self._random.shuffle(ticket.sides)
        for side in ticket.sides:
            buffer = side.land()
            if not side.sends:
                buffer.copy_(self._sent.pop(side.key))
            del self._flying[side.key, side.sends]

    def _name_unmatched(self, waiting: Mapping[int, Ticket]) -> str:
        return "; ".join(side.name for ticket in waiting.values() for side in ticket.sides)


def send_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all virtual ranks send late, and poison the memory that a pass begins with."""
    honest = tensors.empty
    monkeypatch.setattr(LateVirtual, "runs", [])
    monkeypatch.setattr(autograd, "VirtualRanks", LateVirtual)
    monkeypatch.setattr(tensors, "empty", lambda *arguments: honest(*arguments).fill_(POISON))


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
            rotate, comm_dtype = ("kv", "q")[(index + number // 2) % 2], (None, "bfloat16")[index % 2]
            options = {"layout": layout, "schedule": schedule, "rotate": rotate, "comm_dtype": comm_dtype}
            wanted = call(pattern, **options)
            with monkeypatch.context() as patch:
                send_late(patch)
                found = call(pattern, **options)
                runs = list(LateVirtual.runs)
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

    send_late(monkeypatch)
    monkeypatch.setattr(AtenCpu, "forward", scribble)
    with pytest.raises(AssertionError, match="written to while in flight"):
        call(ra.Full())


def test_a_buffer_freed_before_the_wait_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = StepMessages.start

    def hasty(self: StepMessages, index: int) -> None:
        honest(self, index)
        for _, _, sent, _ in self._open:
            for buffer, parts in sent:
                while parts:
                    self.recorder.drop(buffer, parts.pop())

    send_late(monkeypatch)
    monkeypatch.setattr(StepMessages, "start", hasty)
    with pytest.raises(AssertionError, match="written to while in flight"):
        call(ra.Window(23, 5))  # no other test has this plan, which caches the hasty program
