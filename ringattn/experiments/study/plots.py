"""Plots of a study, as SVG and PNG that are the same bytes every time. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InvalidInput, Unsupported, did_you_mean
from ...files import writing
from ...timing.window import StepWindow
from .tables import Row, Table

#: Lines of a plot, small plots side by side, and bars of one: more are left to the table, and the plot says so.
LINES, SIDES, BARS = 10, 3, 24
CAUSES = ("compute", "imbalance", "merge", "interference", "stalls", "wait", "jitter", "call")
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd")
FORMATS = ("svg", "png")
_SETTINGS = {"svg.hashsalt": "ringattn", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 9.0}
#: No dates and no versions, which would make equal plots differ.
_METADATA: dict[str, dict[str, Any]] = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}


def check() -> None:
    """Raise Unsupported where matplotlib is missing."""
    try:
        import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"plots need matplotlib ({error}): pip install 'ringattn[plot]', or leave them out with study.plots=[]"
        ) from None


def check_names(names: Iterable[str]) -> None:
    """Raise InvalidInput where a plot is unknown, or there twice."""
    known: set[str] = set()
    for name in names:
        if name in known:
            raise InvalidInput(f"study.plots: {name} is there twice; name each plot once")
        known.add(name)
        if name not in PLOTS:
            raise InvalidInput(f"study.plots: {did_you_mean(name, PLOTS)}{name!r} is none of {', '.join(PLOTS)}")


def axes_of(table: Table, x: str | None, y: str | None) -> tuple[str, str | None]:
    """The axes of the plots: those that are asked for, or the first two with several numbers. Raises InvalidInput."""
    numeric = [name for name in table.axes if len(_numbers(table, name)) > 1]
    for name in (x, y):
        if name is not None and name not in numeric:
            raise InvalidInput(
                f"study: {name} is no axis with several numbers; those are {', '.join(numeric) or 'none here'}"
            )
    if x is not None and x == y:
        raise InvalidInput(f"study: x and y are both {x}; give two axes, or leave y out")
    left = [name for name in numeric if name not in (x, y)]
    x = x or (left.pop(0) if left else None)
    if x is None:
        raise InvalidInput(
            "study: plots need an axis with several numbers; add one, or leave them out with study.plots=[]"
        )
    return x, y or (left[0] if left else None)


def _numbers(table: Table, name: str) -> list[Any]:
    return sorted({row[name] for row in table.rows if type(row.get(name)) in (int, float)})


def draw(folder: Path, name: str, table: Table, x: str, y: str | None) -> list[Path]:
    """Draw one plot of the table; no file where there is nothing to draw."""
    figure = _figure()
    return _save(folder, name, figure) if PLOTS[name](figure, table, x, y) else []


def heat(folder: Path, name: str, window: StepWindow) -> list[Path]:
    """The ranks' delays by slow ranks, links and stalls over the steps of a window."""
    figure = _figure()
    axes = figure.subplots()
    first, last = window.steps.start, window.steps.stop
    box = (first - 0.5, last + 0.5, window.ranks.start - 0.5, window.ranks.stop - 0.5)
    image = axes.imshow(window.late.T, origin="lower", aspect="auto", extent=box, interpolation="nearest", cmap="magma")
    figure.colorbar(image, ax=axes, label="later than without faults [s], modelled")
    axes.set(xlabel="step", ylabel="rank", title=f"delays, solver {window.solver}")
    return _save(folder, name, figure)


def _figure() -> Any:
    return import_module("matplotlib.figure").Figure(figsize=(7.2, 4.2), layout="constrained")


def _save(folder: Path, name: str, figure: Any) -> list[Path]:
    tools = import_module("matplotlib")
    found = []
    for kind in FORMATS:
        path = folder / f"{name}.{kind}"
        with tools.rc_context(_SETTINGS), writing(path) as temporary:
            figure.savefig(temporary, format=kind, metadata=_METADATA[kind], dpi=110)
        found.append(path)
    return found


def passes(row: Row) -> tuple[str, ...]:
    """The passes that a row has."""
    return tuple(name for name in ("forward", "backward") if f"{name} time" in row)


def total(row: Row, name: str) -> float:
    """A number of all passes of a row together."""
    return sum(row.get(f"{one} {name}", 0.0) for one in passes(row))


def series(table: Table, x: str, without: tuple[str, ...] = ()) -> dict[str, list[Row]]:
    """The rows that have numbers, by what they have in common but for x: a line of a plot each, sorted by x."""
    tied = table.together if x in table.together else ()
    others = [name for name in table.axes if name not in (x, *without, *tied)]
    varied = [name for name in others if len({str(row.get(name)) for row in table.rows}) > 1]
    found: dict[str, list[Row]] = {}
    for row in table.rows:
        if row["status"] == "ok" and type(row.get(x)) in (int, float):
            found.setdefault(", ".join(_label(name, row.get(name)) for name in varied), []).append(row)
    for rows in found.values():
        rows.sort(key=lambda row: row[x])
    return found


def _label(name: str, value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if name in ("pattern", "layout", "schedule", "machine") else f"{name}={text}"


def _scale(axes: Any, x: str, values: list[Any]) -> None:
    if len(values) > 2 and min(values) > 0 and max(values) / min(values) > 8:
        axes.set_xscale("log", base=2)
    axes.set_xlabel(x)


def _efficiency(figure: Any, table: Table, x: str, y: str | None) -> bool:
    axes = figure.subplots()
    lines = series(table, x)
    for (label, rows), colour in zip(list(lines.items())[:LINES], COLOURS, strict=False):
        share = [total(row, "compute") / total(row, "time") if total(row, "time") else math.nan for row in rows]
        axes.plot([row[x] for row in rows], share, "o-", label=label or None, color=colour, markersize=3)
    _scale(axes, x, _numbers(table, x))
    axes.set(ylabel="mean computing time / time, modelled", ylim=(0, 1.05))
    axes.set_title("efficiency" + _more(len(lines), LINES))
    if any(lines):
        axes.legend(fontsize=7)
    return bool(lines)


def _more(count: int, shown: int) -> str:
    return f" ({shown} of {count} lines; all in sweep.csv)" if count > shown else ""


def _stack(figure: Any, table: Table, x: str, y: str | None) -> bool:
    parts = {name: _of_time(name) for name in CAUSES}
    return _bars(figure, table, x, "share of the time, modelled", "time by cause", parts)


def _of_time(name: str) -> Callable[[Row], float]:
    return lambda row: total(row, name) / total(row, "time") if total(row, "time") else 0.0


def _memory(figure: Any, table: Table, x: str, y: str | None) -> bool:
    names = [one.name for one in table.columns if ": " in one.name and one.name.split(" ")[1] == "memory:"]
    last = "backward" if any(name.startswith("backward") for name in names) else "forward"
    kept = [name for name in names if name.startswith(last)]
    parts = {name.partition(": ")[2]: _gib(name) for name in kept}
    return _bars(figure, table, x, "GiB per rank, modelled", f"memory in the {last}", parts)


def _gib(name: str) -> Callable[[Row], float]:
    return lambda row: row.get(name, 0) / 2**30


def _bars(
    figure: Any, table: Table, x: str, ylabel: str, title: str, parts: dict[str, Callable[[Row], float]]
) -> bool:  # fmt: skip
    lines = list(series(table, x).items())
    if not lines:
        return False
    shown = lines[:SIDES]
    figure.set_size_inches(2.6 + 3.0 * len(shown), 4.2)
    sides = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, (label, rows) in zip(sides, shown, strict=True):
        rows = rows[:: -(-len(rows) // BARS)]
        bottom = np.zeros(len(rows))
        for (name, of), colour in zip(parts.items(), COLOURS * 2, strict=False):
            heights = np.array([of(row) for row in rows])
            if heights.any():
                axes.bar(range(len(rows)), heights, bottom=bottom, label=name, color=colour)
                bottom += heights
        axes.set_xticks(range(len(rows)), [f"{row[x]:,}" for row in rows], rotation=60, ha="right", fontsize=6)
        axes.set_xlabel(x)
        axes.set_title(label, fontsize=7)
    sides[0].set_ylabel(ylabel)
    sides[-1].legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(title + _more(len(lines), SIDES))
    return True


def _crossover(figure: Any, table: Table, x: str, y: str | None) -> bool:
    assert y is not None  # checked before the first point
    best = winners(table, x, y)
    if not best:
        return False
    columns, rows = _numbers(table, x), _numbers(table, y)
    names = sorted({name for name, _ in best.values()})
    cells = np.full((len(rows), len(columns)), np.nan)
    for (a, b), (name, _) in best.items():
        cells[rows.index(b), columns.index(a)] = names.index(name)
    tools = import_module("matplotlib.colors")
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(names))]
    axes = figure.subplots()
    axes.imshow(
        cells, origin="lower", aspect="auto", cmap=tools.ListedColormap(colours), vmin=-0.5, vmax=len(names) - 0.5
    )
    axes.set_xticks(range(len(columns)), [f"{value:,g}" for value in columns], rotation=60, ha="right", fontsize=7)
    axes.set_yticks(range(len(rows)), [f"{value:,g}" for value in rows], fontsize=7)
    axes.set(xlabel=x, ylabel=y, title="least time, modelled (white: all refused)")
    patch = import_module("matplotlib.patches").Patch
    handles = [patch(color=colour, label=name or "all") for colour, name in zip(colours, names, strict=True)]
    axes.legend(handles=handles, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return True


def winners(table: Table, x: str, y: str) -> dict[tuple[Any, Any], tuple[str, float]]:
    """What takes the least time of all passes at each pair of values of two axes, and that time; the first of equals."""
    best: dict[tuple[Any, Any], tuple[str, float]] = {}
    for name, rows in series(table, x, without=(y,)).items():
        for row in rows:
            if type(row.get(y)) in (int, float):
                place, seconds = (row[x], row[y]), total(row, "time")
                if place not in best or seconds < best[place][1]:
                    best[place] = (name, seconds)
    return best


PLOTS: dict[str, Callable[[Any, Table, str, str | None], bool]] = {
    "efficiency": _efficiency,
    "stack": _stack,
    "memory": _memory,
    "crossover": _crossover,
}
