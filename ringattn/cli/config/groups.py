"""Config groups of the command line: the dataclasses that hold one option of each group."""

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

#: A whole number as people write it: 4096, 1e9 or 64k. `schema.parse_size` reads it.
Size = int | float | str
#: Groups whose options are a text with parameters.
PARAMETER_GROUPS = ("pattern", "layout", "schedule")


def default_of(settings: object, name: str) -> Any:
    """The default of a setting."""
    return getattr(type(settings)(), name)


def refuse(config: object, keys: str, reason: str) -> None:
    """Raise InvalidInput where one of these keys, separated by blanks, is not its default: it has no effect here."""
    default = type(config)()
    for key in keys.split():
        value, plain = (reduce(getattr, key.split("."), whole) for whole in (config, default))
        for text in _changed(key, value, plain):
            raise InvalidInput(f"{text} has no meaning {reason}; leave it out")


def _changed(key: str, value: object, default: object) -> Iterator[str]:
    """The text key=value of each setting that differs from its default."""
    if is_dataclass(default):
        for one in fields(default):
            yield from _changed(f"{key}.{one.name}", getattr(value, one.name), getattr(default, one.name))
    elif value != default:
        yield f"{key.removesuffix('.spec')}={value}"


def check_choice(key: str, value: str, names: Collection[str]) -> None:
    """Raise InvalidInput where the value of a key is none of these names."""
    if value not in names:
        raise InvalidInput(f"{key}={value}: {did_you_mean(value, names)}expected one of {', '.join(names)}")


def check_least(config: object, prefix: str = "", **least: int) -> None:
    """Raise InvalidInput where a number is below its least; `prefix` is that of its group."""
    for name, number in least.items():
        if getattr(config, name) < number:
            raise InvalidInput(f"{prefix}{name}={getattr(config, name)}: must be at least {number}")


def check_file(group: str, spec: str | None, path: str | None, what: str) -> None:
    """Raise InvalidInput unless a group has the option `file` and a path, which is of `what`, or neither."""
    if spec == "file" and path is None:
        raise InvalidInput(f"{group}=file needs {group}.path=..., {what}; or give its path as {group}=./my.file")
    if spec != "file" and path is not None:
        raise InvalidInput(f"{group}.path={path} has no meaning with {group}={spec}; leave it out, or {group} itself")


def refuse_stdout(name: str, path: str | None, instead: str) -> None:
    """Raise InvalidInput where an output that cannot be printed is sent to standard output."""
    if path == STDOUT:
        raise InvalidInput(f"{name}=-: {instead}")


@dataclass
class ConfigGroup:
    """One option of a config group. `spec` is the text that the library parses; other fields are its parameters."""

    spec: str = "???"


@dataclass
class PatternGroup(ConfigGroup):
    """A pattern: its Python repr, and the parameters that conf/pattern/*.yaml put into that text.

    Of a list of patterns, `weights` are the layers of each.
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
    """A layout: its name with parameters, such as striped(64). `chunk` is a number of tokens, or "auto"."""

    block: int | None = None
    chunk: Size | None = None


@dataclass
class ScheduleGroup(ConfigGroup):
    """A schedule: its name with parameters, such as ulysses(4, direct)."""

    ranks_per_node: int | None = None
    size: int | None = None
    between: str | None = None


Group = TypeVar("Group")


def with_machine_numbers(group: type[Group]) -> type[Group]:
    """The class with an optional key for each number of a machine, None by default; apply it before `dataclass`."""
    for name, number in MACHINE_NUMBERS.items():
        group.__annotations__[name] = f"{number.python_type.__name__} | None"
        setattr(group, name, None)
    return group


@dataclass
@with_machine_numbers
class MachineGroup(ConfigGroup):
    """A preset or a machine file, and the numbers that replace its own; a number that is None replaces nothing."""

    path: str | None = None
    extrapolate: bool = False

    def made(self, device: str = "cpu", ranks: int | None = None) -> Machine:
        """The machine. The preset `auto` is the default of the device type, and `file` is the machine file at `path`.

        Raises InvalidInput where the given numbers do not fit together, or do not fit the number of ranks.
        """
        check_file("machine", self.spec, self.path, "a file of ringattn calibrate output.path=machine.yaml")
        if self.path is not None:
            machine = read_machine(Path(self.path))
        else:
            machine = get_machine(None if self.spec == "auto" else self.spec, device)
        replaced = {name: value for name in MACHINE_NUMBERS if (value := getattr(self, name)) is not None}
        if "flops" in replaced:
            replaced["kernel"] = None  # measured kernel times would take precedence over the given flops
        machine = machine.changed(**replaced)
        _check_nodes(machine, replaced, ranks)
        if self.extrapolate and machine.kernel is not None:
            machine = replace(machine, kernel=replace(machine.kernel, extrapolate=True))
        return machine


def _check_nodes(machine: Machine, replaced: Mapping[str, object], ranks: int | None) -> None:
    """Raise InvalidInput where numbers of nodes that the user gave do not fit together, or do not fit the ranks."""
    size = machine.ranks_per_node
    if "ranks_per_node" in replaced and ranks is not None and ranks > size and ranks % size:
        raise InvalidInput(
            f"machine.ranks_per_node={size}: {ranks} ranks do not fill nodes of {size} evenly; give a divisor of "
            f"{ranks}, or another number of ranks"
        )
    for name in ("node_latency", "node_bandwidth", "switch", "shared_nic"):
        if replaced.get(name) not in (None, False) and size == 1:
            raise InvalidInput(
                f"machine.{name}={replaced[name]} is for nodes with several ranks, and here every rank is a node by "
                "itself; give machine.ranks_per_node=, the ranks of a node"
            )


@dataclass
class ModelGroup:
    """A model by name, or the Hugging Face config at `path`; without either, `simulate` takes a plan alone."""

    spec: str | None = None
    path: str | None = None


@dataclass
class TransportGroup(ConfigGroup):
    """A transport. `gpu_aware` hands CUDA tensors to MPI; `check` is the option of attention."""

    gpu_aware: bool = False
    check: str | None = None


@dataclass
class InputGroup:
    """The input of `ringattn run`: a text, random numbers, or the tensors of a file."""

    name: str = "text"
    path: str | None = None
    seed: int = 0


@settings_of("simulate", "numerics")
class NumericsGroup:
    """What `simulate mode=numerics` executes.

    mode="sample" executes `rows` query rows (their number, or their positions) on at most `spread` ranks. mode="all"
    executes whole ranks: `count` ranks (None: all) from rank `first` on, about `together` ranks at a time.

    `fault` harms the visit of rank `fault_rank` to the block of rank `fault_owner`. Without `fault_rank`, the fault is
    at the rank of the last sampled row, or at the middle rank; without `fault_owner`, in the block of the rank before.
    The faults "lost" and "scaled" harm the gradients that return to the rank of the first sampled row.
    """

    mode: str
    #: A size, or a list of sizes: OmegaConf has no union of the two.
    rows: Any
    spread: int | None
    first: int
    count: int | None
    together: int
    period: int | None
    fault: str | None
    fault_rank: int | None
    fault_owner: int | None
    threads: int


@dataclass
class OutputGroup:
    """The file or folder that a command writes; None: nothing."""

    path: str | None


@settings_of("run", "output")
class RunOutputGroup(OutputGroup):
    """The tensors that `ringattn run` writes to `path`, and the printed numbers that it writes to `report` as JSON."""

    report: str | None


@settings_of("simulate", "study.execute")
class ExecuteGroup:
    """What the numerics simulator executes of each plan of a study, in fp64.

    `budget` is in seconds at assumed rates, so that every machine executes the same plans; None: nothing is executed.
    """

    budget: float | None
    rows: int
    heads: int
    head_dim: int
    seed: int


@settings_of("simulate", "study")
class StudyGroup:
    """The points of a study: every combination of the values of `axes` with every entry of `together`.

    Keys are keys of `simulate`, or label.NAME, which becomes a column of the tables. `extrapolate` is a Size or None.
    """

    name: str
    axes: dict[str, list[Any]]
    together: list[Any]
    plots: list[str]
    x: str | None
    y: str | None
    execute: ExecuteGroup
    extrapolate: Any
