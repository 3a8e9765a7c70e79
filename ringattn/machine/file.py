"""Reads and writes machine files: YAML with the numbers that `ringattn calibrate` measured on a machine.

Imports PyYAML only when a file is read or written, and never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, defstruct

from ..errors import InvalidInput
from ..files import Positive, as_kind, load, writing
from .kernel_times import KernelRates, KernelTimes
from .machine import MACHINE_NUMBERS, TABLES, Machine
from .presets import Fact

#: The value of the key `format`. It changes whenever the keys of the file change.
FORMAT = "ringattn machine 2"


#: The part `values` of a file: a `Fact` for each number, by name; numbers without a default are required.
Values = defstruct(
    "Values",
    [
        (one.name, Fact) if one.default is MISSING else (one.name, Fact | None, None)
        for one in fields(Machine)
        if one.name in MACHINE_NUMBERS
    ],
    forbid_unknown_fields=True,
)


class Residuals(Struct):
    """The `residuals` entry of a machine file: pairs (modelled seconds, measured / modelled seconds)."""

    values: tuple[tuple[Positive, Positive], ...]


class MachineFile(Struct, forbid_unknown_fields=True):
    """The entries of a machine file; each table of measured numbers also has the entries `unit` and `source`."""

    format: Literal["ringattn machine 2"]
    values: Values  # type: ignore[valid-type]
    flops_dtype: str | None = None
    kernel: KernelTimes | None = None
    kernel_rates: KernelRates | None = None
    residuals: Residuals | None = None
    made: dict[str, Any] = {}
    samples: Any = None
    fits: Any = None


def write_machine(
    path: Path,
    machine: Machine,
    *,
    made: Mapping[str, object] | None = None,
    samples: Mapping[str, object] | None = None,
    fits: Mapping[str, object] | None = None,
) -> None:
    """Write a machine to a YAML file, atomically: the file is complete or unchanged.

    `made` says where, when and how the machine was calibrated; `samples` are the raw measurements, and `fits` the lines
    fitted to them.
    """
    yaml = import_module("yaml")  # PyYAML has no type annotations
    values = {
        name: {"value": value, "unit": number.unit, "source": machine.source(name)}
        for name, number in MACHINE_NUMBERS.items()
        if (value := getattr(machine, name)) is not None
    }
    record: dict[str, object] = {"format": FORMAT, "made": made or {}, "values": values}
    if machine.flops_dtype is not None:
        record["flops_dtype"] = machine.flops_dtype
    if machine.kernel is not None:
        unit = "useful flop/s, after an overhead of s per call (forward, backward)"
        record["kernel"] = {"unit": unit, "source": "measured", **asdict(machine.kernel)}
    if machine.kernel_rates is not None:
        record["kernel_rates"] = {"source": machine.source("kernel_rates"), **asdict(machine.kernel_rates)}
    if machine.residuals:
        unit, pairs = "[modelled s, measured s / modelled s]", [*map(list, machine.residuals)]
        record["residuals"] = {"unit": unit, "source": "measured", "values": pairs}
    record.update({key: part for key, part in (("samples", samples), ("fits", fits)) if part is not None})
    with writing(path) as temporary:
        temporary.write_text(yaml.safe_dump(record, sort_keys=False, allow_unicode=True), encoding="utf-8")


def read_machine(path: Path) -> Machine:
    """Read a `Machine` from a machine file.

    Raises InvalidInput, naming the file and the place in it, if the file cannot be used.
    """
    advice = "make a machine file with ringattn calibrate output.path=machine.yaml"
    try:
        content = load(path, dict[str, Any], "machine.path")
        if isinstance(content.get("values"), dict):
            content["values"].pop("jitter", None)  # of earlier calibrations; nothing reads it
        record = as_kind(content, MachineFile, str(path), (*MachineFile.__struct_fields__, *MACHINE_NUMBERS))
        facts = {name: fact for name in MACHINE_NUMBERS if (fact := getattr(record.values, name)) is not None}
        for name, fact in facts.items():
            if fact.unit != (unit := MACHINE_NUMBERS[name].unit):
                raise InvalidInput(f"{path}: values: {name} is in {fact.unit!r}; convert the number to {unit!r}")
        sources = [(name, fact.source) for name, fact in facts.items() if fact.source != "assumed"]
        sources += [(name, content[name].get("source")) for name in TABLES if content.get(name)]
        return Machine(
            **{name: fact.value for name, fact in facts.items()},
            kernel=record.kernel,
            kernel_rates=record.kernel_rates,
            residuals=() if record.residuals is None else record.residuals.values,
            sources=tuple(sources),
            flops_dtype=record.flops_dtype,
        )
    except InvalidInput as error:
        named = "" if str(path) in str(error) else f"{path}: "
        raise InvalidInput(f"{named}{error}; {advice}") from None
