"""Config groups of the command line: what one choice of each holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ..errors import InvalidInput
from ..machine.file import read_machine
from ..machine.machine import MACHINE_NUMBERS, Machine
from ..machine.presets import get_machine


@dataclass
class ConfigGroup:
    """One choice of a config group; `spec` is what it stands for, the rest are its parameters."""

    spec: str = "???"


@dataclass
class PatternGroup(ConfigGroup):
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
    block: int | None = None
    chunk: Any = None


@dataclass
class ScheduleGroup(ConfigGroup):
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
        if (self.spec == "file") != (self.path is not None):
            raise InvalidInput(
                f"machine={self.spec} and machine.path={self.path}: a file needs both machine=file and its path; make "
                "a machine file with ringattn calibrate output.path=machine.yaml"
            )
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
    for name in ("node_latency", "node_bandwidth", "shared_nic"):
        if replaced.get(name) not in (None, False) and size == 1:
            raise InvalidInput(
                f"machine.{name}={replaced[name]} is for nodes with several ranks, and here every rank is a node by "
                "itself; give machine.ranks_per_node=, the ranks of a node"
            )


@dataclass
class TransportGroup(ConfigGroup):
    gpu_aware: bool = False


@dataclass
class InputGroup:
    name: str = "text"
    path: str | None = None
    seed: int = 0


@dataclass
class NumericsGroup:
    """What `simulate mode=numerics` executes: way="sample" `rows` query rows (a number, or their positions) on at most
    `spread` ranks; way="all" whole ranks, `count` (None: all) from `first` on, about `together` at a time.

    `fault` is done to the visit of `fault_rank` (None: that of the last sampled row, or one in the middle) to the block
    of `fault_owner` (None: the rank before it). "lost" and "scaled" are done to what comes home to the rank of the first sampled row.
    """

    way: str = "sample"
    rows: Any = 16
    spread: int | None = None
    first: int = 0
    count: int | None = None
    together: int = 128
    period: int | None = 4099
    fault: str | None = None
    fault_rank: int | None = None
    fault_owner: int | None = None
    threads: int = 1


@dataclass
class OutputGroup:
    path: str | None = None


@dataclass
class RunOutputGroup(OutputGroup):
    """Beside the tensors of `path`: what is printed, as JSON."""

    report: str | None = None


@dataclass
class WindowGroup:
    """The point, the ranks and the steps that the heat map and the trace of a study show; no point: neither is made."""

    point: int | None = None
    first_rank: int = 0
    ranks: int = 32
    first_step: int = 0
    steps: int = 64


@dataclass
class ExecuteGroup:
    """What of each plan of a study is executed by the numerics simulator, in fp64.

    `budget` are seconds by assumed rates, so that it does not depend on the machine what is executed; None: nothing.
    """

    budget: float | None = None
    rows: int = 16
    heads: int = 1
    head_dim: int = 16
    seed: int = 0


@dataclass
class StudyGroup:
    """Many points of `simulate`: all combinations of the values of `axes`, each with every entry of `together`.

    Keys are those of `simulate`, or label.NAME, which is carried along as a column.
    """

    name: str = "sweep"
    axes: dict[str, Any] = field(default_factory=dict)
    together: list[Any] = field(default_factory=list)
    plots: list[str] = field(default_factory=lambda: ["stack", "efficiency", "memory"])
    x: str | None = None
    y: str | None = None
    window: WindowGroup = field(default_factory=WindowGroup)
    execute: ExecuteGroup = field(default_factory=ExecuteGroup)
    extrapolate: Any = None
    progress: bool = True
