"""`ringattn simulate -m ranks=8,64 pattern=window,causal`: comma lists as axes of a study, jobs of a launcher."""

from __future__ import annotations

import re

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from ...errors import InvalidInput
from .overrides import quote, split_commas

#: The launchers of Hydra that an error proposes.
LAUNCHERS = "hydra/launcher=joblib (processes here) or hydra/launcher=submitit_slurm"


def split_jobs(overrides: list[str]) -> tuple[list[str], list[str]]:
    """(the overrides of a study, the arguments by which Hydra's launcher runs the jobs of its points).

    The second list is empty where no launcher is asked for. Raises InvalidInput for a launcher without study.spread,
    and the other way round.
    """
    launcher = [each for each in overrides if each.startswith(("hydra/launcher=", "hydra.launcher."))]
    others = [each for each in overrides if each not in launcher]
    spread = [each.partition("=")[2] for each in others if each.startswith("study.spread=")]
    if not launcher and not spread:
        return others, []
    named = any(each.startswith("hydra/launcher=") for each in launcher)
    if not named or not spread or not re.fullmatch(r"[1-9]\d*", spread[-1]):
        raise InvalidInput(f"jobs of a study need a launcher and a number of jobs: study.spread=4 {LAUNCHERS}")
    return others, ["--multirun", *launcher, f"study.share={','.join(map(str, range(int(spread[-1]))))}"]


def as_study(overrides: list[str]) -> list[str]:
    """The overrides with their comma lists moved into study.axes. Raises InvalidInput where no key has several values.

    Settings of the study, its output and Hydra have one value for all points.
    """
    others, axes = [], {}
    for override in overrides:
        key = override.partition("=")[0]
        values = [] if key.lstrip("+~").startswith(("study", "output", "hydra")) else _values(override)
        if len(values) > 1:
            axes[key] = values
        else:
            others.append(override)
    if not axes and not any(override.startswith("study=") for override in others):
        raise InvalidInput("-m: no key has several values; write them with commas, such as ranks=8,64,512")
    text = ", ".join(f"{key}: [{', '.join(map(quote, values))}]" for key, values in axes.items())
    return [*others, f"+study.axes={{{text}}}"] if axes else others


def _values(override: str) -> list[str]:
    """The values of an override: a comma list, or one of Hydra's functions such as range(1,4)."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:  # patterns and schedules that are written in full
        return split_commas(override.partition("=")[2])
    return [str(value) for value in parsed.sweep_string_iterator()] if parsed.is_sweep_override() else []
