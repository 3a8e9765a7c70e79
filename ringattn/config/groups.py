"""Config groups of the command line: the dataclasses that hold one option of each group."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from ..machine.file import UNITS, read_machine
from ..machine.machine import Machine
from ..machine.presets import get_machine

#: A whole number as people write it: 4096, 1e9 or 64k. `schema.parse_size` reads it.
Size = int | float | str


@dataclass
class ConfigGroup:
    """One option of a config group. `spec` is the text that the library parses; other fields are its parameters."""

    spec: str = "???"


@dataclass
class PatternGroup(ConfigGroup):
    """A pattern: its Python repr, and the parameters that conf/pattern/*.yaml put into that text."""

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


@dataclass
class MachineGroup(ConfigGroup):
    """A preset, or a file, and the values that are to replace its own."""

    path: str | None = None
    extrapolate: bool = False
    flops: float | None = None
    latency: float | None = None
    bandwidth: float | None = None
    ranks_per_node: int | None = None
    node_latency: float | None = None
    node_bandwidth: float | None = None
    shared_nic: bool | None = None
    merge: float | None = None
    buffers: int | None = None
    gamma: float | None = None
    jitter: float | None = None
    call: float | None = None
    memory: float | None = None
    watts: float | None = None
    price: float | None = None
    mtbf: float | None = None
    checkpoint: float | None = None
    restart: float | None = None

    def made(self, device: str = "cpu", ranks: int | None = None) -> Machine:
        """The machine; the preset `auto` is that of the device type, `file` what `path` holds.

        Raises InvalidInput where nodes that are asked for do not fit each other, or `ranks`.
        """
        if (self.spec == "file") != (self.path is not None):
            raise InvalidInput(
                f"machine={self.spec} and machine.path={self.path}: a file needs both machine=file and its path; make one "
                "with ringattn calibrate output.path=machine.yaml"
            )
        if self.path is not None:
            machine = read_machine(Path(self.path))
        else:
            machine = get_machine(None if self.spec == "auto" else self.spec, device)
        given = {name: value for name in UNITS if (value := getattr(self, name)) is not None}
        if "flops" in given:
            given["kernel"] = None  # what was measured of the kernel is not to be used
        machine = machine.changed(**given)
        _check_nodes(machine, given, ranks)
        if self.extrapolate and machine.kernel is not None:
            machine = replace(machine, kernel=replace(machine.kernel, extrapolate=True))
        return machine


def _check_nodes(machine: Machine, given: dict[str, Any], ranks: int | None) -> None:
    ranks_per_node = machine.ranks_per_node
    if "ranks_per_node" in given and ranks is not None and ranks > ranks_per_node and ranks % ranks_per_node:
        raise InvalidInput(
            f"machine.ranks_per_node={ranks_per_node}: {ranks} ranks do not fill nodes of {ranks_per_node} evenly; give a divisor of {ranks}, or another "
            "number of ranks"
        )
    for name in ("node_latency", "node_bandwidth", "shared_nic"):
        if given.get(name) not in (None, False) and ranks_per_node == 1:
            raise InvalidInput(
                f"machine.{name}={given[name]} is of nodes with several ranks, and here every rank is a node by itself; "
                "give machine.ranks_per_node=, the ranks of a node"
            )


@dataclass
class TransportGroup(ConfigGroup):
    """A transport. `gpu_aware` hands CUDA tensors to MPI."""

    gpu_aware: bool = False


@dataclass
class InputGroup:
    """The input of `ringattn run`: a text, random numbers, or the tensors of a file."""

    name: str = "text"
    path: str | None = None
    seed: int = 0


@dataclass
class NumericsGroup:
    """What `simulate mode=numerics` executes.

    way="sample" executes `rows` query rows (their number, or their positions) on at most `spread` ranks. way="all"
    executes whole ranks: `count` ranks (None: all) from rank `first` on, about `together` ranks at a time.

    `fault` harms the visit of rank `fault_rank` to the block of rank `fault_owner`. Without `fault_rank`, the fault is
    at the rank of the last sampled row, or at the middle rank; without `fault_owner`, in the block of the rank before.
    The faults "lost" and "scaled" harm the gradients that return to the rank of the first sampled row.
    """

    way: str = "sample"
    #: A size, or a list of sizes: OmegaConf has no union of the two.
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
    """The file or folder that a command writes; None: nothing, or the default of the verb."""

    path: str | None = None


@dataclass
class RunOutputGroup(OutputGroup):
    """The tensors that `ringattn run` writes to `path`, and the printed numbers that it writes to `report` as JSON."""

    report: str | None = None


@dataclass
class WindowGroup:
    """The point, ranks and steps that the heat map and the trace of a study show. Without a point, neither is made."""

    point: int | None = None
    first_rank: int = 0
    ranks: int = 32
    first_step: int = 0
    steps: int = 64


@dataclass
class ExecuteGroup:
    """What the numerics simulator executes of each plan of a study, in fp64.

    `budget` is in seconds at assumed rates, so that every machine executes the same plans; None: nothing is executed.
    """

    budget: float | None = None
    rows: int = 16
    heads: int = 1
    head_dim: int = 16
    seed: int = 0


@dataclass
class StudyGroup:
    """The points of a study: every combination of the values of `axes` with every entry of `together`.

    Keys are keys of `simulate`, or label.NAME, which becomes a column of the tables. `extrapolate` is a Size or None.
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
