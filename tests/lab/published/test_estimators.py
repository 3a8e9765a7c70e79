"""The page that compares estimators has the numbers that this model gives now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from estimators import RUNS, SERVING, our_bytes, our_ms

PAGE = (Path(__file__).parents[3] / "docs" / "simulation.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("run", RUNS)
def test_bytes_of_the_page_are_those_of_the_model(run: str) -> None:
    (row,) = re.findall(rf"^\| {re.escape(run)} \| ([\d.]+) \| ([\d.]+); ([\d.]+) \|", PAGE, re.MULTILINE)
    needed, reserved, peak = our_bytes(run)
    assert [float(x) for x in row] == pytest.approx([peak, needed, reserved], abs=0.051)


def test_serving_times_of_the_page_are_those_of_the_model() -> None:
    rows = re.findall(r"^\| (?:prefill|decode), `(\w+)`, .* tokens \| ([\d,.]+) \|", PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == [one[1] for one in SERVING]
    told = [float(ms.replace(",", "")) for _, ms in rows]
    assert told == pytest.approx([our_ms(*one) for one in SERVING], rel=0.005)
