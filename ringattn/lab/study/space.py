"""The points of a study: every combination of its axes' values, each with a complete configuration."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ...cli.config.groups import PARAMETER_GROUPS
from ...cli.config.overrides import check_parameters, compose, explain, is_written, prepare
from ...cli.config.schema import SCHEMAS, SimulateConfig, parse_size
from ...errors import InvalidInput
from ..verbs.settings import EstimateConfig, StudyConfig

#: Config groups whose options and keys can be axes.
GROUPS = ("pattern", "layout", "schedule", "machine")
#: The configuration of a point.
PointConfig = SimulateConfig | EstimateConfig
#: Keys that cannot be axes, since they do not affect the numbers of a point.
FIXED = ("output", "experiment")
#: Keys whose values are sizes such as 64k.
SIZES = ("tokens", "shard")
#: Keys that affect a point's numbers, but not its plan.
OF_MACHINE = ("machine", "slow", "slow_links", "stalls", "passes", "solver", "backward")
#: Maximum points of a study: nobody would read a longer table.
MOST_POINTS = 1_000_000


@dataclass(frozen=True)
class Point:
    """One simulation of a study: a combination of settings.

    `number` is its index in the order of the axes, `settings` are the values of the axes by key, `labels` are the
    values of label.NAME, and `config` is the complete configuration.
    """

    number: int
    settings: dict[str, Any]
    labels: dict[str, Any]
    config: PointConfig

    @property
    def inputs(self) -> dict[str, Any]:
        """Everything that the point's numbers depend on, as plain data."""
        values = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(self.config)}
        return {
            name: vars(value) if dataclasses.is_dataclass(value) else value
            for name, value in values.items()
            if name not in FIXED
        }

    @cached_property
    def key(self) -> str:
        """A digest of the inputs: points with equal keys have equal numbers."""
        return digest(self.inputs)

    @property
    def has_auto(self) -> bool:
        """Whether layout or schedule is "auto", so that the choice depends on the machine."""
        return "auto" in (self.config.layout.spec, self.config.schedule.spec)

    @property
    def plan_key(self) -> str:
        """Text that determines the point's plan: points with equal texts have equal plans."""
        left_out = () if self.has_auto else OF_MACHINE
        return json.dumps({name: value for name, value in self.inputs.items() if name not in left_out}, sort_keys=True)


def digest(inputs: Any) -> str:
    """A digest of plain data, 20 hexadecimal digits."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:20]


def list_points(config: StudyConfig, search_path: Sequence[str] = ()) -> list[Point]:
    """The points of a study, from its configuration. Raises InvalidInput for axes that cannot be used.

    `search_path` are overrides of Hydra that say where it finds config groups.
    """
    axes, entries = config.axes, config.together or [{}]
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise InvalidInput(f"together: {entry!r} is not a set of keys and values, such as {{tokens: 8k, ranks: 1}}")
    for key, values in axes.items():
        if not values:
            raise InvalidInput(f"axes.{key}=[]: expected a list of values, such as [8, 64, 512]")
        if any(key in entry for entry in entries):
            raise InvalidInput(f"study: {key} is an axis and in `together`; keep only one of the two")
    fixed = {key: value for key, value in config.fixed.items() if value is not None}
    for key in {*axes, *(key for entry in entries for key in entry)}:
        _check_axis(key, fixed)
    count = math.prod([len(entries), *map(len, axes.values())])
    if count > MOST_POINTS:
        raise InvalidInput(f"study: {count:,} points are more than {MOST_POINTS:,}; give fewer values or fewer axes")
    make = _PointMaker(config.of, [*prepare(config.of, [f"{key}={fixed[key]}" for key in fixed]), *search_path])
    combinations = (
        {**entry, **dict(zip(axes, values, strict=True))} for entry in entries for values in product(*axes.values())
    )
    points = [make.point(number, settings) for number, settings in enumerate(combinations)]
    _check_points(points)
    return points


def _check_axis(key: str, fixed: Mapping[str, Any]) -> None:
    group, dot, _ = key.partition(".")
    if group == "label":
        return
    if group in FIXED or (dot and group not in GROUPS):
        raise InvalidInput(f"study: {key} cannot be an axis; axes are keys that the simulated passes depend on")
    if key in fixed:
        raise InvalidInput(
            f"{key}={fixed[key]} has no meaning: the study varies {key}; give its values as axes.{key}=[...]"
        )


def _check_points(points: Sequence[Point]) -> None:
    """Raise InvalidInput for points with equal inputs and labels, or settings that have no effect at any point."""
    seen: dict[tuple[str, str], Point] = {}
    refusals = []
    for point in points:
        first = seen.setdefault((point.key, json.dumps(point.labels, sort_keys=True)), point)
        if first is not point:
            texts = [", ".join(f"{key}={value}" for key, value in each.settings.items()) for each in (first, point)]
            raise InvalidInput(
                f"study: the points {first.number} and {point.number} are the same "
                f"({' and '.join(dict.fromkeys(texts))}): a value is listed twice; give each value once"
            )
        try:
            point.config.check()
        except InvalidInput as error:
            refusals.append(error)
    if refusals and len(refusals) == len(points):
        raise refusals[0]


class _PointMaker:
    """Makes points by applying settings to a base configuration, with groups composed by Hydra.

    Equal values are parsed once, and equal settings of a group are composed once.
    """

    def __init__(self, verb: str, overrides: Sequence[str]) -> None:
        self.verb, self.overrides = verb, overrides
        composed = self._composed()
        check_parameters(composed)
        try:
            self.base: Any = OmegaConf.to_object(composed)
        except OmegaConfBaseException as error:
            raise explain(verb, error) from None
        self.node, self.compose = cache(self._node), cache(self._compose)
        #: Parses the value of a key outside the groups from its text, to the type of the key.
        self.read = cache(self._read)

    def point(self, number: int, settings: dict[str, Any]) -> Point:
        """The point with these settings. Raises InvalidInput for values that cannot be parsed."""
        by_group: dict[str, dict[str, str]] = {}
        plain, labels = {}, {}
        for key, value in settings.items():
            group, _, name = key.partition(".")
            text = "null" if value is None else str(value)  # as written on the command line
            if group == "label":
                labels[name] = value
            elif group in GROUPS:
                by_group.setdefault(group, {})[key] = text
            else:
                plain[key] = self.read(key, text)
        groups = {group: self.compose(group, tuple(part.items())) for group, part in by_group.items()}
        read = {}
        for key, value in settings.items():  # the table has the number of a group's key, even where it is text here
            group, _, name = key.partition(".")
            if group != "label":
                read[key] = plain[key] if key in plain else getattr(groups[group], name) if name else value
        return Point(number, read, labels, replace(self.base, **plain, **groups))

    def _compose(self, group: str, part: tuple[tuple[str, str], ...]) -> Any:
        """The dataclass of a group, from settings of its option (key `group`) and of its keys (`group.key`)."""
        settings = dict(part)
        root = OmegaConf.create({group: self.node(group, settings.pop(group, None))})
        for key, text in settings.items():
            self._set(root, key, text)
        check_parameters(root)
        return OmegaConf.to_object(root[group])

    def _node(self, group: str, option: str | None) -> Any:
        """A group composed by Hydra with this option, or with the base's option if None."""
        if option is None and group not in PARAMETER_GROUPS:
            return getattr(self.base, group)
        if option is not None and is_written(group, option):
            return type(getattr(self.base, group))(option)
        return self._composed([] if option is None else [f"{group}={option}"])[group]

    def _composed(self, more: Sequence[str] = ()) -> Any:
        """The configuration of the verb, composed by Hydra."""
        try:
            return compose(self.verb, [*self.overrides, *prepare(self.verb, more)])
        except HydraException as error:
            raise explain(self.verb, error) from None

    def _read(self, key: str, text: str) -> Any:
        schema: Any = OmegaConf.structured(SCHEMAS[self.verb])
        to_plain: Any = OmegaConf.to_container
        return to_plain(self._set(schema, key, text))[key]

    def _set(self, config: Any, key: str, text: str) -> Any:
        """The configuration with a key set to a value in command-line syntax. Raises InvalidInput."""
        (override,) = prepare(self.verb, [f"{key}={text}"])
        try:
            value = OverridesParser.create().parse_override(override).value()
            OmegaConf.update(config, key, parse_size(text, key) if key in SIZES and value is not None else value)
        except (HydraException, OmegaConfBaseException) as error:
            raise explain(self.verb, error) from None
        return config
