"""Sampled rows: exact at any number of ranks, from the blocks that arrive on the way of the plan."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numerics_cases import LAYOUTS, PATTERNS, PERIOD, make

import ringattn as ra
from ringattn.pattern import Pattern
from ringattn.plan.schedules import make_schedule
from ringattn.plan.schedules.base import Route
from ringattn.simulator.numerics import numerics
from ringattn.simulator.numerics.sampled import chosen_rows, sample
from ringattn.simulator.numerics.source import RowSource, make_source


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize(
    ("layout", "schedule"), [*zip(LAYOUTS, ("ring", "direct", "ring", "double_ring(4)"), strict=True)]
)
def test_sampled_rows_are_exact(pattern: Pattern, layout: str, schedule: str) -> None:
    plan = make(pattern, layout=layout, schedule=schedule)
    period = (None, PERIOD)[(PATTERNS.index(pattern) + LAYOUTS.index(layout)) % 2]
    report = numerics(plan, rows=6, period=period)
    assert report.passed, report
    assert (report.rows, report.pairs) == (6, report.pairs_expected)
    mask = pattern.mask(256, 4)
    rows = chosen_rows(plan, 6)
    assert report.pairs == mask[:, rows].sum()
    assert len({plan.layout.owner(row) for row in chosen_rows(plan, 6, 2)}) <= 2


def test_sampled_rows_share_one_walk_around_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    block, made = RowSource.block, Counter[int]()

    def counting(self: RowSource, *place: Any) -> tuple[torch.Tensor, torch.Tensor]:
        made[self.end] += 1
        return block(self, *place)

    monkeypatch.setattr(RowSource, "block", counting)
    for ranks in (8, 64, 512):
        plan = make(ra.Full(), tokens=16 * ranks, ranks=ranks)
        report = sample(plan, make_source(plan, period=PERIOD), rows=[0, 8 * ranks, 16 * ranks - 1])
        assert report.passed and report.visits == 3 * ranks and made[16 * ranks] == ranks


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arcs_are_the_arrivals_of_a_route(pattern: Pattern, layout: str) -> None:
    mask = pattern.mask(256, 4)
    ranks = (8, 20)[(PATTERNS.index(pattern) + LAYOUTS.index(layout)) % 2]
    plan = make(pattern, ranks=ranks, layout=layout)
    rows = [plan.layout.positions(rank) for rank in range(ranks)]
    sees = np.array([[mask[:, q][:, :, k].any() for k in rows] for q in rows])
    for rank in range(ranks):
        for schedule in ("ring", "direct", "double_ring(4)"):
            route = make_schedule(schedule, plan.demand)
            arcs, edges = [list(arc) for arc in route.arcs(rank)], list(route.arrivals(rank))
            assert sorted(map(repr, edges)) == sorted(repr(edge) for arc in arcs for edge in arc)
            assert all([e.step for e in arc] == sorted((e.step for e in arc), reverse=True) for arc in arcs)
            assert {rank, *(e.owner for e in edges)} >= set(np.flatnonzero(sees[rank]).tolist())
            if schedule == "direct":
                assert {e.owner for e in edges} == set(np.flatnonzero(sees[rank]).tolist()) - {rank}


@pytest.mark.parametrize("schedule", ["ring", "direct", "double_ring(4)"])
def test_a_block_that_arrives_must_have_been_sent(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make(ra.Causal(), schedule=schedule)
    route = make_schedule(plan.schedule, plan.demand)
    assert isinstance(route, Route)
    for edge in (edge for rank in range(plan.ranks) for edge in route.departures(rank)):
        assert route.sends(edge) and not route.sends(edge._replace(post=edge.post + 1))
    assert numerics(plan, rows=4).passed
    monkeypatch.setattr(type(route), "sends", lambda self, edge: False)
    report = numerics(plan, rows=4)
    assert report.unsent and not report.complete
