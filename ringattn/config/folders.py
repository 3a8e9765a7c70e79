"""The folders that config groups are read from: ringattn's own, then those that the command line names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from .schema import conf_dir

#: Options of Hydra that name one more config folder.
CONFIG_DIR = ("--config-dir", "-cd")


@dataclass(frozen=True)
class ConfigFolders:
    """Config folders in the order in which Hydra searches them; the first that has a file wins."""

    folders: tuple[Path, ...]

    def file(self, group: str, option: str) -> Path | None:
        """The YAML file of an option of a group; None where no folder has one. `option` may be any text."""
        paths = (path for folder in self.folders for path in sorted((folder / group).glob("*.yaml")))
        return next((path for path in paths if path.stem == option), None)

    def text(self, group: str, option: str) -> str:
        """The YAML of an option of a group; "" where no folder has the option."""
        path = self.file(group, option)
        return path.read_text(encoding="utf-8") if path else ""

    def options(self, group: str) -> list[str]:
        """The names of a group's options, sorted."""
        return sorted({path.stem for folder in self.folders for path in (folder / group).glob("*.yaml")})

    def is_group(self, name: str) -> bool:
        """Whether a folder has a group of this name."""
        return any((folder / name).is_dir() for folder in self.folders)


def config_folders(overrides: Sequence[str]) -> ConfigFolders:
    """ringattn's own config folder, then those that `--config-dir` and `hydra.searchpath` name.

    Raises InvalidInput where the folder of `--config-dir` does not exist.
    """
    found = [conf_dir()]
    for i, override in enumerate(overrides):
        name, _, value = override.partition("=")
        if name in CONFIG_DIR:
            following = overrides[i + 1] if i + 1 < len(overrides) else ""
            found.append(Path(value or following).absolute())
            if not found[-1].is_dir():
                raise InvalidInput(
                    f"{name} {value or following}: no such folder; give one that holds pattern/mine.yaml and the like"
                )
        elif name.lstrip("+") == "hydra.searchpath":
            found += [path for entry in re.findall(r"[^\[\],\s'\"]+", value) if (path := _searched(entry))]
    return ConfigFolders(tuple(found))


def read_from(sources: Iterable[Any]) -> ConfigFolders:
    """The folders among the config sources that Hydra says it read (`HydraConfig.get().runtime.config_sources`)."""
    found = (_searched(f"{source.schema}://{source.path}") for source in sources if source.provider != "hydra")
    return ConfigFolders(tuple(path for path in found if path))


def _searched(entry: str) -> Path | None:
    """The folder of an entry of hydra.searchpath: file://FOLDER, pkg://PACKAGE.FOLDER or a plain folder."""
    scheme, split, rest = entry.partition("://")
    if not split:
        return Path(entry).absolute()
    if scheme == "file":
        return Path(rest).absolute()
    if scheme != "pkg":
        return None
    root, *ranks_per_node = rest.split(".")
    spec = find_spec(root)
    places = [] if spec is None else [*(spec.submodule_search_locations or ())]
    return Path(places[0], *ranks_per_node) if places else None
