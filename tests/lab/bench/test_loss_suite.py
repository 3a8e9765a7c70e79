"""Suite "loss": both losses agree, and the summary has the ratios of peak and time."""

from __future__ import annotations

import pytest

from ringattn.lab.bench import get_suite
from ringattn.lab.bench import runner as bench_runner
from ringattn.lab.bench.suites.loss import list_cases
from ringattn.runtime import peak_memory


def test_peaks_and_times_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_memory, "return_freed", lambda: True)  # it would slow down the tests that follow
    (case,) = list_cases(200, 30, 8)
    raw = bench_runner.measure_case(case, 0, None, 2)
    assert raw["errors"]["chunks"] < 1e-5
    raw["peaks"] = {"plain": {"process": 80}, "chunks": {"process": 8}}
    record = bench_runner.summarise_case(case, [raw])
    assert record["summary"]["peak_ratio"] == 10.0 and len(record["columns"]["plain"]["seconds"]) == 2
    assert get_suite("loss").conclude([record])[1]  # type: ignore[misc]
