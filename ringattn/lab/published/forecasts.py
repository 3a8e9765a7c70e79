"""Forecasts: predictions written down before the published number is read, and their scores once it is.

A forecast file is append-only: each row ends with a digest of the row and of the digest before it, so that a changed,
removed or reordered row is noticed. Outcomes are in a file of their own beside it.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from msgspec import ValidationError, convert

from ...errors import InvalidInput
from ...text import shorten
from ..pages.journal import git

T = TypeVar("T")

#: The file of outcomes beside a file of forecasts: its columns are number, measured, source.
OUTCOMES = "outcomes.csv"


@dataclass(frozen=True)
class Forecast:
    """A prediction made before a measurement: tokens/s per GPU, and the range low .. high to expect.

    `settings` are settings of `ringattn simulate`.
    """

    number: int
    settings: str
    predicted: float
    low: float
    high: float
    date: str
    commit: str
    digest: str


@dataclass(frozen=True)
class Publication:
    """The tokens per second and GPU that were measured after a forecast, and where they were published."""

    number: int
    measured: float
    source: str


def read_forecasts(path: Path) -> list[Forecast]:
    """The forecasts of a file, in its order. Raises InvalidInput if a row was changed after it was written."""
    rows, last = _read(path, Forecast), ""
    for number, row in enumerate(rows, 1):
        last = _digest(row, last)
        if (row.number, row.digest) != (number, last):
            raise InvalidInput(f"{path}: forecast {number} was changed after it was written; restore the file")
    return rows


def append_forecast(path: Path, settings: Sequence[str], predicted: float, low: float, high: float) -> Forecast:
    """Append a prediction to a file, which is made if it does not exist. Raises InvalidInput for a changed file."""
    rows = read_forecasts(path) if path.exists() else []
    now, commit = datetime.now(UTC).date().isoformat(), git("rev-parse", "--short=12", "HEAD") or ""
    predicted, low, high = (float(f"{value:.6g}") for value in (predicted, low, high))
    row = Forecast(len(rows) + 1, " ".join(settings), predicted, low, high, now, commit, "")
    row = replace(row, digest=_digest(row, rows[-1].digest if rows else ""))
    with path.open("a", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        if not rows:
            table.writerow([field.name for field in fields(Forecast)])
        table.writerow(astuple(row))
    return row


def score(path: Path) -> tuple[list[Forecast], list[tuple[Forecast, Publication]]]:
    """(all forecasts in a file, pairs of a forecast and the publication that measured it). Raises InvalidInput."""
    forecasts, outcomes = read_forecasts(path), path.with_name(OUTCOMES)
    known = {one.number: one for one in _read(outcomes, Publication)} if outcomes.exists() else {}
    if unknown := known.keys() - {one.number for one in forecasts}:
        raise InvalidInput(f"{outcomes}: no forecast has number {min(unknown)}; use the numbers in {path.name}")
    return forecasts, [(one, known[one.number]) for one in forecasts if one.number in known]


def _digest(row: Forecast, before: str) -> str:
    values = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in list(asdict(row).values())[:-1]]
    return sha256("\n".join([before, *values]).encode()).hexdigest()[:16]


def _read(path: Path, kind: type[T]) -> list[T]:
    with path.open(newline="", encoding="utf-8") as file:
        try:
            rows: Any = csv.DictReader(file)
            return [convert(row, kind, strict=False) for row in rows]
        except ValidationError as error:
            raise InvalidInput(f"{path}: {shorten(str(error), 120)}; restore the file") from None
