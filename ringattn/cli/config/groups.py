"""Dataclasses for the config groups of the command line: each holds the chosen option of its group."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

from ...errors import InvalidInput
from ...files import STDOUT
from ...machine.file import read_machine
from ...machine.machine import MACHINE_NUMBERS, Machine
from ...machine.presets import get_machine
from ...text import did_you_mean
from .defaults import settings_of

#: A whole number in human notation: 4096, 1e9 or 64k. `schema.parse_size` parses it.
Size = int | float | str
#: What a model may do.
PHASES = ("training", "prefill", "decode")
#: Groups whose `spec` is a text with parameters.
PARAMETER_GROUPS = ("pattern", "layout", "schedule")


def default_of(settings: object, name: str) -> Any:
    """The default of the field `name` of a settings object."""
    return getattr(type(settings)(), name)


def refuse(config: object, keys: str, reason: str) -> None:
    """Raise InvalidInput if a setting was changed although it has no effect here.

    `keys` names the settings to check, separated by spaces. `reason` completes the message "key=value has no meaning
    ...".
    """
    default = type(config)()
    for key in keys.split():
        value, plain = (reduce(getattr, key.split("."), whole) for whole in (config, default))
        for text in _changed(key, value, plain):
            raise InvalidInput(f"{text} has no meaning {reason}; leave it out")


def _changed(key: str, value: object, default: object) -> Iterator[str]:
    """The text "key=value" of each setting that differs from its default."""
    if is_dataclass(default):
        for one in fields(default):
            yield from _changed(f"{key}.{one.name}", getattr(value, one.name), getattr(default, one.name))
    elif value != default:
        yield f"{key.removesuffix('.spec')}={value}"


def check_choice(key: str, value: str, names: Collection[str]) -> None:
    """Raise InvalidInput if the value of a key is not one of `names`."""
    if value not in names:
        raise InvalidInput(f"{key}={value}: {did_you_mean(value, names)}expected one of {', '.join(names)}")


def check_least(config: object, prefix: str = "", **least: int) -> None:
    """Raise InvalidInput if a setting is below its minimum, given as name=minimum; `prefix` precedes its name."""
    for name, number in least.items():
        if getattr(config, name) < number:
            raise InvalidInput(f"{prefix}{name}={getattr(config, name)}: must be at least {number}")


def check_file(group: str, spec: str | None, path: str | None, what: str) -> None:
    """Raise InvalidInput if a config group has the option `file` without a path, or a path without this option.

    `spec` is the chosen option of the group. `what` describes the expected file in the message.
    """
    if spec == "file" and path is None:
        raise InvalidInput(f"{group}=file needs {group}.path=..., {what}; or give its path as {group}=./my.file")
    if spec != "file" and path is not None:
        raise InvalidInput(
            f"{group}.path={path} has no meaning with {group}={spec}; leave out {group}.path, or {group}"
        )


def refuse_stdout(name: str, path: str | None, instead: str) -> None:
    """Raise InvalidInput if the output path is "-" (standard output), for outputs that can only go to a file.

    `name` is the setting of the path, and `instead` tells the user what to do.
    """
    if path == STDOUT:
        raise InvalidInput(f"{name}=-: {instead}")


@dataclass
class ConfigGroup:
    """Base class of the settings in one config group, such as `layout`.

    `spec` is the text that the library parses, such as "striped(64)"; Hydra fills it in from the other fields.
    """

    spec: str = "???"


@dataclass
class PatternGroup(ConfigGroup):
    """The settings of a pattern: `spec` is the pattern as a Python expression, such as "Causal() & Window(4095)".

    The files conf/pattern/*.yaml fill in `spec` from the other fields. If `spec` is a list of patterns, `weights` gives
    the number of layers with each of them.
    """

    weights: list[int] | None = None
    left: int | None = None
    n: int | None = None
    step: int | None = None
    lengths: list[int] | None = None
    segments: list[int] | None = None
    rates: list[int] | None = None
    causal: bool | None = None
    mix: str | None = None
    block: int | None = None
    blocks: int | None = None


@dataclass
class LayoutGroup(ConfigGroup):
    """A layout: its name with parameters, such as striped(64). `chunk` is a number of tokens or "auto"."""

    block: int | None = None
    chunk: Size | None = None


@dataclass
class ScheduleGroup(ConfigGroup):
    """The settings of a schedule: `spec` is its name with parameters, such as ulysses(4, direct).

    The parameter "node" stands for the number of ranks per node of the machine.
    """

    ranks_per_node: Size | None = None
    size: Size | None = None
    between: str | None = None


Group = TypeVar("Group")


def with_machine_numbers(group: type[Group]) -> type[Group]:
    """Class decorator, applied before `dataclass`: add a field (default None) for each numeric field of `Machine`."""
    for name, number in MACHINE_NUMBERS.items():
        group.__annotations__[name] = f"{number.python_type.__name__} | None"
        setattr(group, name, None)
    return group


@dataclass
@with_machine_numbers
class MachineGroup(ConfigGroup):
    """The settings of a machine: a preset or a machine file, and numbers that replace those of the preset or file.

    A number that is None replaces nothing. `library` names the attention kernels of a preset, such as fa2; None takes
    the first that the preset has.
    """

    path: str | None = None
    library: str | None = None
    extrapolate: bool = False

    def made(self, device: str = "cpu", ranks: int | None = None) -> Machine:
        """Build the machine. "auto" is the default preset for `device`; "file" reads the machine file at `path`.

        Raises InvalidInput if the given numbers contradict each other or do not fit the number of ranks.
        """
        check_file("machine", self.spec, self.path, "a file of ringattn calibrate output.path=machine.yaml")
        if self.path is not None:
            refuse(self, "library", "with machine=file, which has its own kernel times")
            machine = read_machine(Path(self.path))
        else:
            machine = get_machine(None if self.spec == "auto" else self.spec, device)
            if self.library is not None:
                refuse(self, "flops", f"beside machine.library={self.library}, whose rates replace it")
                machine = get_machine(f"{machine.preset}/{self.library}")
        replaced = {name: value for name in MACHINE_NUMBERS if (value := getattr(self, name)) is not None}
        if "flops" in replaced:
            replaced["kernel"] = None  # measured kernel times would override the given flops
        machine = machine.changed(**replaced)
        _check_nodes(machine, replaced, ranks)
        if self.extrapolate and machine.kernel is not None:
            machine = replace(machine, kernel=replace(machine.kernel, extrapolate=True))
        return machine


def _check_nodes(machine: Machine, replaced: Mapping[str, object], ranks: int | None) -> None:
    """Raise InvalidInput if the user's node settings contradict each other or do not fit the number of ranks."""
    size = machine.ranks_per_node
    if "ranks_per_node" in replaced and ranks is not None and ranks > size and ranks % size:
        raise InvalidInput(
            f"machine.ranks_per_node={size}: {ranks} ranks do not fill nodes of {size} evenly; give a divisor of "
            f"{ranks}, or another number of ranks"
        )
    for name in ("node_latency", "node_bandwidth", "switch", "shared_nic"):
        if replaced.get(name) not in (None, False) and size == 1:
            raise InvalidInput(
                f"machine.{name}={replaced[name]} is for nodes with several ranks, but here every node has one rank; "
                "give machine.ranks_per_node="
            )


@dataclass
class TransportGroup(ConfigGroup):
    """The settings of a transport.

    If `gpu_aware`, CUDA tensors are passed to MPI directly. `check` is the option `check` of `ring_attention`.
    """

    gpu_aware: bool = False
    check: str | None = None


@dataclass
class InputGroup:
    """The input of `ringattn run`: a text, random numbers, or the tensors of a file."""

    name: str = "text"
    path: str | None = None
    seed: int = 0


@dataclass
class OutputGroup:
    """`path`: the file or folder to write; None: write nothing."""

    path: str | None


@settings_of("run", "output")
class RunOutputGroup(OutputGroup):
    """Output files of `ringattn run`: tensors at `path`, the printed numbers as JSON at `report`."""

    report: str | None
