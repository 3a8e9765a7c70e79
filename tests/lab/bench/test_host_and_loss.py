"""Suites "host", "loss" and "reproducible": what a warm call launches beside its kernels; ratios of times and peaks."""

from __future__ import annotations

import pytest

from ringattn.lab.bench import runner as bench_runner
from ringattn.lab.bench.suites import loss, reproducible
from ringattn.lab.bench.suites.host import count_passes
from ringattn.runtime import peak_memory


@pytest.mark.parametrize(
    ("schedule", "rotate", "most"),
    [("ring", "kv", (10.0, 11.5)), ("ring", "q", (10.0, 22.5)), ("double_ring(2)", "kv", (10.5, 12.0))],
)
def test_launches_per_kernel_call_have_a_ceiling(schedule: str, rotate: str, most: tuple[float, float]) -> None:
    """The kernel, the merge of 7 ops, and what packs and unpacks messages; a ceiling for each pass."""
    counts = dict(count_passes(schedule, rotate))
    for name, limit in zip(("forward", "backward"), most, strict=True):
        assert counts[name]["kernel_calls"] == 8 and counts[name]["launches_per_call"] <= limit, counts[name]


def test_peaks_and_times_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_memory, "return_freed", lambda: True)  # it would slow down the tests that follow
    (case,) = loss.list_cases(200, 30, 8)
    raw = bench_runner.measure_case(case, 0, None, 2)
    assert raw["errors"]["chunks"] < 1e-5
    raw["peaks"] = {"plain": {"process": 80}, "chunks": {"process": 8}}
    record = bench_runner.summarise_case(case, [raw])
    assert record["summary"]["peak_ratio"] == 10.0 and len(record["columns"]["plain"]["seconds"]) == 2
    assert loss.SUITE.conclude([record])[1]  # type: ignore[misc]


def test_leaves_are_timed_beside_the_usual_call() -> None:
    raw = bench_runner.measure_case(reproducible._case(2, 96, True), 0, None, 2)
    assert max(raw["errors"].values()) < 1e-5
    record = bench_runner.summarise_case(reproducible._case(2, 96, True), [raw])
    text, met = reproducible._conclude([record])
    assert "(at most 1.05) with leaves of 2048" in text and met is not None
