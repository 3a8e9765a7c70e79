"""Errors of predictions of published measurements by family and cause, of choices, bands of presets, and a plot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean

import numpy as np

from ...files import write_text
from ...machine.bands import SIZES, ErrorBand, size_class
from ..pages.figures import COLOURS, drawing, on_paper, to_svg
from .predictions import CAUSES, PredictedRow

#: A cause beside the kernel that takes less than this part of a prediction is no cause of its error.
LEAST_SHARE = 0.05


@dataclass(frozen=True)
class ErrorStatistics:
    """Relative errors of predictions: the median and the 90th percentile of their sizes, and the mean with signs."""

    rows: int
    median: float
    p90: float
    bias: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> ErrorStatistics:
        """The statistics of at least one error."""
        median, p90 = np.quantile(np.abs(errors), (0.5, 0.9))
        return cls(len(errors), float(median), float(p90), fmean(errors))


@dataclass(frozen=True)
class GroupErrors:
    """ErrorStatistics of a group of rows: by presets made without the family of each row, by the null model, by presets
    as they are, and the errors that no model of these inputs can avoid."""

    name: str
    unseen: ErrorStatistics
    null: ErrorStatistics
    preset: ErrorStatistics
    floor: ErrorStatistics
    #: Parts of the time by cause, as predicted without the family.
    shares: dict[str, float]


@dataclass(frozen=True)
class Choices:
    """The time lost by who takes the predicted fastest of the published ways to compute the same: mean and median.

    A loss is relative to the fastest published way. The null model tells no ways apart: its loss is that of the mean
    way.
    """

    count: int
    mean: float
    median: float
    null: float


def group_errors(predictions: Sequence[PredictedRow], key: Callable[[PredictedRow], str]) -> list[GroupErrors]:
    """The errors of each group of predictions with one key, in the order of their first rows."""
    groups: defaultdict[str, list[PredictedRow]] = defaultdict(list)
    for one in predictions:
        groups[key(one)].append(one)
    return [errors_of(name, group) for name, group in groups.items()]


def cause_of(one: PredictedRow) -> str:
    """What takes longest in a prediction beside the kernel; "kernel" where nothing else takes a twentieth."""
    others = {cause: seconds for cause, seconds in one.unseen.causes.items() if cause != "kernel"}
    longest = max(others, key=lambda cause: others[cause])
    return longest if others[longest] >= LEAST_SHARE * one.unseen.seconds else "kernel"


def judge_choices(predictions: Iterable[PredictedRow]) -> Choices:
    """What the predictions, made without the family of each row, lose where a family has several ways to compute the
    same on equal machines."""
    alike: defaultdict[object, defaultdict[object, list[PredictedRow]]] = defaultdict(lambda: defaultdict(list))
    for one in predictions:
        row = one.row
        sizes = row.tokens, row.batch, row.heads, row.kv_heads, row.head_dim, row.pattern
        alike[row.family, row.machine, row.gpus, row.passes, sizes][row.schedule, row.layout].append(one)
    losses, blind = [], []
    for ways in alike.values():
        if len(ways) > 1:
            # Methods of one way differ in what no plan states: the fastest counts.
            times = [(way[0].unseen.seconds, min(one.row.seconds for one in way)) for way in ways.values()]
            best = min(seconds for _, seconds in times)
            losses.append(min(times)[1] / best - 1)
            blind.append(fmean(seconds for _, seconds in times) / best - 1)
    return Choices(len(losses), fmean(losses), float(np.median(losses)), fmean(blind))


def preset_bands(predictions: Iterable[PredictedRow]) -> dict[str, tuple[ErrorBand | None, ...]]:
    """By preset and size class, how many times as long 90 % of the published passes took as predicted without them."""
    ratios: defaultdict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in SIZES])
    for one in predictions:
        ratios[one.row.machine][size_class(one.row.shard)].append(one.row.seconds / one.unseen.seconds)
    return {name: tuple(map(band_of, parts)) for name, parts in ratios.items()}


def band_of(ratios: Sequence[float]) -> ErrorBand | None:
    """The span of 90 % of ratios; None: there are none."""
    if not ratios:
        return None
    left_out, ordered = int(0.05 * len(ratios)), sorted(ratios)
    return ErrorBand(len(ratios), round(ordered[left_out], 2), round(ordered[-1 - left_out], 2))


def errors_of(name: str, group: Sequence[PredictedRow]) -> GroupErrors:
    """The errors of some predictions, under a name."""
    ways = ([one.unseen.seconds for one in group], [one.null for one in group], [one.preset.seconds for one in group])
    unseen, null, preset = (
        ErrorStatistics.of([one.error(seconds) for one, seconds in zip(group, way, strict=True)]) for way in ways
    )
    total = sum(one.unseen.seconds for one in group)
    shares = {cause: sum(one.unseen.causes[cause] for one in group) / total for cause in CAUSES}
    return GroupErrors(name, unseen, null, preset, ErrorStatistics.of(_unavoidable(group)), shares)


def _unavoidable(group: Sequence[PredictedRow]) -> list[float]:
    """The least errors of one prediction for all rows of a plan on a machine: methods differ in what no plan states."""
    alike: defaultdict[object, list[float]] = defaultdict(list)
    for one in group:
        row = one.row
        alike[row.machine, row.kernel, row.passes, row.plans()].append(row.seconds)
    return [sqrt(min(seconds) * max(seconds)) / second - 1 for seconds in alike.values() for second in seconds]


def draw_scatter(predictions: Sequence[PredictedRow], folder: Path) -> None:
    """Write scatter.svg: each row by its measured and its modelled time, a panel for each kind of prediction."""
    with drawing(4.5, width=9.0) as figure:
        families = list(dict.fromkeys(one.row.family for one in predictions))
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        titles = ("presets made without the family", "null model: half of the peak")
        for panel, title, null in zip(panels, titles, (False, True), strict=True):
            for family, colour in zip(families, COLOURS, strict=False):
                points = [
                    (one.row.seconds, one.null if null else one.unseen.seconds)
                    for one in predictions
                    if one.row.family == family
                ]
                panel.plot(*zip(*points, strict=True), ".", color=colour, label=family, alpha=0.7)
            ends = min(one.row.seconds for one in predictions), max(one.row.seconds for one in predictions)
            panel.plot(ends, ends, color="black", linewidth=0.8)
            panel.set(xscale="log", yscale="log", xlabel="measured [s]", ylabel="modelled [s]", title=title)
        write_text(folder / "scatter.svg", on_paper(to_svg(figure, "scatter")))
