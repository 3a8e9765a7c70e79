"""Training steps that were predicted before their published numbers were read, and what was published: benchmarks/."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec import ValidationError, convert

from ...errors import InvalidInput
from .predictions import read_table

#: The digest of the last forecast of each day, by its number. A digest covers the row and all rows before it.
CLOSED = {21: "146faadc9a39d7bd", 41: "9c9b131c00fa4f51"}


@dataclass(frozen=True)
class Forecast:
    """The tokens/s of a GPU for `settings`, keys of `ringattn simulate`, their band, and the code that made them."""

    number: int
    settings: str
    predicted: float
    low: float
    high: float
    date: date
    commit: str
    digest: str


@dataclass(frozen=True)
class Publication:
    """What a source published for a forecast and when, None where that is not known here, and when it was read."""

    number: int
    measured: float | None
    source: str
    published: date | None
    read: date

    def knew(self, forecast: Forecast) -> bool:
        """Whether the source was public or read before the forecast, which therefore is none."""
        return min(self.published or self.read, self.read) <= forecast.date


def read_forecasts(folder: Path) -> list[tuple[Forecast, Publication | None]]:
    """The rows of forecasts.csv, each with that of outcomes.csv. Raises InvalidInput if a forecast was changed."""
    path, last, forecasts = folder / "forecasts.csv", "", _read(folder, "forecasts.csv", Forecast)
    for number, one in enumerate(forecasts, 1):
        numbers = (f"{value:.12g}" for value in (one.predicted, one.low, one.high))
        texts = (last, str(one.number), one.settings, *numbers, one.date.isoformat(), one.commit)
        last = sha256("\n".join(texts).encode()).hexdigest()[:16]
        if (one.number, one.digest, CLOSED.get(number, last)) != (number, last, last):
            raise InvalidInput(f"{path}: forecast {number} was changed after it was written; restore the file")
    if len(forecasts) != max(CLOSED):
        raise InvalidInput(f"{path}: has {len(forecasts)} forecasts, {max(CLOSED)} were written; restore the file")
    outcomes = {one.number: one for one in _read(folder, "outcomes.csv", Publication)}
    if unknown := outcomes.keys() - range(1, len(forecasts) + 1):
        raise InvalidInput(f"{folder}/outcomes.csv: no forecast has number {min(unknown)}; use those of {path.name}")
    return [(one, outcomes.get(one.number)) for one in forecasts]


def _read(folder: Path, name: str, kind: Any) -> list[Any]:
    rows = [{name: value or None for name, value in row.items()} for row in read_table(name, folder)]
    try:
        return convert(rows, list[kind], strict=False)
    except ValidationError as error:
        raise InvalidInput(f"{folder / name}: {error}; correct the file") from None
