"""All ranks in lockstep, or some of many, against dense attention and the virtual ring."""

from __future__ import annotations

import sys
from typing import Any

import oracle
import pytest
import torch
from numerics_cases import PATTERNS, PERIOD, make, truth_of

import ringattn as ra
from ringattn.errors import InvalidInput
from ringattn.kernels import get_kernel
from ringattn.pattern import Pattern
from ringattn.simulator.numerics import numerics
from ringattn.simulator.numerics.source import TensorSource, make_source
from ringattn.simulator.numerics.whole import Outcome, execute, make_groups, whole

#: Layout, schedule, and what rotates in the backward.
RINGS = (
    ("contiguous", "ring", "kv"),
    ("zigzag", "ring", "q"),
    ("striped", "direct", "kv"),
    ("contiguous", "double_ring(4)", "q"),
    ("contiguous", "allgather", "kv"),
)


@pytest.mark.parametrize(  # three rings for each pattern
    ("pattern", "layout", "schedule", "rotate"),
    [(pattern, *RINGS[(place + turn) % 5]) for place, pattern in enumerate(PATTERNS) for turn in (0, 1, 3)],
    ids=str,
)
def test_all_ranks_in_lockstep_are_the_dense_result(
    pattern: Pattern, layout: str, schedule: str, rotate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make(pattern, layout=layout, schedule=schedule, rotate=rotate)
    truth = truth_of(plan, PERIOD)
    outs: dict[int, torch.Tensor] = {}
    lses: dict[int, torch.Tensor] = {}
    grads: dict[int, tuple[torch.Tensor, ...]] = {}

    def watched(*given: Any, **options: Any) -> tuple[list[Outcome], int]:
        outcomes, answered = execute(*given, **options)
        for outcome in outcomes:
            for i, rank in enumerate(outcome.ranks):
                outs[rank], lses[rank] = outcome.out[i : i + 1], outcome.lse[i : i + 1]
                grads[rank] = tuple(x[i : i + 1].clone() for x in outcome.grads)
        return outcomes, answered

    monkeypatch.setattr(sys.modules["ringattn.simulator.numerics.whole"], "execute", watched)
    report = whole(plan, make_source(plan, period=PERIOD), grads=True)
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


def test_fp32_passes_within_the_rounding_of_a_sum() -> None:
    report = numerics(make(ra.Causal(), dtype="float32"), mode="all", backward=True, period=PERIOD)
    assert report.passed and 0 < report.error < report.tolerance < 1e-5
