"""The YAML files of config groups, built-in and user-defined, and the --help text of a verb made from them."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from ...errors import InvalidInput
from ...files import read_text
from ...machine.machine import MACHINE_NUMBERS
from ...machine.presets import PRESETS
from .defaults import conf_dir, default_options, load_config
from .groups import PARAMETER_GROUPS
from .overrides import JSON_KEYS, WRITTEN

#: Options of every verb, except --json (verbs in `JSON_KEYS`) and --compare (report).
OPTIONS = {
    "-m": "one job per combination of comma-separated values; simulate, estimate: a study",
    "--json": "print only the numbers, as JSON",
    "--compare": "OLD NEW: ratios of two results' medians; noise=0.1 ignores changes below 10 %",
    "--cfg": "job --resolve: print the configuration that would run",
    "--config-dir": "FOLDER: more config groups; FOLDER/pattern/mine.yaml adds pattern=mine",
    "--help": "GROUP: the options of a config group",
    "--hydra-help": "options of Hydra, which implements this command line",
}


def user_folders(config_dir: str | None, overrides: Sequence[str]) -> list[Path]:
    """The config folders given by `--config-dir` and `hydra.searchpath`. Raises InvalidInput if one is missing."""
    named = [] if config_dir is None else [config_dir]
    for override in overrides:
        if override.lstrip("+").startswith("hydra.searchpath="):  # pkg:// is an installed package
            entries = re.split(r"[\[\],'\"\s]+", override.partition("=")[2])
            named += [entry.removeprefix("file://") for entry in entries if entry and not entry.startswith("pkg://")]
    for name in named:
        if not Path(name).is_dir():
            raise InvalidInput(
                f"{name}: no such folder; give a folder of config groups, in which pattern/mine.yaml would define "
                "pattern=mine"
            )
        for path in sorted(Path(name).rglob("*.yaml")):
            _check_file(path, Path(name))
    return [Path(name) for name in named]


def _check_file(path: Path, folder: Path) -> None:
    """Raise InvalidInput if a user's config file configures Hydra: its callbacks and log handlers can run code."""
    content = load_config(path)
    headers = re.findall(r"^# *@package.*", read_text(path, "config"), re.MULTILINE)
    names = " ".join(map(str, (path.relative_to(folder), *headers, *content, content.get("defaults"))))
    if re.search(r"(?<![\w-])hydra(?![\w-])", names):
        raise InvalidInput(
            f"{path}: a config file cannot configure Hydra, which could run code; set it on the command line, "
            "such as hydra.run.dir=/tmp/ringattn"
        )


def verb_help(verb: str, topics: Sequence[str], folders: Sequence[Path]) -> str:
    """The --help text of a command (`verb`): examples and keys with defaults from its YAML file, groups and options.

    With `topics`, names of config groups, only the options and parameters of these groups. Raises InvalidInput for an
    unknown topic or an unreadable config file.
    """
    path = conf_dir() / f"{verb}.yaml"
    head, _, keys = path.read_text(encoding="utf-8").partition("\n\n")
    groups = {group: str(option or "null") for group, option in default_options(verb).items()}
    for topic in topics:
        if topic not in groups:
            raise InvalidInput(f"{topic}: ringattn {verb} --help takes the name of a group: {', '.join(groups)}")
    if topics:
        lines = [line for topic in topics for line in _group_lines(topic, groups[topic], [conf_dir(), *folders])]
        return "\n".join(lines).strip()
    title = "keys, with their defaults (a key within a section is section.key)"
    lines = [*heading(head), "", title, *keys.splitlines(), ""]
    if groups:
        lines.append(f"groups (--help GROUP): {' '.join(map('='.join, groups.items()))}")
    if verb == "report":
        lines.append(f"suites: {', '.join(sorted(entry_points(group='ringattn.bench_suites').names))}")
    flags = {"--json": verb in JSON_KEYS, "--compare": verb == "report"}
    lines.append(f"options (ringattn --help): {' '.join(name for name in OPTIONS if flags.get(name, True))}")
    return "\n".join(lines)


def _group_lines(group: str, default: str, folders: Sequence[Path]) -> list[str]:
    """The help lines of a config group: each option with its comment and parameters, from the first folder with it."""
    texts = {name: f"# {preset.about}" for name, preset in PRESETS.items()} if group == "machine" else {}
    for folder in reversed(folders):
        texts |= {path.stem: path.read_text(encoding="utf-8") for path in (folder / group).glob("*.yaml")}
    texts.pop("custom", None)
    written = f"; or written out, such as {WRITTEN[group]}" if group in WRITTEN else ""
    lines = ["", f"{group}={' | '.join(sorted(texts))}", f"    default: {default}{written}"]
    for option, text in sorted(texts.items()):
        lines += [f"  {option:<20}{line}" if not place else f"    {line}" for place, line in enumerate(heading(text))]
        if group in (*PARAMETER_GROUPS, "input", "transport"):
            lines += [f"    {line}" for line in text.splitlines() if not line.startswith(("# ", "spec:", "name:"))]
    if group == "machine":
        lines += [f"    machine.{name}=null  # {number.help}" for name, number in MACHINE_NUMBERS.items()]
    return lines


def heading(text: str) -> list[str]:
    """The comment lines at the top of a config file, which describe its command or group option."""
    lines = [line for line in text.splitlines() if not line.startswith("# @package")]
    end = next((place for place, line in enumerate(lines) if not line.startswith("# ")), len(lines))
    whole: list[str] = []
    for line in (line.removeprefix("# ") for line in lines[:end]):
        # An indented line is an example; any other one that is no new sentence, or follows a full stop, goes on.
        if whole and " " not in (line[0], whole[-1][0]) and (whole[-1][-1] == "." or not line[0].isupper()):
            whole[-1] += f" {line}"
        else:
            whole.append(line)
    return whole or [""]


def fit(text: str) -> str:
    """The help text, wrapped to the width of the terminal with the indentation of its descriptions.

    A comment that goes on in the next line is joined first, unless that line explains another value, as in "auto: ...".
    """
    width = shutil.get_terminal_size((120, 24)).columns
    whole, lines = [""], list[str]()
    for line in text.splitlines():
        more = re.match(r" +# ((\w+: )?.*)", line)
        if more and (not more[2] or whole[-1][-1:] in ",;"):
            whole[-1] += f" {more[1]}"
        else:
            whole.append(line)
    for line in whole[1:]:
        # Continued lines begin below the comment or the description.
        head = re.sub(r"(.*?#\s+|\s*\S+(?: \S+)*\s{2,}|\s*).*", r"\1", line)
        below = re.sub(r"[^#]", " ", head) if head.strip() else head + "  " * (" " in line[:1] or "|" in line)
        lines += textwrap.wrap(line, width, subsequent_indent=below[24 - width :], break_on_hyphens=False) or [""]
    return "\n".join(lines)
