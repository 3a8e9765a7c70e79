"""Calibration: fits recover what samples were made of."""

from __future__ import annotations

import random

import pytest
import torch
from measured import ROWS, machine, times

import ringattn as ra
from ringattn.errors import InvalidInput
from ringattn.lab.calibrate import fits, kernels, measuring_ranks
from ringattn.lab.calibrate.measure import Calibration, Overlap, Round, join
from ringattn.lab.calibrate.measuring_ranks import MeasuringRanks, Settings
from ringattn.lab.calibrate.passes import Pass, PassCase
from ringattn.lab.verbs.calibrate import _print as print_calibration
from ringattn.machine.kernel_times import SHAPES


@pytest.mark.parametrize("noise", [(1.0, 1.0, 1.0, 1.0, 1.0), (1.1, 0.9, 1.3, 0.9, 1.05)])
def test_a_line_is_the_best_in_relative_squares(noise: tuple[float, ...]) -> None:
    """No neighbour of the fit is better, by brute force; without noise it has no error."""
    sizes = [256, 4096, 1 << 20, 1 << 24, 1 << 28]
    seconds = [factor * (1e-4 + m / 1e9) for m, factor in zip(sizes, noise, strict=True)]
    found = fits.fit_link(sizes, seconds)

    def errors(a: float, b: float) -> list[float]:
        line = [found.latency * a + m / (found.bandwidth * b) for m in sizes]
        return [abs(x / t - 1) for x, t in zip(line, seconds, strict=True)]

    best = sum(error**2 for error in errors(1.0, 1.0))
    assert all(sum(error**2 for error in errors(a, b)) >= best for a in (0.97, 1.0, 1.03) for b in (0.97, 1.0, 1.03))
    assert found.worst_error == pytest.approx(max(errors(1.0, 1.0)))
    assert (found.worst_error < 1e-9) == (set(noise) == {1.0})


def test_a_line_has_no_negative_start_and_needs_growing_times() -> None:
    found = fits.fit_link([1e6, 2e6, 4e6], [0.8e-3, 2e-3, 4.4e-3])
    assert found.latency == 0.0 and found.bandwidth > 0
    for sizes, seconds in (([1e3, 1e6], [2.0, 1.0]), ([1e3, 1e3], [1.0, 1.0])):
        with pytest.raises(InvalidInput, match="do not grow"):
            fits.fit_link(sizes, seconds)


def test_kernel_times_recover_overhead_and_rates() -> None:
    """Samples made of t = t0 + FLOPs / F(n), outliers added, give F back; keys that are no multiple of 16 a factor."""
    source = random.Random(1)
    t0 = (2e-5, 5e-5)
    truth = {(shape, back): 1e10 * (1 + index + 3 * back) for back in (0, 1) for index, shape in enumerate(SHAPES)}
    samples = []
    for (shape, back), peak in truth.items():
        whole = [(rows, keys, 1.0) for rows in ROWS for keys in ((1,) if shape == "triangle" else ROWS)]
        ragged = [(rows, rows - kernels.RAGGED_BY, 0.8) for rows in ROWS] if shape == "dense" else []
        for rows, keys, factor in (*whole, *ragged):
            flops = 1e5 * rows * keys  # so that no call is all overhead
            exact = t0[back] + flops / (factor * peak * rows / (rows + 50))
            seconds = [exact * (1 + source.uniform(-1e-3, 1e-3)) for _ in range(9)] + [exact * 30]
            samples.append(fits.Sample(shape, bool(back), rows, keys, flops, tuple(seconds)))
    found = fits.fit_kernel_times(samples, t0, 64, "float32")
    for (shape, back), peak in truth.items():
        grid = found.grid(shape, bool(back))
        assert grid.keys == ((1,) if shape == "triangle" else ROWS) and (grid.ragged is None) == (shape != "dense")
        for rows in ROWS:
            for keys in grid.keys:
                assert grid.rate(rows, keys) == pytest.approx(peak * rows / (rows + 50), rel=1e-2)
            factors = [grid.rate(rows, odd) / grid.rate(rows, whole) for odd, whole in ((100, 112), (361, 368))]
            assert factors == pytest.approx([0.8 if shape == "dense" else 1.0] * 2, rel=1e-2)


@pytest.mark.parametrize(("most_bytes", "orders"), [(1 << 30, [[0, 1, 0, 1]]), (1, [[0, 0], [1, 1]])])
def test_works_of_one_shape_take_turns(
    most_bytes: int, orders: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that is repeated by itself finds its data in the caches: only works too large for a group may be."""
    called: list[int] = []
    works = list(kernels.list_works([8, 16], [4], heads=1))
    monkeypatch.setattr(kernels, "TOGETHER", most_bytes)
    monkeypatch.setattr(kernels, "make_call", lambda _, work, *__, **___: lambda: called.append(works.index(work)))
    monkeypatch.setattr(measuring_ranks, "ENOUGH", 1e3)
    monkeypatch.setattr(measuring_ranks, "MOST_REPETITIONS", 2)
    settings = Settings(heads=1, head_dim=8, dtype="float32", kernel="aten_cpu", repeat=1)
    samples = kernels.time_works(MeasuringRanks(None, torch.device("cpu")), None, works, settings)  # type: ignore[arg-type]
    assert [sample.rows for sample in samples] == 2 * [len(work.q) for work in works]
    assert all(len(sample.seconds) == 2 for sample in samples)
    first = works.index(next(work for work in works if work.hi is not None))  # bands: two works
    bands = [index - first for index in called if index >= first]
    # A warm-up of each group, then its turns; forward and backward.
    expected = [i for order in orders for i in (*dict.fromkeys(order), *order)] * 2
    assert bands == expected


def test_calls_and_their_seconds_per_byte_are_recovered_and_not_negative() -> None:
    exact = [(1e-3 * (2 + i % 3), 1e5 * 2 ** (i % 5), 1e-4 + 1e-9 * 1e5 * 2 ** (i % 5)) for i in range(12)]
    assert fits.fit_calls(exact, 0.0) == pytest.approx((1e-4, 1e-9))
    falling = [(0.1, x, 1e-3 - 1e-9 * x) for x in (1e5, 2e5, 4e5)]
    assert fits.fit_calls(falling, 0.0) == pytest.approx((7.666667e-4, 0.0))
    assert fits.fit_calls(falling, 1e-10) == pytest.approx((7.666667e-4 - 1e-10 * 7e5 / 3, 1e-10))
    assert fits.fit_calls([(0.1, x, 1e-9 * x - 1e-3) for x in (2e6, 4e6)], 0.0)[0] == 0.0
    # Tensors of one size: what is left is the call's.
    assert fits.fit_calls([(0.03, 1e6, 0.015)] * 3, 1e-9) == pytest.approx((0.014, 1e-9))


#: Nodes of two; a rank exchanges a record with one rank of its node and with six of other nodes.
LINKS = {"latency": 0.5, "node_latency": 0.25, "ranks_per_node": 2}
#: Bytes of q, k, v and the output of a rank.
OWN = 3 * 2048 * (8 + 2 + 2 + 8) * 64 * 4


@pytest.mark.parametrize(
    ("ranks", "values", "forward", "backward"),
    [
        (2, {"call": 0.5, "call_backward": 0.25}, 0.5, 0.25),
        (8, {"call": 1.0, **LINKS}, 1.0 + 3 * 0.5, 1.0 + 3 * 0.5),
        (8, {"call": 1.0, "cores": 1, **LINKS}, 2 * 2.5, 2 * 2.5),
        (2, {"call": 0.25, "sweep": 1e9, "sweep_backward": 5e8}, 0.25 + OWN / 1e9, 0.25 + OWN / 5e8),
        (2, {"sweep": 1e9, "cores": 1, "ranks_per_node": 2}, 2 * OWN / 1e9, 2 * OWN / 1e9),
    ],
)
def test_what_a_call_takes(ranks: int, values: dict[str, float], forward: float, backward: float) -> None:
    """Its own seconds, log2 P rounds of records, and its tensors; ranks that share a core add up."""
    plan = ra.make_plan(ra.Full(), tokens=2048 * ranks, ranks=ranks, heads=8, kv_heads=2, head_dim=64, batch=3)
    calls = [ra.simulate(plan, machine(**values), backward=way).exposed["call"] for way in (False, True)]
    assert calls == pytest.approx([forward, backward])


def test_interference_is_the_middle_of_the_slowdowns() -> None:
    one = ([1.0, 1.1, 9.0], [0.5, 0.5, 0.5], [1.2, 1.3, 9.2])  # 0.2 more under a message of 0.5
    assert fits.fit_interference([one]) == pytest.approx(0.4)
    short = ([0.1], [0.2], [0.26])  # the visit ends first: 0.06 more than the message
    assert fits.fit_interference([one, short, ([1.0], [1.0], [1.0])]) == pytest.approx(0.4)
    assert fits.fit_interference([([1.0], [0.5], [0.9])]) == 0.0
    long, longer = ([0.1], [0.4], [0.43]), ([0.1], [0.9], [1.0])
    assert fits.fit_interference([one, long]) == pytest.approx(0.4)
    assert fits.fit_interference([long, longer]) == pytest.approx(0.3)


def test_times_are_told_at_one_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slows down to a half, and half of the way there."""
    alone = MeasuringRanks(None, torch.device("cpu"))
    assert alone.correction(lambda: "result") == ("result", 1.0), "without a reference there is no pace"
    clock = [2.0]
    monkeypatch.setattr(alone, "time_call", lambda call: call())
    alone.keep_pace(lambda: clock[0])
    assert alone.pace == 2.0
    clock[0] = 4.0
    assert alone.correction(lambda: "result") == ("result", 0.5)
    monkeypatch.setattr(measuring_ranks, "MOST_REPETITIONS", 3)
    monkeypatch.setattr(measuring_ranks, "ENOUGH", 1e3)
    assert alone.time_alternating([lambda: 12.0, lambda: 1.0]) == ([6.0] * 3, [0.5] * 3)
    alone.keep_pace(lambda: clock[0])
    alone.pace = 1.0
    assert alone.correction(lambda: clock.__setitem__(0, 12.0)) == (None, 0.125)


def test_rounds_go_on_while_they_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of 2 seconds: `repeat` of them, and as many as end within `seconds`."""
    alone, clock = MeasuringRanks(None, torch.device("cpu")), [0.0]
    monkeypatch.setattr(measuring_ranks.time, "perf_counter", lambda: clock[0])
    for repeat, seconds, expected in ((3, 0.0, 3), (3, 6.0, 3), (3, 9.0, 4), (1, 9.0, 4), (2, 1e3, 500)):
        settings = Settings(heads=1, head_dim=8, dtype="float32", kernel="auto", repeat=repeat, seconds=seconds)
        found = []
        for number in alone.rounds(settings):
            found.append(number)
            clock[0] += 2.0
        assert found == list(range(expected))


def test_rounds_are_joined() -> None:
    """Every measurement has the seconds of all rounds."""

    def measure(t: float) -> Round:
        times = [measuring_ranks.TimedBytes(256, (t, t + 1))]
        works = [fits.Sample("dense", False, 8, 8, 1.0, (t,)), fits.Sample("dense", False, 8, 16, 1.0, (t, t))]
        overlaps = [Overlap(8, 64, (t,), (t, t), (t,))]
        return Round([(t,), (t, t)], works, times, {"": times, "node_": times}, overlaps, [(t,)] * 2)

    found = join([measure(1.0), measure(5.0)])
    assert found.overheads == [(1.0, 5.0), (1.0, 1.0, 5.0, 5.0)]
    assert [one.seconds for one in found.works] == [(1.0, 5.0), (1.0, 1.0, 5.0, 5.0)]
    assert found.merges == [measuring_ranks.TimedBytes(256, (1.0, 2.0, 5.0, 6.0))]
    assert found.shifts == {"": found.merges, "node_": found.merges}
    assert found.overlaps == [Overlap(8, 64, (1.0, 5.0), (1.0, 1.0, 5.0, 5.0), (1.0, 5.0))]
    assert found.runs == [(1.0, 5.0)] * 2


@pytest.mark.parametrize(("repeat", "counts"), [(1, "1 kind, 1 run"), (2, "1 kind, 2 runs")])
def test_one_run_of_each_pass_has_no_spread(repeat: int, counts: str, capsys: pytest.CaptureFixture[str]) -> None:
    passes = [Pass(PassCase("Full()", "contiguous", 64, False), (1.0,) * repeat, 1.0)]
    print_calibration(Calibration(machine(times(), residuals=((1.0, 1.0),) * repeat), {}, {}, passes))
    told = capsys.readouterr().out
    assert counts in told and ("lacks the spread of runs; try repeat=5" in told) == (repeat == 1)
