"""Plans of packings that change in every step: read off a table, and not kept for ever."""

from __future__ import annotations

import gc
import random
import weakref

import pytest

from ringattn import Causal, Documents, Pattern, Window, make_plan
from ringattn.call import planner
from ringattn.plan import row_reach
from ringattn.plan.schedules import ring


def pack(source: random.Random, tokens: int) -> Documents:
    """Documents between random borders; some may be empty."""
    borders = [0, *sorted(source.choices(range(tokens + 1), k=source.randrange(12))), tokens]
    return Documents(cu_seqlens=borders)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced", "striped", "striped(4)"])
def test_a_table_of_all_blocks_gives_the_steps_of_the_searches(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(1)
    for index in range(12):
        ranks, tokens = source.choice([2, 3, 5, 8]), source.choice([3, 31, 64, 200])
        pattern: Pattern = Causal() & pack(source, tokens)
        pattern = pattern & Window(9, 2) if index % 3 == 2 else pattern
        rotate = ("kv", "q", "auto")[index % 3]

        def steps() -> list[object]:
            planner._plans.clear()
            plan = make_plan(pattern, tokens=tokens, ranks=ranks, layout=layout, schedule="ring", rotate=rotate)
            directions = ring.choose_directions(plan.demand)
            counts = [
                ring.row_counts(plan.demand, rank, direction) for rank in range(ranks) for direction in directions
            ]
            return [plan.rotates, counts, [plan.for_rank(rank) for rank in range(ranks)]]

        by_table = steps()
        with monkeypatch.context() as patch:
            patch.setattr(row_reach, "TABLE_RANKS", 0)
            patch.setattr(row_reach, "MOST_RANKS", 0)
            assert by_table == steps(), (pattern, ranks)


def test_plans_of_passed_steps_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = planner._plans
    plans.clear()
    monkeypatch.setattr(plans, "limit", 1 << 18)
    source, made, tables = random.Random(2), [], set()
    for _ in range(40):
        plan = make_plan(Causal() & pack(source, 500), tokens=500, ranks=8, layout="zigzag", schedule="ring")
        plan.for_rank(3)
        made.append(weakref.ref(plan))
        largest = plan.kept_bytes
        tables.add(len(row_reach._layouts))
        del plan
    gc.collect()
    assert sum(ref() is not None for ref in made) <= len(plans) < 40
    assert plans.bytes <= plans.limit + largest
    assert len(tables) == 1 and row_reach._layouts.bytes <= row_reach.LAYOUTS  # one table of the layout for all plans
