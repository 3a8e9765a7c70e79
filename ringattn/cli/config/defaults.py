"""Defaults of the command line: the settings dataclasses take theirs from conf/VERB.yaml."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform, get_type_hints

from ...files import decode, read_text

T = TypeVar("T")


@cache
def conf_dir() -> Path:
    """The folder of ringattn's config files: inside the package in a wheel, beside the package in a checkout."""
    package = Path(__file__).resolve().parents[2]
    beside = package.parent / "conf"
    return beside if (beside / "run.yaml").is_file() else package / "conf"


def load_config(path: Path) -> dict[str, Any]:
    """The settings of a config file as plain data; interpolations and ??? stay unresolved. Raises InvalidInput."""
    content = decode(read_text(path, "config"), object, str(path), yaml=True)
    # Hydra raises an error for anything but a mapping when the file is used.
    return {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}


def default_options(verb: str) -> dict[str, str | None]:
    """The default option of each config group of a verb; None: no option."""
    entries = load_config(conf_dir() / f"{verb}.yaml")["defaults"]
    return {group: option for entry in entries if isinstance(entry, dict) for group, option in entry.items()}


@cache
def read_defaults(verb: str) -> dict[str, Any]:
    """The default settings of a command (`verb`): those in conf/VERB.yaml and in its default group options."""
    found = {}
    for group, option in default_options(verb).items():
        path = conf_dir() / group / f"{option}.yaml"
        # An option without a file is a machine preset.
        found[group] = load_config(path) if path.is_file() else None if option is None else {"spec": option}
    settings = load_config(conf_dir() / f"{verb}.yaml")
    return {**found, **{key: value for key, value in settings.items() if key != "defaults"}}


@dataclass_transform()
def settings_of(verb: str, section: str = "") -> Callable[[type[T]], type[T]]:
    """Class decorator, used instead of `dataclass`: the defaults of fields come from the file conf/VERB.yaml.

    Each field gets the value that the file has under the field's name. `section`, such as "output", reads that
    section of the file instead of its top level. A verb is a command of ringattn, such as run.
    """

    def decorate(schema: type[T]) -> type[T]:
        defaults = read_defaults(verb)
        for part in section.split(".") if section else ():
            defaults = defaults[part]
        for name, kind in get_type_hints(schema).items():
            value = defaults[name]
            schema.__annotations__[name] = kind  # includes fields of base classes: every verb has its own defaults
            made_anew = is_dataclass(kind) or isinstance(value, list | dict)
            setattr(schema, name, field(default_factory=partial(_make, kind, value)) if made_anew else value)
        return dataclass(schema)

    return decorate


def _make(kind: Any, value: Any) -> Any:
    """A fresh default: `value` as an object of type `kind`."""
    if isinstance(kind, type) and is_dataclass(kind):
        kinds = get_type_hints(kind)
        return kind(**{name: _make(kinds[name], each) for name, each in (value or {}).items()})
    return deepcopy(value)
