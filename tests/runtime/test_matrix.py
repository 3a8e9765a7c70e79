"""Every pattern x layout x ranks x dtype x head sharing against the fp64 oracle, forward and backward.

Every pattern meets every layout in every dtype, every number of ranks, and every head sharing. In fp64 each head
sharing has every other number of ranks, in the narrower dtypes one head sharing has.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from oracle import Case, Result, dense, errors, make_case, single_device, stored

import ringattn as ra
from ringattn import Causal, Dilated, Documents, Full, Pattern, Sinks, Strided, Window, mix

TOKENS = 53
PATTERNS: dict[str, Pattern] = {
    "full": Full(),
    "causal": Causal(),
    "window": Causal() & Window(11),
    "two-sided": Window(7, 4),
    "documents": Documents([20, 1, 17, 15]),
    "causal-documents": Causal() & Documents([9, 30, 14]),
    "sinks": Causal() & (Sinks(3) | Window(6)),
    "strided": Causal() & (Strided(3) | Window(2)),
    "mix": mix(Causal(), Window(5, 5), Strided(4)),
    "hidden-rows": Strided(2) & Window(9, 0) & Documents([13, 40]) & (Sinks(20) | Full()),
    "longnet": Dilated((8, 24, 64), (1, 2, 5)),
    "longnet-causal": Dilated((7, 30), (2, 3), causal=True),
    "dilated-groups": Dilated((16, 32), (1, 3), causal=True, mix="group"),
    "empty-rows": Sinks(4) & Documents([30, 23]),
}
LAYOUTS = ("contiguous", "zigzag", "striped", "striped(4)", "balanced(5)")
RANKS = (1, 2, 3, 4, 5, 7, 8)
HEADS = ((4, 4), (4, 2), (3, 1))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: Every schedule meets every pattern and dtype, and in fp64 every kind of heads, on several layouts and numbers of
#: ranks.
SCHEDULES: tuple[dict[int, str], ...] = (
    {1: "ring", 2: "direct", 3: "allgather", 4: "double_ring(2)", 5: "ring", 7: "direct", 8: "ulysses(2, ring)"},
    {1: "direct", 2: "ulysses(2)", 3: "double_ring(3)", 4: "ring", 5: "direct", 7: "ring", 8: "double_ring(2)"},
)


#: What rotates in the backward changes from number of ranks to number of ranks, and with the pattern and heads.
ROTATE = ("auto", "keys", "queries")


def fitting(schedule: str, heads: tuple[int, int]) -> str:
    """The schedule, where Ulysses groups of two can share the heads."""
    return "ring" if "ulysses" in schedule and heads[1] % 2 else schedule


#: Added to twice the error of one single-device call, which is nearly exact now and then.
FLOOR = 1e-6


@cache
def truth(name: str, heads: tuple[int, int], dtype: torch.dtype) -> tuple[Case, Result, list[float]]:
    """The case, its oracle, and the error allowed for out, dq, dk and dv."""
    case = make_case(TOKENS, *heads, dtype)
    mask = torch.from_numpy(PATTERNS[name].mask(TOKENS, heads[0]))
    scale = PATTERNS[name].output_scale
    oracle = dense(case, mask, scale)
    if dtype == torch.float64:
        return case, oracle, [1e-12] * 4
    # SDPA's rounding is luckier than the best possible one now and then: its output is no worse a yardstick than that.
    single, best = (errors(call(case, mask, scale), oracle) for call in (single_device, stored))
    return case, oracle, [2 * max(pair) + FLOOR for pair in zip(single, best, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PATTERNS)
def test_cell(name: str, layout: str, dtype: torch.dtype) -> None:
    turn = LAYOUTS.index(layout) + DTYPES.index(dtype)
    for place, heads in enumerate(HEADS):
        if dtype != torch.float64 and (turn + place) % len(HEADS):
            continue
        case, oracle, allowed = truth(name, heads, dtype)
        # Layouts 0 and 2, 1 and 3 share a table of schedules: together they meet it with all ranks for each head
        # sharing.
        for ranks in RANKS[(place + LAYOUTS.index(layout) // 2) % 2 :: 2]:
            schedule = fitting(SCHEDULES[LAYOUTS.index(layout) % 2][ranks], heads)
            rotate = ROTATE[(ranks + heads[0] + len(name)) % 3]
            q, k, v = case.leaves()
            options = {"ranks": ranks, "layout": layout, "schedule": schedule, "rotate": rotate}
            out, lse = ra.virtual_attention(q, k, v, PATTERNS[name], **options, return_lse=True)
            grads = torch.autograd.grad(out, (q, k, v), case.grad)
            assert out.dtype == dtype and all(g.dtype == dtype for g in grads)
            found = errors(Result(out, lse, grads), oracle)
            assert all(e <= a for e, a in zip(found, allowed, strict=True)), (heads, options, found, allowed)
            hidden = oracle.lse == -torch.inf
            assert torch.equal(lse == -torch.inf, hidden)
            assert (out[hidden] == 0).all()
            close = 1e-12 if dtype == torch.float64 else 1e-5 if dtype == torch.float32 else 2e-2
            assert (lse[~hidden].double() - oracle.lse[~hidden]).abs().max() <= close * 10


@pytest.mark.parametrize("kernel", ["reference", "aten_cpu"])
@pytest.mark.parametrize("name", PATTERNS)
def test_kernels_and_value_dims(name: str, kernel: str) -> None:
    for value_dim in (16, 8, 20):
        case = make_case(TOKENS, 4, 2, torch.float64, value_dim=value_dim, lse=True)
        oracle = dense(case, torch.from_numpy(PATTERNS[name].mask(TOKENS, 4)), PATTERNS[name].output_scale)
        for rotate in ("keys", "queries"):
            q, k, v = case.leaves()
            options = {"ranks": 3, "layout": "zigzag", "kernel": kernel, "rotate": rotate}
            out, lse = ra.virtual_attention(q, k, v, PATTERNS[name], **options, return_lse=True)
            seen = oracle.lse > -torch.inf
            assert case.grad_lse is not None
            grads = torch.autograd.grad((out, lse), (q, k, v), (case.grad, case.grad_lse * seen))
            assert max(errors(Result(out, lse, grads), oracle)) <= 1e-12
            assert (lse[seen] - oracle.lse[seen]).abs().max() <= 1e-12


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 700])
def test_odd_lengths_and_scales(tokens: int, scale: float) -> None:
    case = make_case(tokens, 2, 1, torch.float64, batch=1)
    case = Case(*case.inputs, case.grad, scale=scale)
    pattern = Causal() & (Window(300) | Sinks(2))
    oracle = dense(case, torch.from_numpy(pattern.mask(tokens, 2)))
    for ranks in (1, 2, 5):
        for layout in LAYOUTS:
            q, k, v = case.leaves()
            rotate = ROTATE[LAYOUTS.index(layout) % 3]
            out = ra.virtual_attention(q, k, v, pattern, ranks=ranks, layout=layout, scale=scale, rotate=rotate)
            grads = torch.autograd.grad(out, (q, k, v), case.grad)
            assert max(errors(Result(out, oracle.lse, grads), oracle)) <= 1e-12
