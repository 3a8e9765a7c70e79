"""`ringattn simulate -m ranks=8,64 pattern=window,causal`: the comma lists of a command line as the axes of a study."""

from __future__ import annotations

import re
from importlib import import_module

from ...config.checks import experiment_value
from ...config.folders import config_folders
from ...errors import InvalidInput

#: Hydra's own words for several values.
FUNCTIONS = re.compile(r"(choice|range|glob)\(")
FLAGS = ("-m", "--multirun")


def as_study(arguments: list[str]) -> list[str]:
    """The arguments with comma lists gathered in study.axes; unchanged where the mode is not that of a study.

    Raises InvalidInput where nothing has several values, or where Hydra's launchers are asked for.
    """
    if _mode(arguments) != "timing":
        return arguments
    rest, axes = [], {}
    for argument in arguments:
        key, found, value = argument.partition("=")
        if key.startswith("hydra"):
            if "launcher" in key or "sweep" in key:
                raise InvalidInput(
                    f"{argument}: the points of ringattn simulate -m are one study in one process and one folder, not Hydra "
                    "jobs; leave it out, or run several commands"
                )
            rest.append(argument)
        elif not found or key.lstrip("+~").startswith(("study", "output")):
            _check_single(argument, key, value)
            rest += [] if argument in FLAGS else [argument]
        elif len(values := _values(argument, value)) > 1:
            axes[key] = values
        else:
            rest.append(argument)
    if not axes and not any(argument.startswith("study=") for argument in rest):
        raise InvalidInput("-m: no key has several values; write them with commas, such as ranks=8,64,512")
    text = ", ".join(f"{key}: [{', '.join(map(_quoted, values))}]" for key, values in axes.items())
    return [*rest, f"+study.axes={{{text}}}"] if axes else rest


def _check_single(argument: str, key: str, value: str) -> None:
    """Refuse several values of what all points of a study share."""
    if len(_values(argument, value)) > 1:
        raise InvalidInput(
            f"{argument}: the points of -m are one study, which has one {key}; run a command for each value, or write a list "
            "in brackets where the key takes one"
        )


def split(text: str) -> list[str]:
    """The parts of a text between commas that are in no brackets and no quotes."""
    found, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
            if letter == "," and not depth:
                found.append("")
                continue
        found[-1] += letter
    return [part.strip() for part in found]


def _values(argument: str, value: str) -> list[str]:
    if FUNCTIONS.match(value):
        parser = import_module("hydra.core.override_parser.overrides_parser").OverridesParser.create()
        override = parser.parse_override(argument)
        return [str(one) for one in override.sweep_iterator()] if override.is_sweep_override() else [value]
    return split(value)


def _quoted(value: str) -> str:
    inner = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    return "'" + inner.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _mode(arguments: list[str]) -> str:
    """The mode that a command line asks for: its own, or that of its experiment."""
    given = dict(argument.partition("=")[::2] for argument in arguments)
    if "mode" in given:
        return given["mode"]
    return experiment_value(given.get("experiment", "null"), "mode", config_folders(arguments)) or "timing"
