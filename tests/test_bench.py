"""The benchmark runner, with a false clock and with two real ranks; no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringattn.bench import SUITES, get_cases
from ringattn.bench import runner as bench_runner
from ringattn.bench.case import Case, Column, Context, Ratio
from ringattn.bench.ring import _against_single, _check, _ring, _single, _template, _whole
from ringattn.errors import InvalidInput
from ringattn.launcher import run_local


def test_columns_take_turns_and_every_raw_number_is_kept() -> None:
    order: list[str] = []
    ticks = iter(range(1000))

    def column(name: str):  # type: ignore[no-untyped-def]
        return lambda: order.append(name)

    times = bench_runner.rounds({n: (1, column(n)) for n in "abc"}, 3, clock=lambda: next(ticks))
    assert order == list("abc" * 3)
    assert times == {n: [1, 1, 1] for n in "abc"}


def case(target: float) -> Case:
    columns = (Column("single", 2, lambda c: None), Column("ring", 1, lambda c: None))
    return Case("x", 2, {"tokens": 4}, columns, (Ratio("single", "ring", target),))


@pytest.mark.parametrize(("target", "met"), [(1.9, True), (2.1, False)])
def test_ratios_are_medians_of_the_rounds(target: float, met: bool) -> None:
    raw = [{"times": {"single": [4.0, 6.0, 1.0], "ring": [2.0, 2.0, 1.0]}, "errors": {"ring": 1e-7}}]
    (ratio,) = bench_runner.summarise(case(target), raw)["ratios"]
    assert ratio["rounds"] == [2.0, 3.0, 1.0] and ratio["median"] == 2.0 and ratio["met"] is met


def test_files_are_dated_numbered_and_complete(tmp_path: Path) -> None:
    raw = [{"times": {"single": [4.0], "ring": [2.0]}, "errors": {"ring": 1e-7}}]
    record = {
        "suite": "ring", "repeat": 1, "machine": bench_runner.machine(), "kind": "measured",
        "cases": [bench_runner.summarise(case(1.5), raw)],
    }  # fmt: skip
    first, text = bench_runner.write(record, tmp_path)
    second, _ = bench_runner.write(record, tmp_path)
    assert first.stem.endswith("_1") and second.stem.endswith("_2")
    assert json.loads(first.read_text()) == record
    assert "single / ring = 2.000" in text.read_text() and "| yes |" in text.read_text()
    assert len(list(tmp_path.iterdir())) == 4


def test_unknown_names() -> None:
    with pytest.raises(InvalidInput, match="suite=rong: unknown; did you mean 'ring'"):
        get_cases("rong")
    with pytest.raises(InvalidInput, match="cases=dense_819: unknown; did you mean 'dense_8192'"):
        get_cases("ring", ["dense_819"])
    assert len({c.name for suite in SUITES for c in get_cases(suite)}) >= 10


def small_case(rank: int, causal: bool) -> dict[str, float]:
    """All three columns of a small case of the real suite, on this rank."""
    made = _against_single("small", 256, causal, True, None)
    context = Context(rank, 2, made.settings)
    results = {}
    for name, make in (("single", _single), ("ring", _ring), ("template", _template)):
        run = make(context)
        results[name] = run() if run is not None else None
    assert len(_whole(made.settings)) == 4
    return _check(context, results)


@pytest.mark.multi
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_timed_is_right(causal: bool) -> None:
    errors = run_local(small_case, 2, causal, timeout=60, threads=1)[0]
    assert set(errors) == {"ring", "template"} and max(errors.values()) < 1e-5
