"""Schemas of the command line, sizes such as 64k, and errors that name the key."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import InvalidInput, did_you_mean
from .groups import (
    Group,
    InputGroup,
    LayoutGroup,
    MachineGroup,
    OutputGroup,
    PatternGroup,
    ScheduleGroup,
    StudyGroup,
    TransportGroup,
)

#: Groups whose value may also be written out, such as pattern="Causal() & Window(4096)".
WRITTEN = ("pattern", "layout", "schedule", "kernel")
#: What a calibration measures: rows and keys of tiles, keys per row of bands, bytes of messages.
ROWS, WIDTHS, MESSAGES = (64, 256, 1024, 4096), (64, 256, 1024), (256, "4k", "64k", "1M", "4M", "16M")
#: Groups whose options take parameters.
PARAMETERS = ("pattern", "layout", "schedule")
#: What `stream` leaves without a meaning: one process computes chunk after chunk, in order, and sends nothing.
RINGS = ("transport", "ranks", "layout", "schedule", "machine", "wire_dtype", "rotate", "timeout", "progress")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def conf_dir() -> Path:
    """The folder of the config groups: inside the package in a wheel, beside it in a checkout."""
    here = Path(__file__).resolve().parent
    beside = here.parent / "conf"
    return beside if (beside / "run.yaml").is_file() else here / "conf"


def parse_size(value: str | int | float, name: str = "size") -> int:
    """A whole number written as 4096, 1_000_000, 64k, 1M, 2G (powers of 1024) or 1e9."""
    text = str(value).strip().replace("_", "").lower()
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)([kmgt]?)", text)
    if match:
        number = (
            float(match[1]) * _UNITS[match[2]] if re.search(r"[.e]", match[1]) else int(match[1]) * _UNITS[match[2]]
        )
        if number == int(number):
            return int(number)
    raise InvalidInput(f"{name}={value}: not a whole number; write 4096, 64k (65,536), 1M (1,048,576) or 1e9")


@dataclass
class Shape:
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
    wire_dtype: str | None = None
    rotate: str = "auto"

    def size(self) -> int:
        return parse_size(self.tokens, "tokens")


@dataclass
class RunConfig(Shape):
    transport: TransportGroup = field(default_factory=TransportGroup)
    kernel: Group = field(default_factory=Group)
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
class PlanConfig(Shape):
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
    repeat: int = 5
    threads: int | None = None
    timeout: float = 600.0


@dataclass
class SimulateConfig(Shape):
    mode: str = "timing"
    backward: bool = False
    slow: Any = None
    slow_links: Any = None
    stalls: Any = None
    passes: int = 1
    tier: str = "auto"
    seed: int = 0
    shard: Any = None
    validate: ValidateGroup = field(default_factory=ValidateGroup)
    study: StudyGroup = field(default_factory=StudyGroup)

    def size(self) -> int:
        return super().size() if self.shard is None else parse_size(self.shard, "shard") * self.ranks


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
    kernel: Group = field(default_factory=Group)
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


def prepare(verb: str, overrides: Sequence[str]) -> list[str]:
    """The overrides as Hydra wants them: written patterns quoted, unknown keys and options refused with a hint."""
    prepared = [part for override in overrides for part in _prepare(verb, override)]
    _check_used(verb, overrides)
    if verb == "run":
        _check_stream(overrides)
    return prepared


def _check_used(verb: str, overrides: Sequence[str]) -> None:
    """Refuse parameters of a pattern, a layout or a schedule that the chosen option does not take."""
    given = dict(override.partition("=")[::2] for override in overrides if "=" in override)
    for key, value in given.items():
        group, _, name = key.partition(".")
        if group not in PARAMETERS or name in ("", "spec") or group not in _names(SCHEMAS[verb]):
            continue
        if group not in given and {"experiment", "study"} & set(given):
            continue  # the experiment or the study chooses
        text = given.get(group) or _default(verb, group)
        chosen = ["custom"] if "(" in text or ":" in text else text.split(",")
        takers = [path.stem for path in sorted((conf_dir() / group).glob("*.yaml")) if _takes(path, name)]
        if not set(chosen) & set(takers):
            raise InvalidInput(
                f"{key}={value} has no meaning with {group}={text}; {group}s that take {name}: {', '.join(takers)}"
            )


def _default(verb: str, group: str) -> str:
    """The option of a group that a verb starts from."""
    text = (conf_dir() / f"{verb}.yaml").read_text(encoding="utf-8")
    found = re.search(rf"^ *- {group}: *(\S+)", text, re.MULTILINE)
    assert found, f"conf/{verb}.yaml names no default of {group}"
    return found[1]


def _takes(path: Path, name: str) -> bool:
    return re.search(rf"^{name}:", path.read_text(encoding="utf-8"), re.MULTILINE) is not None


def _check_stream(overrides: Sequence[str]) -> None:
    """Refuse what is given beside `stream` and cannot be honoured with it, be it the default."""
    given = dict(override.lstrip("+~").partition("=")[::2] for override in overrides)
    stream = given.get("stream", "null")
    for key in given:
        name = re.split(r"[./@]", key)[0]
        if stream != "null" and name in RINGS:
            raise without_meaning(f"{key}={given[key]}", stream)


def without_meaning(option: str, stream: str) -> InvalidInput:
    """The error of an option of rings that is given beside `stream`."""
    return InvalidInput(
        f"{option} has no meaning with stream={stream}: one process computes chunk after chunk and sends nothing to "
        "others; leave it out (chunk= says how many rows a chunk has)"
    )


def _prepare(verb: str, override: str) -> list[str]:
    match = re.fullmatch(r"([~+]{0,2})([\w./@-]+)=(.*)", override, re.DOTALL)
    if match is None or match[2].startswith("hydra"):
        return [override]
    prefix, key, value = match.groups()
    schema = SCHEMAS[verb]
    check_key(verb, schema, key.replace("/", "."))
    if _kind(schema, key) in ("int", "int | None") and not re.search(r"[(\[{$'\"]", value):
        return [f"{prefix}{key}={','.join(_whole(key, part) for part in value.split(','))}"]
    folder = conf_dir() / key
    if prefix or not folder.is_dir() or key not in _names(schema):
        return [override]
    options = sorted(path.stem for path in folder.glob("*.yaml"))
    if key in WRITTEN and ("(" in value or ":" in value):
        return [f"{key}=custom", f"{key}.spec={value!r}"]
    for option in value.split(","):
        if option not in options and option != "null":
            shown = [name for name in options if name != "custom"]
            raise InvalidInput(
                f"{key}={option}: unknown option; {did_you_mean(option, shown)}expected one of {', '.join(shown)}"
            )
    return [override]


def _kind(schema: Any, key: str) -> str:
    """The annotation of a key; nothing of one inside a plain value."""
    first, _, rest = key.partition(".")
    found = _names(schema).get(first)
    if found is None or not rest:
        return "" if found is None else str(found.type)
    return _kind(found.default_factory, rest) if dataclasses.is_dataclass(found.default_factory) else ""


def _whole(key: str, text: str) -> str:
    """A whole number in digits: sizes are understood everywhere."""
    return text if text == "null" or re.fullmatch(r"[+-]?\d+", text) else str(parse_size(text, key))


def check_key(verb: str, schema: type, key: str) -> None:
    """Raise InvalidInput, with a hint, where a verb has no such key."""
    names = _names(schema)
    first, _, rest = key.partition(".")
    if first not in names:
        raise InvalidInput(
            f"unknown key {first!r}; {did_you_mean(first, list(names))}keys of {verb}: {', '.join(names)} "
            f"(ringattn {verb} --cfg job shows their values)"
        )
    inner = names[first].default_factory
    while rest and dataclasses.is_dataclass(inner):
        part, _, rest = rest.partition(".")
        if part not in _names(inner):
            shown = list(_names(inner))
            raise InvalidInput(f"unknown key {key!r}; {did_you_mean(part, shown)}keys of {first}: {', '.join(shown)}")
        first, inner = f"{first}.{part}", _names(inner)[part].default_factory


def _names(schema: Any) -> dict[str, Any]:
    return {f.name: f for f in dataclasses.fields(schema)}
