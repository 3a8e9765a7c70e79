"""The points of a study: every combination of the values of its axes, each with a whole configuration."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from itertools import product
from typing import Any

from ...errors import InvalidInput
from ...text import did_you_mean
from ..config.checks import CUSTOM
from ..config.folders import ConfigFolders, config_folders
from ..config.overrides import WRITTEN, check_key
from ..config.schema import SimulateConfig, parse_size

#: Config groups whose options and keys may be axes.
GROUPS = ("pattern", "layout", "schedule", "machine")
#: Keys that cannot be axes: keys of the study itself, and keys of other modes.
FIXED = ("study", "output", "experiment", "mode", "validate", "numerics")
#: Keys whose values are sizes such as 64k.
SIZES = ("tokens", "shard")
#: Keys of a configuration that do not affect the numbers of a point.
WITHOUT_EFFECT = (*FIXED, "label")
#: Keys that affect a point's numbers, but not its plan.
OF_MACHINE = ("machine", "slow", "slow_links", "stalls", "passes", "solver", "seed", "backward")
#: Most points of a study: nobody would read a longer table.
MOST_POINTS = 1_000_000


@dataclass(frozen=True)
class Point:
    """One point of a study.

    `number` is its place in the order of the axes, `settings` has the values of the axes by key, `together` the keys
    that vary together, `labels` the values of label.NAME, and `config` the whole configuration.
    """

    number: int
    settings: dict[str, Any]
    labels: dict[str, Any]
    config: SimulateConfig
    together: tuple[str, ...] = ()

    @property
    def inputs(self) -> dict[str, Any]:
        """All that the point's numbers depend on, as plain data."""
        values = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(self.config)}
        return {
            name: vars(value) if dataclasses.is_dataclass(value) else value
            for name, value in values.items()
            if name not in WITHOUT_EFFECT
        }

    @cached_property
    def key(self) -> str:
        """A digest of the inputs: points with equal keys have equal numbers."""
        return digest(self.inputs)

    @property
    def plan_key(self) -> str:
        """The inputs of the point's plan as text: points with equal texts have equal plans.

        With a layout or schedule that is "auto", the plan depends on the machine too.
        """
        has_auto = self.config.layout.spec == "auto" or self.config.schedule.spec == "auto"
        left_out = () if has_auto else OF_MACHINE
        return json.dumps({name: value for name, value in self.inputs.items() if name not in left_out}, sort_keys=True)


def digest(inputs: Any) -> str:
    """20 hexadecimal digits that are equal for equal plain data."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:20]


def list_points(
    config: SimulateConfig,
    overrides: Sequence[str] = (),
    choices: Mapping[str, str] | None = None,
    folders: ConfigFolders | None = None,
) -> list[Point]:
    """The points of the study in a configuration. Raises InvalidInput for axes that cannot be used.

    `overrides` are those of the command line, `choices` the chosen options of config groups by group. Axes that name an
    option read it from `folders` (None: the folders of ringattn).
    """
    axes = {str(key): _check_values(str(key), values) for key, values in config.study.axes.items()}
    entries = [_check_entry(entry) for entry in config.study.together] or [{}]
    given = dict(override.lstrip("+~").partition("=")[::2] for override in overrides)
    _check_axes(config, axes, entries, given)
    make = _PointMaker(config, given, choices or {}, folders or config_folders(()))
    combinations = (
        {**entry, **dict(zip(axes, values, strict=True))} for entry in entries for values in product(*axes.values())
    )
    together = tuple(dict.fromkeys(key for entry in entries for key in entry if not key.startswith("label.")))
    points = [replace(make.point(number, settings), together=together) for number, settings in enumerate(combinations)]
    _check_distinct(points)
    return points


def group_by_plan(points: Sequence[Point]) -> Iterator[Point]:
    """All points, those with equal plans one after another, so that a cached plan serves all of its points."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.plan_key, []).append(point)
    for group in groups.values():
        yield from group


def _check_axes(
    config: SimulateConfig,
    axes: Mapping[str, list[Any]],
    entries: Sequence[dict[str, Any]],
    given: Mapping[str, str],
) -> None:
    """Refuse keys that cannot be axes or contradict each other, and more points than MOST_POINTS."""
    keys = {*axes, *(key for entry in entries for key in entry)}
    for key in keys:
        _check_axis(key, given)
    for entry in entries:
        repeated = sorted({*entry} & {*axes})
        if repeated:
            raise InvalidInput(f"study: {repeated[0]} is an axis and in `together`; keep only one of the two")
    if "tokens" in {*keys, *given} and ("shard" in keys or config.shard is not None):
        advice = "take shard or tokens, not both" if "shard" in keys else "leave tokens out, or add shard=null"
        raise InvalidInput(f"study: shard sets the tokens (shard x ranks); {advice}")
    count = len(entries)
    for values in axes.values():
        count *= len(values)
    if count > MOST_POINTS:
        raise InvalidInput(f"study: {count:,} points are more than {MOST_POINTS:,}; take fewer values or fewer axes")


def _check_values(key: str, values: Any) -> list[Any]:
    if not isinstance(values, list) or not values:
        raise InvalidInput(f"study.axes.{key}={values!r}: expected a list of values, such as [8, 64, 512]")
    return values


def _check_entry(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise InvalidInput(
            f"study.together: {entry!r} is not a set of keys and values, such as {{tokens: 8192, ranks: 1}}"
        )
    return {str(key): value for key, value in entry.items()}


def _check_axis(key: str, given: Mapping[str, str]) -> None:
    if key.startswith("label."):
        return
    check_key("simulate", SimulateConfig, key)
    group, dot, _ = key.partition(".")
    if group in FIXED or (dot and group not in GROUPS):
        raise InvalidInput(f"study: {key} cannot be an axis; axes are keys that the simulated passes depend on")
    if key in given:
        raise InvalidInput(
            f"{key}={given[key]} has no meaning: the study goes through {key}; its values are study.axes.{key}=[...]"
        )


def _check_distinct(points: Sequence[Point]) -> None:
    """Refuse two points with equal inputs and labels: the second row would say nothing new."""
    seen: dict[tuple[str, str], Point] = {}
    for point in points:
        first = seen.setdefault((point.key, json.dumps(point.labels, sort_keys=True)), point)
        if first is not point:
            texts = [", ".join(f"{key}={value}" for key, value in each.settings.items()) for each in (first, point)]
            raise InvalidInput(
                f"study: the points {first.number} and {point.number} are the same "
                f"({' and '.join(dict.fromkeys(texts))}): a value is there twice; give each value once"
            )


class _PointMaker:
    """Makes points from settings over a base configuration. Equal settings of a group are composed once.

    `given` are the overrides of the command line by key.
    """

    def __init__(
        self, base: SimulateConfig, given: Mapping[str, str], choices: Mapping[str, str], folders: ConfigFolders
    ) -> None:
        self.base, self.choices, self.folders = base, choices, folders
        self.groups: dict[str, Any] = {}
        #: Overrides of single keys of groups. They hold for every option of the group that has the key.
        self.group_overrides = {
            key: value for key, value in given.items() if key.split(".")[0] in GROUPS and "." in key
        }

    def point(self, number: int, settings: dict[str, Any]) -> Point:
        """The point with these settings. Raises InvalidInput for values that cannot be read."""
        by_group: dict[str, dict[str, Any]] = {}
        read, labels = {}, {}
        for key, value in settings.items():
            group, _, name = key.partition(".")
            if group == "label":
                labels[name] = value
            elif group in GROUPS:
                by_group.setdefault(group, {})[key] = read[key] = value
            else:
                read[key] = _read_value(key, value)
        groups = {group: self._compose_once(group, part) for group, part in by_group.items()}
        plain = {key: value for key, value in read.items() if key.split(".")[0] not in GROUPS}
        config = replace(self.base, **plain, **groups)
        for key in read:  # the table has the number of a group's key, even where the axis writes it as text
            group, _, name = key.partition(".")
            if name:
                read[key] = getattr(groups[group], name)
        return Point(number, read, labels, config)

    def _compose_once(self, group: str, part: dict[str, Any]) -> Any:
        key = json.dumps([group, part], sort_keys=True)
        if key not in self.groups:
            self.groups[key] = self._compose(group, dict(part))
        return self.groups[key]

    def _compose(self, group: str, part: dict[str, Any]) -> Any:
        """The dataclass of a group from the settings of its option (key `group`) and of its keys (`group.key`)."""
        omegaconf = import_module("omegaconf")
        schema = type(getattr(self.base, group))
        types = {field.name: str(field.type) for field in dataclasses.fields(schema)}
        option = part.pop(group, None)
        values, allowed = self._base_values(group) if option is None else self._option_values(group, option, types)
        for key, value in part.items():
            name = key.partition(".")[2]
            if name not in allowed:
                chosen = self.choices.get(group) if option is None else option
                raise InvalidInput(f"study: {key}={value} has no meaning with {group}={chosen}")
            values[name] = _read_group_value(types[name], value, key)
        try:
            merged = omegaconf.OmegaConf.merge(omegaconf.OmegaConf.structured(schema), values)
            return omegaconf.OmegaConf.to_object(merged)
        except import_module("omegaconf.errors").OmegaConfBaseException as error:
            raise InvalidInput(f"study: {group} {part}: {str(error).splitlines()[0]}") from None

    def _base_values(self, group: str) -> tuple[dict[str, Any], set[str]]:
        """The values of the base configuration, and the keys that axes may set."""
        values = dataclasses.asdict(getattr(self.base, group))
        if group not in WRITTEN:
            return values, set(values)
        # The spec of the base has its parameters filled in: take the spec of the option, which has placeholders.
        from_file = self._read_option(group, self.choices.get(group))
        values["spec"] = from_file.get("spec", values["spec"])
        return values, set(from_file)

    def _option_values(self, group: str, option: Any, types: Mapping[str, str]) -> tuple[dict[str, Any], set[str]]:
        """The values of an option, or of a written pattern, layout or schedule, and the keys that axes may set."""
        is_written = group in WRITTEN and set("(:") & set(str(option))
        values = {"spec": str(option)} if is_written else self._read_option(group, option)
        allowed = set(types) if group == "machine" else set(values)
        prefix = f"{group}."
        overridden = {
            key.removeprefix(prefix): text for key, text in self.group_overrides.items() if key.startswith(prefix)
        }
        return values | {name: _read_yaml(text) for name, text in overridden.items() if name in allowed}, allowed

    def _read_option(self, group: str, option: Any) -> dict[str, Any]:
        """What the file of an option sets. Raises InvalidInput for an unknown option."""
        if self.folders.file(group, str(option)) is None:
            names = [name for name in self.folders.options(group) if name != CUSTOM]
            raise InvalidInput(
                f"study: {group}={option}: unknown option; {did_you_mean(option, names)}expected one of "
                f"{', '.join(names)}"
            )
        return self.folders.settings(group, str(option))


def _read_yaml(text: str) -> Any:
    return import_module("yaml").safe_load(text)


def _read_group_value(type_name: str, value: Any, key: str) -> Any:
    """A value of a group's key, which may be written as text; whole numbers may be sizes such as 64k."""
    if not isinstance(value, str):
        return value
    return parse_size(value, key) if type_name.startswith("int") and value != "null" else _read_yaml(value)


def _read_value(key: str, value: Any) -> Any:
    """A value of a key outside the groups, in the type of the key. Raises InvalidInput."""
    (type_name,) = (str(field.type) for field in dataclasses.fields(SimulateConfig) if field.name == key)
    if value is None or value == "null":
        if "None" in type_name or type_name == "Any":
            return None
        raise InvalidInput(f"study: {key} needs a value")
    if type_name.startswith("int") or key in SIZES:
        return parse_size(value, key)
    if type_name == "bool":
        flag = _read_yaml(value) if isinstance(value, str) else value
        if not isinstance(flag, bool):
            raise InvalidInput(f"study: {key}={value}: expected true or false")
        return flag
    if type_name.startswith("str"):
        return str(value)
    if isinstance(value, str) and value[:1] in ("{", "["):
        return _read_yaml(value)
    return value
