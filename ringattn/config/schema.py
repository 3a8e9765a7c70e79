"""Schemas of the command line, and sizes such as 64k."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from .groups import (
    ConfigGroup,
    InputGroup,
    LayoutGroup,
    MachineGroup,
    NumericsGroup,
    OutputGroup,
    PatternGroup,
    RunOutputGroup,
    ScheduleGroup,
    StudyGroup,
    TransportGroup,
)

#: What a calibration measures: rows and keys of tiles, keys per row of bands, bytes of messages.
ROWS, WIDTHS, MESSAGES = (64, 256, 1024, 4096), (64, 256, 1024), (256, "4k", "64k", "1M", "4M", "16M")
#: The largest number that is understood: what 64 bits hold.
MOST = (1 << 63) - 1
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def conf_dir() -> Path:
    """The folder of the config groups: inside the package in a wheel, beside it in a checkout."""
    here = Path(__file__).resolve().parents[1]
    beside = here.parent / "conf"
    return beside if (beside / "run.yaml").is_file() else here / "conf"


def parse_size(value: str | int | float, name: str = "size") -> int:
    """A whole number written as 4096, 1_000_000, 64k, 1M, 2G (powers of 1024) or 1e9."""
    text = str(value).strip().replace("_", "").lower()
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)([kmgt]?)", text)
    if match and re.fullmatch(
        rf"0*[1-9]\d{{{len(str(MOST))},}}[kmgt]?", text
    ):  # digits that are not worth a conversion
        raise _too_large(value, name)
    if match:
        number = (
            float(match[1]) * _UNITS[match[2]] if re.search(r"[.e]", match[1]) else int(match[1]) * _UNITS[match[2]]
        )
        if number < math.inf and number == int(number):
            if number > MOST:
                raise _too_large(value, name)
            return int(number)
    if re.fullmatch(r"-\d.*", text):
        raise InvalidInput(f"{name}={value}: is negative; write 4096, 64k (65,536), 1M (1,048,576) or 1e9")
    raise InvalidInput(f"{name}={value}: not a whole number; write 4096, 64k (65,536), 1M (1,048,576) or 1e9")


def _too_large(value: str | int | float, name: str) -> InvalidInput:
    shown = str(value) if len(str(value)) <= 40 else f"{str(value)[:40]}..."
    return InvalidInput(f"{name}={shown}: is larger than 2^63 - 1 = {MOST:,}, the largest number that is understood")


@dataclass
class ProblemSizes:
    """What `run`, `plan` and `simulate` share."""

    pattern: PatternGroup = field(default_factory=PatternGroup)
    layout: LayoutGroup = field(default_factory=LayoutGroup)
    schedule: ScheduleGroup = field(default_factory=ScheduleGroup)
    machine: MachineGroup = field(default_factory=MachineGroup)
    output: OutputGroup = field(default_factory=OutputGroup)
    experiment: Any = None
    ranks: int = 2
    tokens: Any = "8k"
    heads: int = 8
    kv_heads: int | None = None
    head_dim: int = 64
    batch: int = 1
    dtype: str = "float32"
    comm_dtype: str | None = None
    rotate: str = "auto"

    def size(self) -> int:
        return parse_size(self.tokens, "tokens")


@dataclass
class RunConfig(ProblemSizes):
    output: RunOutputGroup = field(default_factory=RunOutputGroup)
    transport: TransportGroup = field(default_factory=TransportGroup)
    kernel: ConfigGroup = field(default_factory=ConfigGroup)
    input: InputGroup = field(default_factory=InputGroup)
    stream: str | None = None
    chunk: Any = None
    device: str | None = None
    scale: float | None = None
    backward: bool = False
    deterministic: bool = False
    repeat: int = 3
    sample: int = 8
    threads: int | None = None
    timeout: float = 120.0
    progress: bool | None = None


@dataclass
class PlanConfig(ProblemSizes):
    ascii: bool = False


@dataclass
class ValidateGroup:
    """Validation on several numbers of ranks. Without a machine file, `rows`, `widths` and `messages` are calibrated first.

    `held_out` are rows per rank of the passes that are compared; None: between the calibrated ones.
    """

    ranks: list[int] = field(default_factory=lambda: [2])
    held_out: list[Any] | None = None
    rows: list[Any] = field(default_factory=lambda: list(ROWS))
    widths: list[Any] = field(default_factory=lambda: list(WIDTHS))
    messages: list[Any] = field(default_factory=lambda: list(MESSAGES))
    repeat: int = 7
    threads: int | None = None
    timeout: float = 600.0


@dataclass
class SimulateConfig(ProblemSizes):
    mode: str = "timing"
    dtype: str = "auto"
    backward: bool = False
    slow: Any = None
    slow_links: Any = None
    stalls: Any = None
    passes: int | None = None
    solver: str = "auto"
    seed: int = 0
    shard: Any = None
    validate: ValidateGroup = field(default_factory=ValidateGroup)
    numerics: NumericsGroup = field(default_factory=NumericsGroup)
    study: StudyGroup = field(default_factory=StudyGroup)

    def __post_init__(self) -> None:
        if self.dtype == "auto":
            self.dtype = "float64" if self.mode == "numerics" else "float32"

    def length(self) -> int:
        """The tokens, also where there are none, as in a point of a study that is refused. Raises InvalidInput."""
        return super().size() if self.shard is None else parse_size(self.shard, "shard") * self.ranks

    def size(self) -> int:
        found = self.length()
        if not found and self.ranks:  # without ranks, that is what is wrong
            name = "tokens" if self.shard is None else "shard"
            raise InvalidInput(f"{name}=0: without tokens there is nothing to simulate; try {name}=64k")
        return found


@dataclass
class BenchConfig:
    suite: str = "ring"
    cases: list[str] | None = None
    repeat: int = 5
    output: OutputGroup = field(default_factory=OutputGroup)


@dataclass
class DoctorConfig:
    pass


@dataclass
class CalibrateConfig:
    """Sizes are lists of numbers, or of texts such as 64k."""

    transport: TransportGroup = field(default_factory=TransportGroup)
    kernel: ConfigGroup = field(default_factory=ConfigGroup)
    machine: MachineGroup = field(default_factory=MachineGroup)
    output: OutputGroup = field(default_factory=OutputGroup)
    ranks: int = 2
    device: str = "cpu"
    heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    rows: list[Any] = field(default_factory=lambda: list(ROWS))
    widths: list[Any] = field(default_factory=lambda: list(WIDTHS))
    messages: list[Any] = field(default_factory=lambda: list(MESSAGES))
    repeat: int = 5
    threads: int | None = None
    timeout: float = 600.0


SCHEMAS: dict[str, type] = {
    "run": RunConfig,
    "plan": PlanConfig,
    "simulate": SimulateConfig,
    "bench": BenchConfig,
    "calibrate": CalibrateConfig,
    "doctor": DoctorConfig,
}
