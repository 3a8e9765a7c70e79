"""Config groups of the command line: what one choice of each holds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from ..machine.file import UNITS, read_machine
from ..machine.machine import Machine
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
