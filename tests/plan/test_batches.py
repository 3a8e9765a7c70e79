"""What is posted at a step: one batch per deadline, symmetric, in an order that cannot deadlock, nothing of no size."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import ringattn as ra
from ringattn import Causal, Dilated, Documents, Full, Pattern, Sinks, Strided, Window, mix
from ringattn.plan.steps import Hop

PATTERNS: tuple[Pattern, ...] = (
    Full(),
    Causal(),
    Causal() & Window(20),
    Window(5, 30),
    Documents([40, 1, 60, 9]),
    Causal() & (Sinks(2) | Window(7)),
    mix(Causal(), Strided(3)),
    Dilated((16, 40), (2, 3)),
)
LAYOUTS = ("contiguous", "zigzag", "striped(8)")
TOKENS = 110
#: Source, target, tag, bytes.
Name = tuple[int, int, int, int]


@dataclass(frozen=True)
class Posted:
    step: int
    sends: tuple[Name, ...]
    recvs: tuple[Name, ...]


def posted(plan: ra.Plan, rank: int, backward: bool) -> list[Posted]:
    """The batches of a rank, in order."""
    steps = plan.for_rank(rank).backward if backward else plan.for_rank(rank).forward

    def names(hops: tuple[Hop, ...], *, sends: bool) -> tuple[Name, ...]:
        ends = [(rank, hop.peer) if sends else (hop.peer, rank) for hop in hops]
        sizes = [sum(map(plan.part_bytes, hop.parts)) for hop in hops]
        return tuple((*pair, hop.tag, size) for pair, hop, size in zip(ends, hops, sizes, strict=True))

    return [
        Posted(index, names(sends, sends=True), names(recvs, sends=False))
        for index, step in enumerate(steps)
        for _, sends, recvs in step.posts
    ]


def undone(batches: dict[int, list[Posted]]) -> dict[int, Posted]:
    """Where each rank hangs when its batches run one after the other, each until all of its messages are done, as those
    of NCCL do on their stream; empty where all come to their end. A message is done when both sides run it.
    """
    place = dict.fromkeys(batches, 0)
    done: dict[int, set[tuple[str, Name]]] = {rank: set() for rank in batches}
    moved = True
    while moved:
        moved = False
        heads = {rank: batches[rank][i] for rank, i in place.items() if i < len(batches[rank])}
        for head in heads.values():
            for name in head.sends:
                other = heads.get(name[1])
                if other is not None and name in other.recvs:
                    done[name[0]].add(("send", name))
                    done[name[1]].add(("receive", name))
        for rank, head in heads.items():
            wanted = {("send", n) for n in head.sends} | {("receive", n) for n in head.recvs}
            if wanted <= done[rank]:
                place[rank] += 1
                moved = True
    return {rank: batches[rank][i] for rank, i in place.items() if i < len(batches[rank])}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("ranks", "schedule"),
    [(r, s) for r in (2, 3, 4, 6, 8) for s in ("ring", "direct", "allgather", "double_ring(2)", "double_ring(4)")
     if not s.startswith("double") or r % int(s[-2]) == 0],
)  # fmt: skip
def test_batches(ranks: int, schedule: str, layout: str, backward: bool) -> None:
    """Of the patterns one half, and of the next layout, number of ranks or direction the other."""
    place = LAYOUTS.index(layout) + ranks // 2 + backward
    for pattern in PATTERNS[place % 2 :: 2]:
        plan = ra.make_plan(pattern, tokens=TOKENS, ranks=ranks, layout=layout, schedule=schedule, heads=4, kv_heads=2)
        batches = {rank: posted(plan, rank, backward) for rank in range(ranks)}
        sends = sorted(name for row in batches.values() for batch in row for name in batch.sends)
        recvs = sorted(name for row in batches.values() for batch in row for name in batch.recvs)
        assert sends == recvs, pattern  # symmetric
        assert len({name[:3] for name in sends}) == len(sends), pattern  # told apart by their tags
        assert all(size > 0 and source != target for source, target, _, size in sends), pattern
        for a in range(ranks):  # messages of a pair: in the same order on both sides, as NCCL matches them
            for b in range(ranks):
                out = [n for batch in batches[a] for n in sorted(batch.sends, key=lambda n: (n[2], n[1])) if n[1] == b]
                into = [n for batch in batches[b] for n in sorted(batch.recvs, key=lambda n: (n[2], n[0])) if n[0] == a]
                assert out == into, (pattern, a, b)
        assert undone(batches) == {}, pattern


def test_a_step_is_one_batch_unless_some_may_take_longer() -> None:
    for schedule, most in (("ring", 1), ("direct", 1), ("allgather", 1), ("double_ring(4)", 2)):
        plan = ra.make_plan(Full(), tokens=64, ranks=8, schedule=schedule)
        for rank in range(8):
            for steps in (plan.for_rank(rank).forward, plan.for_rank(rank).backward):
                assert max(len(step.posts) for step in steps) == most, schedule


def test_the_simulation_finds_a_deadlock() -> None:
    a, b = (0, 1, 0, 8), (1, 0, 0, 8)
    assert undone({0: [Posted(0, (a,), ()), Posted(1, (), (b,))], 1: [Posted(0, (b,), ()), Posted(1, (), (a,))]})
    assert not undone({0: [Posted(0, (a,), (b,))], 1: [Posted(0, (b,), (a,))]})
