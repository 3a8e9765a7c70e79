"""The benchmark runner, alone and with two real ranks; no time is asserted."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from ringattn.cli.config.groups import OutputGroup
from ringattn.errors import CommFailure, InvalidInput, LaunchFailure, OutOfMemory
from ringattn.lab.bench import SUITES, get_cases, records
from ringattn.lab.bench import runner as bench_runner
from ringattn.lab.bench.case import TOLERANCES, BenchCase, BenchColumn, Ratio
from ringattn.lab.bench.report import BenchReport
from ringattn.lab.bench.suites import ring
from ringattn.lab.pages.journal import write_line
from ringattn.lab.pages.pages import render_page
from ringattn.lab.verbs import report as report_command
from ringattn.lab.verbs.settings import ReportConfig
from ringattn.transport.launcher import run_local


def test_columns_take_turns_and_every_raw_number_is_kept() -> None:
    order: list[str] = []
    times = bench_runner.take_turns({name: lambda name=name: order.append(name) or len(order) for name in "abc"}, 3)
    assert order == list("abc" * 3)
    assert times == {"a": [1, 4, 7], "b": [2, 5, 8], "c": [3, 6, 9]}


def case(target: float) -> BenchCase:
    columns = (BenchColumn("single", 2, lambda c: None), BenchColumn("ring", 1, lambda c: None))
    return BenchCase("x", 2, {"tokens": 4}, columns, (Ratio("single", "ring", target),))


@pytest.mark.parametrize(("target", "met"), [(1.9, True), (2.1, False)])
def test_ratios_are_medians_of_the_rounds(target: float, met: bool) -> None:
    raw = [{"times": {"single": [4.0, 6.0, 1.0], "ring": [2.0, 2.0, 1.0]}, "errors": {"ring": 1e-7}}]
    (ratio,) = bench_runner.summarise_case(case(target), raw)["ratios"]
    assert ratio["rounds"] == [2.0, 3.0, 1.0] and ratio["median"] == 2.0 and ratio["met"] is met


def make_header() -> dict[str, Any]:
    return bench_runner.make_header("ring", ["x", "y"], 1, None, [case(1.5), case(1.6)])


RAW = [{"times": {"single": [4.0], "ring": [2.0]}, "errors": {"ring": 1e-7}}]


def test_an_interrupted_run_goes_on_and_a_whole_one_does_not(tmp_path: Path) -> None:
    header, record = make_header(), bench_runner.summarise_case(case(1.5), RAW)
    with records.open_results(tmp_path, header, ["x", "y"]) as journal:
        journal.add("x", record)
    with journal.path.open("a") as file:
        file.write('{"key": "y", "case"')  # killed while it wrote
    later = {**header, "machine": {**header["machine"], "date": "2099-01-01T00:00:00"}}
    with records.open_results(tmp_path, later, ["x", "y"]) as again:
        assert again.path == journal.path and list(again.records) == ["x"]
        again.add("y", {**record, "source": "another"})
    found = records.read_results(journal.path)
    assert [one["key"] for one in found["cases"]] == ["x", "y"] and found["mixed"] and found["suite"] == "ring"
    assert found["cases"][0]["columns"] == json.loads(json.dumps(record["columns"]))
    for other in (header, {**header, "repeat": 2}):
        with records.open_results(tmp_path, other, ["x", "y"]) as new:
            assert new.path.stem.endswith("_2") and not new.records
        new.path.unlink()
    with pytest.raises(InvalidInput, match="line 1 is not from a study or suite"):
        records.read_results(Path(__file__))


@pytest.mark.parametrize("head", [{"format": "ringattn bench 2"}, {"format": "ringattn study 2"}, None])
def test_results_of_another_format_are_refused(head: dict[str, str] | None, tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_bytes(b"" if head is None else write_line(head))
    with pytest.raises(InvalidInput, match=f"in the format '{records.FORMAT}'; measure them again"):
        records.read_results(path)


def test_the_command_of_a_report_is_one_of_a_shell_and_of_hydra() -> None:
    names = ["causal_4096", "it's; rm -rf ~"]
    words = shlex.split(BenchReport({"suite": "ring", "repeat": 5, "memory": 1 << 30, "asked": names}).command)
    assert words[:5] == ["ringattn", "report", "ring", "repeat=5", f"memory={1 << 30}"] and len(words) == 6
    assert [str(name) for name in OverridesParser.create().parse_override(words[5]).value()] == names


@pytest.mark.parametrize("suite", ["ring", "not_installed"])
def test_a_report_has_the_tables(suite: str, tmp_path: Path) -> None:
    path, header = tmp_path / "ring_cpu_2026-01-01_1.jsonl", make_header()
    lines = [
        {**header, "suite": suite, "planned": 3, "machine": {**header["machine"], "cores": 2}},
        {"key": "x", **bench_runner.summarise_case(case(1.5), RAW), "source": "another", "others": 1.5},
        {"key": "y", **bench_runner.summarise_case(case(1.5), [bench_runner._failure("OutOfMemory", "<script>")])},
    ]
    path.write_bytes(b"".join(map(write_line, lines)))
    report = BenchReport(records.read_results(path))
    page = render_page("ringattn.lab.bench", "bench.j2", {"report": report})
    assert "<td>single / ring</td>" in page and 'data-v="2.0"' in page and "1.0e-07" in page
    assert "<td>&gt;= 1.5</td><td>yes</td>" in page
    assert "<strong>The machine was busy. Other processes used at most 1.50 of 2 cores, beside x.</strong>" in page
    assert "measured different versions" in page and "2 of 3 cases" in page and f"ringattn report {suite}" in page
    assert "OutOfMemory: &lt;script" in page


def test_work_of_others_is_that_of_the_cores_less_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, tick = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    counts.write_text(f"cpu  {50 * tick} 0 {20 * tick} 900 30 {tick} {tick} {8 * tick} 5 0\ncpu0 1 2 3\n")
    monkeypatch.setattr(bench_runner, "Path", lambda name: counts)
    monkeypatch.setattr(bench_runner.os, "times", lambda: (3.0, 1.0, 4.0, 2.0, 99.0))
    assert bench_runner.others_seconds() == 80.0 - 10.0
    counts.unlink()
    assert bench_runner.others_seconds() is None


def test_a_failure_has_a_class_and_ends_what_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    no_memory = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 1 byte")
    no_memories = [(error, "OutOfMemory") for error in (no_memory, MemoryError(), OutOfMemory("x"))]
    others = [(kind("x"), kind.__name__) for kind in (InvalidInput, CommFailure)]
    for error, kind in (*no_memories, *others, (AssertionError("x"), "WrongResult")):
        assert bench_runner.classify(error) == kind
    lost, cause = (bench_runner._failure(kind, "why") for kind in ("CommFailure", "OutOfMemory"))
    failed = bench_runner.summarise_case(case(1.0), [lost, cause])
    assert failed["failed"] == {"class": "OutOfMemory", "message": "why"}
    longer = bench_runner.run_case(BenchCase("y", 1, {}, (), after="x"), make_header(), {"x": failed})
    assert longer["failed"] == {"class": "NotTried", "message": "x failed: OutOfMemory"}
    (table,) = BenchReport({"cases": [failed]}).tables
    assert table.rows[0][-1] == "OutOfMemory: why"
    for status, kind in ((None, "Timeout"), (-9, "Killed"), (1, "Crashed")):

        def end(*args: Any, status: int | None = status, **rest: Any) -> None:
            raise LaunchFailure("it ended", status)

        monkeypatch.setattr(bench_runner, "run_local", end)
        assert bench_runner.run_case(case(1.0), make_header(), {})["failed"]["class"] == kind


def test_unknown_names() -> None:
    with pytest.raises(InvalidInput, match="suite=rong: unknown; did you mean 'ring'"):
        get_cases("rong")
    with pytest.raises(InvalidInput, match="cases=dense_409: unknown; did you mean 'dense_4096'"):
        get_cases("ring", ["dense_409"])
    assert len({c.name for suite in SUITES for c in get_cases(suite)}) >= 10


def test_a_bad_output_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(InvalidInput, match=r"cannot be made as a folder|is not a folder"):
            report_command.main(ReportConfig(output=OutputGroup(str(path))))
    with pytest.raises(InvalidInput, match="suite=rong"):
        report_command.main(ReportConfig(suite="rong", output=OutputGroup(str(tmp_path / "new"))))
    assert not (tmp_path / "new").exists()


HALF = ("bfloat16", "float16")


def small() -> list[BenchCase]:
    """The kinds of cases of suite "ring", at sizes for tests. The memory case needs a process with a fresh heap."""
    return [
        ring._memory_case(2, rows=1024),
        ring._ring_case(False, False, 256),
        ring._ring_case(True, True, 256),
        *(ring._half_case(dtype, True, True, 256) for dtype in HALF),
    ]


def measure_small(rank: int) -> dict[str, dict[str, Any]]:
    return {case.name: bench_runner.measure_case(case, rank, None, 2) for case in small()}


@pytest.fixture(scope="module")
def measured() -> list[dict[str, dict[str, Any]]]:
    """What two real ranks measured, by case; one start for all tests."""
    return run_local(measure_small, 2, timeout=150)


@pytest.mark.multi
@pytest.mark.parametrize("name", ["dense_256", "causal_256_backward"])
def test_what_is_timed_is_right(name: str, measured: list[dict[str, dict[str, Any]]]) -> None:
    found = measured[0][name]
    columns = ["single", "compute", "ring", "template", "template_a2a"]
    assert list(found["times"]) == columns and all(len(times) == 2 for times in found["times"].values())
    assert list(found["errors"]) == columns[2:] and max(found["errors"].values()) < 1e-5


@pytest.mark.multi
@pytest.mark.parametrize("dtype", HALF)
def test_rows_of_16_bits(dtype: str, measured: list[dict[str, dict[str, Any]]]) -> None:
    """One rank and two, against torch's call of the same dtype, and within its rounding."""
    found = measured[0][f"causal_256_{dtype}_backward"]
    assert list(found["times"]) == ["single", "one rank", "ring"]
    assert list(found["errors"]) == ["one rank", "ring"] and max(found["errors"].values()) < TOLERANCES[dtype]
    names = {case.name for case in ring.list_cases()}
    assert {f"{mask}_4096_{x}{end}" for mask in ("dense", "causal") for x in HALF for end in ("", "_backward")} < names


@pytest.mark.multi
def test_every_round_sees_the_whole_peak(measured: list[dict[str, dict[str, Any]]]) -> None:
    for rank in measured:
        found = rank["memory_2_ranks"]
        assert all(0.8 < peak / found["allowed"] < 1.2 for peak in found["bytes"]), found


@pytest.mark.multi
def test_tables_show_every_case(measured: list[dict[str, dict[str, Any]]]) -> None:
    cases = [bench_runner.summarise_case(case, [rank[case.name] for rank in measured]) for case in small()]
    tables = {table.title: table for table in BenchReport({"cases": cases}).tables}
    titles = ("every column [measured]", "ratios of times, round by round [measured]")
    columns, ratios = (tables[title] for title in titles)
    formulas = tables["peak memory per rank [measured] and its formula [counted]"]
    shown = {(row[0], row[columns.header.index("column")]): row for row in columns.rows}
    row = dict(zip(columns.header, shown["causal_256_backward", "template_a2a"], strict=True))
    assert row["median"] and row["IQR"] and row["peak of tensors"] and row["error"] and row["threads"] == "1"
    assert [row[1] for row in ratios.rows if row[1].startswith("template_a2a")] == ["template_a2a / ring"] * 2
    assert ">= 0.9" in ratios.rows[3] and "<= 1.1" in formulas.rows[0]
    tensors = 4 * 128 * 8 * 64 * 4
    assert tensors <= cases[1]["columns"]["ring"]["peaks"]["tensors"] < 4 * tensors
