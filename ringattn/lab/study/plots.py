"""Plots of a study, by matplotlib; every run gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from ...cli.config.groups import check_choice
from ...errors import InvalidInput
from ..pages.figures import COLOURS, SMALL, draw_lines, draw_stacks, drawing, to_svg, use_log_y, wrap
from ..pages.pages import Plot
from ..verbs.settings import StudyConfig
from .tables import DIRECTIONS, WAITS, Row, Table, efficiency, is_number, name_value, show_number, total

#: Panels side by side (each 160 pixels wide on a phone), and the most ticks, and the most lines, in a panel.
PANELS, MOST_TICKS, MOST_LINES = 2, 10, 8
CAUSES = ("compute", "imbalance", "merge", "interference", "stalls", *WAITS, "host", "call")


def choose_plots(options: StudyConfig, table: Table) -> list[str]:
    """The plots to draw; by default three, if an axis has several numbers. Raises InvalidInput for wrong names."""
    if options.plots is None:
        drawable = any(len(table.numbers(name)) > 1 for name in table.axes)
        return ["stack", "time" if options.of == "estimate" else "efficiency", "memory"] if drawable else []
    for place, name in enumerate(options.plots):
        check_choice("plots", name, PLOTS)
        if name in options.plots[:place]:
            raise InvalidInput(f"plots: {name} is listed twice; name each plot once")
    return options.plots


def choose_axes(table: Table, x: str | None, y: str | None) -> tuple[str, str | None]:
    """The study axes to plot: `x` and `y`, or by default the first two that have several numbers.

    Raises InvalidInput.
    """
    numeric = [name for name in table.axes if len(table.numbers(name)) > 1]
    for name in (x, y):
        if name is not None and name not in numeric:
            more = f"; give it two numbers or more, such as {name}=8,64" if name in table.axes else ""
            raise InvalidInput(
                f"study: {name} is no axis with several numbers; those are {', '.join(numeric) or 'none here'}{more}"
            )
    if x is not None and x == y:
        raise InvalidInput(f"study: x and y are both {x}; give two axes, or leave y out")
    others = [name for name in numeric if name not in (x, y)]
    x = x or (others.pop(0) if others else None)
    if x is None:
        raise InvalidInput(
            "study: plots need an axis with several numbers; add an axis, or leave plots out with plots=[]"
        )
    return x, y or (others[0] if others else None)


def draw(name: str, table: Table, x: str, y: str | None) -> list[Plot]:
    """The plots called `name` of a table; empty if no row has numbers."""
    title = f"{name}: {PLOTS[name][1]}, by {x}" + (f" and {y}" if name == "crossover" else "")
    with drawing(4.2) as figure:
        return [Plot(title, to_svg(figure, name))] if PLOTS[name][0](figure, table, x, y) else []


def _draw_curves(
    figure: Any,
    table: Table,
    x: str,
    y: str | None,
    *,
    value: Callable[[Row], float],
    ylabel: str,
    title: str,
    **more: Any,
) -> bool:
    """Draw a value of the rows as lines. All _draw functions return False if no row has numbers."""
    values, panels = table.numbers(x), _split(table, x)
    log = len(values) > 2 and min(values) > 0 and max(values) / min(values) > 8
    lines = {part: rows.series(x) for part, rows in panels.items()}
    names = list(dict.fromkeys(name for series in lines.values() for name in series))
    high = -(-len(panels) // PANELS)
    figure.set_size_inches(4.8, 0.4 + 2.8 * high + 0.16 * sum(wrap(name).count("\n") + 1 for name in names))
    all_axes = figure.subplots(high, min(PANELS, len(panels)), sharey=True, squeeze=False).ravel()
    for axes in all_axes[len(panels) :]:
        axes.remove()
    for axes, (part, series) in zip(all_axes, lines.items(), strict=False):
        points = {name: [(row[x], value(row)) for row in series.get(name, ())] for name in names}
        draw_lines(figure, points, x, "", log=log, axes=axes)
        axes.set(**more)
        axes.set_title(wrap(part, 30), fontsize=SMALL)
        if axes.get_yscale() == "log":
            use_log_y(axes, "{:g}".format)
        ticks = values[:: -(-len(values) // MOST_TICKS)]
        axes.set_xticks(ticks, [show_number(x, value) for value in ticks], rotation=60, ha="right")
    handles = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    if any(names):
        figure.legend(handles=handles.values(), loc="outside lower center")
    figure.supylabel(ylabel, fontsize=9)
    figure.suptitle(title)
    return bool(names)


def _split(table: Table, x: str) -> dict[str, Table]:
    """The tables of the panels of a plot over `x`, by title: one, or if it has too many lines, one for each value.

    Values are those of the axis that has the most.
    """
    if len(table.series(x)) <= MOST_LINES:
        return {"": table}
    splits: list[dict[str, Table]] = []
    for name in table.varied(x):
        rows: dict[str, list[Row]] = {}
        for row in table.rows:
            rows.setdefault(name_value(name, row.get(name)), []).append(row)
        splits.append({title: replace(table, rows=tuple(some)) for title, some in rows.items()})
    return max(splits, key=len)


def _draw_stack(figure: Any, table: Table, x: str, y: str | None) -> bool:
    """Draw the time by cause as bars."""
    parts = [column.name.partition(" ")[2] for column in table.columns if " time: " in column.name] or CAUSES

    def shares(row: Row) -> dict[str, float]:
        return {cause.removeprefix("time: "): total(row, cause) / (total(row, "time") or 1.0) for cause in parts}

    return _draw_bars(figure, table, x, "share of the time, modelled", "time by cause", shares)


def _draw_memory(figure: Any, table: Table, x: str, y: str | None) -> bool:
    """Draw a rank's memory by category as bars, for the backward if the study has one."""
    names = [column.name for column in table.columns if ": " in column.name and column.name.split(" ")[1] == "memory:"]
    direction = next((one for one in DIRECTIONS[::-1] if any(name.startswith(one) for name in names)), "forward")

    def gibibytes(row: Row) -> dict[str, float]:
        return {name.partition(": ")[2]: row.get(name, 0) / 2**30 for name in names if name.startswith(direction)}

    return _draw_bars(figure, table, x, "GiB per rank, modelled", f"memory in the {direction}", gibibytes)


def _draw_bars(
    figure: Any, table: Table, x: str, ylabel: str, title: str, heights: Callable[[Row], dict[str, float]]
) -> bool:
    """Draw stacked bars, one panel per series; `heights` computes the parts of a row's bar, the same for all rows."""
    series = list(table.series(x).items())
    if not series:
        return False
    lines = -(-len(series) // PANELS)
    figure.set_size_inches(4.8, 1.6 + 2.9 * lines)
    panels = figure.subplots(lines, min(PANELS, len(series)), sharey=True, squeeze=False).ravel()
    for axes in panels[len(series) :]:
        axes.remove()
    drawn: dict[str, Any] = {}
    for axes, (label, rows) in zip(panels, series, strict=False):
        bars = [heights(row) for row in rows]
        drawn |= draw_stacks(axes, bars, [*bars[0]])
        ticks = range(0, len(rows), -(-len(rows) // MOST_TICKS))
        axes.set_xticks(ticks, [show_number(x, rows[i][x]) for i in ticks], rotation=60, ha="right")
        axes.set_xlabel(x)
        axes.set_title(wrap(label, 30), fontsize=SMALL)
    figure.supylabel(ylabel, fontsize=9)
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=2)
    figure.suptitle(title)
    return True


def _draw_crossover(figure: Any, table: Table, x: str, y: str | None) -> bool:
    """Draw a map over two axes that shows the fastest series."""
    assert y is not None  # `checks` refuses a crossover without y before the first point
    best = find_fastest(table, x, y)
    if not best:
        return False
    columns, rows = table.numbers(x), table.numbers(y)
    names = list(dict.fromkeys(name for name, _ in best.values()))
    cells = np.full((len(rows), len(columns)), np.nan)
    for (x_value, y_value), (name, _) in best.items():
        cells[rows.index(y_value), columns.index(x_value)] = names.index(name)
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(names))]
    colormap = import_module("matplotlib.colors").ListedColormap(colours)
    axes = figure.subplots()
    axes.imshow(cells, origin="lower", aspect="auto", cmap=colormap, vmin=-0.5, vmax=len(names) - 0.5)
    labels = [show_number(x, value) for value in columns]
    axes.set_xticks(range(len(columns)), labels, rotation=60, ha="right")
    axes.set_yticks(range(len(rows)), [show_number(y, value) for value in rows])
    axes.set(xlabel=x, ylabel=y, title="least time, modelled (white: all refused)")
    patch = import_module("matplotlib.patches").Patch
    handles = [patch(color=colour, label=wrap(name) or "all") for colour, name in zip(colours, names, strict=True)]
    figure.legend(handles=handles, loc="outside lower center")
    return True


def find_fastest(table: Table, x: str, y: str) -> dict[tuple[Any, Any], tuple[str, float]]:
    """(label, seconds) of the fastest series over all passes, for each pair of values of x and y.

    The label of series that are equally fast names all of them.
    """
    best: dict[tuple[Any, Any], tuple[str, float]] = {}
    for label, rows in table.series(x, without=(y,)).items():
        for row in rows:
            if is_number(row.get(y)):
                place, seconds = (row[x], row[y]), total(row, "time")
                if place not in best or seconds < best[place][1]:
                    best[place] = (label, seconds)
                elif seconds == best[place][1]:
                    best[place] = (f"{best[place][0]} = {label}", seconds)
    return best


#: By name, the function that draws a plot, and what the plot shows.
PLOTS: dict[str, tuple[Callable[[Any, Table, str, str | None], bool], str]] = {
    "efficiency": (
        partial(
            _draw_curves,
            value=efficiency,
            ylabel="mean computing time / time, modelled",
            ylim=(0, 1.05),
            title="efficiency",
        ),
        "the part of the time in which ranks compute",
    ),
    "time": (
        partial(
            _draw_curves, value=partial(total, name="time"), ylabel="seconds, modelled", yscale="log", title="time"
        ),
        "the time",
    ),
    "stack": (_draw_stack, "the time by cause"),
    "memory": (_draw_memory, "the memory of a rank by category"),
    "crossover": (_draw_crossover, "what takes the least time"),
}
