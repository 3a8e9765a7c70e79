"""Errors of predictions of published measurements: by family, by cause, the bands of presets, and a scatter plot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from ...machine.bands import SIZES, ErrorBand, size_class
from ..reporting.pages import COLOURS, check_matplotlib, save_figure
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
    def of(cls, errors: Sequence[float]) -> ErrorStatistics | None:
        """The statistics of some errors; None without errors."""
        if not errors:
            return None
        median, p90 = np.quantile(np.abs(errors), (0.5, 0.9))
        return cls(len(errors), float(median), float(p90), fmean(errors))


@dataclass(frozen=True)
class GroupErrors:
    """ErrorStatistics of a group of rows by the preset alone, and with the source's kernel rate where it gives one."""

    name: str
    preset: ErrorStatistics
    source: ErrorStatistics | None
    #: The median and the 90th percentile of the errors that no model of these inputs can avoid.
    floor: ErrorStatistics
    #: Parts of the predicted time by cause, by the preset.
    shares: dict[str, float]


def group_errors(predictions: Sequence[PredictedRow], key: Callable[[PredictedRow], str]) -> list[GroupErrors]:
    """The errors of each group of predictions with one key, in the order of their first rows."""
    groups: defaultdict[str, list[PredictedRow]] = defaultdict(list)
    for one in predictions:
        groups[key(one)].append(one)
    return [errors_of(name, group) for name, group in groups.items()]


def cause_of(one: PredictedRow) -> str:
    """What takes longest in a prediction beside the kernel; "kernel" where nothing else takes a twentieth."""
    others = {cause: seconds for cause, seconds in one.preset.causes.items() if cause != "kernel"}
    longest = max(others, key=lambda cause: others[cause])
    return longest if others[longest] >= LEAST_SHARE * one.preset.seconds else "kernel"


def preset_bands(predictions: Iterable[PredictedRow]) -> dict[str, tuple[ErrorBand | None, ...]]:
    """By preset and size class, how many times as long as predicted 90 % of the published passes took."""
    ratios: defaultdict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in SIZES])
    for one in predictions:
        ratios[one.row.machine][size_class(one.row.shard)].append(one.row.seconds / one.preset.seconds)
    return {name: tuple(_band(sorted(part)) for part in parts) for name, parts in ratios.items()}


def _band(ratios: list[float]) -> ErrorBand | None:
    if not ratios:
        return None
    left_out = int(0.05 * len(ratios))
    return ErrorBand(len(ratios), round(ratios[left_out], 2), round(ratios[-1 - left_out], 2))


def errors_of(name: str, group: Sequence[PredictedRow]) -> GroupErrors:
    """The errors of some predictions, under a name."""
    preset = ErrorStatistics.of([one.error(one.preset) for one in group])
    floor = ErrorStatistics.of(_unavoidable(group))
    assert preset is not None and floor is not None
    source = ErrorStatistics.of([one.error(one.source) for one in group if one.source is not None])
    total = sum(one.preset.seconds for one in group)
    shares = {cause: sum(one.preset.causes[cause] for one in group) / total for cause in CAUSES}
    return GroupErrors(name, preset, source, floor, shares)


def _unavoidable(group: Sequence[PredictedRow]) -> list[float]:
    """The least errors of one prediction for all rows of a plan on a machine: methods differ in what no plan states."""
    alike: defaultdict[object, list[float]] = defaultdict(list)
    for one in group:
        row = one.row
        alike[row.machine, row.kernel, row.passes, row.plans()].append(row.seconds)
    return [sqrt(min(seconds) * max(seconds)) / second - 1 for seconds in alike.values() for second in seconds]


def draw_scatter(predictions: Sequence[PredictedRow], folder: Path) -> None:
    """Write scatter.svg and scatter.png: each row by its measured and its modelled time, a panel for each prediction.

    Raises Unsupported where matplotlib is missing.
    """
    check_matplotlib("leave output.path out")
    figures: Any = import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(9, 4.5), layout="constrained")
    families = list(dict.fromkeys(one.row.family for one in predictions))
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for panel, title in zip(panels, ("preset alone", "with the source's kernel rate"), strict=True):
        for family, colour in zip(families, COLOURS, strict=False):
            points = [
                (one.row.seconds, predicted.seconds)
                for one in predictions
                if one.row.family == family
                and (predicted := one.preset if panel is panels[0] else one.source) is not None
            ]
            if points:
                panel.plot(*zip(*points, strict=True), ".", color=colour, label=family, alpha=0.7)
        ends = min(one.row.seconds for one in predictions), max(one.row.seconds for one in predictions)
        panel.plot(ends, ends, color="black", linewidth=0.8)
        panel.set(xscale="log", yscale="log", xlabel="measured [s]", ylabel="modelled [s]", title=title)
    panels[0].legend(fontsize=7)
    save_figure(figure, folder, "scatter")
