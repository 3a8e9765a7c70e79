"""NCCL ignores tags and runs batches in order: the k-th send of a pair of ranks must meet the k-th receive."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from posts import Batch, Op, find_violation, planned_posts

import ringattn as ra
from ringattn.plan.plan import Plan
from ringattn.transport import torchdist
from ringattn.transport.base import Message, Post

TOKENS = 45
PATTERNS = (
    ra.Full(),
    ra.Causal(),
    ra.Causal() & ra.Window(9),
    ra.Window(5, 9),
    ra.Causal() & (ra.Sinks(2) | ra.Window(7)),
    ra.Documents([20, 1, 24]),
    ra.Causal() & ra.Documents([20, 1, 24]),
    ra.mix(ra.Causal(), ra.Strided(3)),
    ra.Dilated((16, 40), (2, 3)),
    ra.Dilated((16, 40), (2, 3)) & ra.Causal(),
)
#: Schedules for any number of ranks, and all.
ODD = ("ring", "direct", "allgather")
SCHEDULES = (*ODD, "double_ring(2)", "ulysses(2, ring)", "ulysses(2, direct)")
LAYOUTS = ("contiguous", "zigzag", "striped")


class Recorder:
    """A transport of which torch sends nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.transport, self.batches = torchdist.TorchDist(), list[Batch]()
        self.data = torch.empty(1 << 18, dtype=torch.uint8)
        monkeypatch.setattr(dist, "P2POp", self._operation)
        monkeypatch.setattr(dist, "batch_isend_irecv", self._start)

    def post(self, post: Post) -> Batch:
        """What the transport hands to torch for a request."""
        self.transport.post(post)
        return self.batches.pop()

    def __call__(self, plan: Plan, backward: bool) -> list[list[Batch]]:
        """What the transport hands to torch, batch by batch, for each rank of a plan."""
        return [
            [self.post(self._request(batch)) for batch in planned_posts(plan, rank, backward=backward)]
            for rank in range(plan.ranks)
        ]

    def _request(self, batch: Batch) -> Post:
        sends, recvs = (
            tuple(Message(op.peer, op.tag, self.data[: op.size]) for op in batch if op.sends is which)
            for which in (True, False)
        )
        return Post(sends, recvs, "test")

    def _operation(
        self, op: object, tensor: torch.Tensor, *, group: object, tag: int, group_peer: int
    ) -> SimpleNamespace:
        wanted = Op(op is dist.isend, group_peer, tag - torchdist.FIRST_TAG, tensor.numel())
        return SimpleNamespace(tensor=tensor, op=wanted)

    def _start(self, operations: list[SimpleNamespace]) -> list[SimpleNamespace]:
        self.batches.append([operation.op for operation in operations])
        return [SimpleNamespace(wait=print)]


def plan_of(pattern: ra.Pattern, ranks: int, schedule: str, layout: str, rotate: str) -> Plan:
    return ra.make_plan(
        pattern, tokens=TOKENS, ranks=ranks, layout=layout, schedule=schedule, rotate=rotate, heads=4, kv_heads=2,
        head_dim=8,
    )  # fmt: skip


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A recorder on a group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Recorder(monkeypatch)
    dist.destroy_process_group()


def test_messages_meet_in_order(record: Recorder) -> None:
    """Patterns x schedules x layouts, with each rotation and number of ranks by turns; nothing of no size is posted."""
    messages = 0
    for index, pattern in enumerate(PATTERNS):
        for place, schedule in enumerate(SCHEDULES):
            for number, layout in enumerate(LAYOUTS):
                ranks = (4, 6, 8, 3)[(index + place + number) % (4 if schedule in ODD else 3)]
                rotate = ("kv", "q")[(index // 2 + place + number) % 2]
                plan = plan_of(pattern, ranks, schedule, layout, rotate)
                for backward in (False, True):
                    found = record(plan, backward)
                    assert find_violation(found) is None, (pattern, ranks, schedule, layout, rotate, backward)
                    posted = [op for batches in found for batch in batches for op in batch]
                    assert all(op.size > 0 for op in posted), (pattern, ranks, schedule, layout, rotate, backward)
                    messages += len(posted)
    assert messages > 10_000


def test_a_step_is_one_batch_unless_some_may_take_longer() -> None:
    for schedule, most in (("ring", 1), ("direct", 1), ("allgather", 1), ("double_ring(4)", 2)):
        plan = ra.make_plan(ra.Full(), tokens=64, ranks=8, schedule=schedule)
        for rank in range(8):
            for steps in (plan.for_rank(rank).forward, plan.for_rank(rank).backward):
                assert max(len(step.posts) for step in steps) == most, schedule


def test_two_posts_in_another_order_are_caught(record: Recorder) -> None:
    swapped = 0
    for ranks, schedule, backward in product((4, 6), SCHEDULES, (False, True)):
        found = record(plan_of(ra.Full(), ranks, schedule, "contiguous", "kv"), backward)
        for rank, batches in enumerate(found):
            for number, (first, second) in enumerate(pairwise(batches)):
                if {op[:2] for op in first} & {op[:2] for op in second}:  # messages of other pairs may change places
                    other = list(found)
                    other[rank] = [*batches[:number], second, first, *batches[number + 2 :]]
                    assert find_violation(other) is not None, (rank, number)
                    swapped += 1
    assert swapped > 100


def test_a_batch_in_two_parts_is_caught(record: Recorder) -> None:
    """Ranks that all send before they receive wait for each other."""
    found = record(plan_of(ra.Full(), 4, "ring", "contiguous", "kv"), False)
    parts = [[[op for op in b if op.sends is which] for b in batches for which in (True, False)] for batches in found]
    assert find_violation(parts) == "ranks [0, 1, 2, 3] wait for each other"


def test_the_order_in_a_batch_is_that_of_tags(record: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages of one pair in one batch, which the two sides may list in different orders."""
    data = torch.empty(8, dtype=torch.uint8)
    first, second = Message(1, 4, data), Message(1, 9, data)
    posts = Post((first, second), (), "sender"), Post((), (second, first), "receiver")
    for sort in (torchdist.sort_by_tag, tuple):
        monkeypatch.setattr(torchdist, "sort_by_tag", sort)
        sent, received = ([op[2:] for op in record.post(post)] for post in posts)
        assert (sent == received) is (sort is not tuple)
