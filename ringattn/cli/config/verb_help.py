"""The help of a verb: its config groups and keys, as their YAML files explain them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...machine.machine import MACHINE_NUMBERS
from .folders import default_options, group_files
from .groups import PARAMETER_GROUPS
from .overrides import JSON_KEYS, WRITTEN
from .schema import conf_dir

#: Options of every verb; --json is an option of the verbs in `JSON_KEYS` only, and --compare of report only.
OPTIONS = {
    "-m": "one job for each combination of values, such as ranks=2,4,8; for simulate, one study",
    "--json": "print the numbers as JSON, and nothing else, on standard output",
    "--compare OLD NEW": "ratios of two results' medians, such as --compare old.jsonl new.jsonl noise=0.1",
    "--cfg job --resolve": "print the configuration that would run",
    "--config-dir FOLDER": "read config groups from this folder, too: FOLDER/pattern/mine.yaml is pattern=mine",
    "--hydra-help": "options of Hydra, on which this command line is built",
}


def verb_help(verb: str, folders: Sequence[Path], name_lists: Mapping[str, Sequence[str]]) -> str:
    """The help text of a verb: groups with their options, keys with defaults as the verb's YAML has them, options.

    `name_lists` are lists of names to add, by title, such as the suites of `bench`. Raises InvalidInput where a config
    file cannot be read.
    """
    head, _, keys = (conf_dir() / f"{verb}.yaml").read_text(encoding="utf-8").partition("\n\n")
    lines = [*_heading(head), "", f"usage: ringattn {verb} [key=value ...] [options]"]
    for group, default in default_options(verb).items():
        lines += _group_lines(group, default, group_files(group, [conf_dir(), *folders]))
    lines += ["", "keys, with their defaults (a key within a section is section.key)", *keys.splitlines()]
    for title, names in name_lists.items():
        lines += ["", f"{title}: {', '.join(names)}"]
    options = {"--json": verb in JSON_KEYS, "--compare OLD NEW": verb == "report"}
    lines += ["", "options", *(f"  {name:<22}{text}" for name, text in OPTIONS.items() if options.get(name, True))]
    return "\n".join(lines)


def _group_lines(group: str, default: str, files: Mapping[str, Path]) -> list[str]:
    """The lines of a config group: each option with its comment and its parameters."""
    written = f"; or written out, such as {WRITTEN[group]}" if group in WRITTEN else ""
    lines = ["", f"{group}={' | '.join(files)}", f"    default: {default}{written}"]
    for option, path in files.items():
        text = path.read_text(encoding="utf-8")
        lines += [f"  {option:<20}{line}" if not place else f"    {line}" for place, line in enumerate(_heading(text))]
        if group in (*PARAMETER_GROUPS, "input", "transport"):
            body = text.splitlines()[len(_heading(text)) :]
            lines += [f"    {line}" for line in body if not line.startswith(("spec:", "name:"))]
    if group == "machine":
        lines += [f"    machine.{name}=null  # {number.help}" for name, number in MACHINE_NUMBERS.items()]
    return lines


def _heading(text: str) -> list[str]:
    """What a config file says of its option: the comment lines at its top."""
    lines = [line for line in text.splitlines() if not line.startswith("# @package")]
    end = next((place for place, line in enumerate(lines) if not line.startswith("# ")), len(lines))
    return [line.removeprefix("# ") for line in lines[:end]] or [""]
