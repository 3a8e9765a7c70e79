"""ringattn simulate mode=published: published measurements of attention on GPUs, predicted twice without a fit."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from ..files import write_json, writing
from ..machine.bands import BANDS, SIZES, describe_band
from ..simulator.published.errors import (
    ErrorStatistics,
    GroupErrors,
    cause_of,
    draw_scatter,
    errors_of,
    group_errors,
    preset_bands,
)
from ..simulator.published.predictions import CAUSES, SOURCES, PredictedRow, predict_measurements, read_measurements
from ..simulator.reporting.console import get_console, print_grid, print_paragraph, show_progress
from ..simulator.reporting.pages import check_matplotlib
from .config.groups import refuse_stdout
from .config.schema import SimulateConfig


def main(config: SimulateConfig) -> None:
    """Print the errors by family and by cause; write predictions.csv, summary.json and a scatter plot to a folder."""
    refuse_stdout("output.path", config.output.path, "mode=published writes several files; try output.path=errors")
    if config.output.path is not None:
        check_matplotlib("leave output.path out")
    with show_progress(Console(stderr=True), tenths=True) as tell:
        predictions = predict_measurements(read_measurements(), tell)
    families = group_errors(predictions, lambda one: one.row.family)
    causes = group_errors(predictions, cause_of)
    print_paragraph(
        "387 published measurements, modelled without a fit: by the preset alone, and with the kernel rate that the "
        "source itself gives. A floor is what no model of these inputs can avoid, as the source's methods differ in "
        "what no plan states."
    )
    _print_errors("errors by family", [errors_of("all", predictions), *families])
    _print_errors("errors by what takes longest beside the kernel", causes)
    header = ("part of the modelled time", *CAUSES)
    print_grid("", header, [(group.name, *(f"{group.shares[cause]:.1%}" for cause in CAUSES)) for group in families])
    get_console().print()
    for preset in BANDS:
        for size in SIZES:
            print_paragraph(describe_band(preset, size))
    for family, source in SOURCES.items():
        print_paragraph(f"{family}: {source}")
    if config.output.path is not None:
        _write(Path(config.output.path), predictions, families, causes)


def _print_errors(title: str, groups: list[GroupErrors]) -> None:
    header = ("", "rows", "preset: median", "P90", "bias", "rows", "source's rate: median", "P90", "bias", "floor P90")
    rows = [
        (group.name, *_statistics(group.preset), *_statistics(group.source), f"{group.floor.p90:.1%}")
        for group in groups
    ]
    get_console().print()
    print_grid(title, header, rows)


def _statistics(errors: ErrorStatistics | None) -> tuple[str, ...]:
    if errors is None:
        return ("0", "", "", "")
    return (str(errors.rows), f"{errors.median:.1%}", f"{errors.p90:.1%}", f"{errors.bias:+.1%}")


def _write(
    folder: Path, predictions: list[PredictedRow], families: list[GroupErrors], causes: list[GroupErrors]
) -> None:
    """Write the predictions, their errors, and the plot."""
    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder / "predictions.csv") as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        names = ("id", "machine", "kernel", "method", "measured [s]", "preset [s]", "source's rate [s]")
        table.writerow([*names, *(f"{cause} by preset [s]" for cause in CAUSES)])
        for one in predictions:
            row, source = one.row, "" if one.source is None else f"{one.source.seconds:.6g}"
            numbers = (f"{row.seconds:.6g}", f"{one.preset.seconds:.6g}", source)
            parts = [f"{one.preset.causes[cause]:.6g}" for cause in CAUSES]
            table.writerow([row.id, row.machine, row.kernel, row.method, *numbers, *parts])
    record = {
        "kind": "modelled against published measurements",
        "all": asdict(errors_of("all", predictions)),
        "families": [asdict(group) for group in families],
        "causes": [asdict(group) for group in causes],
        "bands": {
            name: [None if band is None else asdict(band) for band in bands]
            for name, bands in preset_bands(predictions).items()
        },
    }
    write_json(str(folder / "summary.json"), record)
    draw_scatter(predictions, folder)
