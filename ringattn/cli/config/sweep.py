"""`ringattn simulate -m ranks=8,64 pattern=window,causal`: comma lists as axes of a study, jobs of a launcher."""

from __future__ import annotations

import re
from importlib import import_module

from ...errors import InvalidInput
from .checks import experiment_value
from .folders import config_folders

#: Hydra's functions that stand for several values.
FUNCTIONS = re.compile(r"(choice|range|glob)\(")
FLAGS = ("-m", "--multirun")
#: The launchers of Hydra that an error proposes.
LAUNCHERS = "hydra/launcher=joblib (processes here) or hydra/launcher=submitit_slurm"


def split_jobs(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(the arguments of a study, the arguments by which Hydra's launcher runs the jobs of its points).

    The second list is empty where no launcher is asked for. Raises InvalidInput for a launcher without study.spread,
    and the other way round.
    """
    launcher = [each for each in arguments if each.startswith(("hydra/launcher=", "hydra.launcher."))]
    others = [each for each in arguments if each not in launcher]
    spread = [each.partition("=")[2] for each in others if each.startswith("study.spread=")]
    if not launcher and not spread:
        return others, []
    named = [each for each in launcher if each.startswith("hydra/launcher=")]
    if not named or not spread:
        given, missing = (named[0], "study.spread=4") if named else ("".join(launcher[:1]) or "study.spread", LAUNCHERS)
        raise InvalidInput(f"{given}: jobs of a study need a launcher and a number of jobs; add {missing}")
    if not re.fullmatch(r"[1-9]\d*", spread[-1]):
        raise InvalidInput(f"study.spread={spread[-1]}: expected a number of jobs >= 1")
    return others, ["--multirun", *launcher, f"study.share={','.join(map(str, range(int(spread[-1]))))}"]


def as_study(arguments: list[str]) -> list[str]:
    """The arguments with their comma lists moved into study.axes; unchanged for modes without studies.

    Raises InvalidInput where no key has several values, and where an argument asks for Hydra's sweepers.
    """
    if _mode(arguments) != "timing":
        return arguments
    others, axes = [], {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key.startswith("hydra"):
            if "sweep" in key:
                raise InvalidInput(
                    f"{argument}: the points of ringattn simulate -m are one study in one folder, not Hydra jobs; "
                    f"leave it out, or spread the points over jobs with study.spread=4 {LAUNCHERS}"
                )
            others.append(argument)
        elif not equals or key.lstrip("+~").startswith(("study", "output")):
            _check_single_value(argument, key, value)
            others += [] if argument in FLAGS else [argument]
        elif len(values := _values(argument, value)) > 1:
            axes[key] = values
        else:
            others.append(argument)
    if not axes and not any(argument.startswith("study=") for argument in others):
        raise InvalidInput("-m: no key has several values; write them with commas, such as ranks=8,64,512")
    text = ", ".join(f"{key}: [{', '.join(map(quote, values))}]" for key, values in axes.items())
    return [*others, f"+study.axes={{{text}}}"] if axes else others


def _check_single_value(argument: str, key: str, value: str) -> None:
    """Refuse several values of a key that all points of a study share."""
    if len(_values(argument, value)) > 1:
        raise InvalidInput(
            f"{argument}: the points of -m are one study, which has one {key}; run a command for each value, or write "
            "a list in brackets where the key takes a list"
        )


def split_commas(text: str) -> list[str]:
    """The parts of a text between commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
            if letter == "," and not depth:
                parts.append("")
                continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def _values(argument: str, value: str) -> list[str]:
    """The values of an argument, of a comma list or of one of Hydra's functions."""
    if FUNCTIONS.match(value):
        parser = import_module("hydra.core.override_parser.overrides_parser").OverridesParser.create()
        override = parser.parse_override(argument)
        return [str(each) for each in override.sweep_iterator()] if override.is_sweep_override() else [value]
    return split_commas(value)


def quote(value: str) -> str:
    """The value in single quotes, which replace quotes of its own."""
    bare = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    return "'" + bare.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _mode(arguments: list[str]) -> str:
    """The mode of a command line: its own override, or the mode of its experiment."""
    overrides = dict(argument.partition("=")[::2] for argument in arguments)
    if "mode" in overrides:
        return overrides["mode"]
    return experiment_value(overrides.get("experiment", "null"), "mode", config_folders(arguments)) or "timing"
