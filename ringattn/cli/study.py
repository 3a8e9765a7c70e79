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

from ..config.checks import check_needs
from ..config.folders import ConfigFolders, config_folders, read_from
from ..config.schema import SimulateConfig
from ..errors import InvalidInput, plural
from ..experiments.study.point import DIRECTIONS
from ..experiments.study.runner import STUDIES, Study, run
from ..experiments.study.space import list_points
from ..experiments.study.tables import Row
from ..files import STDOUT
from ..reporting.console import console
from .progress import progress


def main(config: SimulateConfig) -> None:
    """Run a study, or go on with it, and say where its files are."""
    if config.mode != "timing":
        raise InvalidInput(f"mode={config.mode} has no meaning with a study, whose points are modelled; leave it out")
    if config.output.path == STDOUT:
        raise InvalidInput("output.path=-: a study is a folder of files; give one, such as output.path=scaling")
    overrides, choices, text, folders = _hydra(config)
    found = list_points(config, overrides, choices, folders)
    check_needs("timing", *(point.config for point in found))
    study = Study(config.study.name, config, found, Path("."), text, overrides)
    folder = Path(config.output.path) if config.output.path else _folder(study)
    study = dataclasses.replace(study, folder=folder)
    try:
        with progress(Console(stderr=True), wanted=config.study.progress, lines=True) as tell:
            done = run(study, tell)
    except KeyboardInterrupt:
        sys.stderr.write(f"ringattn: {folder} keeps the points that are done; the same command goes on from there\n")
        raise
    console().print(
        f"{_told(done.rows)}; {folder / 'report.md'}, report.html, sweep.csv, summary.json",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip


def _told(rows: Sequence[Row]) -> str:
    """How many points have numbers, and by how many plans something was executed."""
    refused = sum(row["status"] == "refused" for row in rows)
    words = sorted({row[f"{one} kind"] for row in rows for one in DIRECTIONS if f"{one} kind" in row}, reverse=True)
    text = f"{plural(len(rows) - refused, 'point')} [{', '.join(words)}], {refused:,} refused"
    turns = {row["executed turn"]: "executed how" in row for row in rows if "executed turn" in row}
    return f"{text}; {sum(turns.values()):,} of {plural(len(turns), 'plan')} executed [counted]" if turns else text


def _folder(study: Study) -> Path:
    """A folder of this study's own: the same command goes on there, another one has another."""
    digest = hashlib.sha256(json.dumps(study.head, sort_keys=True).encode()).hexdigest()[:8]
    return STUDIES / f"{re.sub(r'[^A-Za-z0-9]+', '-', study.name)}-{digest}"


def _hydra(config: SimulateConfig) -> tuple[list[str], dict[str, str], str, ConfigFolders]:
    """The overrides of this job, the options of its groups, its configuration as YAML, and its config folders."""
    known = import_module("hydra.core.hydra_config").HydraConfig
    text = import_module("omegaconf").OmegaConf.to_yaml(dataclasses.asdict(config))
    if not known.initialized():
        return [], {}, text, config_folders(())
    job = known.get()
    choices = {str(key): str(value) for key, value in job.runtime.choices.items()}
    return list(job.overrides.task), choices, text, read_from(job.runtime.config_sources)
