"""Calibration: fits recover what samples were made of, files read back, validation counts what it says."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringattn as ra
from ringattn.calibrate import fits, kernels, noise, validate
from ringattn.calibrate.measure import Sizes
from ringattn.calibrate.passes import Case, Pass
from ringattn.calibrate.published import published
from ringattn.config import conf_dir
from ringattn.errors import InvalidInput, Unsupported
from ringattn.groups import MachineGroup
from ringattn.machine_file import read_machine, read_record, write_machine
from ringattn.timing import FACTS, Grid, KernelTimes, get_machine
from ringattn.timing.machine import SOURCES
from ringattn.timing.speed import SHAPES, lowered
from ringattn.work import Work

ROWS = (64, 256, 1024)


def times(rate: float = 1e10, overhead: float = 0.0, head_dim: int = 64, **by_shape: float) -> KernelTimes:
    """Kernel times with one rate per shape, forward and backward."""
    grids = [
        Grid(shape, back, ROWS, (1,) if shape == "triangle" else ROWS, tuple(((by_shape.get(shape, rate),) * (1 if shape == "triangle" else 3),) * 3))
        for shape in SHAPES for back in (False, True)
    ]  # fmt: skip
    return KernelTimes(head_dim, "float32", (overhead, overhead), tuple(grids))


def machine(kernel: KernelTimes | None = None, **values: object) -> ra.Machine:
    return ra.Machine(**{"flops": 1e10, "alpha": 0.0, "beta": 1e15, "kernel": kernel, **values})  # type: ignore[arg-type]


# Links


@given(st.floats(1e-6, 1e-2), st.floats(1e8, 1e11))
def test_a_line_recovers_alpha_and_beta(alpha: float, beta: float) -> None:
    sizes = [256, 4096, 1 << 20, 1 << 24, 1 << 28]
    found = fits.line(sizes, [alpha + m / beta for m in sizes])
    assert found.alpha == pytest.approx(alpha, rel=1e-3, abs=1e-9)
    assert found.beta == pytest.approx(beta, rel=1e-3)
    assert found.worst_error < 1e-3


def test_a_line_is_the_best_in_relative_squares() -> None:
    """No neighbour of the fit is better, by brute force."""
    sizes, seconds = [1e3, 1e5, 1e6, 1e7], [1.1e-4, 1.6e-4, 1.3e-3, 0.9e-2]
    found = fits.line(sizes, seconds)

    def loss(alpha: float, beta: float) -> float:
        return sum(((alpha + m / beta) / t - 1) ** 2 for m, t in zip(sizes, seconds, strict=True))

    best = loss(found.alpha, found.beta)
    for a in (0.97, 1.0, 1.03):
        for b in (0.97, 1.0, 1.03):
            assert loss(found.alpha * a, found.beta * b) >= best * (1 - 1e-9)
    worst = max(abs((found.alpha + m / found.beta) / t - 1) for m, t in zip(sizes, seconds, strict=True))
    assert found.worst_error == pytest.approx(worst)


def test_a_line_has_no_negative_start_and_needs_growing_times() -> None:
    found = fits.line([1e6, 2e6, 4e6], [0.8e-3, 2e-3, 4.4e-3])
    assert found.alpha == 0.0 and found.beta > 0
    with pytest.raises(InvalidInput, match="do not grow"):
        fits.line([1e3, 1e6], [2.0, 1.0])
    with pytest.raises(InvalidInput, match="at least two sizes"):
        fits.line([1e3, 1e3], [1.0, 1.0])


# Kernels


def test_kernel_times_recover_overhead_and_rates() -> None:
    """Samples made of t = t0 + FLOPs / F(n), outliers added, give F and t back."""
    source = random.Random(1)
    t0 = (2e-5, 5e-5)
    truth = {(shape, back): 1e10 * (1 + index + 3 * back) for back in (0, 1) for index, shape in enumerate(SHAPES)}
    samples = []
    for (shape, back), peak in truth.items():
        for rows in ROWS:
            for keys in (1,) if shape == "triangle" else ROWS:
                flops = 256.0 * rows * keys * 8
                exact = t0[back] + flops / (peak * rows / (rows + 50))
                seconds = [exact * (1 + source.uniform(-1e-3, 1e-3)) for _ in range(9)] + [exact * 30]
                samples.append(fits.Sample(shape, bool(back), rows, keys, flops, tuple(seconds)))
    found = fits.kernel_times(samples, t0, 64, "float32")
    for (shape, back), peak in truth.items():
        grid = found.grid(shape, bool(back))
        for rows in ROWS:
            for keys in grid.keys:
                if 256.0 * rows * keys * 8 / peak > 5 * t0[back]:  # where the call is not all overhead
                    assert grid.rate(rows, keys) == pytest.approx(peak * rows / (rows + 50), rel=1e-2)
    with pytest.raises(InvalidInput, match="missing"):
        fits.kernel_times([s for s in samples if (s.rows, s.keys) != (256, 64)], t0, 64, "float32")


@given(st.floats(-1, 1), st.floats(-1, 1), st.integers(64, 1024), st.integers(64, 1024))
def test_interpolation_follows_power_laws(p: float, q: float, rows: int, keys: int) -> None:
    """Linear in logarithms: a power law is met between the nodes, and outside the nearest node counts."""

    def law(n: float, m: float) -> float:
        return 1e9 * n**p * m**q

    grid = Grid("dense", False, ROWS, ROWS, tuple(tuple(law(n, m) for m in ROWS) for n in ROWS))
    assert grid.rate(rows, keys) == pytest.approx(law(rows, keys))
    assert grid.rate(1, 10**6) == pytest.approx(law(64, 1024))


@given(st.lists(st.floats(1e8, 1e12), min_size=9, max_size=9), st.integers(1, 4000), st.integers(1, 4000))
def test_interpolation_never_leaves_its_neighbours(rates: list[float], rows: int, keys: int) -> None:
    grid = Grid("dense", False, ROWS, ROWS, tuple(tuple(rates[3 * i : 3 * i + 3]) for i in range(3)))
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
    assert sum(pairs for *_, pairs in lowered(work)) == 3 * 2 * len(seen)


def test_tiles_are_one_shape_each_with_every_size_once() -> None:
    found = []
    for work in kernels.tiles(ROWS, (16, 64), heads=2):
        (tile,) = lowered(work)
        found.append(tile[:3])
        seen = sum(
            1
            for i in range(len(work.q)) for j in range(work.keys)
            if (work.lo is None or i - j >= work.lo) and (work.hi is None or i - j <= work.hi)
        ) if work.keys < 400 else None  # fmt: skip
        assert seen is None or tile[3] == 2 * seen
    dense = [("dense", n, m) for n in ROWS for m in ROWS]
    assert found == dense + [("triangle", n, 1) for n in ROWS] + [("band", n, w) for n in ROWS for w in (16, 64)]


def test_a_plan_takes_as_long_as_its_tiles() -> None:
    """By hand: causal, contiguous, 2 ranks of n rows: two triangles and one dense block."""
    n, heads = 128, 2
    plan = ra.make_plan(ra.Causal(), tokens=2 * n, ranks=2, schedule="ring", heads=heads, head_dim=64)
    kernel = times(dense=4e10, triangle=1e10, overhead=1e-5)
    triangle, square = n * (n + 1) / 2 * heads, n * n * heads
    seconds = 3e-5 + 256 * (2 * triangle / 1e10 + square / 4e10)
    per_pair = seconds / (2 * triangle + square)
    assert ra.predict(plan, machine(kernel)).compute == pytest.approx(per_pair * (triangle + square))
    # Rank 1 is the last: it sees itself and rank 0.
    timeline = ra.simulate(plan, machine(kernel))
    assert timeline.seconds == pytest.approx(per_pair * (triangle + square), rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 3, 40])
@pytest.mark.parametrize(
    "pattern", [ra.Full(), ra.Causal(), ra.Causal() & ra.Window(40), ra.Dilated((64, 128), (1, 2))]
)
@pytest.mark.parametrize("backward", [False, True])
def test_equal_rates_are_one_speed(pattern: ra.Pattern, ranks: int, backward: bool) -> None:
    """Where all tiles run at one speed and calls cost nothing, a table says what the speed alone says."""
    plan = ra.make_plan(pattern, tokens=640, ranks=ranks, schedule="ring", heads=2, head_dim=64)
    table, speed = machine(times(3e10)), machine(None, flops=3e10)
    assert ra.predict(plan, table, backward=backward).seconds == pytest.approx(
        ra.predict(plan, speed, backward=backward).seconds
    )
    assert ra.simulate(plan, table, backward=backward).seconds == pytest.approx(
        ra.simulate(plan, speed, backward=backward).seconds
    )


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: Grid("dence", False, ROWS, ROWS, ()), "did you mean 'dense'"),
        (lambda: Grid("dense", False, (64, 64), ROWS, ()), "ascending"),
        (lambda: Grid("dense", False, ROWS, ROWS, ((1.0,),)), "a rate for each"),
        (lambda: Grid("band", False, (1,), (1,), ((0.0,),)), "FLOP/s > 0"),
        (lambda: KernelTimes(64, "float32", (0.0, 0.0), times().grids[1:]), "dense forward missing"),
        (lambda: replace(times(), overhead=(-1.0, 0.0)), "two times >= 0"),
        (lambda: machine(residuals=(1.0, 0.0)), "ratios > 0"),
        (lambda: Sizes([64], [1], [1, 2]), "rows=.*at least 2 ascending"),
        (lambda: Sizes([64, 32], [1], [1, 2]), "rows=.*at least 2 ascending"),
    ],
)
def test_wrong_tables_are_refused(change: object, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        change()  # type: ignore[operator]


# Noise


def test_jitter_is_recovered_and_its_scale_does_not_matter() -> None:
    source = random.Random(3)
    shape = 1 / 0.1**2
    samples = [[scale * source.gammavariate(shape, 1 / shape) for _ in range(400)] for scale in (1e-3, 1.0, 2.0, 50.0)]
    assert fits.jitter(samples) == pytest.approx(0.1, rel=0.1)
    assert fits.jitter([[t * 7 for t in one] for one in samples]) == pytest.approx(fits.jitter(samples))
    assert fits.jitter([[1.0, 1.0], [2.0, 2.0]]) == 0.0


def test_interference_is_the_middle_of_the_slowdowns() -> None:
    one = ([1.0, 1.1, 9.0], [0.5, 0.5, 0.5], [1.2, 1.3, 9.2])  # 0.2 more under a message of 0.5
    assert fits.interference([one]) == pytest.approx(0.4)
    short = ([0.1], [0.4], [0.16])  # the visit ends first
    assert fits.interference([one, short, ([1.0], [1.0], [1.0])]) == pytest.approx(0.4)
    assert fits.interference([([1.0], [0.5], [0.9])]) == 0.0


def test_intervals_are_order_statistics() -> None:
    ninety_nine = machine(residuals=tuple(float(x) for x in random.Random(1).sample(range(1, 100), 99)))
    assert ninety_nine.interval(2.0) == (10.0, 190.0)  # 5 of 100 places on each side
    assert ninety_nine.interval(1.0, level=0.98) == (1.0, 99.0)
    assert ninety_nine.interval(1.0, level=0.99) is None, "99 ratios say nothing of 1 in 200"
    assert machine().interval(1.0) is None


@pytest.mark.parametrize("seed", [1, 2])
def test_intervals_cover_what_they_promise_whatever_the_law(seed: int) -> None:
    """New draws of a skewed law fall inside as often as promised, over many calibrations."""
    source = random.Random(seed)
    hits = total = 0
    for _ in range(400):
        low, high = machine(residuals=tuple(source.lognormvariate(0, 0.8) for _ in range(60))).interval(1.0) or (0, 0)
        for _ in range(20):
            hits, total = hits + (low <= source.lognormvariate(0, 0.8) <= high), total + 1
    assert 0.88 <= hits / total <= 0.93


# Machine files


def measured_machine() -> ra.Machine:
    sources = tuple((name, "measured") for name in ("flops", "alpha", "beta", "merge", "gamma", "kernel", "residuals"))
    return machine(
        times(3.25e10, 1.5e-5, triangle=2e10), merge=1e10, gamma=0.03, inner=2, shared=True, watts=700.0,
        residuals=(0.9, 1.0, 1.05), sources=(*sources, ("watts", "cited")),
    )  # fmt: skip


def test_a_machine_reads_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    write_machine(path, measured_machine(), made={"cpu": "some"}, samples={"unit": "s", "shift": [1.0]})
    back = read_machine(path)
    assert replace(back, sources=()) == replace(measured_machine(), sources=())
    assert all(
        back.source(n) == measured_machine().source(n) for n in ("flops", "watts", "inner", "kernel", "residuals")
    )
    assert read_record(path)["samples"]["shift"] == [1.0]
    for name, entry in read_record(path)["values"].items():
        assert entry["unit"] and entry["source"] in SOURCES, name
    write_machine(path, machine())
    assert read_machine(path) == machine()


BROKEN = [
    (lambda text: text.replace("values:", "value:"), "unknown key 'value'; did you mean 'values'"),
    (
        lambda text: text.replace("unit: bytes per", "unit: bits per").replace("unit: bytes/s", "unit: bits/s"),
        "is in 'bits/s'",
    ),
    (lambda text: text.replace("  alpha:", "  alfa:"), "did you mean 'alpha'"),
    (lambda text: text.replace("ringattn machine 1", "ringattn machine 9"), "is no machine file"),
    (lambda text: "a: [", "is no YAML"),
    (lambda text: text.replace("overhead:", "overheat:"), "a part is missing"),
    (
        lambda text: text.replace("residuals:", "residuals: {source: measured, values: [abc]}\nsamples:"),
        "a part is missing",
    ),
    (lambda text: text.replace("source: cited", "source: dreamt"), "expected a field and one of cited"),
]


@pytest.mark.parametrize(("change", "words"), BROKEN)
def test_broken_files_say_what_is_wrong(tmp_path: Path, change: object, words: str) -> None:
    path = tmp_path / "m.yaml"
    write_machine(path, measured_machine())
    path.write_text(change(path.read_text()))  # type: ignore[operator]
    with pytest.raises(InvalidInput, match=words):
        read_machine(path)


def test_missing_files_say_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="make one with ringattn calibrate"):
        read_machine(tmp_path / "none.yaml")


def test_a_file_is_a_machine_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    write_machine(path, measured_machine())
    assert MachineGroup("file", path=str(path)).made().kernel == measured_machine().kernel
    flagged = MachineGroup("file", path=str(path), extrapolate=True, beta=5.0).made()
    assert flagged.kernel is not None and flagged.kernel.extrapolate and flagged.beta == 5.0
    assert flagged.source("beta") == "assumed" and flagged.source("alpha") == "measured"
    assert MachineGroup("file", path=str(path), flops=1e9).made().kernel is None
    for wrong in (MachineGroup("file"), MachineGroup("cpu", path=str(path))):
        with pytest.raises(InvalidInput, match="needs both machine=file and its path"):
            wrong.made()


# Machines by name


def test_every_machine_by_name_says_where_its_numbers_come_from() -> None:
    files = {path.stem for path in (conf_dir() / "machine").glob("*.yaml")}
    assert files == {*FACTS, "auto", "file"}
    for name, facts in FACTS.items():
        found = get_machine(name)
        for field, fact in facts.items():
            assert getattr(found, field) == fact.value and found.source(field) == fact.source
            assert len(fact.why) >= 8, f"{name}: {field}"
            if fact.source == "cited":
                assert any(word in fact.why for word in ("data sheet", "systems", "(2024)", "whitepaper")), fact.why
        plan = ra.make_plan(ra.Causal(), tokens=1 << 16, ranks=16, layout="zigzag", schedule="ring", dtype="bfloat16")
        assert 0 < ra.simulate(plan, found).seconds < math.inf


@pytest.mark.parametrize("name", [name for name in FACTS if name not in ("cpu", "cuda")])
def test_the_files_show_the_numbers_of_the_code(name: str) -> None:
    text = (conf_dir() / "machine" / f"{name}.yaml").read_text()
    for field, fact in FACTS[name].items():
        value = fact.value if isinstance(fact.value, bool) else f"{fact.value:.4g}"
        assert f"#   {field} = {value} [{fact.source}]: {fact.why}\n" in text


# Validation


def test_held_out_sizes_are_held_out() -> None:
    rows = (64, 256, 1024, 4096)
    inside = {*rows, *noise.between(rows)}
    found = validate.held_out(rows)
    assert len(found) == 4 and not inside & set(found)
    assert all(rows[1] < n < rows[-1] for n in found)
    assert {c.tokens for c in validate.chosen(found, 4)} == {4 * n for n in found}


def test_errors_are_those_of_a_plain_count() -> None:
    source = random.Random(5)
    case = Case("Full()", "contiguous", 64, False)
    passes = [
        Pass(case, tuple(source.uniform(0.5, 2.0) for _ in range(5)), source.uniform(0.8, 1.2)) for _ in range(11)
    ]
    found = validate.errors(passes, machine(residuals=tuple(0.5 + i / 20 for i in range(19))))
    signed = [p.modelled / sorted(p.seconds)[2] - 1 for p in passes]
    absolute = sorted(map(abs, signed))
    # 19 ratios: the 90 % interval is from the least to the largest.
    hits = sum(0.5 * p.modelled <= t <= 1.4 * p.modelled for p in passes for t in p.seconds)
    assert (found.passes, found.runs) == (11, 55)
    assert found.bias == pytest.approx(sum(signed) / 11)
    assert (found.median, found.worst) == (absolute[5], absolute[10])
    assert found.p90 == pytest.approx(absolute[9])  # of 11 numbers, 0.9 of the way is the tenth
    assert found.coverage == pytest.approx(hits / 55)
    assert validate.errors(passes, machine()).coverage is None


def test_oversubscribed_cores_are_shared() -> None:
    assert validate.oversubscribed(4, 1, 2, (2, 1)) == 2.0
    assert validate.oversubscribed(2, 1, 2, (2, 1)) == 1.0
    assert validate.oversubscribed(8, 1, 2, (4, 1)) == 2.0
    assert validate.oversubscribed(2, 1, 16, (2, 1)) == 1.0


def test_published_rings_are_predicted_without_a_fit() -> None:
    """Contiguous causal rings wait for the busiest rank, within 5 %; balanced ones are bounded from above: merging,
    interference and smaller kernels are not in the table."""
    found = list(published())
    assert len(found) == 8
    for one in found:
        if "contiguous" in one.name:
            assert abs(one.error) < 0.05, one
        else:
            assert 0 < one.error < 0.25, one
