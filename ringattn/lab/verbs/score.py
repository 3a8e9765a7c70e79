"""ringattn score: published GPU measurements, predicted by presets made without them."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ...cli.config.groups import refuse_stdout
from ...files import make_folder, write_json, writing
from ...machine.bands import BANDS, SIZES, describe_band
from ...machine.presets import PRESETS
from ...simulator.reporting.console import get_console, print_grid, print_paragraph, show_progress
from ..pages.figures import check_matplotlib
from ..published.errors import (
    Errors,
    band_of_sources,
    count_left_out,
    draw_scatter,
    errors_by_family,
    judge_choices,
    preset_bands,
)
from ..published.predictions import LEFT_OUT, SOURCES, PredictedRow, predict_measurements, read_measurements
from ..published.steps import step_errors
from .settings import ScoreConfig


def main(config: ScoreConfig) -> None:
    """Compare predictions with published measurements; print their errors by publication.

    Writes predictions.csv, summary.json and a scatter plot to a folder.
    """
    refuse_stdout("output.path", config.output.path, "several files are written; try output.path=errors")
    if config.output.path is not None:
        check_matplotlib("leave output.path out")
        make_folder(Path(config.output.path))
    with show_progress(Console(stderr=True), tenths=True) as tell:
        predictions = predict_measurements(read_measurements(), tell)
    families = errors_by_family(predictions)
    print_paragraph(
        f"{len(predictions)} published measurements, each modelled by presets made without the rows of its family "
        "(unseen), by a null model (all FLOPs at half of the data sheet's peak), and by the presets as they are, with "
        "the numbers below fitted to rows. A floor is the error that no model of these inputs can avoid, since the "
        "methods of a source differ in details that no plan states."
    )
    _print_errors("by family", families)
    get_console().print()
    choices = judge_choices(predictions)
    print_paragraph(
        f"choosing the method that is predicted to be fastest, in {choices['count']} published comparisons, loses "
        f"{choices['mean']:.1%} on average ({choices['median']:.1%} in the median); choosing any method "
        f"{choices['null']:.1%}"
    )
    for number, machines in _fitted_numbers().items():
        print_paragraph(f"{number}: {', '.join(machines)}")
    for name in BANDS:
        for size in SIZES:
            print_paragraph(describe_band(name, size))
    for family, source in SOURCES.items():
        print_paragraph(f"{family}: {source}")
    for why in dict.fromkeys(LEFT_OUT.values()):
        names = [name for name, reason in LEFT_OUT.items() if reason == why]
        print_paragraph(f"left out: {', '.join(names)}: {why}")
    steps, ratios = step_errors()
    _print_errors("steps of training; bytes where the source tells a peak, which holds what an allocator had", steps)
    for kind, of_sources in ratios.items():
        band = band_of_sources(of_sources)
        counts = ", ".join(f"{name} {held} of {rows}" for name, (held, rows) in count_left_out(of_sources).items())
        print_paragraph(
            f"{kind} measured / modelled: {band.low:g} to {band.high:g} holds 90 % of {band.rows} steps, sources "
            f"counted alike; the band of all other sources holds {counts}"
        )
    if config.output.path is not None:
        _write(Path(config.output.path), predictions, families, steps)


def _fitted_numbers() -> dict[str, list[str]]:
    """The preset numbers that were fitted to rows, as text, with the machines that have them."""
    found: dict[str, list[str]] = {}
    for name, preset in PRESETS.items():
        for facts in (preset.values, *preset.kernels.values()):
            for number, fact in facts.items():
                if fact.families:
                    rows = " and ".join(fact.families)
                    machines = found.setdefault(f"{number} {fact.value:g} (without {rows} {fact.without:g})", [])
                    machines += [] if name in machines else [name]
    return found


def _print_errors(title: str, groups: dict[str, Errors]) -> None:
    kinds = dict.fromkeys(kind for errors in groups.values() for kind in errors)
    rows = [
        (name, str(next(iter(errors.values())).rows), *(str(errors.get(kind, "")) for kind in kinds))
        for name, errors in groups.items()
    ]
    get_console().print()
    print_grid(f"{title}: median / P90 of absolute errors / mean error", ("", "rows", *kinds), rows)


def _plain(groups: dict[str, Errors]) -> dict[str, Any]:
    return {name: {kind: asdict(one) for kind, one in errors.items()} for name, errors in groups.items()}


def _write(
    folder: Path, predictions: list[PredictedRow], families: dict[str, Errors], steps: dict[str, Errors]
) -> None:
    """Write the predictions, their errors and the plot to a folder."""
    with writing(folder / "predictions.csv") as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["id", "machine", "kernel", "method", "measured [s]", "unseen [s]", "null [s]", "preset [s]"])
        for one in predictions:
            row = one.row
            seconds = (row.seconds, one.unseen, one.null, one.preset)
            table.writerow([row.id, row.machine, row.kernel, row.method, *(f"{x:.6g}" for x in seconds)])
    record = {
        "kind": "modelled against published measurements",
        "families": _plain(families),
        "steps of training": _plain(steps),
        "choices": judge_choices(predictions),
        "bands": {
            name: [None if band is None else asdict(band) for band in bands]
            for name, bands in preset_bands(predictions).items()
        },
    }
    write_json(str(folder / "summary.json"), record)
    draw_scatter(predictions, folder)
