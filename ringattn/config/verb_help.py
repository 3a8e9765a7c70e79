"""The help of a verb: its config groups and keys, as the comments of their YAML files explain them."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from ..machine.machine import MACHINE_NUMBERS
from .folders import ConfigFolders
from .overrides import JSON, PARAMETERS, WRITTEN, takes

#: Options of every verb; --json is of those in `overrides.JSON`.
OPTIONS = (
    ("-m", "one job for each combination of values, such as ranks=2,4,8; of simulate, one study"),
    ("--json", "print the numbers as JSON, and nothing else, on standard output"),
    ("--cfg job --resolve", "print the configuration that would run"),
    ("--config-dir FOLDER", "read config groups from this folder, too: FOLDER/pattern/mine.yaml is pattern=mine"),
    ("--hydra-help", "options of Hydra, on which this command line is built"),
)
#: The narrowest and the widest lines of a help text, in columns.
NARROW, WIDE = 60, 120


@dataclass(frozen=True)
class Key:
    """A key of a YAML file, with its value and comment as they stand there; `ranks_per_node` for keys of a section."""

    name: str
    value: str
    comment: str


def keys(text: str) -> Iterator[Key]:
    """The keys of a YAML file from its text, in order; keys of a section are named section.key.

    A comment is what follows `#` on the line of the key, and whole comment lines behind that.
    """
    path: list[tuple[int, str]] = []
    found: Key | None = None
    for line in text.splitlines():
        more = re.fullmatch(r"\s+# *(.*)", line)
        if more and found:
            found = Key(found.name, found.value, f"{found.comment} {more[1]}".strip())
            continue
        match = re.fullmatch(r"( *)([\w.]+):(?: +(.*?))??(?:\s+# *(.*))?", line)
        if found:
            yield found
            found = None
        if match:
            indent = len(match[1])
            path = [*(one for one in path if one[0] < indent), (indent, match[2])]
            found = Key(".".join(name for _, name in path), match[3] or "", match[4] or "")
    if found:
        yield found


def heading(text: str) -> str:
    """What an option's YAML file says of it: its comment lines down to the first that is empty, in one."""
    lines = (line for line in text.splitlines() if line != "# @package _global_")
    return " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("# "), lines))


def verb_help(verb: str, folders: ConfigFolders, extra: dict[str, list[str]]) -> str:
    """The help text of a verb: usage, groups with their options, keys with defaults, options.

    `extra` has lists of names by title, such as the suites of `bench`.
    """
    width = min(max(shutil.get_terminal_size().columns, NARROW), WIDE)
    text = (folders.folders[0] / f"{verb}.yaml").read_text(encoding="utf-8")
    lines = [*textwrap.wrap(heading(text), width), "", f"usage: ringattn {verb} [key=value ...] [options]"]
    for group, chosen in re.findall(r"^ *- (?:optional )?(\w+): (\w+)", text, re.MULTILINE):
        shown = [one for one in folders.options(group) if one != "custom" and takes(verb, folders.text(group, one))]
        lines += ["", *textwrap.wrap(f"{group}={' | '.join(shown)}", width, subsequent_indent="    ")]
        lines.append(f"    default: {chosen}")
        if group in WRITTEN:
            lines[-1] += f"; or written out, such as {WRITTEN[group]}"
        for option in shown:
            said = folders.text(group, option)
            lines += _row(f"  {option}", heading(said), width)
            for key in _option_keys(group, said, option == chosen):
                lines += _row(f"    {group}.{key.name}={key.value}", key.comment, width)
    found = [key for key in keys(text) if not key.name.startswith(("defaults", "hydra"))]
    sections = {key.name.rpartition(".")[0] for key in found}
    if found:
        lines += ["", "keys, with their defaults"]
    for key in found:
        if key.name not in sections:
            lines += _row(f"  {key.name}={key.value}", key.comment, width)
    for title, names in extra.items():
        lines += ["", *textwrap.wrap(f"{title}: {', '.join(names)}", width, subsequent_indent="    ")]
    lines += ["", "options"]
    for option, says in OPTIONS:
        if option == "--json" and verb not in JSON:
            continue
        lines += _row(f"  {option}", says, width)
    return "\n".join(line.rstrip() for line in lines)


def _option_keys(group: str, text: str, is_default: bool) -> Iterator[Key]:
    """The keys of an option of a group: of its YAML `text`, or for the default machine the numbers of any machine."""
    if group == "machine" and is_default:
        yield from (Key(name, "null", number.help) for name, number in MACHINE_NUMBERS.items())
    elif group in (*PARAMETERS, "transport"):
        yield from (key for key in keys(text) if key.name not in ("spec", "name"))


def _row(name: str, says: str, width: int, column: int = 34) -> list[str]:
    """A name and its explanation, wrapped beside it; below it where the name is long."""
    if not says:
        return [name]
    wrapped = textwrap.wrap(says, width - column)
    first = [name] if len(name) >= column else [f"{name:<{column}}{wrapped.pop(0)}"]
    return [*first, *(" " * column + line for line in wrapped)]
