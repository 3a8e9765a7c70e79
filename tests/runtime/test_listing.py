"""A printed plan is what ranks really post, compute and wait for."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch
from posts import planned_posts

import ringattn as ra
from ringattn.errors import InvalidInput
from ringattn.kernels import get_kernel
from ringattn.plan.row_sets import RowSet
from ringattn.runtime.passes import backward, forward
from ringattn.runtime.ring import Job
from ringattn.transport.base import Compute, Post, Program, Wait
from ringattn.transport.virtual import VirtualRanks

TOKENS, RANKS = 37, 4
PATTERNS = (ra.Causal(), ra.Causal() & (ra.Sinks(2) | ra.Window(7)), ra.Dilated((8, 32), (1, 3)))


def requests_of(program: Program[Any], requests: list[Any]) -> Program[Any]:
    """The program, whose requests are noted: each with the reply to it."""
    reply = None
    while True:
        try:
            request = program.send(reply)
        except StopIteration as stop:
            return stop.value
        reply = yield request
        requests.append((request, reply))


def flatten(steps: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The posts, visits and waits of a listing in the order in which the rank requests them."""
    found: list[tuple[Any, ...]] = []
    for step in steps:
        for message in step["post"]:
            found.append(("post", message["do"], message["peer"], message["tag"], message["bytes"]))
        for visit in step["compute"]:
            if visit["pairs"] or visit["kind"] == "kv":
                found.append(("compute", visit["kind"], visit["owner"], visit["heads"], visit["rows"], visit["pairs"]))
        found += [("wait", number) for number in step["wait"]]
    return found


def flatten_requests(requests: list[Any]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    numbers: dict[int, range] = {}
    count = 0
    for request, reply in requests:
        if isinstance(request, Post):
            for do, messages in (("send", request.sends), ("receive", request.recvs)):
                found += [("post", do, x.peer, x.tag, x.data.numel()) for x in messages]
            numbers[id(reply)] = range(count, count := count + len(request.sends) + len(request.recvs))
        elif isinstance(request, Compute):
            part, rows = request.visit.part, request.visit.part.row_set
            heads = list(rows.heads) if isinstance(rows, RowSet) else None
            lists = [[[r.start, r.stop, r.step] for r in x] for x in rows.rows] if isinstance(rows, RowSet) else None
            pairs = sum(count_in_works(request.visit.works))
            found.append(("compute", part.kind, part.owner, heads, lists, pairs))
        else:
            assert isinstance(request, Wait)
            found += [("wait", number) for number in numbers[id(request.ticket)]]
    return found


def count_in_works(works: Any) -> list[int]:
    """The pairs of works, counted one by one."""
    return [
        len(work.heads)
        * sum(
            (work.lo is None or i - j >= work.lo) and (work.hi is None or i - j <= work.hi)
            for i, j in product(range(len(work.q)), range(work.keys))
        )
        for work in works
    ]


@pytest.mark.parametrize("schedule", ["ring", "direct", "double_ring(2)", "allgather", "ulysses(2, ring)"])
def test_ranks_do_what_a_listing_says(schedule: str) -> None:
    for pattern, rotate in product(PATTERNS, ("kv", "q")):
        plan = ra.make_plan(
            pattern, tokens=TOKENS, ranks=RANKS, layout="zigzag", schedule=schedule, rotate=rotate, heads=4, kv_heads=2,
            head_dim=8,
        )  # fmt: skip
        q, k, v = (torch.randn(1, heads, TOKENS, 8) for heads in (4, 2, 2))
        kernel = get_kernel("reference", q, k, v)
        jobs = [Job(plan, rank, kernel, 1.0) for rank in range(RANKS)]
        shards = [[plan.layout.shard_tensor(x, rank) for x in (q, k, v)] for rank in range(RANKS)]
        noted: list[list[Any]] = [[] for _ in range(RANKS)]
        programs = [forward(job, q, (k, v), save=True) for job, (q, k, v) in zip(jobs, shards, strict=True)]
        results = VirtualRanks(RANKS).run([requests_of(*each) for each in zip(programs, noted, strict=True)])
        back: list[list[Any]] = [[] for _ in range(RANKS)]
        each = zip(jobs, shards, results, strict=True)
        programs = [backward(job, result.out, None, q, (k, v), result) for job, (q, k, v), result in each]
        VirtualRanks(RANKS).run([requests_of(*each) for each in zip(programs, back, strict=True)])
        for rank in range(RANKS):
            record = json.loads(plan.listing(rank).to_json())
            assert flatten(record["forward"]["steps"]) == flatten_requests(noted[rank])
            assert flatten(record["backward"]["steps"]) == flatten_requests(back[rank])
            posted = sum(len(batch) for batch in planned_posts(plan, rank, backward=False))
            assert sum(len(step["post"]) for step in record["forward"]["steps"]) == posted


def test_text() -> None:
    plan = ra.make_plan(
        ra.Causal() & ra.Window(1023), tokens=16384, ranks=4, layout="contiguous", schedule="ring", heads=8, kv_heads=2,
        head_dim=64, dtype="bfloat16",
    )  # fmt: skip
    lines = str(plan.listing(1)).splitlines()
    assert lines[0] == f"plan {plan.hash}  rank 1 of 4: rows 4,096 .. 8,191"
    expected = """forward, keys travel
      0 post kv of 1 to 2 local rows 3,073 .. 4,095, heads 0 .. 1 523,776 B
      kv of 0 from 0 local rows 3,073 .. 4,095, heads 0 .. 1 523,776 B
      compute kv of 1 all 4,096 rows 29,364,224 pairs
      wait kv of 0
      1 compute kv of 0 local rows 3,073 .. 4,095, heads 0 .. 1 4,190,208 pairs, kept"""
    assert [line.split() for line in lines[1:7]] == [line.split() for line in expected.splitlines()]
    assert lines[-1] == "sends 523,776 B in 1 message forward, 1,047,552 B in 1 message backward"
    assert max(map(len, lines)) <= 110
    with pytest.raises(InvalidInput, match=r"rank 4 is not one of the 4 ranks 0 \.\. 3"):
        plan.listing(4)
    assert "1 posts, 2 visits" in repr(program_of(plan))


def program_of(plan: ra.Plan) -> Any:
    from ringattn.runtime.program import forward_program

    kernel = get_kernel("reference", *(torch.zeros(1, 1, 1, 64),) * 3)
    return forward_program(plan, 1, kernel, torch.device("cpu"), save=True)
