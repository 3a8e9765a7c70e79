"""The folders that hold config groups, and their YAML files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import InvalidInput
from ...files import decode, read_text
from .schema import conf_dir


def user_folders(options: Sequence[str], overrides: Sequence[str]) -> list[Path]:
    """The config folders that `--config-dir` and `hydra.searchpath` name. Raises InvalidInput for one that is none."""
    named = [option.partition("=")[2] for option in options if option.startswith("--config-dir=")]
    for override in overrides:
        if override.lstrip("+").startswith("hydra.searchpath="):  # pkg:// is an installed package, which is no folder
            entries = re.split(r"[\[\],'\"\s]+", override.partition("=")[2])
            named += [entry.removeprefix("file://") for entry in entries if entry and not entry.startswith("pkg://")]
    for name in named:
        if not Path(name).is_dir():
            raise InvalidInput(f"{name}: no such folder; give a folder with config groups, such as pattern/mine.yaml")
        _check_folder(Path(name))
    return [Path(name) for name in named]


def _check_folder(folder: Path) -> None:
    """Raise InvalidInput where a config file of a user sets Hydra, whose callbacks and handlers run code."""
    for path in sorted(folder.rglob("*.yaml")):
        content = load_config(path)
        headers = re.findall(r"^# *@package.*", read_text(path, "config"), re.MULTILINE)
        names = " ".join(map(str, (path.relative_to(folder), *headers, *content, content.get("defaults"))))
        if re.search(r"(?<![\w-])hydra(?![\w-])", names):
            raise InvalidInput(
                f"{path}: a config file cannot set Hydra, which may run code; give what it sets on the command line, "
                "such as hydra.run.dir=/tmp/ringattn"
            )


def load_config(path: Path) -> dict[str, Any]:
    """The settings of a config file as plain data, interpolations and ??? as they are written. Raises InvalidInput."""
    content = decode(read_text(path, "config"), object, str(path), yaml=True)
    # Hydra refuses another value than a mapping where the file is used.
    return {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}


def group_files(group: str, folders: Sequence[Path]) -> dict[str, Path]:
    """The file of each option of a group by its name, sorted, without `custom`: the first folder that has one wins."""
    found = {path.stem: path for folder in reversed(folders) for path in (folder / group).glob("*.yaml")}
    return {name: found[name] for name in sorted(found) if name != "custom"}


def default_options(verb: str) -> dict[str, str]:
    """The option of each group that a verb starts from."""
    entries = [entry for entry in load_config(conf_dir() / f"{verb}.yaml")["defaults"] if isinstance(entry, dict)]
    return {key: str(option or "null") for entry in entries for key, option in entry.items()}
