"""Suite "loss": both losses agree, and the summary has the ratios of peak and time."""

from __future__ import annotations

import pytest

from ringattn.bench import get_suite
from ringattn.bench import runner as bench_runner
from ringattn.bench.case import Context
from ringattn.runtime import peak_memory


def test_peaks_and_times_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_memory, "return_freed", lambda: True)  # it would slow down the tests that follow
    suite = get_suite("loss")
    (case,) = suite.cases()
    assert case.measure is not None and suite.conclude is not None
    raw = case.measure(Context(0, 1, {"tokens": 200, "classes": 30, "width": 8}), 2)
    assert raw["errors"]["chunks"] < 1e-5
    raw["details"]["peak_bytes"] = {"plain": [60, 80], "chunks": [7, 7]}
    record = bench_runner.summarise_case(case, [raw])
    assert record["summary"]["peak_ratio"] == 10.0 and len(record["columns"]["plain"]["seconds"]) == 2
    assert suite.conclude([record])["met"]
