"""What is worked out once and kept: bounded by bytes, and left behind by pickle and copy."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import ringattn as ra
from ringattn.cache import ENTRY, Cache, cached, estimate_bytes
from ringattn.layout.regular import make_layout
from ringattn.machine.presets import get_machine
from ringattn.pattern import Pattern


def packing(seed: int, tokens: int, count: int) -> ra.Documents:
    rng = random.Random(seed)
    cuts = [0, *sorted(rng.randrange(tokens + 1) for _ in range(count - 1)), tokens]
    return ra.Documents([b - a for a, b in pairwise(cuts)])


def test_the_least_recently_used_goes_first_and_bytes_stay_below_the_limit() -> None:
    cache = Cache(4 * (ENTRY + 1000), lambda value: 1000)
    for key in "abcd":
        cache.answer(key, lambda key=key: key.upper())  # type: ignore[misc]
    assert cache.answer("a", lambda: "made again") == "A"
    cache.answer("e", lambda: "E")
    assert len(cache) == 4 and cache.bytes == cache.limit
    assert cache.answer("a", lambda: "made again") == "A"
    assert cache.answer("b", lambda: "made again") == "made again"
    cache.clear()
    assert len(cache) == cache.bytes == 0


def test_none_is_an_answer_and_an_error_is_not() -> None:
    cache = Cache(1000)
    assert cache.answer("none", lambda: None) is None
    assert cache.answer("none", lambda: 1) is None
    with pytest.raises(ZeroDivisionError):
        cache.answer("error", lambda: 1 // 0)
    assert cache.answer("error", lambda: 2) == 2


def test_functions_and_named_arguments_have_answers_of_their_own() -> None:
    class Owner:
        cache = Cache(1 << 16)

    def make(name: str) -> Any:
        return cached(lambda owner, x, by=1: (name, x, by))

    owner, one, two = Owner(), make("one"), make("two")
    calls = [(f, x, by) for f in (one, two) for x in (1, 2) for by in (1, 2)]
    found = [f(owner, x, by=by) for _ in range(2) for f, x, by in calls]
    assert found == 2 * [(name, x, by) for name in ("one", "two") for x in (1, 2) for by in (1, 2)]


def test_a_value_that_grows_is_weighed_again_and_a_large_one_alone_is_kept() -> None:
    cache = Cache(10_000, lambda value: 1000 * len(value), grows=True)
    grown: list[int] = cache.answer("grown", list)
    grown += [0] * 50
    assert cache.answer("large", lambda: [0] * 20) == [0] * 20
    assert len(cache) == 1 and cache.answer("grown", lambda: "gone") == "gone"


def test_threads_may_share_a_cache() -> None:
    cache = Cache(50 * (ENTRY + 32))

    def ask(seed: int) -> bool:
        rng = random.Random(seed)
        return all(cache.answer(key, lambda key=key: key + 1) == key + 1 for key in rng.choices(range(200), k=3000))  # type: ignore[misc]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(8)))
    assert cache.bytes == len(cache) * (ENTRY + 32) <= cache.limit


def test_weights_are_near_the_truth_and_long_lists_are_sampled() -> None:
    assert estimate_bytes(np.zeros(1000)) == 8128
    value = [(range(i, i + 1000), i + 10**6) for i in range(10_000)]
    truth = sys.getsizeof(value) + sum(
        sum(map(sys.getsizeof, (item, *item, item[0].start, item[0].stop))) for item in value
    )
    assert 0.5 * truth < estimate_bytes(value) < 2 * truth


USED: dict[str, Pattern] = {
    "causal": ra.Causal(),
    "documents": ra.Causal() & packing(1, 256, 5),
    "blocks": ra.BlockSparse(32, np.tri(8, dtype=bool)),
    "levels": ra.hierarchical(16, density=0.5),
    "mix": ra.mix(ra.Window(20), ra.Strided(7)),
}


def derived(plan: ra.Plan) -> list[object]:
    """What a plan works out and keeps."""
    steps = [plan.for_rank(rank) for rank in range(plan.ranks)]
    return [steps, plan.hash, plan.bytes_sent(), plan.ring_plan(0)[0].demand.works(0, 0)]


@pytest.mark.parametrize("schedule", ["ring", "double_ring(2)", "ulysses(2)", "auto"])
@pytest.mark.parametrize("name", USED)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_used_plan_is_pickled_and_copied_without_its_caches(name: str, schedule: str, duplicate: object) -> None:
    assert callable(duplicate)
    plan = ra.make_plan(USED[name], tokens=256, ranks=4, layout="zigzag", schedule=schedule, heads=2)
    used = derived(plan)
    again = duplicate(plan)
    assert set(vars(again)) == set(plan.__dataclass_fields__)
    assert again == plan and hash(again) == hash(plan) and again.choice == plan.choice
    assert used == derived(again)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_patterns_layouts_machines_and_steps_are_pickled_too(duplicate: object) -> None:
    assert callable(duplicate)
    layouts = [
        make_layout(name, tokens=256, ranks=4, pattern=ra.Causal(), heads=1)
        for name in ("contiguous", "zigzag", "striped(8)", "balanced(16)")
    ]
    for layout in layouts:
        layout.shard(1), layout.span(range(2)), hash(layout), layout.digest
    bound = [pattern.bind(2, 256) for pattern in USED.values()]
    for pattern in bound:
        hash(pattern), repr(pattern), pattern.count(range(256), range(256))
    machines = [get_machine(name) for name in ("cpu", "cuda", "h100_nvlink_ib")]
    steps = ra.make_plan(USED["documents"], tokens=256, ranks=4, layout="zigzag", schedule="ring").for_rank(2)
    for value in (*layouts, *bound, *machines, steps):
        again = duplicate(value)
        assert again == value and hash(again) == hash(value) and repr(again) == repr(value)
    table = duplicate(bound[2])
    with pytest.raises(ValueError, match="read-only"):
        table.table[0, 0, 0] = False


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_rings_with_fewer_tokens_than_ranks_are_planned(tokens: int) -> None:
    pattern = ra.Causal() & ra.Documents([tokens])
    plan = ra.make_plan(pattern, tokens=tokens, ranks=40, layout="zigzag", schedule="ring")
    assert sum(plan.pairs(rank) for rank in range(40)) == tokens * (tokens + 1) // 2
    assert plan.bytes_sent() <= plan.full_ring_bytes()
