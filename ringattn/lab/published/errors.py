"""Errors of predicted published measurements, by family; of choices; and error bands of presets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, floor, log
from statistics import fmean

import numpy as np

from ...machine.bands import SIZES, ErrorBand, size_class
from ...machine.presets import PRESETS, TUNING
from .predictions import PredictedRow


@dataclass(frozen=True)
class ErrorStatistics:
    """Statistics of the relative errors of predictions: the median and the 90th percentile of their size, and the bias.

    The bias is the mean of the errors with their signs.
    """

    rows: int
    median: float
    p90: float
    bias: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> ErrorStatistics:
        """Compute the statistics of at least one error."""
        median, p90 = np.quantile(np.abs(errors), (0.5, 0.9))
        return cls(len(errors), float(median), float(p90), fmean(errors))

    def __str__(self) -> str:
        return f"{100 * self.median:.1f} / {100 * self.p90:.1f} / {self.bias:+.1%}"


#: The group of all rows whose families set no number of a preset: only they are scored.
SCORED = "families that set nothing"
#: Errors by what they are of.
Errors = dict[str, ErrorStatistics]


def errors_by_family(predictions: Sequence[PredictedRow]) -> dict[str, Errors]:
    """The errors of three models, by family, and over the families that set no number of a preset (`SCORED`).

    "unseen": presets made without the row's publication. "null": every GPU at half its peak rate. "in sample": the
    presets as they are, for families that set a number; for others that is "unseen".
    """
    groups: defaultdict[str, list[PredictedRow]] = defaultdict(list)
    for one in predictions:
        for name in (one.row.family, *(() if one.row.family in TUNING else (SCORED,))):
            groups[name].append(one)
    found: dict[str, Errors] = {}
    for name in sorted(groups, key=SCORED.__ne__):
        ways = {"unseen": "unseen", "null": "null"} | ({"in sample": "preset"} if name in TUNING else {})
        errors = {label: [getattr(x, way) / x.row.seconds - 1 for x in groups[name]] for label, way in ways.items()}
        found[name] = {label: ErrorStatistics.of(x) for label, x in errors.items()}
    return found


def judge_choices(predictions: Iterable[PredictedRow]) -> dict[str, float]:
    """How much time is lost if the fastest way to compute something is chosen by prediction.

    The ways to choose from are published by the same family, for the same sizes and machine. The loss is relative to
    the fastest published way: "mean" and "median" over "count" choices. "null" is the mean loss of a random choice,
    because the null model cannot tell the ways apart.
    """
    alike: defaultdict[object, defaultdict[object, list[PredictedRow]]] = defaultdict(lambda: defaultdict(list))
    for one in predictions:
        row = one.row
        sizes = row.tokens, row.batch, row.heads, row.kv_heads, row.head_dim, row.pattern
        alike[row.family, row.machine, row.gpus, row.passes, sizes][row.schedule, row.layout].append(one)
    losses, blind = [], []
    for ways in alike.values():
        if len(ways) > 1:
            # Methods of one way differ in what no plan describes: the fastest counts.
            times = [(way[0].unseen, min(one.row.seconds for one in way)) for way in ways.values()]
            best = min(seconds for _, seconds in times)
            losses.append(min(times)[1] / best - 1)
            blind.append(fmean(seconds for _, seconds in times) / best - 1)
    middle = float(np.median(losses))
    return {"count": len(losses), "mean": fmean(losses), "median": middle, "null": fmean(blind)}


def preset_bands(predictions: Iterable[PredictedRow]) -> dict[tuple[str, str], tuple[ErrorBand | None, ...]]:
    """By preset with its kernels and size class, the range of measured / predicted seconds of 90 % of the passes.

    The predictions are by presets as they are, beside which the bands are printed. None where there are no passes.
    """
    groups: defaultdict[tuple[str, str], list[list[PredictedRow]]] = defaultdict(lambda: [[] for _ in SIZES])
    for one in predictions:
        groups[one.row.machine, one.row.kernel][size_class(one.row.shard)].append(one)
    return {name: tuple(map(_band_of, parts)) for name, parts in groups.items()}


def _band_of(group: Sequence[PredictedRow]) -> ErrorBand | None:
    if not group:
        return None
    left_out, ordered = int(0.05 * len(group)), sorted(100 * one.row.seconds / one.preset for one in group)
    seen = sum(one.row.family in PRESETS[one.row.machine].families(one.row.kernel) for one in group)
    return ErrorBand(len(group), floor(ordered[left_out]) / 100, ceil(ordered[-1 - left_out]) / 100, seen)


def band_of_sources(ratios: Mapping[str, Sequence[float]]) -> ErrorBand:
    """The range of errors to expect for a new source: 1 / high .. high contains 90 % of the rows.

    Each source has the same weight, whatever its number of rows.
    """
    logs = sorted((abs(log(ratio)), 1 / len(of_source)) for of_source in ratios.values() for ratio in of_source)
    held = np.cumsum([weight for _, weight in logs])
    high = exp(logs[int(np.searchsorted(held, 0.9 * held[-1]))][0])
    return ErrorBand(len(logs), round(1 / high, 2), round(high, 2))


def count_left_out(ratios: Mapping[str, Sequence[float]]) -> dict[str, tuple[int, int]]:
    """Test `band_of_sources` on each source, with the range computed from all other sources.

    Returns by source: (number of its rows within that range, number of all its rows).
    """
    found = {}
    for source, rows in ratios.items():
        band = band_of_sources({other: ratios[other] for other in ratios if other != source})
        found[source] = sum(band.low <= ratio <= band.high for ratio in rows), len(rows)
    return found
