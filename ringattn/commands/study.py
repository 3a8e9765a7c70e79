"""ringattn simulate study=NAME, or -m: many points of the timing model, in one folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from importlib import import_module
from pathlib import Path

from rich.console import Console

from ..config import SimulateConfig
from ..errors import InvalidInput
from ..modes import check_needs
from ..report import console
from ..study.runner import Study, run
from ..study.space import points
from .progress import progress


def main(config: SimulateConfig) -> None:
    """Run a study, or go on with it, and say where its files are."""
    if config.mode != "timing":
        raise InvalidInput(f"mode={config.mode} has no meaning with a study, whose points are modelled; leave it out")
    overrides, choices, text = _hydra(config)
    found = points(config, overrides, choices)
    check_needs("timing", *(point.config for point in found))
    study = Study(config.study.name, config, found, Path("."), text, overrides)
    folder = Path(config.output.path) if config.output.path else _folder(study)
    study = dataclasses.replace(study, folder=folder)
    with progress(Console(stderr=True), wanted=config.study.progress, lines=True) as tell:
        done = run(study, tell)
    refused = sum(row["status"] == "refused" for row in done.rows)
    console().print(
        f"{len(done.rows) - refused:,} points [modelled], {refused:,} refused; {folder / 'report.md'}, report.html, sweep.csv, "
        "summary.json",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip


def _folder(study: Study) -> Path:
    """A folder of this study's own: the same command goes on there, another one has another."""
    digest = hashlib.sha256(json.dumps(study.head, sort_keys=True).encode()).hexdigest()[:8]
    return Path("outputs") / "studies" / f"{re.sub(r'[^A-Za-z0-9]+', '-', study.name)}-{digest}"


def _hydra(config: SimulateConfig) -> tuple[list[str], dict[str, str], str]:
    """The overrides of this job, the options of its groups, and its configuration as YAML."""
    known = import_module("hydra.core.hydra_config").HydraConfig
    text = import_module("omegaconf").OmegaConf.to_yaml(dataclasses.asdict(config))
    if not known.initialized():
        return [], {}, text
    job = known.get()
    return list(job.overrides.task), {str(key): str(value) for key, value in job.runtime.choices.items()}, text
