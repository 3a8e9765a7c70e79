"""What rotates in the backward by default: the bytes of both ways are counted without planning all ranks, and are
right."""

from __future__ import annotations

import pytest

import ringattn as ra
from ringattn import Causal, Documents, Full, Pattern, Plan, Window, make_plan
from ringattn.plan.schedules.base import EXACT_RANKS

TOKENS = 384
PATTERNS: dict[str, Pattern] = {
    "full": Full(),
    "causal": Causal(),
    "window": Causal() & Window(37),
    "documents": Causal() & Documents([100, 3, 80, 20, 81, 100]),
    "dilated": ra.Dilated((64, 128), (1, 2)),
    "group": ra.Dilated((64, 256), (2, 3), mix="group"),
    "blocks": ra.dilated_blocks(16, offsets=(1, 3, 8)),
    "global": ra.global_local(16, globals=2, blocks=1),
    "strided": ra.strided_blocks(16, stride=5),
}


def between_nodes(plan: Plan, inner: int) -> int:
    return sum(
        sum(map(plan.part_bytes, hop.parts))
        for rank in range(plan.ranks)
        for step in plan.for_rank(rank).backward
        for hop in step.sends
        if hop.peer // inner != rank // inner
    )


@pytest.mark.parametrize("name", PATTERNS)
def test_auto_takes_the_way_with_fewer_bytes(name: str) -> None:
    cases = (
        (6, "zigzag", "ring", 4, 2), (12, "contiguous", "double_ring(4)", 2, 2), (17, "striped(16)", "direct", 2, 2),
        (10, "zigzag", "allgather", 4, 2), (EXACT_RANKS, "contiguous", "ring", 2, 1),
    )  # fmt: skip
    few = name in ("causal", "window", "documents", "dilated")  # the steps of 64 ranks take seconds with the others
    for ranks, layout, schedule, heads, kv_heads in cases if few else cases[:-1]:
        auto, keys, queries = (
            make_plan(
                PATTERNS[name], tokens=TOKENS, ranks=ranks, layout=layout, schedule=schedule, heads=heads,
                kv_heads=kv_heads, head_dim=8, rotate=rotate,
            )
            for rotate in ("auto", "kv", "q")
        )  # fmt: skip
        inner = auto._rotation.keys.ranks_per_node
        counted = tuple((between_nodes(plan, inner), plan.bytes_sent(backward=True)) for plan in (keys, queries))
        found = auto._rotation.count_bytes()
        assert found == counted, f"{ranks} ranks, {layout}, {schedule}: {found} is not {counted}"
        assert auto.rotates == ("q" if counted[1] < counted[0] else "kv")
        assert auto.bytes_sent() == keys.bytes_sent() == queries.bytes_sent()
        chosen = keys if auto.rotates == "kv" else queries
        assert all(auto.for_rank(rank) == chosen.for_rank(rank) for rank in (0, ranks // 2))


@pytest.mark.parametrize("name", ["window", "dilated", "causal"])
@pytest.mark.parametrize("schedule", ["ring", "direct"])
def test_above_the_ranks_that_are_counted_the_way_is_the_same(name: str, schedule: str) -> None:
    """A period of ranks, or evenly spaced ones, tell the way of a plan with half as many ranks again as are counted."""
    ranks = EXACT_RANKS + EXACT_RANKS // 2
    for heads, kv_heads in ((2, 2), (2, 1)) if name == "window" else ((2, 1),):
        options = {"tokens": 8 * ranks, "ranks": ranks, "schedule": schedule, "heads": heads, "kv_heads": kv_heads}
        plans = [make_plan(PATTERNS[name], rotate=way, **options) for way in ("kv", "q")]  # type: ignore[arg-type]
        sent = [plan.bytes_sent(backward=True) for plan in plans]
        auto = make_plan(PATTERNS[name], **options)  # type: ignore[arg-type]
        assert auto.rotates == ("q" if sent[1] < sent[0] else "kv"), sent
