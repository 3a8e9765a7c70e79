"""Errors of predicted published measurements, by family; of choices; error bands of presets; and a plot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean

import numpy as np

from ...files import writing
from ...machine.bands import SIZES, ErrorBand, size_class
from ..pages.figures import COLOURS, drawing
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
        return f"{self.median:.1%} / {self.p90:.1%} / {self.bias:+.1%}"


#: The predictions of a row.
WAYS = ("unseen", "null", "preset")
#: Errors by what they are of.
Errors = dict[str, ErrorStatistics]


def errors_by_family(predictions: Sequence[PredictedRow]) -> dict[str, Errors]:
    """The errors of four models, over all rows and by family; a family is the rows of one publication.

    "unseen": machine presets fitted without the row's family. "null": every GPU at half its peak rate. "preset": the
    presets as they are. "floor": the least error that any model with these inputs must make.
    """
    groups: defaultdict[str, list[PredictedRow]] = defaultdict(list, all=[*predictions])
    for one in predictions:
        groups[one.row.family].append(one)
    return {
        name: {
            **{way: ErrorStatistics.of([getattr(x, way) / x.row.seconds - 1 for x in group]) for way in WAYS},
            "floor": ErrorStatistics.of(_unavoidable(group)),
        }
        for name, group in groups.items()
    }


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


def preset_bands(predictions: Iterable[PredictedRow]) -> dict[str, tuple[ErrorBand | None, ...]]:
    """By preset and size class, the range of measured / predicted seconds that holds for 90 % of the passes.

    The predictions are by presets fitted without the row's own family. None where there are no passes.
    """
    ratios: defaultdict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in SIZES])
    for one in predictions:
        ratios[one.row.machine][size_class(one.row.shard)].append(one.row.seconds / one.unseen)
    return {name: tuple(map(band_of, parts)) for name, parts in ratios.items()}


def band_of(ratios: Sequence[float]) -> ErrorBand | None:
    """The range that contains 90 % of the ratios; None if there are no ratios."""
    if not ratios:
        return None
    left_out, ordered = int(0.05 * len(ratios)), sorted(ratios)
    return ErrorBand(len(ratios), round(ordered[left_out], 2), round(ordered[-1 - left_out], 2))


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


def _unavoidable(group: Sequence[PredictedRow]) -> list[float]:
    """The least errors of one prediction for all rows with the same plan and machine: no plan describes the method."""
    alike: defaultdict[object, list[float]] = defaultdict(list)
    for one in group:
        row = one.row
        alike[row.machine, row.kernel, row.passes, row.plans()].append(row.seconds)
    return [sqrt(min(seconds) * max(seconds)) / second - 1 for seconds in alike.values() for second in seconds]


def draw_scatter(predictions: Sequence[PredictedRow], folder: Path) -> None:
    """Write scatter.svg: measured against modelled time of each row, one panel for each kind of prediction."""
    with drawing(4.5, width=9.0) as figure:
        families = list(dict.fromkeys(one.row.family for one in predictions))
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        titles = ("presets made without the family", "null model: half of the peak")
        for panel, title, way in zip(panels, titles, WAYS, strict=False):
            for family, colour in zip(families, COLOURS, strict=False):
                of_family = [one for one in predictions if one.row.family == family]
                points = [(one.row.seconds, getattr(one, way)) for one in of_family]
                panel.plot(*zip(*points, strict=True), ".", color=colour, label=family, alpha=0.7)
            ends = min(one.row.seconds for one in predictions), max(one.row.seconds for one in predictions)
            panel.plot(ends, ends, color="black", linewidth=0.8)
            panel.set(xscale="log", yscale="log", xlabel="measured [s]", ylabel="modelled [s]", title=title)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        with writing(folder / "scatter.svg") as path:
            figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
