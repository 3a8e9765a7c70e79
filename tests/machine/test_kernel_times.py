"""Kernel times: interpolation, what a plan takes by its tiles, and what was not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured import ROWS, machine, times

import ringattn as ra
from ringattn.errors import InvalidInput, Unsupported
from ringattn.lab.calibrate import kernels
from ringattn.lab.calibrate.measuring_ranks import Settings
from ringattn.machine.kernel_times import KernelTimes, TimeGrid
from ringattn.plan.work import Work
from ringattn.simulator.timing.kernel_seconds import lower_to_tiles


@given(st.floats(-1, 1), st.floats(-1, 1), st.integers(64, 1024), st.integers(64, 1024))
def test_interpolation_follows_power_laws(p: float, q: float, rows: int, keys: int) -> None:
    """Linear in logarithms: a power law is met between the nodes, and outside the nearest node counts."""

    def law(n: float, m: float) -> float:
        return 1e9 * n**p * m**q

    grid = TimeGrid("dense", False, ROWS, ROWS, tuple(tuple(law(n, m) for m in ROWS) for n in ROWS))
    assert grid.rate(rows, keys) == pytest.approx(law(rows, keys))
    assert grid.rate(1, 10**6) == pytest.approx(law(64, 1024))


@given(st.lists(st.floats(1e8, 1e12), min_size=9, max_size=9), st.integers(1, 4000), st.integers(1, 4000))
def test_interpolation_never_leaves_its_neighbours(rates: list[float], rows: int, keys: int) -> None:
    grid = TimeGrid("dense", False, ROWS, ROWS, tuple(tuple(rates[3 * i : 3 * i + 3]) for i in range(3)))
    near = [
        rates[3 * i + j]
        for i in range(3) for j in range(3)
        if (i == 0 or ROWS[i - 1] < rows) and (i == 2 or ROWS[i + 1] > rows or i == 2)
        and (j == 0 or ROWS[j - 1] < keys) and (j == 2 or ROWS[j + 1] > keys)
    ]  # fmt: skip
    assert min(near) * (1 - 1e-9) <= grid.rate(rows, keys) <= max(near) * (1 + 1e-9)


@given(st.data())
def test_lowered_works_hold_their_pairs(data: st.DataObject) -> None:
    """Against a count of every (i, j), one by one."""
    rows, keys = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    lo = data.draw(st.one_of(st.none(), st.integers(-keys, 0)))
    hi = data.draw(st.one_of(st.none(), st.integers(0, rows)))
    seen = [
        (i, j) for i in range(rows) for j in range(keys) if (lo is None or lo <= i - j) and (hi is None or i - j <= hi)
    ]
    work = Work(range(3), range(3), range(rows), (range(keys),), lo, hi, repeat=2, q_shift=rows, k_shift=0)
    assert sum(pairs for *_, pairs in lower_to_tiles(work)) == 3 * 2 * len(seen)


def test_tiles_are_one_shape_each_with_every_size_once() -> None:
    found = []
    pairs: dict[str, list[int]] = {"dense": [], "triangle": [], "band": []}
    for work in kernels.list_works(ROWS, (16, 64), heads=2):
        (tile,) = lower_to_tiles(work)
        found.append(tile[:3])
        pairs[tile[0]].append(tile[3])
        seen = sum(
            1
            for i in range(len(work.q)) for j in range(work.keys)
            if (work.lo is None or i - j >= work.lo) and (work.hi is None or i - j <= work.hi)
        ) if work.keys < 400 else None  # fmt: skip
        assert seen is None or tile[3] == 2 * seen
    dense = [("dense", n, m) for n in ROWS for m in ROWS] + [("dense", n, n - kernels.RAGGED_BY) for n in ROWS]
    others = [("triangle", n, 1) for n in ROWS] + [("band", n, w) for n in ROWS for w in (16, 64)]
    assert sorted(found) == sorted(dense + others)
    assert list(dict.fromkeys(shape for shape, *_ in found)) == list(pairs), "one shape after another"
    assert all(counts == sorted(counts, reverse=True) for counts in pairs.values()), "from the largest to the smallest"


def test_a_plan_takes_as_long_as_its_tiles() -> None:
    """By hand: causal, contiguous, 2 ranks of n rows: two triangles and one dense block.

    `simulate` looks at the visits of few ranks one by one; `predict`, and `simulate` of many ranks, take the mean.
    """
    n, heads = 128, 2
    plan = ra.make_plan(ra.Causal(), tokens=2 * n, ranks=2, schedule="ring", heads=heads, head_dim=64)
    kernel = times(dense=4e10, triangle=1e10, overhead=1e-5)
    triangle, square = n * (n + 1) / 2 * heads, n * n * heads
    seconds = 3e-5 + 256 * (2 * triangle / 1e10 + square / 4e10)
    per_pair = seconds / (2 * triangle + square)
    assert ra.predict(plan, machine(kernel)).compute == pytest.approx(per_pair * (triangle + square))
    # Rank 1 is the last: it sees itself and rank 0.
    timeline = ra.simulate(plan, machine(kernel))
    assert timeline.seconds == pytest.approx(2e-5 + 256 * (triangle / 1e10 + square / 4e10), rel=1e-6)
    # Its call of a second keeps a core busy: of two ranks on one core both take their turn.
    shared = ra.simulate(plan, machine(kernel, ranks_per_node=2, cores=1, call=1.0))
    first, second = 2 * (1e-5 + 256 * triangle / 1e10), 1e-5 + 256 * square / 4e10
    assert shared.seconds == pytest.approx(2.0 + first + second, rel=1e-6)
    many = ra.make_plan(ra.Causal(), tokens=66 * n, ranks=66, schedule="ring", heads=heads, head_dim=64)
    assert ra.simulate(many, machine(kernel)).solver != "events"


@pytest.mark.parametrize("ranks", [1, 3, 40])
@pytest.mark.parametrize(
    "pattern", [ra.Full(), ra.Causal(), ra.Causal() & ra.Window(40), ra.Dilated((64, 128), (1, 2))]
)
@pytest.mark.parametrize("backward", [False, True])
def test_equal_rates_are_one_speed(pattern: ra.Pattern, ranks: int, backward: bool) -> None:
    """Where all tiles run at one speed and calls cost nothing, a table says what the speed alone says."""
    plan = ra.make_plan(pattern, tokens=640, ranks=ranks, schedule="ring", heads=2, head_dim=64)
    table, speed = machine(times(3e10)), machine(None, flops=3e10)
    assert backward or ra.predict(plan, table).seconds == pytest.approx(ra.predict(plan, speed).seconds)
    by_table, by_speed = (ra.simulate(plan, one, backward=backward).seconds for one in (table, speed))
    assert by_table == pytest.approx(by_speed)


def test_what_was_not_measured_is_refused_unless_flagged() -> None:
    kernel = times()
    large = ra.make_plan(ra.Full(), tokens=4200, ranks=2, schedule="ring", heads=1, head_dim=64)
    fits_still = ra.make_plan(ra.Full(), tokens=4096, ranks=2, schedule="ring", heads=1, head_dim=64)
    assert ra.predict(fits_still, machine(kernel)).seconds > 0
    with pytest.raises(Unsupported, match=r"2,100 rows x 2,100 keys.*end at 1,024 x 1,024.*machine.extrapolate=true"):
        ra.predict(large, machine(kernel))
    flagged = machine(replace(kernel, extrapolate=True))
    assert ra.predict(large, flagged).seconds == pytest.approx(ra.predict(large, machine()).seconds)
    for other in (dict(head_dim=256), dict(dtype="bfloat16")):
        plan = ra.make_plan(ra.Full(), tokens=64, ranks=2, schedule="ring", **{"head_dim": 64, **other})  # type: ignore[arg-type]
        with pytest.raises(Unsupported, match="were measured with"):
            ra.simulate(plan, machine(kernel))
        assert ra.simulate(plan, flagged).seconds > 0


SIZES = Settings(1, 8, "float32", "auto", 1, widths=(1,), messages=(1, 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: TimeGrid("dence", False, ROWS, ROWS, ()), "did you mean 'dense'"),
        (lambda: TimeGrid("dense", False, (64, 64), ROWS, ()), "ascending"),
        (lambda: TimeGrid("dense", False, ROWS, ROWS, ((1.0,),)), "a rate for each"),
        (lambda: TimeGrid("band", False, (1,), (1,), ((0.0,),)), r"rates: \[0\]\[0\]: Expected float > 0.0, got 0.0"),
        (lambda: KernelTimes(64, "float32", (0.0, 0.0), times().grids[1:]), "dense forward missing"),
        (lambda: replace(times(), overhead=(-1.0, 0.0)), r"overhead: \[0\]: Expected float >= 0.0, got -1.0"),
        (lambda: machine(residuals=((1.0, 0.0),)), r"residuals: \[0\]\[1\]: Expected float > 0.0, got 0.0"),
        (lambda: replace(SIZES, rows=(64,)).check_sizes(), "rows=.*at least 2 ascending"),
        (lambda: replace(SIZES, rows=(64, 32)).check_sizes(), "rows=.*at least 2 ascending"),
    ],
)
def test_wrong_tables_are_refused(change: object, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        change()  # type: ignore[operator]
