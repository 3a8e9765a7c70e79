"""The settings of the laboratory's verbs; their defaults are in conf/. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from ...cli.config.defaults import settings_of
from ...cli.config.groups import (
    PHASES,
    ConfigGroup,
    LayoutGroup,
    MachineGroup,
    OutputGroup,
    ScheduleGroup,
    Size,
    TransportGroup,
    check_choice,
    refuse,
)
from ...cli.config.schema import parse_size
from ...errors import InvalidInput
from ...files import make_folder
from ...machine.machine import MACHINE_NUMBERS
from ..models.packing import Lognormal
from ..models.parallel import Software

#: The largest deviation of the logarithm of lengths: half of them are then within 1/15 to 15 times the median.
MOST_SIGMA = 4


@settings_of("advise", "output")
class AdviseOutputGroup(OutputGroup):
    """The JSON file that `ringattn advise` writes to `path`, and the HTML page that it writes to `page`."""

    page: str | None


@dataclass
class ModelSettings:
    """The settings shared by `estimate` and `advise`."""

    model: str
    machine: MachineGroup
    tokens: Size
    phase: str
    dtype: str
    fp8: Any
    fp8_cache: bool
    lora: int | None
    documents: Any
    tp_overlap: bool


@settings_of("advise")
class AdviseConfig(ModelSettings):
    """The settings of `ringattn advise`; conf/advise.yaml explains each. `prices` are numbers by machine."""

    output: AdviseOutputGroup
    gpus: int
    prices: Any
    batch: int | None
    by: str
    within: float | None

    def check(self) -> None:
        """Raise InvalidInput for a setting that has no effect in this `phase`."""
        check_choice("phase", self.phase, PHASES)
        if self.phase == "training":
            refuse(self, "within fp8_cache", "with phase=training, only with phase=prefill or phase=decode")
        else:
            refuse(self, "by output.page lora documents", f"with phase={self.phase}, only with phase=training")


@settings_of("estimate")
class EstimateConfig(ModelSettings):
    """The settings of `ringattn estimate`; conf/estimate.yaml explains each."""

    layout: LayoutGroup
    schedule: ScheduleGroup
    output: OutputGroup
    batch: int
    cp: int
    dp: int
    tp: int
    ep: int
    pp: int
    micro_batches: int | None
    interleaved: int
    checkpointing: str
    sharding: str
    chunk: Size | None
    merge: str
    windows: str

    def check(self) -> None:
        """Raise InvalidInput for a setting that has no effect in this `phase`."""
        check_choice("phase", self.phase, PHASES)
        if self.phase != "training":
            training = "checkpointing sharding pp micro_batches interleaved lora documents"
            refuse(self, training, f"with phase={self.phase}")
        else:
            refuse(self, "fp8_cache", "with phase=training, which keeps no keys")
        if self.phase != "prefill":
            refuse(self, "chunk", f"with phase={self.phase}, only with phase=prefill")
        if self.phase != "decode":
            refuse(self, "merge windows", f"with phase={self.phase}, only with phase=decode")

    def length(self) -> int:
        """The number of tokens of each sequence. Raises InvalidInput."""
        return parse_size(self.tokens, "tokens")


@settings_of("study", "execute")
class ExecuteGroup:
    """The settings of a study for executing its plans with the numerics simulator, in fp64.

    `budget` limits the execution time in seconds; with None, no plan is executed. The time is estimated from fixed
    rates, so that every machine executes the same plans.
    """

    budget: float | None
    rows: int
    heads: int
    head_dim: int
    seed: int


@settings_of("study")
class StudyConfig:
    """The settings of `ringattn study`, which simulates many points; conf/study.yaml explains each.

    `axes` gives values for keys of the verb `of`, and `fixed` one value for each of others, as on the command line. The
    points are all combinations of one value per axis, each combined with every set of settings in `together`.
    `extrapolate` is a number of tokens (a Size) to extrapolate to, or None.
    """

    of: str
    name: str
    axes: dict[str, list[Any]]
    fixed: dict[str, Any]
    together: list[Any]
    plots: list[str] | None
    x: str | None
    y: str | None
    execute: ExecuteGroup
    extrapolate: Any
    output: OutputGroup

    def check(self) -> None:
        """Raise InvalidInput for a study without axes, or a setting that has no effect with the verb `of`."""
        check_choice("of", self.of, ("simulate", "estimate"))
        if not self.axes and not self.together:
            raise InvalidInput(
                "study: no key has several values; write them with commas, such as ranks=8,64,512, or give a NAME"
            )
        if self.of == "estimate":
            refuse(self, "execute extrapolate", "with of=estimate, whose points are no plans")


@settings_of("score")
class ScoreConfig:
    """The settings of `ringattn score`; conf/score.yaml explains them."""

    output: OutputGroup


@settings_of("audit", "output")
class AuditOutputGroup(OutputGroup):
    """What `ringattn audit` writes: a JSON file, and the scripts of failures in a folder."""

    scripts: str | None


@settings_of("audit")
class AuditConfig:
    """The settings of `ringattn audit`; conf/audit.yaml explains each."""

    target: str
    model: str | None
    ranks: int | None
    features: list[str] | None
    patience: float
    known: str | None
    output: AuditOutputGroup

    def check(self) -> None:
        """Raise InvalidInput for a patience that is no time, or a folder that cannot be written."""
        if not 0 < self.patience < inf:
            raise InvalidInput(f"patience={self.patience}: must be a number of seconds > 0")
        if self.output.scripts is not None:
            make_folder(Path(self.output.scripts))


@settings_of("play")
class PlayConfig:
    """The settings of `ringattn play`; conf/play.yaml explains them."""

    port: int


@settings_of("report")
class ReportConfig:
    """The settings of `ringattn report`; conf/report.yaml explains each."""

    suite: str
    cases: list[str] | None
    repeat: int
    output: OutputGroup
    memory: Size | None
    results: str | None
    compare: list[str] | None
    noise: float

    def check(self) -> None:
        """Raise InvalidInput if settings for measuring are given with `results`, which are already measured."""
        if self.compare is not None:
            refuse(self, "results", "beside compare=, which reads two results")
        if self.compare is not None or self.results is not None:
            refuse(self, "suite cases repeat memory", "beside stored results, which say what was measured")


@settings_of("calibrate")
class CalibrateConfig:
    """The settings of `ringattn calibrate`; conf/calibrate.yaml explains each."""

    transport: TransportGroup
    kernel: ConfigGroup
    machine: MachineGroup
    output: OutputGroup
    ranks: int
    device: str
    heads: int
    head_dim: int
    dtype: str
    rows: list[Size]
    widths: list[Size]
    messages: list[Size]
    repeat: int
    seconds: float
    threads: int | None
    timeout: float

    def check(self) -> None:
        """Raise InvalidInput for a setting that has no effect, or for a number that the calibration measures."""
        by = ("every",) if self.transport.spec == "none" else ("every", "ranks")
        measured = [f"machine.{name}" for name, number in MACHINE_NUMBERS.items() if number.measured_by in by]
        refuse(self, " ".join([*measured, "machine.extrapolate"]), "here: a calibration measures it")
        if self.transport.spec == "none":
            refuse(self, "ranks messages timeout", "with transport=none, which is one process alone")


def read_software(config: ModelSettings) -> Software:
    """How a framework runs a layer, by the keys dtype, fp8, fp8_cache, lora and tp_overlap. Raises InvalidInput."""
    check_choice("fp8", str(config.fp8).lower(), ("false", "true", "blocks"))
    lora = config.lora if config.phase == "training" else None
    fp8 = {"fp8": bool(config.fp8), "fp8_blocks": config.fp8 == "blocks", "fp8_cache": config.fp8_cache}
    return Software(config.dtype, **fp8, lora=lora, hides_exchanges=config.tp_overlap)


def read_documents(config: ModelSettings) -> tuple[int, ...] | Lognormal:
    """The tokens of each document that is packed in a sequence, or their distribution. Raises InvalidInput."""
    given = [] if config.documents is None else config.documents
    if drawn := re.fullmatch(r"lognormal\((\w+), *([\d.]+)(?:, *(\d+))?\)", str(given)):
        median, sigma = parse_size(drawn[1], "documents"), float(drawn[2])
        if median and 0 < sigma <= MOST_SIGMA:
            return Lognormal(median, sigma, int(drawn[3] or 0))
    if not isinstance(given, list):
        raise InvalidInput(
            f"documents={given}: expected the tokens of each, or a median, a deviation of the logarithm up to "
            f"{MOST_SIGMA} and a seed; try 'documents=[3000, 1096]' or 'documents=lognormal(2000, 1.2, 0)'"
        )
    found = tuple(parse_size(one, "documents") for one in given)
    if given and not min(found):
        raise InvalidInput(f"documents={given}: a document has at least 1 token; leave out empty ones")
    return found
