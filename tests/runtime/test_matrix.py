"""Every pattern x layout, on covering dtypes, numbers of ranks and head sharings, against the fp64 oracle, forward and
backward.

Every pattern meets every layout in fp64 with two head sharings, and in a narrower dtype with one. Those and numbers of
ranks are chosen so that `test_the_cells_cover_pairs` holds.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
from oracle import Case, Result, errors, make_case, same_lse, single_device, solve, stored, truth_of

import ringattn as ra
from ringattn import Causal, Dilated, Documents, Full, Pattern, Sinks, Strided, Window, mix
from ringattn.kernels.aten_cpu import bf16_is_fast

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
#: Layouts with an even place in `LAYOUTS` have the first table, the others the second.
SCHEDULES: tuple[dict[int, str], ...] = (
    {1: "ring", 2: "direct", 3: "allgather", 4: "double_ring(2)", 5: "ring", 7: "direct", 8: "ulysses(2, ring)"},
    {1: "direct", 2: "ulysses(2)", 3: "double_ring(3)", 4: "ring", 5: "direct", 7: "ring", 8: "double_ring(2)"},
)


#: What rotates in the backward.
ROTATE = ("auto", "kv", "q")


def fitting(schedule: str, heads: tuple[int, int]) -> str:
    """The schedule, where Ulysses groups of two can share the heads."""
    return "ring" if "ulysses" in schedule and heads[1] % 2 else schedule


#: Added to twice the error of one single-device call, which is nearly exact now and then.
FLOOR = 1e-6


@cache
def truth(name: str, heads: tuple[int, int], dtype: torch.dtype) -> tuple[Case, Result, list[float]]:
    """The case, its oracle, and the error allowed for out, dq, dk and dv."""
    case = make_case(TOKENS, *heads, dtype)
    oracle = truth_of(case, PATTERNS[name])
    if dtype == torch.float64:
        return case, oracle, [1e-12] * 4
    # SDPA's rounding is luckier than the best possible one now and then: its output is no worse a yardstick than that.
    single, best = (errors(truth_of(case, PATTERNS[name], call), oracle) for call in (single_device, stored))
    # Where a backward is computed in bf16, each of its visits rounds its gradients, too: two roundings more.
    fast = dtype == torch.bfloat16 and bf16_is_fast(backward=True)
    floors = [FLOOR, *[torch.finfo(dtype).eps if fast else FLOOR] * 3]
    return case, oracle, [2 * max(pair) + floor for *pair, floor in zip(single, best, floors, strict=True)]


Run = tuple[tuple[int, int], dict[str, Any]]


def pairs(cell: tuple[str, str, torch.dtype], heads: tuple[int, int], options: dict[str, Any]) -> set[Any]:
    """The pairs of values that meet in a run."""
    return set(combinations((*cell, heads, options["ranks"], options["schedule"], options["rotate"]), 2))


@cache
def chosen() -> dict[tuple[str, str, torch.dtype], list[Run]]:
    """(heads, options) of the runs of each cell, those in which most values meet that have not met before."""
    found: dict[tuple[str, str, torch.dtype], list[Run]] = {cell: [] for cell in CELLS}
    met = set[Any]()
    for turn, cell in [*((0, cell) for cell in CELLS), *((1, cell) for cell in CELLS if cell[2] == torch.float64)]:
        layout, possible = cell[1], list[Run]()
        for heads, ranks, rotate in product(HEADS, RANKS, ROTATE):
            schedule = fitting(SCHEDULES[LAYOUTS.index(layout) % 2][ranks], heads)
            options = {"ranks": ranks, "layout": layout, "schedule": schedule, "rotate": rotate}
            if not turn or heads != found[cell][0][0]:
                possible.append((heads, options))
        best = max(possible, key=lambda run: len(pairs(cell, *run) - met))
        met |= pairs(cell, *best)
        found[cell].append(best)
    return found


CELLS = [
    (name, layout, dtype)
    for place, name in enumerate(PATTERNS)
    for turn, layout in enumerate(LAYOUTS, place // 3 + 2)
    for dtype in (DTYPES[0], DTYPES[1 + turn % 3])
]


def test_the_cells_cover_pairs() -> None:
    """Every pattern, every layout and every dtype meets every number of ranks, head sharing, schedule and rotation."""
    met = set[Any]().union(*(pairs(cell, *run) for cell, runs in chosen().items() for run in runs))
    assert met >= {*product(PATTERNS, LAYOUTS), *product(PATTERNS, DTYPES), *product(LAYOUTS, DTYPES)}
    for kind in (PATTERNS, LAYOUTS, DTYPES):
        assert met >= {*product(kind, HEADS), *product(kind, RANKS), *product(kind, ROTATE)}
    schedules = {schedule for table in SCHEDULES for schedule in table.values()}
    assert met >= {*product(PATTERNS, schedules), *product(DTYPES, schedules)}
    assert met >= {*product(HEADS, RANKS), *product(HEADS[:2], schedules), *product(RANKS, ROTATE)}


@pytest.mark.parametrize(("name", "layout", "dtype"), CELLS, ids=str)
def test_cell(name: str, layout: str, dtype: torch.dtype) -> None:
    for heads, options in chosen()[name, layout, dtype]:
        case, oracle, allowed = truth(name, heads, dtype)
        result = solve(ra.virtual_attention, case, PATTERNS[name], **options)
        out, lse = result.out, result.lse
        assert out.dtype == dtype and all(g.dtype == dtype for g in result.grads)
        found = errors(result, oracle)
        assert all(e <= a for e, a in zip(found, allowed, strict=True)), (heads, options, found, allowed)
        hidden = oracle.lse == -torch.inf
        assert torch.equal(lse == -torch.inf, hidden)
        assert (out[hidden] == 0).all()
        close = 1e-12 if dtype == torch.float64 else 1e-5 if dtype == torch.float32 else 2e-2
        assert (lse[~hidden].double() - oracle.lse[~hidden]).abs().max() <= close * 10


@pytest.mark.parametrize("kernel", ["reference", "aten_cpu"])
@pytest.mark.parametrize("name", PATTERNS)
def test_kernels_and_value_dims(name: str, kernel: str) -> None:
    """What rotates changes from value dim to value dim, from pattern to pattern, and from kernel to kernel."""
    first = list(PATTERNS).index(name) + (kernel == "aten_cpu")
    for turn in (first, first + 1):
        case = make_case(TOKENS, 4, 2, torch.float64, value_dim=(16, 8, 20)[turn % 3], lse=True)
        oracle = truth_of(case, PATTERNS[name])
        options = {"ranks": 3, "layout": "zigzag", "kernel": kernel, "rotate": ("kv", "q")[turn % 2]}
        found = solve(ra.virtual_attention, case, PATTERNS[name], **options)
        assert max(errors(found, oracle)) <= 1e-12
        same_lse(found.lse, oracle.lse, 1e-12)


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 700])
def test_odd_lengths_and_scales(tokens: int, scale: float) -> None:
    case = make_case(tokens, 2, 1, torch.float64, batch=1)
    case = Case(*case.inputs, case.grad, scale=scale)
    pattern = Causal() & (Window(300) | Sinks(2))
    oracle = truth_of(case, pattern)
    for place, layout in enumerate(LAYOUTS, round(scale * 10)):
        options = {"ranks": (1, 2, 5)[place % 3], "layout": layout, "rotate": ROTATE[(place + tokens) % 3]}
        assert max(errors(solve(ra.virtual_attention, case, pattern, **options), oracle)) <= 1e-12


@pytest.mark.parametrize(
    ("heads", "ranks", "schedule"),
    [((4, 2), 4, "ulysses(4)"), ((4, 1), 4, "ulysses(2)"), ((8, 2), 8, "ulysses(4, direct)")],
)
def test_copies_of_key_value_heads(heads: tuple[int, int], ranks: int, schedule: str) -> None:
    """Ulysses groups of more ranks than key/value heads: the gradients of all copies of a head are added."""
    for dtype, rotate in ((torch.float64, "kv"), (torch.float64, "q"), (torch.bfloat16, "auto")):
        case, oracle, allowed = truth("hidden-rows", heads, dtype)
        options = {"ranks": ranks, "layout": "zigzag", "schedule": schedule, "rotate": rotate}
        found = errors(solve(ra.virtual_attention, case, PATTERNS["hidden-rows"], **options), oracle)
        assert all(e <= a for e, a in zip(found, allowed, strict=True)), (dtype, rotate, found, allowed)
