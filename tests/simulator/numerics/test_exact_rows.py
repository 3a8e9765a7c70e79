"""Rows and gradients of the oracles, and the rows that they read, against dense attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numerics_cases import PATTERNS, PERIOD, case_of, make, truth_of

import ringattn as ra
from ringattn.pattern import Pattern
from ringattn.plan.steps import Part
from ringattn.simulator.numerics.oracle import ExactQueries, exact_keys, exact_rows
from ringattn.simulator.numerics.source import make_source


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
    a, b = source.block(plan, Part("kv", 3))
    assert torch.equal(a, plan.layout.shard_tensor(k, 3)) and torch.equal(b, plan.layout.shard_tensor(v, 3))


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
