"""What travels: rows are held before they are used, nothing that nobody needs moves, and bytes reach their minimum."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import byte_table
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import mark_pairs
from strategies import head_counts, problems, schedules

from ringattn import Causal, Dilated, InvalidInput, Pattern, Plan, Window, make_layout, make_plan  # fmt: skip
from ringattn.kernels import get_kernel
from ringattn.plan.demand import KeyDemand
from ringattn.plan.row_sets import ALL_ROWS, RowSet, count_rows, find_copies, subtract, to_numbers, to_ranges, union
from ringattn.plan.steps import Part
from ringattn.runtime.executor import Job, forward
from ringattn.transport.virtual import Virtual


class Facts:
    """Who needs which rows, from the dense mask alone."""

    def __init__(self, plan: Plan) -> None:
        self.plan, ranks = plan, range(plan.ranks)
        mask = plan.pattern.mask(plan.tokens, plan.heads)
        seen = (mask.reshape(plan.kv_heads, plan.heads // plan.kv_heads, plan.tokens, plan.tokens) > 0).any(1)
        places = [plan.layout.positions(rank) for rank in ranks]
        self.need = [[seen[:, places[r]][:, :, places[s]].any(1) for s in ranks] for r in ranks]

    def rows(self, part: Part) -> np.ndarray:
        """[K, rows]: what a part holds."""
        found = np.zeros((self.plan.kv_heads, self.plan.layout.rows(part.owner)), dtype=bool)
        if part.row_set is ALL_ROWS:
            return ~found
        for head in part.row_set.heads:
            for run in part.row_set.rows_of(head):
                assert not found[head, run.start : run.stop : run.step].any(), "rows of a cut are disjoint"
                found[head, run.start : run.stop : run.step] = True
        return found

    def bytes(self, rows: int) -> int:
        return rows * 2 * self.plan.head_dim * 4


def plan_of(case: tuple[Pattern, int, int, str], counts: tuple[int, int], schedule: str) -> Plan:
    pattern, tokens, ranks, layout = case
    heads, kv_heads = counts
    return make_plan(
        pattern, tokens=tokens, ranks=ranks, layout=layout, schedule=schedule, heads=heads, kv_heads=kv_heads,
        rotate="keys",
    )  # fmt: skip


@given(problems(), head_counts, st.data())
def test_rows_are_held_before_they_are_used(
    case: tuple[Pattern, int, int, str], counts: tuple[int, int], data: st.DataObject
) -> None:
    """Each rank computes all that it must on rows that it holds; messages pair up and are not empty; every gradient
    comes home exactly once from every rank that it comes from."""
    plan = plan_of(case, counts, data.draw(st.sampled_from(schedules(case[2]))))
    facts, ranks = Facts(plan), range(plan.ranks)
    plans = [plan.for_rank(rank) for rank in ranks]
    shapes = [(plan.kv_heads, plan.layout.rows(owner)) for owner in ranks]
    for backward in (False, True):
        sent: dict[tuple[int, int, int], tuple[tuple[Part, ...], list[np.ndarray]]] = {}
        expected: dict[tuple[int, int, int], tuple[Part, ...]] = {}
        home: list[list[tuple[tuple[int, int, int], Part]]] = [[] for _ in ranks]
        sums = [[np.zeros((plan.ranks, *shapes[s]), dtype=int) for s in ranks] for _ in ranks]
        # Ranks run in an order in which every message was sent before it is waited for.
        todo = {
            rank: _run(plan, facts, plans[rank], backward, sums[rank], sent, expected, home[rank]) for rank in ranks
        }
        while todo:
            before = {rank: next(todo[rank], None) for rank in list(todo)}
            stuck = all(state == "waits" for state in before.values())
            assert not stuck, "ranks wait for each other"
            todo = {rank: todo[rank] for rank, state in before.items() if state is not None}
        assert {key: parts for key, (parts, _) in sent.items()} == expected
        if backward:
            for owner in ranks:
                for rank in ranks:
                    assert (sums[owner][owner][rank] == facts.need[rank][owner]).all()


def _run(plan, facts, rank_plan, backward, sums, sent, expected, home):  # type: ignore[no-untyped-def]
    """A rank, step by step: yields "waits" as long as a message that it needs now has not been sent."""
    rank, steps = rank_plan.rank, rank_plan.backward if backward else rank_plan.forward
    held = [np.zeros((plan.kv_heads, plan.layout.rows(owner)), dtype=bool) for owner in range(plan.ranks)]
    held[rank][:] = True
    if backward:
        for part in rank_plan.kept:
            held[part.owner] |= facts.rows(part)
    done, waiting = [], []
    for index, step in enumerate(steps):
        for hop in step.sends:
            key = rank, hop.peer, hop.tag
            assert hop.parts and hop.until >= index and key not in sent
            carried = []
            for part in hop.parts:
                rows = facts.rows(part)
                assert rows.any()
                if part.kind == "kv":
                    assert (held[part.owner] >= rows).all(), "a rank sends rows that it does not hold"
                    carried.append(rows)
                else:
                    carried.append(np.where(rows, sums[part.owner], 0))
                    sums[part.owner] *= ~rows
            sent[key] = hop.parts, carried
        for hop in step.recvs:
            key = hop.peer, rank, hop.tag
            assert key not in expected
            expected[key] = hop.parts
            waiting.append((hop.until, key))
        for owner in {part.owner for part in step.visits}:
            rows = sum(facts.rows(part).astype(int) for part in step.visits if part.owner == owner)
            assert rows.max(initial=1) == 1 and (rows >= facts.need[rank][owner]).all()
            assert (held[owner] >= rows).all(), "a rank computes with rows that it does not hold"
            sums[owner][rank] += facts.need[rank][owner]
            done.append(owner)
        for until, key in [message for message in waiting if message[0] <= index]:
            while key not in sent:
                yield "waits"
            parts, carried = sent[key]
            for part, rows in zip(parts, carried, strict=True):
                if part.kind == "kv":
                    held[part.owner] |= rows
                else:
                    sums[part.owner] += rows
            waiting.remove((until, key))
        yield "runs"
    assert sorted(done) == [owner for owner in range(plan.ranks) if facts.need[rank][owner].any()]
    assert not waiting
    if not backward:
        kept = [facts.rows(part) for part in rank_plan.kept]
        assert all((held[part.owner] >= rows).all() for part, rows in zip(rank_plan.kept, kept, strict=True))


@given(problems(), head_counts)
def test_direct_sends_the_information_minimum(case: tuple[Pattern, int, int, str], counts: tuple[int, int]) -> None:
    plan = plan_of(case, counts, "direct")
    facts, ranks = Facts(plan), range(plan.ranks)
    least = sum(int(facts.need[r][s].sum()) for r in ranks for s in ranks if r != s)
    assert plan.bytes_sent() == facts.bytes(least)


@given(problems(), head_counts)
def test_the_ring_carries_what_somebody_further_on_needs(
    case: tuple[Pattern, int, int, str], counts: tuple[int, int]
) -> None:
    """The bytes of the best of three directions, by brute force: up, down, or both with the shorter arcs."""
    plan = plan_of(case, counts, "ring")
    facts, size = Facts(plan), plan.ranks

    def along(sign: int, limit: int) -> int:
        rows = 0
        for owner in range(size):
            beyond = np.zeros_like(facts.need[owner][owner])
            for distance in range(limit, 0, -1):
                beyond |= facts.need[(owner + sign * distance) % size][owner]
                rows += int(beyond.sum())
        return rows

    ways = along(1, size - 1), along(-1, size - 1), along(1, size // 2) + along(-1, (size - 1) // 2)
    assert plan.bytes_sent() == facts.bytes(min(ways))


@given(problems(), head_counts, st.data())
def test_works_on_a_cut_hold_the_pairs_of_its_rows(
    case: tuple[Pattern, int, int, str], counts: tuple[int, int], data: st.DataObject
) -> None:
    pattern, tokens, ranks, name = case
    heads, kv_heads = counts
    layout = make_layout(name, tokens=tokens, ranks=ranks, pattern=pattern, heads=heads)
    demand = KeyDemand(pattern.bind(heads, tokens), layout, heads, kv_heads)
    mask = pattern.mask(tokens, heads)
    rank, owner = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, ranks - 1))
    first = data.draw(st.integers(0, rank))
    queriers = (range(first, data.draw(st.integers(rank + 1, ranks))),)
    wanted = mask[:, layout.positions(rank)][:, :, layout.positions(owner)]
    found = np.zeros_like(wanted)
    for cut in demand.needed_rows(queriers, owner):
        whole = RowSet(tuple(range(kv_heads)), ((range(layout.rows(owner)),),))
        cut = whole if cut is ALL_ROWS else cut
        inside = np.zeros((heads, wanted.shape[1], cut.count), dtype=wanted.dtype)
        for work in demand.batched(rank, owner, cut):
            mark_pairs(inside, _renumbered(work, cut), kv_heads)
        for head in range(heads):
            kv = head * kv_heads // heads
            if kv in cut.index:
                found[head][:, to_numbers(cut.rows_of(kv))] += inside[head]
            else:
                assert not inside[head].any()
    assert (found == wanted).all()


def _renumbered(work, cut):  # type: ignore[no-untyped-def]
    """The work with the numbers of its key/value heads instead of their places in the cut."""
    return replace(work, kv=[cut.heads[place] for place in work.kv])


numbers = st.sets(st.integers(0, 60), max_size=40)


@given(numbers)
def test_decoded_numbers_are_the_same_in_ascending_ranges(some: set[int]) -> None:
    found = to_ranges(np.array(sorted(some), dtype=int))
    assert [i for run in found for i in run] == sorted(some)
    assert all(a[-1] < b[0] for a, b in pairwise(found))


ranges = st.builds(
    lambda start, length, step: range(start, start + length * step, step),
    st.integers(0, 20), st.integers(1, 8), st.integers(1, 4),
).filter(lambda r: r[-1] < 48)  # fmt: skip
pieces = st.lists(st.tuples(st.sampled_from([range(3), range(1), range(0, 3, 2), range(2, 3)]), ranges), max_size=6)


@given(pieces, pieces)
def test_union_difference_and_shared_rows_of_cuts(
    some: list[tuple[range, range]], more: list[tuple[range, range]]
) -> None:
    def dense(parts: list[tuple[range, range]]) -> np.ndarray:
        found = np.zeros((3, 48), dtype=bool)
        for heads, rows in parts:
            found[np.ix_(list(heads), list(rows))] = True
        return found

    def mask(cuts) -> np.ndarray:  # type: ignore[no-untyped-def]
        found = np.zeros((3, 48), dtype=int)
        for cut in cuts:
            for head in range(3) if cut is ALL_ROWS else cut.heads:
                found[head, slice(None) if cut is ALL_ROWS else to_numbers(cut.rows_of(head))] += 1
        return found

    a, b = union(some, 3, 48), union(more, 3, 48)
    assert (mask(a) == dense(some)).all() and count_rows(a, 3, 48) == dense(some).sum()
    assert (mask(subtract(a, [b], 3, 48)) == (dense(some) & ~dense(more))).all()
    for x in a:
        for y in b:
            label = np.arange(3 * 48).reshape(3, 48)
            to, of = (
                label if cut is ALL_ROWS else np.stack([label[h, to_numbers(cut.rows_of(h))] for h in cut.heads])
                for cut in (x, y)
            )
            moved = np.full_like(to, -1)
            for move in find_copies(x, y, 3, 48):
                moved[np.ix_(move.to_heads, np.asarray(move.to_rows))] = of[
                    np.ix_(move.from_heads, np.asarray(move.from_rows))
                ]
            assert (np.where(np.isin(to, of), to, -1) == moved).all()


def test_byte_table() -> None:
    """Planned, and counted on virtual ranks; for real ranks see tests/transport."""
    counted: list[list[int]] = [[] for _ in range(byte_table.RANKS)]
    for plan in byte_table.plans():
        x = torch.zeros(1, plan.heads, plan.tokens, plan.head_dim)
        kernel, transport = get_kernel("reference", x, x, x), Virtual(plan.ranks)
        shards = [plan.layout.shard_tensor(x, rank) for rank in range(plan.ranks)]
        transport.run(
            [forward(Job(plan, r, kernel, 1.0), mine, mine, mine, keep=False) for r, mine in enumerate(shards)]
        )
        for rank, counters in enumerate(transport.counters):
            counted[rank].append(counters.sent_bytes)
    byte_table.check(counted)
    relay, direct = (plan.bytes_sent() for plan in byte_table.plans()[-4:-2])
    assert direct < 0.7 * relay  # the ring carries on what was asked for by ranks that are far apart


def test_long_sequences_on_64_ranks() -> None:
    """1,048,576 tokens: a window moves 0.005 of a full ring at most, LongNet with 8 heads 0.002."""
    for pattern, most in (
        (Causal() & Window(4095), 0.005),
        (Dilated((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12)), 0.002),
        (Dilated((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12)) & Causal(), 0.002),
    ):
        for schedule in ("ring", "direct"):
            plan = make_plan(pattern, tokens=1 << 20, ranks=64, schedule=schedule, heads=8)
            assert plan.bytes_sent() <= most * plan.full_ring_bytes()


def test_what_is_kept_is_one_block_at_most() -> None:
    """In the causal ring all blocks end at the last rank, which keeps one and gets the others again."""
    for layout, schedule in (("contiguous", "ring"), ("zigzag", "ring"), ("zigzag", "direct")):
        plan = make_plan(Causal(), tokens=512, ranks=8, layout=layout, schedule=schedule, rotate="keys")
        kept = [sum(map(plan.part_bytes, plan.for_rank(rank).kept)) for rank in range(8)]
        assert 0 < max(kept) <= 64 * 128 * 4
    # A narrow window keeps all that it got: no K/V moves in the backward.
    plan = make_plan(Causal() & Window(31), tokens=512, ranks=8, rotate="keys")
    assert plan.bytes_sent(backward=True) == plan.bytes_sent()


def test_wrong_schedules() -> None:
    for schedule, words in (
        ("double_ring(3)", "nodes do not divide 8 ranks; try double_ring with 2 or 4 or 8"),
        ("double_ring", r"takes the number of ranks of a node; try double_ring\(2\)"),
        ("double_ring(inner=2)", r"try double_ring\(2\)"),
        ("direct(2)", "expected auto, ring"),
        ("ulysses", "expected auto, ring"),
        ("ulysses(3)", "3 does not divide 8 ranks; try sizes 2 or 4 or 8"),
        ("ulysses(4)", "4 does not divide 6 query heads"),
        ("ulysses(2)", "2 does not divide 3 key/value heads"),
        ("ulysses(2, rong)", "did you mean 'ring'"),
        ("double_rung(2)", "did you mean 'double_ring'"),
    ):
        with pytest.raises(InvalidInput, match=words):
            make_plan(Causal(), tokens=64, ranks=8, schedule=schedule, heads=6, kv_heads=3)
