"""Forecasts are append-only, and are scored by outcomes of the same number."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringattn import InvalidInput
from ringattn.lab.published.forecasts import append_forecast, read_forecasts, score

STORED = Path(__file__).parents[3] / "benchmarks" / "forecasts.csv"


def test_a_changed_forecast_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "forecasts.csv"
    for i in range(3):
        append_forecast(path, ["model=x", f"dp={i}", "schedule=ulysses(4, ring)"], 100.0 + i / 3, 81.0, 124.0)
    rows = read_forecasts(path)
    assert [one.number for one in rows] == [1, 2, 3] and rows[1].settings == "model=x dp=1 schedule=ulysses(4, ring)"
    lines = path.read_text().splitlines(keepends=True)
    for changed in (
        [*lines[:2], lines[2].replace("100.333", "100.334"), lines[3]],  # another prediction
        [*lines[:2], lines[3]],  # a row less
        [lines[0], lines[2], lines[1], lines[3]],  # another order
    ):
        path.write_text("".join(changed))
        with pytest.raises(InvalidInput, match=r"forecast \d was changed after it was written"):
            append_forecast(path, ["model=y"], 1.0, 1.0, 1.0)
    path.write_text("".join(lines).replace(",81.0,", ",many,"))
    with pytest.raises(InvalidInput, match="Expected `float`"):
        read_forecasts(path)


def test_outcomes_score_forecasts(tmp_path: Path) -> None:
    path, outcomes = tmp_path / "forecasts.csv", tmp_path / "outcomes.csv"
    for i in range(2):
        append_forecast(path, [f"dp={i}"], 100.0, 81.0, 124.0)
    assert score(path)[1] == []
    outcomes.write_text("number,measured,source\n2,120.5,a page\n")
    forecasts, ((one, outcome),) = score(path)
    assert len(forecasts) == 2 and one.number == 2 and outcome.measured == 120.5
    outcomes.write_text("number,measured,source\n3,120.5,a page\n")
    with pytest.raises(InvalidInput, match=r"no forecast has number 3; use the numbers in forecasts\.csv"):
        score(path)


def test_the_first_forecasts_are_those_that_were_stored() -> None:
    """The digest of a row contains all rows before it."""
    rows = read_forecasts(STORED)
    assert len(rows) >= 20 and rows[19].digest == "308132422fedd9b9"
