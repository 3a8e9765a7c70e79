"""The scatter plot of measured against modelled times. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..reporting.figures import COLOURS, check_matplotlib, save_figure
from .predictions import PredictedRow


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
