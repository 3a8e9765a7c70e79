"""Plans: every pair once, hops that somebody needs, matching messages, JSON, and the cost of one rank."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from counted import CALLS, Counted
from hypothesis import given
from hypothesis import strategies as st
from oracle import mark_pairs
from strategies import problems

from ringattn import (
    Causal,
    Dilated,
    Documents,
    Full,
    InvalidInput,
    Pattern,
    Plan,
    Sinks,
    Strided,
    Window,
    make_plan,
    mix,
)
from ringattn.kernels.aten_cpu import AtenCpu
from ringattn.layout.regular import make_layout
from ringattn.plan import demand
from ringattn.plan.demand import MOST_RANGES, BlockDemand, KeyDemand, QueryDemand, sees_some
from ringattn.plan.row_sets import ALL_ROWS, to_numbers

SCHEDULES = ("ring", "direct", "allgather", "double_ring(1)")
head_counts = st.sampled_from([(1, 1), (4, 2), (3, 1), (2, 2)])


@given(problems(), head_counts)
def test_works_hold_every_pair_once(case: tuple[Pattern, int, int, str], counts: tuple[int, int]) -> None:
    """Invariant 1: over all visits of all ranks, each (query, key, branch) of the mask is computed once."""
    pattern, tokens, ranks, name = case
    heads, kv_heads = counts
    layout = make_layout(name, tokens=tokens, ranks=ranks, pattern=pattern, heads=heads)
    demand = KeyDemand(pattern, layout, heads, kv_heads)
    mask = pattern.mask(tokens, heads)
    positions = [layout.positions(rank) for rank in range(ranks)]
    for rank in range(ranks):
        for owner in range(ranks):
            wanted = mask[:, positions[rank]][:, :, positions[owner]]
            for works in (
                demand.works(rank, owner),
                demand.joined_works(rank, owner),
                [call for work in demand.joined_works(rank, owner) for call in AtenCpu().split(work)],
            ):
                found = np.zeros_like(wanted)
                for work in works:
                    mark_pairs(found, work, kv_heads)
                assert (found == wanted).all()
            assert demand.pairs(rank, owner) == wanted.sum()
            assert demand.needs(range(rank, rank + 1), range(owner, owner + 1)) == bool(wanted.any())


@given(problems(), st.sampled_from(SCHEDULES))
def test_json_round_trip(case: tuple[Pattern, int, int, str], schedule: str) -> None:
    pattern, tokens, ranks, layout = case
    plan = make_plan(pattern, tokens=tokens, ranks=ranks, layout=layout, schedule=schedule, heads=2, dtype="bfloat16")
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.hash == plan.hash


def test_plans_are_frozen_cached_and_told_apart() -> None:
    plan = make_plan(Causal(), tokens=100, ranks=4)
    assert make_plan(Causal(), tokens=100, ranks=4) is plan
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.heads = 3  # type: ignore[misc]
    others = [
        make_plan(Full(), tokens=100, ranks=4),
        make_plan(Causal(), tokens=101, ranks=4),
        make_plan(Causal(), tokens=100, ranks=5),
        make_plan(Causal(), tokens=100, ranks=4, layout="zigzag"),
        make_plan(Causal(), tokens=100, ranks=4, schedule="allgather"),
        make_plan(Causal(), tokens=100, ranks=4, schedule="direct"),
        make_plan(Causal(), tokens=100, ranks=4, dtype="bfloat16"),
        make_plan(Causal(), tokens=100, ranks=4, heads=2),
        make_plan(Causal(), tokens=100, ranks=4, batch=2),
    ]
    assert len({plan.hash, *(other.hash for other in others)}) == 10


def test_edited_json_is_refused() -> None:
    text = make_plan(Causal(), tokens=100, ranks=4).to_json()
    edited = json.loads(text)
    edited["tokens"] = 101
    for wrong, words in (
        (json.dumps(edited), "edited"),
        ("{}", "the plan: Object missing required field format"),
        ("[1", "the plan: is not valid JSON"),
        (text.replace('"format": 4', '"format": 99'), "format 99"),
    ):
        with pytest.raises(InvalidInput, match=words):
            Plan.from_json(wrong)


@pytest.mark.parametrize("backward", [False, True])
def test_full_ring_bytes_do_not_depend_on_the_schedule(backward: bool) -> None:
    sizes = dict(tokens=515, ranks=4, heads=8, kv_heads=4, head_dim=16, dtype="bfloat16", rotate="kv")
    tensors = {False: 2 * 2, True: 2 * 2 + 2 * 4}[backward]  # bytes of k and v, and of their gradients in fp32
    expected = 3 * 515 * 4 * 16 * tensors
    for schedule in ("ring", "allgather", "ulysses(2, ring)", "ulysses(4, ring)"):
        assert make_plan(Causal(), schedule=schedule, **sizes).full_ring_bytes(backward=backward) == expected


def test_causal_contiguous_sends_half() -> None:
    plan = make_plan(Causal(), tokens=512, ranks=8)
    assert plan.bytes_sent() / plan.full_ring_bytes() == 0.5
    assert plan.messages(7) == 0 and plan.messages(0) == 1  # rank 0 sends its own block, and nobody sends to it
    assert plan.pairs() == 512 * 513 // 2
    assert make_plan(Causal(), tokens=512, ranks=8, layout="zigzag").imbalance == 1.0
    assert plan.imbalance == pytest.approx(1.873, abs=1e-3)


def test_window_reaches_one_neighbour() -> None:
    plan = make_plan(Window(32), tokens=512, ranks=8)
    assert plan.messages() == 7 and [len(plan.for_rank(r).forward) for r in (0, 1, 7)] == [1, 2, 2]
    both = make_plan(Window(32, 32), tokens=512, ranks=8)
    assert both.messages() == 14


def test_dense_ring_and_its_backward() -> None:
    plan = make_plan(Full(), tokens=512, ranks=8, head_dim=16, dtype="bfloat16", rotate="kv")
    block = 64 * 32 * 2
    assert plan.bytes_sent() == 8 * 7 * block
    # From the block that the forward ended with: P-2 hops of K/V, P-1 of fp32 dK/dV, none exposed.
    assert plan.bytes_sent(backward=True) == 8 * (6 * block + 7 * 2 * block)
    assert all(len(plan.for_rank(r).saved) == 1 for r in range(8))


def test_bad_arguments() -> None:
    for arguments, words in (
        ({"heads": 4, "kv_heads": 3}, "4 query heads cannot share 3.*kv_heads=1 or 2 or 4"),
        ({"heads": 0}, "heads=0"),
        ({"dtype": "int8"}, "dtype int8 is not supported"),
        ({"schedule": "rings"}, "did you mean 'ring'"),
        ({"layout": "zagzig"}, "unknown layout"),
        ({"pattern": 3}, "pattern must be a ringattn pattern"),
        ({"tokens": 10.5, "layout": "zigzag"}, "tokens=10.5 must be an integer >= 0"),
        ({"tokens": 10.5, "layout": "balanced"}, "tokens=10.5 must be an integer >= 0"),
        ({"tokens": 1 << 62, "layout": "zigzag"}, "the largest number is"),
        ({"q_tokens": 4, "q_layout": f"shifted(zigzag, {1 << 61})"}, "the largest number is"),
        ({"q_tokens": 4, "q_layout": f"shifted(zigzag, {10**400})"}, "the largest number is"),
    ):
        with pytest.raises(InvalidInput, match=words):
            make_plan(**{"pattern": Causal(), "tokens": 8, "ranks": 2, **arguments})  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="rank 2 is not one of the 2 ranks"):
        make_plan(Causal(), tokens=8, ranks=2).for_rank(2)


@pytest.mark.parametrize(
    "pattern",
    [
        Causal() & Window(4095),
        Window(100, 100),
        Causal() & (Window(4095) | Sinks(4)),
        Causal() & Documents([1 << 14] * (1 << 16)),
    ],
    ids=["window", "two-sided", "sinks", "documents"],
)
def test_one_rank_of_many_is_planned_without_looking_at_the_others(pattern: Pattern) -> None:
    """Invariant 6: the tiles that are looked at do not grow with P."""
    CALLS.clear()
    ranks = 262_144
    plan = make_plan(Counted(pattern, Full()), tokens=1 << 30, ranks=ranks)
    rank_plan = plan.for_rank(ranks // 2)
    assert ranks // 2 in {part.owner for step in rank_plan.forward for part in step.visits}
    assert len(rank_plan.forward) <= 8
    assert len(CALLS) < 40_000 < ranks


def test_a_sequence_without_documents_has_a_choice() -> None:
    plan = make_plan(Documents([]), tokens=0, ranks=1, layout="auto", heads=2)
    assert plan.choice is not None and plan.messages() == 0


MASKS = (
    Causal() & (Window(9) | Sinks(2)),
    Window(5, 3) | Sinks(3),
    Causal() & (Window(4) | Strided(5)),
    mix(Causal(), Strided(3)),
    Dilated((8, 32), (1, 2)),
)


@pytest.mark.parametrize("pattern", MASKS, ids=repr)
@pytest.mark.parametrize(("tokens", "block", "heads"), [(137, 5, (2, 1)), (170, 6, (4, 4))])
def test_needed_rows_of_blocks_of_many_ranges(
    pattern: Pattern, tokens: int, block: int, heads: tuple[int, int]
) -> None:
    """By a dense mask: what each run of ranks needs of each block, of keys and of queries."""
    layout = make_layout(f"striped({block})", tokens=tokens, ranks=5)
    assert len(layout.shard(4)) > MOST_RANGES
    mask = pattern.mask(tokens, heads[0]) > 0
    keys = KeyDemand(pattern.bind(heads[0], tokens), layout, *heads)
    for side, seen in ((keys, mask.transpose(0, 2, 1)), (QueryDemand(keys), mask)):
        seen = seen.reshape(side.block_heads, -1, tokens, tokens).any(1)  # [heads of the block, its rows, readers]
        for first, stop, owner in product(range(5), range(1, 6), range(5)):
            readers = range(first, stop)
            wanted = np.zeros((side.block_heads, layout.rows(owner)), dtype=bool)
            for rank in readers:
                wanted |= seen[:, layout.positions(owner)][:, :, layout.positions(rank)].any(2)
            found = np.zeros_like(wanted)
            for cut in side.needed_rows((readers,), owner) if readers else ():
                for head in range(side.block_heads):
                    if cut is ALL_ROWS:
                        found[:] = True
                    elif head in cut.index:
                        found[head, to_numbers(cut.rows_of(head))] = True
            assert (found == wanted).all(), (side.side, readers, owner)
            assert side.needs(readers, range(owner, owner + 1)) == bool(wanted.any())
            assert side.needs(range(owner, owner + 1), readers) == bool(
                seen[:, [p for rank in readers for p in layout.positions(rank)]][:, :, layout.positions(owner)].any()
            )


@pytest.mark.parametrize("pattern", [Causal() & (Window(1024) | Sinks(4)), Window(256) | Sinks(4)], ids=repr)
def test_planning_sinks_on_stripes_takes_time_as_the_tokens(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of ranges are not looked at one by one, which would take four times as long for twice the tokens."""
    looks, honest = [0], BlockDemand._needed_pieces

    def counted(self: BlockDemand, *ranges: range) -> Iterator[tuple[range, range]]:
        looks[-1] += 1
        return honest(self, *ranges)

    def seen(pattern: Pattern, q: range, keys: tuple[range, ...], heads: int) -> bool:
        looks[-1] += 1
        return sees_some(pattern, q, keys, heads)

    monkeypatch.setattr(BlockDemand, "_needed_pieces", counted)
    monkeypatch.setattr(demand, "sees_some", seen)
    for tokens in (1 << 13, 1 << 14):
        plan = make_plan(pattern, tokens=tokens, ranks=8, layout="striped(64)", schedule="ring", head_dim=64)
        for rank in range(8):
            plan.for_rank(rank)
        looks.append(0)
    assert 0 < looks[0] < looks[1] < 2.6 * looks[0]
