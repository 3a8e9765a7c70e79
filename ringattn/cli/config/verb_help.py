"""The help of a verb: its config groups and keys, as the comments of their YAML files explain them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from typing import Any

from ...machine.machine import MACHINE_NUMBERS
from .checks import PARAMETER_GROUPS
from .folders import GLOBAL_PACKAGE, ConfigFolders, chosen_options, load_config, read_config
from .overrides import JSON_KEYS, WRITTEN, offered_options

COMPARE = "--compare OLD NEW"
#: Options of every verb; --json is an option of the verbs in `JSON_KEYS` only, and COMPARE of report only.
OPTIONS = (
    ("-m", "one job for each combination of values, such as ranks=2,4,8; for simulate, one study"),
    ("--json", "print the numbers as JSON, and nothing else, on standard output"),
    (COMPARE, "ratios of two results' medians, such as --compare old.jsonl new.jsonl noise=0.1"),
    ("--cfg job --resolve", "print the configuration that would run"),
    ("--config-dir FOLDER", "read config groups from this folder, too: FOLDER/pattern/mine.yaml is pattern=mine"),
    ("--hydra-help", "options of Hydra, on which this command line is built"),
)
#: The narrowest and the widest lines of a help text, in columns.
NARROWEST, WIDEST = 60, 120
#: The column at which explanations start.
EXPLANATION_COLUMN = 34


@dataclass(frozen=True)
class Key:
    """A key of a config file, with its value and comment as they stand there; keys of a section are section.key."""

    name: str
    value: str
    comment: str


def read_keys(text: str) -> list[Key]:
    """The keys of a config file from its text, in order.

    The comment of a key is what follows `#` on the last line of its value, and the indented comment lines below.
    OmegaConf drops comments, so this walks the nodes of PyYAML, which say where each value ends.
    """
    root = import_module("yaml").compose(text)
    return [] if root is None or root.id != "mapping" else [*_walk_keys(root, text, "")]


def _walk_keys(mapping: Any, text: str, prefix: str) -> Iterator[Key]:
    """The keys of a mapping node and of its sections."""
    for key_node, node in mapping.value:
        name = f"{prefix}{key_node.value}"
        if node.id == "scalar" or node.flow_style:
            value = text[node.start_mark.index : node.end_mark.index]
            yield Key(name, value, _read_comment(text, node.end_mark))
        else:
            yield Key(name, "", _read_comment(text, key_node.end_mark))
            if node.id == "mapping":
                yield from _walk_keys(node, text, f"{name}.")


def _read_comment(text: str, end: Any) -> str:
    """The comment after a mark, with the indented comment lines below it."""
    lines = text.splitlines()
    first = lines[end.line][end.column :].partition("#")[2] if end.line < len(lines) else ""
    below = takewhile(lambda line: line[:1] == " " and line.lstrip()[:1] == "#", lines[end.line + 1 :])
    return " ".join(part.strip(" #") for part in (first, *below)).strip()


def read_heading(text: str) -> str:
    """What a config file says of its option: the comment lines at its top, joined, down to the first empty comment."""
    lines = (line for line in text.splitlines() if line != GLOBAL_PACKAGE)
    return " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("# "), lines))


def verb_help(verb: str, folders: ConfigFolders, name_lists: Mapping[str, Sequence[str]]) -> str:
    """The help text of a verb: usage, groups with their options, keys with defaults, options.

    `name_lists` are lists of names to add, by title, such as the suites of `bench`. Raises InvalidInput where a config
    file cannot be read.
    """
    width = min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)
    path = folders.folders[0] / f"{verb}.yaml"
    text = read_config(path)
    lines = [*textwrap.wrap(read_heading(text), width), "", f"usage: ringattn {verb} [key=value ...] [options]"]
    for group, default in chosen_options(load_config(path)).items():
        lines += _group_lines(verb, group, default, folders, width)
    lines += _key_lines(text, width)
    for title, names in name_lists.items():
        lines += ["", *textwrap.wrap(f"{title}: {', '.join(names)}", width, subsequent_indent="    ")]
    lines += ["", "options"]
    for option, explanation in OPTIONS:
        if {"--json": verb in JSON_KEYS, COMPARE: verb == "report"}.get(option, True):
            lines += _row(f"  {option}", explanation, width)
    return "\n".join(line.rstrip() for line in lines)


def _group_lines(verb: str, group: str, default: str, folders: ConfigFolders, width: int) -> list[str]:
    """The lines of a config group: its options and default, then each option with its parameters."""
    options = offered_options(verb, group, folders)
    lines = ["", *textwrap.wrap(f"{group}={' | '.join(options)}", width, subsequent_indent="    ")]
    lines.append(
        f"    default: {default}" + (f"; or written out, such as {WRITTEN[group]}" if group in WRITTEN else "")
    )
    for option in options:
        option_text = folders.text(group, option)
        lines += _row(f"  {option}", read_heading(option_text), width)
        for key in _option_keys(group, option_text, option == default):
            lines += _row(f"    {group}.{key.name}={key.value}", key.comment, width)
    return lines


def _option_keys(group: str, text: str, is_default: bool) -> Iterator[Key]:
    """The keys of an option of a group: of its YAML `text`, or for the default machine the numbers of any machine."""
    if group == "machine" and is_default:
        yield from (Key(name, "null", number.help) for name, number in MACHINE_NUMBERS.items())
    elif group in (*PARAMETER_GROUPS, "transport"):
        yield from (key for key in read_keys(text) if key.name not in ("spec", "name"))


def _key_lines(text: str, width: int) -> list[str]:
    """The lines of a verb's own keys, without the names of sections."""
    keys = [key for key in read_keys(text) if not key.name.startswith(("defaults", "hydra"))]
    sections = {key.name.rpartition(".")[0] for key in keys}
    lines = ["", "keys, with their defaults"] if keys else []
    for key in keys:
        if key.name not in sections:
            lines += _row(f"  {key.name}={key.value}", key.comment, width)
    return lines


def _row(name: str, explanation: str, width: int) -> list[str]:
    """A name with its explanation beside it; below it where the name is too long for that."""
    if not explanation:
        return [name]
    indent = " " * EXPLANATION_COLUMN
    wrapped = textwrap.wrap(explanation, width - EXPLANATION_COLUMN)
    if len(name) >= EXPLANATION_COLUMN:
        return [name, *(indent + line for line in wrapped)]
    return [f"{name:<{EXPLANATION_COLUMN}}{wrapped[0]}", *(indent + line for line in wrapped[1:])]
