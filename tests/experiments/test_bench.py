"""The benchmark runner, with a fake clock and with two real ranks; no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringattn.cli import bench as bench_command
from ringattn.config.groups import OutputGroup
from ringattn.config.schema import BenchConfig
from ringattn.errors import InvalidInput
from ringattn.experiments.bench import SUITES, get_cases, records
from ringattn.experiments.bench import runner as bench_runner
from ringattn.experiments.bench.case import BenchCase, BenchColumn, Ratio
from ringattn.experiments.bench.suites import ring
from ringattn.transport.launcher import run_local


def test_columns_take_turns_and_every_raw_number_is_kept() -> None:
    order: list[str] = []
    ticks = iter(range(1000))

    def column(name: str):  # type: ignore[no-untyped-def]
        return lambda: order.append(name)

    times = bench_runner.time_rounds({n: (1, column(n)) for n in "abc"}, 3, clock=lambda: next(ticks))
    assert order == list("abc" * 3)
    assert times == {n: [1, 1, 1] for n in "abc"}


def case(target: float) -> BenchCase:
    columns = (BenchColumn("single", 2, lambda c: None), BenchColumn("ring", 1, lambda c: None))
    return BenchCase("x", 2, {"tokens": 4}, columns, (Ratio("single", "ring", target),))


@pytest.mark.parametrize(("target", "met"), [(1.9, True), (2.1, False)])
def test_ratios_are_medians_of_the_rounds(target: float, met: bool) -> None:
    raw = [{"times": {"single": [4.0, 6.0, 1.0], "ring": [2.0, 2.0, 1.0]}, "errors": {"ring": 1e-7}}]
    (ratio,) = bench_runner.summarise_case(case(target), raw)["ratios"]
    assert ratio["rounds"] == [2.0, 3.0, 1.0] and ratio["median"] == 2.0 and ratio["met"] is met


def test_files_are_dated_numbered_and_complete(tmp_path: Path) -> None:
    raw = [{"times": {"single": [4.0], "ring": [2.0]}, "errors": {"ring": 1e-7}}]
    record = {
        "suite": "ring", "repeat": 1, "machine": bench_runner.describe_host(), "mixed": True, "kind": "measured",
        "cases": [bench_runner.summarise_case(case(1.5), raw)],
    }  # fmt: skip
    first, text = records.write_record(record, tmp_path)
    second, _ = records.write_record(record, tmp_path)
    assert first.stem.endswith("_1") and second.stem.endswith("_2")
    assert json.loads(first.read_text()) == record
    assert "single / ring = 2.000" in text.read_text() and "| yes |" in text.read_text()
    assert records.MIXED in text.read_text()
    assert len(list(tmp_path.iterdir())) == 4


def test_unknown_names() -> None:
    with pytest.raises(InvalidInput, match="suite=rong: unknown; did you mean 'ring'"):
        get_cases("rong")
    with pytest.raises(InvalidInput, match="cases=dense_819: unknown; did you mean 'dense_8192'"):
        get_cases("ring", ["dense_819"])
    assert len({c.name for suite in SUITES for c in get_cases(suite)}) >= 10


def test_a_bad_output_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(InvalidInput, match=r"cannot be a folder|is not a folder"):
            bench_command.main(BenchConfig(output=OutputGroup(str(path))))
    with pytest.raises(InvalidInput, match="suite=rong"):
        bench_command.main(BenchConfig(suite="rong", output=OutputGroup(str(tmp_path / "new"))))
    assert not (tmp_path / "new").exists()


def small() -> list[BenchCase]:
    """The kinds of cases of suite "ring", at sizes for tests. The memory case needs a process with a fresh heap."""
    return [
        ring._memory_case(2, rows=1024),
        ring._ring_case("dense", 256, False, False, None),
        ring._ring_case("causal_backward", 256, True, True, 0.5),
    ]


def measure_small(rank: int) -> dict[str, dict[str, Any]]:
    return {case.name: bench_runner.measure_case(case, rank, None, 2) for case in small()}


@pytest.fixture(scope="module")
def measured() -> list[dict[str, dict[str, Any]]]:
    """What two real ranks measured, by case; one start for all tests."""
    return run_local(measure_small, 2, timeout=60)


@pytest.mark.multi
@pytest.mark.parametrize("name", ["dense", "causal_backward"])
def test_what_is_timed_is_right(name: str, measured: list[dict[str, dict[str, Any]]]) -> None:
    found = measured[0][name]
    columns = ["single", "ring", "template", "template_a2a"]
    assert list(found["times"]) == columns and all(len(times) == 2 for times in found["times"].values())
    assert list(found["errors"]) == columns[1:] and max(found["errors"].values()) < 1e-5


@pytest.mark.multi
def test_every_round_sees_the_whole_peak(measured: list[dict[str, dict[str, Any]]]) -> None:
    for rank in measured:
        found = rank["memory_2_ranks"]
        assert all(0.8 < peak / found["allowed"] < 1.2 for peak in found["bytes"]), found


@pytest.mark.multi
def test_tables_show_every_case(measured: list[dict[str, dict[str, Any]]], capsys: pytest.CaptureFixture[str]) -> None:
    bench_command.print_record(
        {"cases": [bench_runner.summarise_case(case, [rank[case.name] for rank in measured]) for case in small()]}
    )
    shown = capsys.readouterr().out
    for text in ("template_a2a / ring", "causal_backward", ">= 0.5", "<= 1.1", "seconds [measured]", "[counted]"):
        assert text in shown
