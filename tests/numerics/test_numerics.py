"""The numerics simulator: its oracles against dense attention, its ledger against brute force, its faults caught."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from command_line import Inside

import ringattn as ra
from ringattn.cli.simulate_numerics import main
from ringattn.config.groups import NumericsGroup
from ringattn.config.schema import LayoutGroup, MachineGroup, PatternGroup, ScheduleGroup, SimulateConfig
from ringattn.errors import InvalidInput, NumericsFailure, Unsupported
from ringattn.kernels import get_kernel
from ringattn.kernels.base import Kernel
from ringattn.numerics import (
    FAULT_KINDS,
    GRADIENT_FAULTS,
    Fault,
    TensorSource,
    chosen_rows,
    execute,
    make_groups,
    make_source,
    numerics,
    whole,
)
from ringattn.numerics.exact import ExactQueries, exact_keys, exact_rows
from ringattn.numerics.ledger import PairLedger, expect, expected_counts, weights
from ringattn.numerics.oracle import exact_gradients, exact_row
from ringattn.numerics.sampled import sample
from ringattn.pattern import Pattern, Tile
from ringattn.pattern.tile import make_tile
from ringattn.plan.plan import Plan
from ringattn.plan.schedules import make_schedule
from ringattn.plan.schedules.route import Route
from ringattn.plan.work import Work

PATTERNS = (
    ra.Full(),
    ra.Causal(),
    ra.Window(37, 5),
    ra.Dilated((32, 64, 128), (1, 2, 4), causal=True),
    ra.Dilated((32, 64), (1, 2), mix="group"),
    ra.Causal() & ra.Documents([30, 100, 126]),
    ra.Strided(3),
)
LAYOUTS = ("contiguous", "zigzag", "striped", "striped(4)")
PERIOD = 37


def make(pattern: Pattern, tokens: int = 256, ranks: int = 8, **options: object) -> Plan:
    chosen = {"schedule": "ring", "dtype": "float64", "head_dim": 8, "heads": 4, "kv_heads": 2, "rotate": "keys"}
    return ra.make_plan(pattern, tokens=tokens, ranks=ranks, **{**chosen, **options})  # type: ignore[arg-type]


def case_of(plan: Plan, period: int | None) -> oracle.Case:
    """The inputs of a simulation as whole tensors."""
    source, every = make_source(plan, period=period), range(plan.tokens)
    return oracle.Case(*(source.rows(name, every) for name in ("q", "k", "v", "grad")))  # type: ignore[arg-type]


def truth_of(plan: Plan, period: int | None) -> oracle.Result:
    mask = torch.from_numpy(plan.pattern.mask(plan.tokens, plan.heads))
    return oracle.dense(case_of(plan, period), mask, plan.pattern.output_scale)


@pytest.mark.parametrize("period", [None, PERIOD])
def test_rows_of_a_source_do_not_depend_on_how_they_are_asked_for(period: int | None) -> None:
    plan = make(ra.Causal(), tokens=200, layout="striped(4)")
    source, every = make_source(plan, seed=3, period=period), range(200)
    for name in ("q", "k", "v", "grad"):
        x = source.rows(name, every)  # type: ignore[arg-type]
        assert torch.equal(source.rows(name, range(5, 190, 7)), x[:, :, 5:190:7])  # type: ignore[arg-type]
        assert not torch.equal(make_source(plan, seed=4, period=period).rows(name, every), x)  # type: ignore[arg-type]
        stacked = source.stacked(name, plan.layout, [2, 5])  # type: ignore[arg-type]
        assert torch.equal(stacked[1:], plan.layout.shard_tensor(x, 5))
    k, v = source.rows("k", every), source.rows("v", every)
    if period is not None:
        assert torch.equal(k[:, :, period:], k[:, :, :-period])
        assert torch.equal(v[:, :, period:, 2:], v[:, :, :-period, 2:])
    assert torch.equal(v[0, 0, :, 1] / source.unit, torch.arange(200.0, dtype=torch.float64))
    assert (source.rows("q", every)[..., -1] == 0).all() and (k[..., -2] == 0).all() and (v[..., 0] == 1).all()
    with source.shard(plan.layout.shard(3)) as (a, b):
        assert source.live == 1
        assert torch.equal(a, plan.layout.shard_tensor(k, 3)) and torch.equal(b, plan.layout.shard_tensor(v, 3))
    assert (source.live, source.peak) == (0, 1)


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("period", [None, PERIOD])
def test_a_row_of_the_oracle_is_that_of_dense_attention(pattern: Pattern, period: int | None) -> None:
    plan = make(pattern)
    source, truth = make_source(plan, period=period), truth_of(plan, period)
    for position in (0, 1, 36, 37, 130, 255):
        row = exact_row(plan.pattern, source, position, 8**-0.5)
        np.testing.assert_allclose(row.out, truth.out[0, :, position].numpy(), rtol=0, atol=1e-14)
        np.testing.assert_allclose(row.lse, truth.lse[0, :, position].numpy(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("period", [None, PERIOD])
def test_gradients_of_the_oracle_are_those_of_dense_attention(pattern: Pattern, period: int | None) -> None:
    """The cotangent is that of the rows, and 0 elsewhere."""
    plan, rows, keys = make(pattern), [3, 77, 200], [0, 3, 40, 76, 199]
    case = case_of(plan, period)
    grad = torch.zeros_like(case.grad)
    grad[:, :, rows] = case.grad[:, :, rows]
    mask = torch.from_numpy(pattern.mask(256, 4))
    truth = oracle.dense(replace(case, grad=grad), mask, plan.pattern.output_scale)
    found = exact_gradients(plan.pattern, make_source(plan, period=period), rows, keys, 8**-0.5)
    for x, y, chosen in zip(found, truth.grads, (rows, keys, keys), strict=True):
        np.testing.assert_allclose(x, y[0][:, chosen].numpy(), rtol=0, atol=1e-14)


def mixed(x: int) -> int:
    """The finaliser of splitmix64 after one increment, in Python integers."""
    z = (x + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_expected_ledger_is_that_of_the_mask(pattern: Pattern, layout: str) -> None:
    plan = make(pattern, layout=layout)
    mask = pattern.mask(256, 4)
    terms = []
    for key in range(256):
        a, b, c = (mixed(plan.layout.owner(key) * 4 + salt) for salt in range(3))
        terms.append(a + b * key + c * key * key)
    ledger = PairLedger(np.arange(256), 4)
    met = {r: expect(plan.pattern, plan.layout, range(r, r + 1), 4, ledger).tolist() for r in range(0, 256, 8)}
    for start in range(1, 8):  # many rows at a time
        expect(plan.pattern, plan.layout, range(start, 256, 8), 4, ledger)
    for head in range(4):
        for q in range(0, 256, 5):
            wanted = sum(int(times) * term for times, term in zip(mask[head, q], terms, strict=True))
            assert int(ledger.hashes[head, q]) == wanted % 2**64
            assert ledger.pairs[head, q] == mask[head, q].sum()
    for q, owners in met.items():
        assert owners == sorted({plan.layout.owner(int(key)) for key in np.flatnonzero(mask[:, q].any(0))})


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_the_counts_that_gradients_carry_are_those_of_the_mask(pattern: Pattern) -> None:
    bound, mask = pattern.bind(4, 256), pattern.mask(256, 4)
    w = weights(np.arange(256))
    assert w.min() == 1 and w.max() == 8
    every, part = range(256), range(3, 250, 2)
    refine = lambda tiles: (piece for tile in tiles for piece in tile.refine())  # noqa: E731
    keys = expected_counts(refine(bound.tiles(every, part, range(4))), part, 4, keys=True)
    np.testing.assert_array_equal(keys, np.einsum("hqk,q->hk", mask, w)[:, 3:250:2])
    queries = expected_counts(refine(bound.tiles(part, every, range(4))), part, 4, keys=False)
    np.testing.assert_array_equal(queries, np.einsum("hqk,k->hq", mask, w)[:, 3:250:2])


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize(
    ("layout", "schedule"), [*zip(LAYOUTS, ("ring", "direct", "ring", "double_ring(4)"), strict=True)]
)
def test_sampled_rows_are_exact(pattern: Pattern, layout: str, schedule: str) -> None:
    plan = make(pattern, layout=layout, schedule=schedule)
    period = (None, PERIOD)[(PATTERNS.index(pattern) + LAYOUTS.index(layout)) % 2]
    report = numerics(plan, rows=6, period=period, backward=True)
    assert report.passed and report.keys >= 5 and report.wrong_gradients == 0, report
    assert (report.rows, report.pairs) == (6, report.pairs_expected)
    mask = pattern.mask(256, 4)
    rows = chosen_rows(plan, 6)
    assert report.pairs == mask[:, rows].sum()
    assert len({plan.layout.owner(row) for row in chosen_rows(plan, 6, 2)}) <= 2


def test_sampled_shards_in_memory_do_not_depend_on_the_number_of_ranks() -> None:
    for ranks in (8, 64, 512):
        plan = make(ra.Full(), tokens=16 * ranks, ranks=ranks)
        source = make_source(plan, period=PERIOD)
        report = sample(plan, source, rows=[0, 8 * ranks, 16 * ranks - 1])
        assert report.passed and report.live == 1 and source.live == 0
        assert report.visits == 3 * ranks
        assert source.made == ranks  # one walk around the ring


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arcs_are_the_arrivals_of_a_route(pattern: Pattern, layout: str) -> None:
    mask = pattern.mask(256, 4)
    ranks = (8, 20)[(PATTERNS.index(pattern) + LAYOUTS.index(layout)) % 2]
    plan = make(pattern, ranks=ranks, layout=layout)
    rows = [plan.layout.positions(rank) for rank in range(ranks)]
    sees = np.array([[mask[:, q][:, :, k].any() for k in rows] for q in rows])
    for rank in range(ranks):
        for owner in range(ranks):
            known = (
                plan.demand.all_needed(rank, range(owner, owner + 1)),
                plan.query_demand.all_needed(owner, range(rank, rank + 1)),
            )
            assert sees[rank, owner] or not any(known)
        for schedule in ("ring", "direct", "double_ring(4)"):
            route = make_schedule(schedule, plan.demand)
            arcs, edges = [list(arc) for arc in route.arcs(rank)], list(route.arrivals(rank))
            assert sorted(map(repr, edges)) == sorted(repr(edge) for arc in arcs for edge in arc)
            assert all([e.step for e in arc] == sorted((e.step for e in arc), reverse=True) for arc in arcs)
            assert {rank, *(e.owner for e in edges)} >= set(np.flatnonzero(sees[rank]).tolist())
            if schedule == "direct":
                assert {e.owner for e in edges} == set(np.flatnonzero(sees[rank]).tolist()) - {rank}


def test_ranks_without_rows_need_nothing() -> None:
    plan = make(ra.Full(), tokens=5, ranks=8)
    assert not plan.demand.all_needed(1, range(0, 8)) and not plan.query_demand.all_needed(1, range(0, 8))
    assert make(ra.Full()).demand.all_needed(1, range(0, 8))


#: Layout, schedule, and what rotates in the backward.
RINGS = (
    ("contiguous", "ring", "keys"),
    ("zigzag", "ring", "queries"),
    ("striped", "direct", "keys"),
    ("contiguous", "double_ring(4)", "queries"),
    ("contiguous", "allgather", "keys"),
)


@pytest.mark.parametrize(  # three rings for each pattern
    ("pattern", "layout", "schedule", "rotate"),
    [(pattern, *RINGS[(place + turn) % 5]) for place, pattern in enumerate(PATTERNS) for turn in (0, 1, 3)],
    ids=str,
)
def test_all_ranks_in_lockstep_are_the_dense_result(pattern: Pattern, layout: str, schedule: str, rotate: str) -> None:
    plan = make(pattern, layout=layout, schedule=schedule, rotate=rotate)
    truth = truth_of(plan, PERIOD)
    outs: dict[int, torch.Tensor] = {}
    lses: dict[int, torch.Tensor] = {}
    grads: dict[int, tuple[torch.Tensor, ...]] = {}

    def watch(outcome: object) -> None:
        for i, rank in enumerate(outcome.ranks):  # type: ignore[attr-defined]
            outs[rank], lses[rank] = outcome.out[i : i + 1], outcome.lse[i : i + 1]  # type: ignore[attr-defined]
            grads[rank] = tuple(x[i : i + 1].clone() for x in outcome.grads)  # type: ignore[attr-defined]

    report = whole(plan, make_source(plan, period=PERIOD), grads=True, watch=watch)
    assert report.passed, report
    assert report.visits == sum(plan.demand.visits(r, o) for r in range(8) for o in range(8))
    unshard = plan.layout.unshard_tensor
    assert oracle.error(unshard([outs[r] for r in range(8)]), truth.out) < 1e-13
    found, wanted = unshard([lses[r] for r in range(8)], -1), truth.lse
    assert torch.equal(found.isfinite(), wanted.isfinite())
    assert oracle.error(found[wanted.isfinite()], wanted[wanted.isfinite()]) < 1e-13
    for place, tag in enumerate((-2, -1, 1)):  # the columns in which gradients carry their counts
        x, y = unshard([grads[r][place] for r in range(8)]), truth.grads[place].clone()
        x[..., tag] = y[..., tag] = 0
        assert oracle.error(x, y) < 1e-13


def test_lockstep_is_the_virtual_ring_up_to_rounding() -> None:
    plan = make(ra.Causal() & ra.Window(70), tokens=256, ranks=16, kv_heads=4)
    source = make_source(plan)
    q, k, v = (source.rows(name, range(256)) for name in ("q", "k", "v"))
    out = ra.virtual_attention(q, k, v, plan.pattern, ranks=16, schedule="ring")
    kernel = get_kernel("auto", q, k, v)
    for group in make_groups(plan, range(16), backward=False):
        for outcome in execute(group, TensorSource.of(source), lambda: kernel, 8**-0.5, grads=False)[0]:
            for i, rank in enumerate(outcome.ranks):
                worst = (outcome.out[i] - plan.layout.shard_tensor(out, rank)[0]).abs().max()
                assert worst <= 4 * torch.finfo(torch.float64).eps  # products of a batch may be summed in another order


@pytest.mark.parametrize("pattern", [ra.Window(40), ra.Dilated((32, 64, 128), (1, 2, 4))], ids=repr)
def test_calls_do_not_grow_with_the_ranks(pattern: Pattern) -> None:
    few, many = (numerics(make(pattern, 32 * ranks, ranks), mode="all", period=PERIOD) for ranks in (12, 32))
    assert few.passed and many.passed
    assert many.calls == few.calls


def test_some_ranks_of_many() -> None:
    plan = make(ra.Window(100), tokens=32 << 14, ranks=1 << 14)
    report = numerics(plan, mode="all", ranks=range(5000, 5040), together=16, period=PERIOD)
    assert report.passed and (report.ranks, report.live) == (40, 16)
    assert report.answered > 0  # blocks that cross the borders of groups
    with pytest.raises(InvalidInput, match="exchanges gradients with rank"):
        numerics(plan, mode="all", ranks=range(5000, 5040), backward=True, period=PERIOD)
    closed = make(ra.Dilated((32, 128), (1, 2), causal=True), tokens=32 << 14, ranks=1 << 14)
    report = numerics(closed, mode="all", ranks=range(400, 480), together=32, backward=True, period=PERIOD)
    assert report.passed and report.answered == 0 and report.gradient_error is not None and report.live == 32


def test_fp32_is_compared_with_single_calls() -> None:
    report = numerics(make(ra.Causal(), dtype="float32"), mode="all", backward=True, period=PERIOD)
    assert report.passed and 0 < report.error < report.tolerance < 1e-5


@pytest.mark.parametrize(
    ("pattern", "ranks"),
    [(ra.Full(), 10), (ra.Causal(), 12), (ra.Window(40), 16), (ra.Dilated((64,), (2,), causal=True), 16)],
    ids=repr,
)
def test_every_fault_is_caught_in_both_modes(pattern: Pattern, ranks: int) -> None:
    plan = make(pattern, tokens=8 * ranks, ranks=ranks, heads=1, kv_heads=1)
    hurt = ranks * 3 // 4 + 1
    rows = [hurt * 8, hurt * 8 + 6, hurt * 8 + 10, 8 * ranks - 1]
    assert numerics(plan, rows=rows, period=PERIOD).passed
    assert numerics(plan, mode="all", backward=True, period=PERIOD).passed
    for fault in FAULT_KINDS:
        where = Fault(fault, hurt, hurt if fault in GRADIENT_FAULTS else hurt - 1)
        for report in (
            numerics(plan, mode="all", backward=True, period=PERIOD, fault=where),
            numerics(plan, rows=rows, backward=True, period=PERIOD, fault=where),
        ):
            assert not report.accurate, (fault, report)
            assert not report.complete, (fault, report)


class WrongGradients(Kernel):
    """A kernel whose gradients are changed before they leave it, where the ledger does not look."""

    def __init__(self, inner: Kernel, change: Callable[[torch.Tensor], torch.Tensor], which: int | None = None) -> None:
        self.inner, self.change, self.which, self.name, self.calls = inner, change, which, inner.name, 0

    def check(self, *tensors: torch.Tensor) -> None:
        self.inner.check(*tensors)

    def split(self, work: Work) -> Iterator[Work]:
        return self.inner.split(work)

    def forward(self, *given: object) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner.forward(*given)  # type: ignore[arg-type]

    def backward(self, *given: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = self.inner.backward(*given)  # type: ignore[arg-type]
        some = range(3) if self.which is None else [self.which]
        return tuple(self.change(x) if i in some else x for i, x in enumerate(found))  # type: ignore[return-value]


WRONG: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int | None]] = {
    "zeroed": (torch.zeros_like, None),
    "dk zeroed": (torch.zeros_like, 1),
    "columns in another order": (lambda x: x.flip(-1), None),
    "1 % too large": (lambda x: x * 1.01, None),
    "dv of one row": (lambda x: x * (1 + 1e-2 * (torch.arange(x.shape[2])[:, None] == 5)), 2),
    "dq of one row": (lambda x: x * (1 + 1e-2 * (torch.arange(x.shape[2])[:, None] == 5)), 0),
}


@pytest.mark.parametrize("pattern", [ra.Causal(), ra.Dilated((128, 256), (1, 2), mix="group")], ids=repr)
@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_gradients_are_compared_where_no_dense_mask_is(
    pattern: Pattern, wrong: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["ringattn.numerics.whole"]
    monkeypatch.setattr(module, "DENSE", 0)
    if wrong is not None:
        change, which = WRONG[wrong]
        monkeypatch.setattr(module, "get_kernel", lambda *given: WrongGradients(get_kernel(*given), change, which))
    plan = make(pattern, tokens=512, ranks=4, layout="zigzag" if pattern == ra.Causal() else "contiguous")
    report = numerics(plan, mode="all", backward=True, period=PERIOD)
    assert report.accurate == (wrong is None), (wrong, report)
    assert (report.rows, report.keys, report.dense) == (4 * 16, 4 * 16, 0)
    assert report.gradient_error is not None and report.sum_error is not None


def test_gradients_of_more_rows_than_a_dense_mask_has(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["ringattn.numerics.whole"]
    monkeypatch.setattr(module, "DENSE", 1024)
    plan = make(ra.Causal(), tokens=1032, ranks=4, heads=1, kv_heads=1)
    assert numerics(plan, mode="all", backward=True).passed
    for fault in GRADIENT_FAULTS:  # noticed by the numbers as well as by the ledger
        report = numerics(plan, mode="all", backward=True, fault=Fault(fault, 2, 2))
        assert not report.accurate and not report.complete, (fault, report)
    monkeypatch.setattr(module, "get_kernel", lambda *given: WrongGradients(get_kernel(*given), lambda x: x * 1.01))
    assert not numerics(plan, mode="all", backward=True).accurate


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_oracles_of_many_rows_are_dense_attention(pattern: Pattern) -> None:
    plan = make(pattern, layout="striped(4)")
    truth, source, every = truth_of(plan, PERIOD), make_source(plan, period=PERIOD), range(256)
    case = case_of(plan, PERIOD)
    chosen = [range(3, 250, 7), range(0, 2)]
    at = [place for r in chosen for place in r]
    found = exact_rows(plan.pattern, source, chosen, 8**-0.5)
    for x, y in ((found.out, truth.out), (found.dq, truth.grads[0]), (found.lse, truth.lse)):
        np.testing.assert_allclose(x.numpy(), y[0][:, at].numpy(), rtol=0, atol=1e-13)
    grad = case.grad[0] * plan.pattern.output_scale
    queries = ExactQueries(np.arange(256), case.q[0], grad, truth.lse[0], (case.grad * truth.out)[0].sum(-1))
    for x, y in zip(exact_keys(plan.pattern, source, chosen, 8**-0.5, queries), truth.grads[1:], strict=True):
        np.testing.assert_allclose(x.numpy(), y[0][:, at].numpy(), rtol=0, atol=1e-13)
    some = ExactQueries(np.arange(200), *(x[:, :200] for x in (case.q[0], grad, truth.lse[0], queries.delta)))
    missing = exact_keys(plan.pattern, source, [every], 8**-0.5, some)[1].isnan().any(-1)
    sees = torch.from_numpy(pattern.mask(256, 4)[:, 200:].any(1)).unflatten(0, (2, 2)).any(1)
    assert torch.equal(missing, sees)


@pytest.mark.parametrize("schedule", ["ring", "direct", "double_ring(4)"])
def test_a_block_that_arrives_must_have_been_sent(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make(ra.Causal(), schedule=schedule)
    route = make_schedule(plan.schedule, plan.demand)
    assert isinstance(route, Route)
    departures = Route.departures
    for rank in range(plan.ranks):
        edges = departures(route, rank)
        one_by_one = [edge for e in edges for edge in departures(route, rank, (e.owner, e.target))]
        assert one_by_one == edges
    assert numerics(plan, rows=4).passed
    monkeypatch.setattr(Route, "departures", lambda self, rank, block=None: departures(self, rank, block)[1:])
    report = numerics(plan, rows=4)
    assert report.unsent and not report.complete


class OffByOne(Pattern):
    """A causal mask whose tiles show one key too many."""

    def tiles(self, q: range, k: range, heads: range = range(1)) -> Iterator[Tile]:
        tile = make_tile(heads, q, k, -1, None)
        if tile is not None:
            yield tile

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        return k <= q


@pytest.mark.parametrize(("mode", "tokens"), [("sample", 256), ("sample", 1 << 20), ("all", 64)])
def test_tiles_that_are_not_the_mask_are_seen(mode: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringattn.numerics.oracle.MASK_CELLS", 4096)
    for pattern, passes in ((ra.Window(30, 0), True), (OffByOne(), False)):
        report = numerics(make(pattern, tokens=tokens, head_dim=4), mode=mode, rows=4)
        assert report.mask_keys == pytest.approx(4 * min(tokens, 1024), rel=0.1)
        assert report.wrong_mask_keys == (0 if passes else 4) and report.passed == passes


def test_what_cannot_be_simulated_is_refused() -> None:
    plan = make(ra.Causal())
    for options, words in (
        ({"mode": "al"}, "did you mean 'all'"),
        ({"period": 36}, "must be a prime"),
        ({"ranks": [1]}, "mode='all'"),
        ({"fault": Fault("lost", 9, 1), "backward": True}, r"ranks 0 \.\. 7"),
        ({"fault": Fault("lost", 7, 7), "backward": True, "rows": [3, 40]}, "nothing to lose"),
        ({"rows": [256]}, "distinct query positions"),
        ({"rows": [3, 3]}, "distinct query positions"),
        ({"mode": "all", "together": 0}, "together=0"),
        ({"fault": Fault("lost", 1, 1)}, "harms gradients"),
        ({"fault": Fault("dropp", 1, 0)}, "did you mean 'drop'"),
        ({"fault": Fault("drop", 1, 5)}, "nothing to harm"),
        ({"fault": Fault("drop", 1, 8)}, "ranks 0 .. 7"),
    ):
        with pytest.raises(InvalidInput, match=words):
            numerics(plan, **{"period": PERIOD, **options})  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="divides the 37 rows"):
        numerics(make(ra.Full(), tokens=37 * 8), period=37)
    with pytest.raises(InvalidInput, match="exact in fp64 only"):
        numerics(make(ra.Full(), dtype="float32"), period=PERIOD)
    with pytest.raises(InvalidInput, match="positions of the sequence exactly"):
        numerics(make(ra.Full(), dtype="bfloat16"), mode="all", period=PERIOD)
    with pytest.raises(InvalidInput, match="at least 3"):
        numerics(make(ra.Full(), head_dim=2), period=PERIOD)
    with pytest.raises(Unsupported, match="exchange of tokens for heads"):
        numerics(make(ra.Full(), schedule="ulysses(2)"), mode="all", period=PERIOD)
    with pytest.raises(Unsupported, match="all blocks at once"):
        numerics(make(ra.Full(), schedule="allgather"), period=PERIOD)
    with pytest.raises(Unsupported, match="would round the tags"):
        numerics(make(ra.Full(), dtype="float32", comm_dtype="bfloat16"), mode="all", period=PERIOD)


def config(**options: object) -> SimulateConfig:
    return SimulateConfig(
        PatternGroup("Window(100)"), LayoutGroup("contiguous"), ScheduleGroup("ring"), MachineGroup("auto"),
        tokens="64k", ranks=2048, dtype="float64", head_dim=8, heads=1,
        numerics=NumericsGroup(**{"period": PERIOD, **options}),  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_command_reports_and_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    main(config(way="all", first=100, count=30, fault="swap", fault_rank=120))
    assert "swap at rank 120, block of 119: caught by the ledger and the numbers" in capsys.readouterr().out
    for options, words in (
        ({"way": "all", "first": 2048}, "expected ranks among"),
        ({"way": "al"}, "did you mean 'all'"),
        ({"way": "all", "spread": 3}, "numerics.spread=3 has no meaning with numerics.way=all"),
        ({"count": 3}, "numerics.count=3 has no meaning with numerics.way=sample"),
        ({"fault_rank": 3}, "numerics.fault_rank=3 has no meaning without numerics.fault"),
        ({"rows": [5], "fault": "drop", "fault_rank": 9}, "numerics.fault_rank=9 is not executed"),
        ({"rows": 0}, "at least one row"),
        ({"threads": 0}, "numerics.threads=0"),
    ):
        with pytest.raises(InvalidInput, match=words):
            main(config(**options))
    monkeypatch.setattr("ringattn.numerics.sampled.TOLERANCE", 0.0)
    with pytest.raises(NumericsFailure, match="caught by the numbers"):
        main(config(rows=4))


def test_the_command_line(inside: Inside, tmp_path: Path) -> None:
    shape = ("mode=numerics", "tokens=4k", "ranks=64", "head_dim=8", "pattern=Causal()", "numerics.period=37")
    done = inside("simulate", *shape, "numerics.rows=[5,100,4095]", "output.path=found.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("3 of 4,096 query rows", "complete: ", "[measured]", "[counted]", "peak memory"):
        assert words in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["pairs"] == 6 + 101 + 4096 and found["accurate"] and found["complete"]
    assert (found["words"]["error"], found["words"]["ledger"]) == ("measured", "counted")
    assert found["plan"]["dtype"] == "float64" and 0 < found["error"] < 1e-11
    for fault in ("swap", "lost", "scaled"):
        done = inside("simulate", *shape, "backward=true", "numerics.rows=4", f"numerics.fault={fault}", cwd=tmp_path)
        assert done.returncode == 0 and "caught by the ledger and the numbers" in done.stdout, done.stderr
    for wrong, words in (
        (("mode=numerics", "stalls=[[1,0,0.5]]"), "stalls=[[1,0,0.5]] has no meaning with mode=numerics"),
        (("mode=numerics", "numerics.row=3"), "did you mean 'rows'?"),
        (("mode=numerics", "dtype=float32"), "sampled rows are exact in fp64 only"),
        (("mode=numerics", "backward=true", "numerics.way=all", "numerics.count=2"), "exchanges gradients"),
    ):
        done = inside("simulate", *wrong, cwd=tmp_path)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["found.json"]
