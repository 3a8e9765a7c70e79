"""The folders that hold config groups, and the settings of the YAML files in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ...errors import InvalidInput
from ...files import decode, read_text
from .schema import SCHEMAS, conf_dir, key_names

#: Options of Hydra that name one more config folder.
CONFIG_DIR_OPTIONS = ("--config-dir", "-cd")
#: The first line of a config file whose keys are those of the whole configuration, as in experiments.
GLOBAL_PACKAGE = "# @package _global_"


class ConfigSource(Protocol):
    """A place that Hydra read configs from: an entry of `HydraConfig.get().runtime.config_sources`."""

    provider: str
    path: str
    schema: str


@dataclass(frozen=True)
class ConfigFolders:
    """Config folders in the order in which Hydra searches them: the first folder that has a file wins."""

    folders: tuple[Path, ...]

    def file(self, group: str, option: str) -> Path | None:
        """The YAML file of an option of a group; None where no folder has the option. `option` may be any text."""
        paths = (path for folder in self.folders for path in sorted((folder / group).glob("*.yaml")))
        return next((path for path in paths if path.stem == option), None)

    def text(self, group: str, option: str) -> str:
        """The YAML of an option of a group; "" where no folder has the option. Raises InvalidInput."""
        path = self.file(group, option)
        return read_config(path) if path else ""

    def settings(self, group: str, option: str) -> dict[str, Any]:
        """What the YAML of an option of a group sets; nothing where no folder has the option. Raises InvalidInput."""
        path = self.file(group, option)
        return load_config(path) if path else {}

    def options(self, group: str) -> list[str]:
        """The names of a group's options, sorted."""
        return sorted({path.stem for folder in self.folders for path in (folder / group).glob("*.yaml")})

    def is_group(self, name: str) -> bool:
        """Whether a folder has a group of this name."""
        return any((folder / name).is_dir() for folder in self.folders)


def config_folders(overrides: Sequence[str]) -> ConfigFolders:
    """ringattn's own config folder, then the folders that `--config-dir` and `hydra.searchpath` name.

    Raises InvalidInput where the folder of `--config-dir` does not exist.
    """
    folders = [conf_dir()]
    for i, override in enumerate(overrides):
        name, _, value = override.partition("=")
        if name in CONFIG_DIR_OPTIONS:
            following = overrides[i + 1] if i + 1 < len(overrides) else ""
            folder = Path(value or following).absolute()
            if not folder.is_dir():
                raise InvalidInput(
                    f"{name} {value or following}: no such folder; give a folder that holds config groups, such as "
                    "pattern/mine.yaml"
                )
            folders.append(folder)
        elif name.lstrip("+") == "hydra.searchpath":
            folders += _search_folders(_split_list(value))
    return ConfigFolders(tuple(folders))


def source_folders(sources: Iterable[ConfigSource]) -> ConfigFolders:
    """The folders that Hydra read the configs of this job from."""
    entries = (f"{source.schema}://{source.path}" for source in sources if source.provider != "hydra")
    return ConfigFolders(tuple(_search_folders(entries)))


def _split_list(value: str) -> list[str]:
    """The entries of a list that is written as an override; a list that cannot be read is left for Hydra to refuse."""
    yaml = import_module("yaml")
    try:
        entries = yaml.safe_load(value)
    except yaml.YAMLError:
        return []
    return [str(entry) for entry in (entries if isinstance(entries, list) else [entries])]


def _search_folders(entries: Iterable[str]) -> list[Path]:
    """The folders of entries of hydra.searchpath: file://FOLDER, pkg://PACKAGE.FOLDER or FOLDER."""
    folders = []
    for entry in entries:
        scheme, separator, rest = entry.partition("://")
        if not separator or scheme == "file":
            folders.append(Path(rest if separator else entry).absolute())
        elif scheme == "pkg":
            package, *subfolders = rest.split(".")
            spec = find_spec(package)
            places = [] if spec is None else [*(spec.submodule_search_locations or ())]
            folders += [Path(place, *subfolders) for place in places[:1]]
    return folders


def load_config(path: Path) -> dict[str, Any]:
    """The settings of a config file as plain data, interpolations and ??? as they are written. Raises InvalidInput."""
    content = decode(read_text(path, "config"), object, str(path), yaml=True)
    # Hydra refuses another value than a mapping where the file is used.
    return {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}


def read_config(path: Path) -> str:
    """The text of a config file. Raises InvalidInput where it is not YAML, or where its values would not fit."""
    load_config(path)
    return read_text(path, "config")


def chosen_options(settings: Mapping[str, Any]) -> dict[str, str]:
    """The option of each group that the defaults list of a config names, without Hydra's own groups."""
    options: dict[str, str] = {}
    for entry in settings.get("defaults", ()):
        if isinstance(entry, Mapping):
            for key, option in entry.items():
                group = str(key).split()[-1].lstrip("/")  # after "optional" or "override"
                if not group.startswith("hydra"):
                    options[group] = "null" if option is None else str(option)
    return options


def is_for_verb(verb: str, text: str, settings: Mapping[str, Any]) -> bool:
    """Whether a verb takes experiments, and has all keys that an experiment's YAML sets; True of options of groups."""
    return GLOBAL_PACKAGE not in text or {"experiment", *set_names(settings)} <= {*key_names(SCHEMAS[verb])}


def set_names(settings: Mapping[str, Any]) -> set[str]:
    """The keys and groups that a config sets."""
    return ({*settings} | {*chosen_options(settings)}) - {"defaults", "hydra"}
