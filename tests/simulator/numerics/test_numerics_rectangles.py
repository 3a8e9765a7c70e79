"""Queries and keys at different positions, and queries that travel: executed, counted, and harmed on purpose."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import oracle
import pytest
from numerics_cases import PERIOD, make
from planted import FAULT_KINDS, GRADIENT_FAULTS, Fault, numerics_with
from rectangles import Rectangle, draw_rectangle

import ringattn as ra
from ringattn.errors import InvalidInput, Unsupported
from ringattn.plan.plan import Plan
from ringattn.simulator.numerics import numerics
from ringattn.simulator.numerics.source import make_source
from ringattn.simulator.numerics.whole import execute, whole

#: The columns in which dq, dk and dv carry their counts.
TAGS = (-2, -1, 1)


def ringed(seed: int, *, cross: bool) -> Rectangle:
    """A random rectangle without Ulysses groups, which numerics do not execute."""
    drawn = draw_rectangle(seed, cross=cross)
    schedule = drawn.options["schedule"]
    return replace(drawn, options={**drawn.options, "schedule": "ring" if "ulysses" in schedule else schedule})


@pytest.mark.parametrize("cross", [False, True])
def test_random_rectangles_are_the_dense_result(cross: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def watched(*given: Any, **options: Any) -> Any:
        found = execute(*given, **options)
        seen.append([replace(o, grads=tuple(x.clone() for x in o.grads)) for o in found[0]])
        return found

    monkeypatch.setattr(sys.modules["ringattn.simulator.numerics.whole"], "execute", watched)
    for seed in range(15 if cross else 30):
        rectangle = ringed(seed, cross=cross)
        plan = rectangle.plan(head_dim=8, value_dim=5, dtype="float64")
        source = make_source(plan, period=7 if seed % 2 and plan.layout.rows(0) % 7 else None)
        seen.clear()
        report = whole(plan, source, grads=True)
        assert report.passed, (seed, report)
        assert report.pairs == int(rectangle.mask().sum())
        assert report.sent_bytes == plan.bytes_sent() + plan.bytes_sent(backward=True)
        assert report.sent_messages == plan.messages() + plan.messages(backward=True)
        _same(plan, rectangle, source, [outcome for group in seen for outcome in group])


@pytest.mark.parametrize(
    ("layout", "q_layout"),
    [
        ("contiguous", "shifted(striped, 8)"),
        ("shifted(zigzag, 26)", "joined(shifted(rows(1, 1, 10), 43)[12], shifted(striped(5), 0)[31])"),
        ("joined(shifted(contiguous, 1)[29], shifted(striped(8), 44)[9], shifted(rows(0, 1, 4), 39)[5])", "striped"),
    ],
)
def test_queries_of_some_heads_only_are_counted_under_their_heads(layout: str, q_layout: str) -> None:
    """Offsets differ by head, so a rank may need a block's queries of one head, which then travel alone."""
    sizes: dict[str, Any] = {"tokens": 43, "q_tokens": 43, "ranks": 3, "heads": 2, "head_dim": 8, "dtype": "float64"}
    layouts: dict[str, Any] = {"layout": layout, "q_layout": q_layout, "schedule": "double_ring(1)"}
    plan = ra.make_plan(ra.Dilated((8, 16), (1, 2)), rotate="q", **sizes, **layouts)
    report = whole(plan, make_source(plan), grads=True)
    assert report.passed, report


def _same(plan: Plan, rectangle: Rectangle, source: Any, outcomes: list[Any]) -> None:
    """Outputs and gradients of all ranks are those of dense attention."""
    sides = plan.layout_of("q"), plan.layout, plan.layout, plan.layout_of("q")
    case = oracle.Case(*(source.join(n, x.domain) for n, x in zip(("q", "k", "v", "grad"), sides, strict=True)))
    truth = oracle.dense(case, rectangle.mask(), rectangle.pattern.output_scale)
    place = {rank: (o, i) for o in outcomes for i, rank in enumerate(o.ranks)}
    ordered = [place[rank] for rank in range(plan.ranks)]
    assert oracle.error(sides[0].unshard_tensor([o.out[i : i + 1] for o, i in ordered]), truth.out) < 1e-12
    oracle.same_lse(sides[0].unshard_tensor([o.lse[i : i + 1] for o, i in ordered], -1), truth.lse, 1e-12)
    for g, tag in enumerate(TAGS):
        found, wanted = sides[g].unshard_tensor([o.grads[g][i : i + 1] for o, i in ordered]), truth.grads[g].clone()
        found[..., tag] = wanted[..., tag] = 0
        assert oracle.error(found, wanted) < 1e-12


def test_sampled_rows_of_rectangles_are_exact() -> None:
    compared = 0
    for seed in range(30):
        rectangle = ringed(seed, cross=seed % 4 == 0)
        rectangle.options["rotate"] = "kv"
        if rectangle.options["schedule"] == "allgather" or not rectangle.queries:
            continue
        report = numerics(rectangle.plan(head_dim=8, dtype="float64"), rows=4, period=None, seed=seed)
        assert report.passed and report.rows == min(4, rectangle.queries), (seed, report)
        compared += report.rows
    assert compared > 30
    square = make(ra.Causal(), rotate="q, kv")
    with pytest.raises(Unsupported, match="sampled rows need pass-KV"):
        numerics(square, rows=3, period=PERIOD)
    assert numerics(square, mode="all", backward=True, period=PERIOD).passed
    with pytest.raises(InvalidInput, match=r"exchanges \(out, lse\) of queries with rank"):
        numerics(square, mode="all", ranks=range(3), period=PERIOD)
    with pytest.raises(InvalidInput, match=r"query positions in 5 \.\. 9; got \[4\]"):
        numerics(make(ra.Causal(), 10, 2, q_layout="shifted(contiguous, 5)", q_tokens=5), rows=[4], period=None)


@pytest.mark.parametrize(
    ("pattern", "q_layout", "rotate"),
    [
        (ra.Full(), "striped(3)", "kv"),
        (ra.Full(), "contiguous", "q, kv"),
        (ra.Causal(), "shifted(contiguous, 32)", "q"),
        (ra.Window(40), "shifted(contiguous, 32)", "kv, q"),
        (ra.Documents([48], q_lengths=[36]), "contiguous", "q"),
    ],
    ids=repr,
)
def test_every_fault_is_caught_on_rectangles(pattern: ra.Pattern, q_layout: str, rotate: str) -> None:
    """48 keys and 36 queries on 6 ranks."""
    plan = make(pattern, 48, 6, heads=1, kv_heads=1, q_layout=q_layout, q_tokens=36, rotate=rotate)
    by_queries = plan.forward_rotates == "q"
    assert by_queries == rotate.startswith("q")
    visited = [o for o in range(6) if plan.demand.visits(*((o, 4) if by_queries else (4, o)))]
    hurt, owner = 4, next(o for o in (3, 2, 1, 5) if o in visited)
    rows = plan.layout_of("q").positions(hurt).tolist()
    assert numerics(plan, mode="all", backward=True, period=PERIOD).passed
    for kind in FAULT_KINDS:
        where = Fault(kind, hurt, hurt if kind in GRADIENT_FAULTS else owner)
        for backward in (True, False):
            if not backward and kind in GRADIENT_FAULTS and not by_queries:
                continue
            report = numerics_with(where, plan, mode="all", backward=backward)
            assert not report.accurate, (where, backward, report)
            # A forward's (out, lse) carry no count.
            assert not report.complete or (kind in GRADIENT_FAULTS and not backward), (where, backward, report)
        if kind not in GRADIENT_FAULTS and not by_queries:
            report = numerics_with(where, plan, rows=rows)
            assert not report.accurate and not report.complete, (where, report)


def test_what_is_sent_must_be_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make(ra.Causal(), 64, 4, q_layout="zigzag", q_tokens=40)
    assert numerics(plan, mode="all", period=PERIOD).complete
    planned = Plan.bytes_sent
    monkeypatch.setattr(Plan, "bytes_sent", lambda *given, **named: planned(*given, **named) + 8)
    report = numerics(plan, mode="all", period=PERIOD)
    assert report.accurate and not report.complete and report.planned_bytes == report.sent_bytes + 4 * 8


def test_keys_without_queries_have_zero_gradients() -> None:
    plan = make(ra.Causal(), 12, 5, q_layout="shifted(contiguous, 12)", q_tokens=0)
    report = numerics(plan, mode="all", backward=True, period=None)
    assert report.passed and (report.rows, report.keys) == (0, 12) and report.sent_bytes == 0
    assert report.gradient_error == report.product_error == 0.0
