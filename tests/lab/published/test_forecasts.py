"""Predictions that were stated before their published numbers were read stay as they were, and are scored honestly."""

from __future__ import annotations

import csv
import re
from datetime import date
from pathlib import Path

import pytest

from ringattn.errors import InvalidInput
from ringattn.lab.published.forecasts import CLOSED, Publication, read_forecasts
from ringattn.lab.verbs.score import print_forecasts

STORED = Path(__file__).parents[3] / "benchmarks"


def _copy(folder: Path, forecasts: list[list[str]], outcomes: str = "number,measured,source,published,read\n") -> Path:
    with (folder / "forecasts.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(forecasts)
    (folder / "outcomes.csv").write_text(outcomes, encoding="utf-8")
    return folder


def _stored_rows() -> list[list[str]]:
    with (STORED / "forecasts.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_stored_forecasts_are_as_written() -> None:
    stored = read_forecasts(STORED)
    assert len(stored) == max(CLOSED) == 41
    assert {one.date for one, _ in stored[21:]} == {date(2026, 11, 30)}
    assert [one.number for one, outcome in stored if outcome and outcome.knew(one)] == [*range(1, 8)]
    page = (STORED / "published.md").read_text(encoding="utf-8")
    assert all(f"`{digest}`" in page for digest in CLOSED.values())
    assert len({one.settings for one, _ in stored}) == 41 and all(
        one.low < one.predicted < one.high for one, _ in stored
    )


@pytest.mark.parametrize("number", [1, 12, 21, 22, 40, 41])
@pytest.mark.parametrize("column", [1, 2, 3, 4, 5, 6, 7])
def test_a_changed_forecast_is_refused(number: int, column: int, tmp_path: Path) -> None:
    """The last rows, too."""
    rows = _stored_rows()
    new = {1: "model=x", 5: "2020-01-01"}.get(column) or re.sub(
        r"[1-8]", lambda one: str(int(one[0]) + 1), rows[number][column]
    )
    rows[number][column] = new
    with pytest.raises(InvalidInput, match=f"forecast {number} was changed after it was written"):
        read_forecasts(_copy(tmp_path, rows))


@pytest.mark.parametrize("number", [21, 41])
def test_a_missing_forecast_is_refused(number: int, tmp_path: Path) -> None:
    rows = _stored_rows()
    with pytest.raises(InvalidInput, match=r"was changed|has 40 forecasts, 41 were written"):
        read_forecasts(_copy(tmp_path, rows[:number] + rows[number + 1 :]))


def test_outcomes_are_scored_by_their_dates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Forecast 22 was made on 2026-11-30 with a band of 8,229.53 to 19,286.3."""
    outcomes = (
        "number,measured,source,published,read\n"
        "1,10000,a page,2026-11-27,2026-12-01\n"  # public on the day
        "2,,a page,,2026-11-20\n"  # read before
        "22,15000,a report,2026-12-02,2026-12-03\n"
        "23,1,an undated page,,2026-12-03\n"
    )
    print_forecasts(_copy(tmp_path, _stored_rows(), outcomes))
    told = " ".join(capsys.readouterr().out.split())
    assert "not scored, as their source was public or read: 1, 2 " in told
    assert "published 15000, -15.6% (a report, 2026-12-02)" in told and "(an undated page, undated)" in told
    assert "forecasts with an outcome: 2, within their bands: 1" in told and "forecast 1," not in told


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("99,1,a page,,2026-12-01", "no forecast has number 99"),
        ("1,1,a page,,yesterday", "correct the file"),
        ("1,1,a page,,", "correct the file"),
        ("1,many,a page,,2026-12-01", "correct the file"),
    ],
)
def test_wrong_outcomes_are_one_line(outcome: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=words):
        read_forecasts(_copy(tmp_path, _stored_rows(), f"number,measured,source,published,read\n{outcome}\n"))


def test_a_folder_without_forecasts_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_forecasts(tmp_path)
    assert "not scored" in capsys.readouterr().out
    assert Publication(1, None, "x", None, date(2026, 1, 1)).published is None
