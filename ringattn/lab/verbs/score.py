"""ringattn score: published GPU measurements, predicted by presets made without them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from msgspec import to_builtins
from rich.console import Console

from ...files import check_json, write_json
from ...machine.bands import BANDS, SIZES, describe_band
from ...machine.presets import PRESETS, TUNING
from ...simulator.reporting.console import get_console, print_grid, print_paragraph, show_progress
from ..published.errors import Errors, band_of_sources, count_left_out, errors_by_family, judge_choices, preset_bands
from ..published.forecasts import read_forecasts
from ..published.predictions import NOTES, SOURCES, predict_measurements, read_measurements
from ..published.steps import step_errors
from .settings import ScoreConfig


def main(config: ScoreConfig) -> None:
    """Compare predictions with published measurements; print their errors by publication.

    Also writes them to `output.path` as JSON, if set.
    """
    check_json(config.output.path)
    with show_progress(Console(stderr=True), tenths=True) as tell:
        predictions = predict_measurements(read_measurements(), tell)
    families = errors_by_family(predictions)
    print_paragraph(
        f"{len(predictions)} published measurements, each modelled by presets made without the rows of its publication "
        "(unseen), by a null model (all FLOPs at half of the data sheet's peak), and, where the publication set one of "
        "the numbers below, by the presets as they are (in sample); only families that set nothing are scored"
    )
    _print_errors("by family", families)
    get_console().print()
    choices = judge_choices(one for one in predictions if one.row.family not in TUNING)
    print_paragraph(
        f"choosing the method that is predicted to be fastest, in {choices['count']} published comparisons, loses "
        f"{choices['mean']:.1%} on average ({choices['median']:.1%} in the median); choosing any method "
        f"{choices['null']:.1%}"
    )
    print_paragraph("set by publications: " + "; ".join(_tuned_numbers()))
    for preset, library in BANDS:
        for size in SIZES:
            print_paragraph(describe_band(preset, library, size))
    for family, source in SOURCES.items():
        print_paragraph(f"{family}: {source}")
    for one in NOTES["left_out"]:
        print_paragraph(f"left out: {', '.join(one['rows'])}: {one['why']}")
    steps, ratios = step_errors()
    _print_errors("steps of training; bytes where the source tells a peak, which holds what an allocator had", steps)
    for kind, of_sources in ratios.items():
        band = band_of_sources(of_sources)
        counts = ", ".join(f"{name} {held} of {rows}" for name, (held, rows) in count_left_out(of_sources).items())
        print_paragraph(
            f"{kind} measured / modelled: {band.low:g} to {band.high:g} holds 90 % of {band.rows} steps, sources "
            f"counted alike; the band of all other sources holds {counts}"
        )
    print_forecasts(Path("benchmarks"))
    if config.output.path is not None:
        record = {
            "kind": "modelled against published measurements",
            "families": families,
            "steps of training": steps,
            "choices": choices,
            "bands": {"/".join(spec): bands for spec, bands in preset_bands(predictions).items()},
            "predictions": [asdict(one) for one in predictions],
        }
        write_json(config.output.path, to_builtins(record))


def print_forecasts(folder: Path) -> None:
    """Print how far the outcomes in a folder are from their forecasts."""
    if not (folder / "forecasts.csv").is_file():
        return print_paragraph(f"forecasts are not scored: there is no {folder}/forecasts.csv here, as in a clone")
    forecasts = read_forecasts(folder)
    late = [str(one.number) for one, outcome in forecasts if outcome and outcome.knew(one)]
    print_paragraph(f"of {len(forecasts)} forecasts, not scored, as their source was public or read: {', '.join(late)}")
    held = []
    for one, outcome in forecasts:
        if outcome and outcome.measured and not outcome.knew(one):
            held.append(one.low <= outcome.measured <= one.high)
            print_paragraph(
                f"forecast {one.number}, {one.settings}: {one.predicted:g} tokens/s of a GPU ({one.low:g} to "
                f"{one.high:g}), published {outcome.measured:g}, {one.predicted / outcome.measured - 1:+.1%} "
                f"({outcome.source}, {outcome.published or 'undated'})"
            )
    print_paragraph(f"forecasts with an outcome: {len(held)}, within their bands: {sum(held)}")


def _tuned_numbers() -> dict[str, None]:
    """The preset numbers that publications set, as text."""
    libraries = ((preset, library) for preset in PRESETS.values() for library in ("", *preset.kernels))
    facts = (fact for preset, library in libraries for fact in preset.tuned(library).items())
    return {
        f"{number} {fact.value:g} (without {', '.join(fact.families)} {fact.without:g})": None for number, fact in facts
    }


def _print_errors(title: str, groups: dict[str, Errors]) -> None:
    kinds = dict.fromkeys(kind for errors in groups.values() for kind in errors)
    rows = [
        (name, str(next(iter(errors.values())).rows), *(str(errors.get(kind, "")) for kind in kinds))
        for name, errors in groups.items()
    ]
    get_console().print()
    print_grid(f"{title}: median / P90 of absolute errors / mean error", ("", "rows", *kinds), rows)
