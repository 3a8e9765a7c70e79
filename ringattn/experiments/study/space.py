"""The points of a study: every combination of its axes, each with a configuration of its own."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import import_module
from itertools import product
from typing import Any

from ...config.folders import ConfigFolders, config_folders
from ...config.overrides import WRITTEN, check_key
from ...config.schema import SimulateConfig, parse_size
from ...errors import InvalidInput, did_you_mean

#: Groups whose options a study can go through.
GROUPS = ("pattern", "layout", "schedule", "machine")
#: Keys that are those of the study itself, or of other modes.
FIXED = ("study", "output", "experiment", "mode", "validate", "numerics")
#: Keys whose values are sizes, however they are written.
SIZES = ("tokens", "shard")
#: Keys of a configuration that a point's numbers do not depend on.
ELSEWHERE = (*FIXED, "label")
#: More points than this are refused: a list of them would not be looked at.
MOST = 1_000_000


@dataclass(frozen=True)
class Point:
    """One point: its number in the order of the axes, what the axes say, its labels, and the whole configuration."""

    number: int
    settings: dict[str, Any]
    labels: dict[str, Any]
    config: SimulateConfig
    #: The settings that vary together.
    together: tuple[str, ...] = ()

    @property
    def inputs(self) -> dict[str, Any]:
        """All that its numbers depend on, as plain data."""
        found = {f.name: getattr(self.config, f.name) for f in dataclasses.fields(self.config)}
        return {
            name: vars(value) if dataclasses.is_dataclass(value) else value
            for name, value in found.items()
            if name not in ELSEWHERE
        }

    @cached_property
    def key(self) -> str:
        """A name of its inputs: points with equal keys have equal numbers."""
        return digest(self.inputs)

    @property
    def problem(self) -> str:
        """What a plan is made of: points that differ in the machine alone have the same."""
        left = ("machine", "slow", "slow_links", "stalls", "passes", "solver", "seed", "backward")
        found = {name: value for name, value in self.inputs.items() if name not in left}
        chosen = self.config.layout.spec == "auto" or self.config.schedule.spec == "auto"
        return json.dumps(self.inputs if chosen else found, sort_keys=True)


def digest(inputs: Any) -> str:
    """A short name of plain data, equal where the data is."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:20]


def points(
    config: SimulateConfig,
    overrides: Sequence[str] = (),
    choices: Mapping[str, str] | None = None,
    folders: ConfigFolders | None = None,
) -> list[Point]:
    """The points of a study over a configuration.

    `overrides` are those of its command line, `choices` the options of groups that it was made of; values of axes that
    name an option are read from `folders` (None: ringattn's own). Raises InvalidInput.
    """
    axes = {str(key): _listed(str(key), values) for key, values in config.study.axes.items()}
    rows = [_settings(row) for row in config.study.together] or [{}]
    given = dict(override.lstrip("+~").partition("=")[::2] for override in overrides)
    for key in {*axes, *(key for row in rows for key in row)}:
        _check(key, given)
    for row in rows:
        twice = sorted({*row} & {*axes})
        if twice:
            raise InvalidInput(f"study: {twice[0]} is an axis and in `together`; keep one of them")
    kinds = {*axes, *(key for row in rows for key in row)}
    if "tokens" in {*kinds, *given} and ("shard" in kinds or config.shard is not None):
        other = "take shard or tokens, not both" if "shard" in kinds else "leave tokens out, or add shard=null"
        raise InvalidInput(f"study: shard sets the tokens (shard x ranks); {other}")
    count = len(rows)
    for values in axes.values():
        count *= len(values)
    if count > MOST:
        raise InvalidInput(f"study: {count:,} points are more than {MOST:,}; take fewer values or fewer axes")
    made = _Maker(config, given, choices or {}, folders or config_folders(()))
    combined = ({**row, **dict(zip(axes, values, strict=True))} for row in rows for values in product(*axes.values()))
    together = tuple(dict.fromkeys(key for row in rows for key in row if not key.startswith("label.")))
    found = [replace(made.point(number, settings), together=together) for number, settings in enumerate(combined)]
    _check_apart(found)
    return found


def _check_apart(found: Sequence[Point]) -> None:
    """Refuse a point that is another one again: as typed it would be a row that says nothing."""
    known: dict[tuple[str, str], Point] = {}
    for point in found:
        first = known.setdefault((point.key, json.dumps(point.labels, sort_keys=True)), point)
        if first is not point:
            written = [", ".join(f"{key}={value}" for key, value in one.settings.items()) for one in (first, point)]
            both = " and ".join(dict.fromkeys(written))
            raise InvalidInput(
                f"study: the points {first.number} and {point.number} are the same ({both}): a value is there twice; give each "
                "value once"
            )


def in_order(found: Sequence[Point]) -> Iterator[Point]:
    """The points, those of one plan after another, so that a plan and what it counted serve all of its points."""
    groups: dict[str, list[Point]] = {}
    for point in found:
        groups.setdefault(point.problem, []).append(point)
    for group in groups.values():
        yield from group


def _listed(key: str, values: Any) -> list[Any]:
    if not isinstance(values, list) or not values:
        raise InvalidInput(f"study.axes.{key}={values!r}: expected a list of values, such as [8, 64, 512]")
    return values


def _settings(row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise InvalidInput(
            f"study.together: {row!r} is not a set of keys and values, such as {{tokens: 8192, ranks: 1}}"
        )
    return {str(key): value for key, value in row.items()}


def _check(key: str, given: Mapping[str, str]) -> None:
    if key.startswith("label."):
        return
    check_key("simulate", SimulateConfig, key)
    group, dotted, _ = key.partition(".")
    if group in FIXED or (dotted and group not in GROUPS):
        raise InvalidInput(f"study: {key} cannot be an axis; axes are what a simulated pass depends on")
    if key in given:
        raise InvalidInput(
            f"{key}={given[key]} has no meaning: the study goes through {key}; its values are study.axes.{key}=[...]"
        )


class _Maker:
    """Configurations from settings. What a group's settings mean is worked out once."""

    def __init__(
        self, base: SimulateConfig, given: Mapping[str, str], choices: Mapping[str, str], folders: ConfigFolders
    ) -> None:
        self.base, self.choices, self.folders = base, choices, folders
        self.groups: dict[str, Any] = {}
        #: What the command line says of parts of groups, which holds for every option that takes it.
        self.given = {key: value for key, value in given.items() if key.split(".")[0] in GROUPS and "." in key}

    def point(self, number: int, settings: dict[str, Any]) -> Point:
        parts: dict[str, dict[str, Any]] = {}
        read, labels = {}, {}
        for key, value in settings.items():
            group, _, name = key.partition(".")
            if group == "label":
                labels[name] = value
            elif group in GROUPS:
                parts.setdefault(group, {})[key] = read[key] = value
            else:
                read[key] = _value(key, value)
        made = {group: self._group(group, part) for group, part in parts.items()}
        config = replace(
            self.base, **{key: value for key, value in read.items() if key.split(".")[0] not in GROUPS}, **made
        )
        for key in read:  # numbers of groups are numbers, too, however they were written
            group, _, name = key.partition(".")
            if name:
                read[key] = getattr(made[group], name)
        return Point(number, read, labels, config)

    def _group(self, group: str, part: dict[str, Any]) -> Any:
        known = json.dumps([group, part], sort_keys=True)
        if known not in self.groups:
            self.groups[known] = self._made(group, dict(part))
        return self.groups[known]

    def _option(self, group: str, option: Any) -> dict[str, Any]:
        return dict(_file(self.folders, group, str(option)))

    def _made(self, group: str, part: dict[str, Any]) -> Any:
        tools = import_module("omegaconf")
        kind = type(getattr(self.base, group))
        kinds = {f.name: str(f.type) for f in dataclasses.fields(kind)}
        option = part.pop(group, None)
        if option is None:
            values = dataclasses.asdict(getattr(self.base, group))
            taken = set(values)
            if group in WRITTEN:  # the base's text has its own parameters in it already
                option = self.choices.get(group)
                values["spec"] = self._option(group, option).get("spec", values["spec"])
                taken = set(self._option(group, option))
        else:
            written = group in WRITTEN and set("(:") & set(str(option))
            values = {"spec": str(option)} if written else self._option(group, option)
            taken = set(kinds) if group == "machine" else set(values)
            words = {key.partition(".")[2]: value for key, value in self.given.items() if key.startswith(f"{group}.")}
            values |= {name: _read(text) for name, text in words.items() if name in taken}
        for key, value in part.items():
            name = key.partition(".")[2]
            if name not in taken:
                raise InvalidInput(f"study: {key}={value} has no meaning with {group}={option}")
            values[name] = _number_or(kinds[name], value, key)
        try:
            return tools.OmegaConf.to_object(tools.OmegaConf.merge(tools.OmegaConf.structured(kind), values))
        except import_module("omegaconf.errors").OmegaConfBaseException as error:
            raise InvalidInput(f"study: {group} {part}: {str(error).splitlines()[0]}") from None


@cache
def _file(folders: ConfigFolders, group: str, option: str) -> dict[str, Any]:
    tools = import_module("omegaconf")
    path = folders.file(group, option)
    if path is None:
        shown = [one for one in folders.options(group) if one != "custom"]
        raise InvalidInput(
            f"study: {group}={option}: unknown option; {did_you_mean(option, shown)}expected one of {', '.join(shown)}"
        )
    return dict(tools.OmegaConf.to_container(tools.OmegaConf.load(path)))


def _read(text: str) -> Any:
    """A value as it is written in YAML."""
    return import_module("yaml").safe_load(text)


def _number_or(kind: str, value: Any, key: str) -> Any:
    """A value of a group's key: sizes such as 64k are whole numbers there, too."""
    if not isinstance(value, str):
        return value
    return parse_size(value, key) if kind.startswith("int") and value != "null" else _read(value)


def _value(key: str, value: Any) -> Any:
    """A value of a plain key, of the type that the key has. Raises InvalidInput."""
    (kind,) = (str(f.type) for f in dataclasses.fields(SimulateConfig) if f.name == key)
    if value is None or value == "null":
        if "None" in kind or kind == "Any":
            return None
        raise InvalidInput(f"study: {key} needs a value")
    if kind.startswith("int") or key in SIZES:
        return parse_size(value, key)
    if kind == "bool":
        read = _read(value) if isinstance(value, str) else value
        if not isinstance(read, bool):
            raise InvalidInput(f"study: {key}={value}: expected true or false")
        return read
    if kind.startswith("str"):
        return str(value)
    if isinstance(value, str) and value[:1] in ("{", "["):
        return _read(value)
    return value
