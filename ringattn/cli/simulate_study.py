"""ringattn simulate study=NAME, or -m: many points of the timing model, in one folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console

from ..errors import InvalidInput
from ..files import STDOUT
from ..simulator.reporting.console import print_plain
from ..simulator.reporting.progress_bar import show_progress
from ..text import plural
from .config.schema import SimulateConfig
from .study.point import DIRECTIONS
from .study.runner import STUDIES, Study, run, run_share
from .study.space import list_points
from .study.tables import Row


def main(config: SimulateConfig) -> None:
    """Run a study, or continue one, and print where its files are."""
    if config.output.path == STDOUT:
        raise InvalidInput("output.path=-: a study is a folder of files; give a folder, such as output.path=scaling")
    overrides, search_path = _read_hydra()
    text = import_module("omegaconf").OmegaConf.to_yaml(dataclasses.asdict(config))
    study_points = list_points(config, [*overrides, *search_path])
    study = Study(config.study.name, config, study_points, Path("."), text, overrides)
    folder = _default_folder(study) if config.output.path is None else Path(config.output.path)
    study = dataclasses.replace(study, folder=folder)
    shown = config.study.progress and not config.study.share  # of several shares, the first speaks
    try:
        with show_progress(Console(stderr=True), shown=shown, tenths=True) as tell:
            if config.study.share is not None:
                return run_share(study, tell)
            table = run(study, tell)
    except KeyboardInterrupt:
        if folder.exists():
            sys.stderr.write(f"ringattn: {folder} keeps the finished points; the same command continues from there\n")
        raise
    print_plain(f"{_summarize(table.rows)}; {folder / 'report.md'}, report.html, sweep.csv, summary.json")


def _summarize(rows: Sequence[Row]) -> str:
    """How many points have numbers and of which kinds, how many were refused, and how many plans were executed."""
    refused = sum(row["status"] == "refused" for row in rows)
    kinds = {row[f"{name} kind"] for row in rows for name in DIRECTIONS if f"{name} kind" in row}
    words = ", ".join(sorted(kinds, reverse=True))
    text = f"{plural(len(rows) - refused, 'point')} [{words}], {refused:,} refused"
    plans = {row["executed turn"]: "executed how" in row for row in rows if "executed turn" in row}
    return f"{text}; {sum(plans.values()):,} of {plural(len(plans), 'plan')} executed [counted]" if plans else text


def _default_folder(study: Study) -> Path:
    """A folder that only this study uses: the same command continues there."""
    digest = hashlib.sha256(json.dumps(study.head, sort_keys=True).encode()).hexdigest()[:8]
    return STUDIES / f"{re.sub(r'[^A-Za-z0-9]+', '-', study.name)}-{digest}"


def _read_hydra() -> tuple[list[str], list[str]]:
    """The overrides of this job, and those that name folders of configs; none for a caller in Python."""
    hydra_config = import_module("hydra.core.hydra_config").HydraConfig
    if not hydra_config.initialized():
        return [], []
    overrides = hydra_config.get().overrides
    return list(overrides.task), [each for each in overrides.hydra if each.startswith("hydra.searchpath=")]
