"""The settings of the laboratory's verbs; their defaults are in conf/. Imports no torch."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path
from typing import Any

from ...cli.config.defaults import settings_of
from ...cli.config.groups import (
    PHASES,
    ConfigGroup,
    MachineGroup,
    ModelGroup,
    OutputGroup,
    Size,
    TransportGroup,
    check_choice,
    refuse,
)
from ...cli.config.schema import SimulateConfig, parse_size
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


@settings_of("advise")
class AdviseConfig:
    """The settings of `ringattn advise`; conf/advise.yaml explains each. `prices` are numbers by machine."""

    model: ModelGroup
    machine: MachineGroup
    output: AdviseOutputGroup
    tokens: Size
    gpus: int
    prices: Any
    batch: int | None
    by: str
    dtype: str
    phase: str
    within: float | None
    fp8: Any
    fp8_cache: bool
    lora: int | None
    documents: Any
    tp_overlap: bool

    def check(self) -> None:
        """Raise InvalidInput for a setting that has no effect in this `phase`."""
        check_choice("phase", self.phase, PHASES)
        if self.phase == "training":
            refuse(self, "within fp8_cache", "with phase=training, only with phase=prefill or phase=decode")
        else:
            refuse(self, "by output.page lora documents", f"with phase={self.phase}, only with phase=training")


@settings_of("audit", "output")
class AuditOutputGroup(OutputGroup):
    """What `ringattn audit` writes: a JSON file, and the scripts of failures in a folder."""

    scripts: str | None


@settings_of("audit")
class AuditConfig:
    """The settings of `ringattn audit`; conf/audit.yaml explains each."""

    target: str
    model: ModelGroup
    ranks: int | None
    features: list[str] | None
    patience: float
    known: str | None
    output: AuditOutputGroup

    def check(self) -> None:
        """Raise InvalidInput for a patience that is no time, a file of a model, or a folder that cannot be written."""
        if not 0 < self.patience < inf:
            raise InvalidInput(f"patience={self.patience}: must be a number of seconds > 0")
        if self.model.path is not None:
            raise InvalidInput(f"model.path={self.model.path}: try model=module:function, which makes the model")
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


def read_software(config: AdviseConfig | SimulateConfig) -> Software:
    """How a framework runs a layer, by the keys dtype, fp8, fp8_cache, lora and tp_overlap. Raises InvalidInput."""
    check_choice("fp8", str(config.fp8).lower(), ("false", "true", "blocks"))
    lora = config.lora if config.phase == "training" else None
    fp8 = {"fp8": bool(config.fp8), "fp8_blocks": config.fp8 == "blocks", "fp8_cache": config.fp8_cache}
    return Software(config.dtype, **fp8, lora=lora, hides_exchanges=config.tp_overlap)


def read_documents(config: AdviseConfig | SimulateConfig) -> tuple[int, ...] | Lognormal:
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
