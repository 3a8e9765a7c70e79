"""Rows and gradients of the oracles, and the rows that they read, against dense attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch
from numerics_cases import PATTERNS, PERIOD, case_of, make, truth_of

import ringattn as ra
from ringattn.pattern import Pattern
from ringattn.plan.row_sets import ALL_ROWS
from ringattn.simulator.numerics import make_source
from ringattn.simulator.numerics.oracle import ExactQueries, exact_keys, exact_rows


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
    with source.shard(plan.layout, 3, ALL_ROWS) as (a, b):
        assert source.live == 1
        assert torch.equal(a, plan.layout.shard_tensor(k, 3)) and torch.equal(b, plan.layout.shard_tensor(v, 3))
    assert (source.live, source.peak) == (0, 1)


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("period", [None, PERIOD])
def test_key_gradients_of_few_queries_are_those_of_dense_attention(pattern: Pattern, period: int | None) -> None:
    """The cotangent is that of the rows, and 0 elsewhere."""
    plan, rows, keys = make(pattern), [3, 77, 200], [0, 3, 40, 76, 199]
    case, source = case_of(plan, period), make_source(plan, period=period)
    grad = torch.zeros_like(case.grad)
    grad[:, :, rows] = case.grad[:, :, rows]
    mask = torch.from_numpy(pattern.mask(256, 4))
    truth = oracle.dense(replace(case, grad=grad), mask, plan.pattern.output_scale)
    places = [range(row, row + 1) for row in rows]
    found, given = exact_rows(plan.pattern, source, places, 8**-0.5), grad[0][:, rows]
    scaled = given * plan.pattern.output_scale
    queries = ExactQueries(np.array(rows), case.q[0][:, rows], scaled, found.lse, (given * found.out).sum(-1))
    of_keys = exact_keys(plan.pattern, source, [range(key, key + 1) for key in keys], 8**-0.5, queries, places)
    for x, y, chosen in zip((found.dq, *of_keys), truth.grads, (rows, keys, keys), strict=True):
        np.testing.assert_allclose(x.numpy(), y[0][:, chosen].numpy(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("period", [None, PERIOD])
def test_the_oracle_is_dense_attention(pattern: Pattern, period: int | None) -> None:
    plan = make(pattern, layout="striped(4)")
    truth, source, every = truth_of(plan, period), make_source(plan, period=period), range(256)
    case = case_of(plan, period)
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
