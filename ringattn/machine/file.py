"""Machine files: YAML with what `ringattn calibrate` measured on a machine, and the `Machine` that a file describes.

Loads PyYAML and OmegaConf only when a file is read or written, and never torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from ..errors import InvalidInput
from ..files import check_readable, writing
from ..text import did_you_mean
from .kernel_times import KernelRates, KernelTimes, TimeGrid
from .machine import MACHINE_NUMBERS, Machine

#: The value of the key `format`. A file with another arrangement of keys has another value.
FORMAT = "ringattn machine 2"
#: Keys that a file must have, and keys that it may have.
REQUIRED_KEYS, OPTIONAL_KEYS = (
    ("format", "values"),
    ("made", "flops_dtype", "kernel", "kernel_rates", "residuals", "samples", "fits"),
)
#: Limits of a file in bytes and in levels of nesting. A calibration writes about 100 kB and 5 levels.
MOST_BYTES, MOST_LEVELS = 1 << 24, 32
#: Numbers without a default, which every file must have.
REQUIRED_NUMBERS = tuple(f.name for f in fields(Machine) if f.name in MACHINE_NUMBERS and f.default is MISSING)


def write_machine(
    path: Path,
    machine: Machine,
    *,
    made: Mapping[str, object] | None = None,
    samples: Mapping[str, object] | None = None,
    fits: Mapping[str, object] | None = None,
) -> None:
    """Write a machine as YAML; the file is there whole or not at all.

    `made` says where, when and with what the machine was calibrated; `samples` are the raw measurements, and `fits` the
    lines that were fitted to them.
    """
    from omegaconf import OmegaConf

    record: dict[str, object] = {"format": FORMAT, "made": made or {}, "values": _values_part(machine)}
    if machine.flops_dtype is not None:
        record["flops_dtype"] = machine.flops_dtype
    if machine.kernel is not None:
        record["kernel"] = _kernel_part(machine.kernel)
    if machine.kernel_rates is not None:
        record["kernel_rates"] = {"source": machine.source("kernel_rates"), **asdict(machine.kernel_rates)}
    if machine.residuals:
        values = [list(pair) for pair in machine.residuals]
        record["residuals"] = {"unit": "[modelled s, measured s / modelled s]", "source": "measured", "values": values}
    record.update({key: part for key, part in (("samples", samples), ("fits", fits)) if part is not None})
    with writing(path) as temporary:
        OmegaConf.save(OmegaConf.create(record), temporary)


def _values_part(machine: Machine) -> dict[str, dict[str, object]]:
    """The part `values` of a file: each number of the machine that is not None, with unit and source."""
    return {
        name: {"value": value, "unit": number.unit, "source": machine.source(name)}
        for name, number in MACHINE_NUMBERS.items()
        if (value := getattr(machine, name)) is not None
    }


def _kernel_part(times: KernelTimes) -> dict[str, object]:
    """The part `kernel` of a file."""
    return {
        "unit": "useful flop/s, after an overhead of s per call (forward, backward)",
        "source": "measured",
        "head_dim": times.head_dim,
        "dtype": times.dtype,
        "heads": times.heads,
        "overhead": list(times.overhead),
        "grids": [asdict(grid) for grid in times.grids],
    }


def read_machine(path: Path) -> Machine:
    """The machine that a file describes. Raises InvalidInput, with file and key, where the file cannot be used."""
    record = read_record(path)
    allowed_keys = (*REQUIRED_KEYS, *OPTIONAL_KEYS)
    for key in record:
        if key not in allowed_keys:
            hint = did_you_mean(key, allowed_keys)
            raise InvalidInput(f"{path}: unknown key {key!r}; {hint}expected {', '.join(allowed_keys)}")
    try:
        return _build_machine(record)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise InvalidInput(
            f"{path}: {type(error).__name__} {error}: a part is missing or has another type than expected; make the "
            "file again with ringattn calibrate"
        ) from error


def read_record(path: Path) -> dict[str, Any]:
    """The content of a machine file, by key. Raises InvalidInput where the file is not a machine file."""
    try:
        check_readable(path, "machine.path")
        content = _load_yaml(path)
    except InvalidInput as error:
        raise InvalidInput(f"{error}; make a machine file with ringattn calibrate output.path=machine.yaml") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidInput(
            f"machine.path={path}: is not a machine file, as it lacks the line 'format: {FORMAT}'; make a machine file "
            "with ringattn calibrate output.path=machine.yaml"
        )
    return {str(key): value for key, value in content.items()}


def _load_yaml(path: Path) -> object:
    """The numbers, texts, lists and mappings of a YAML file, read in time linear in its size. Raises InvalidInput."""
    yaml: Any = import_module("yaml")  # PyYAML has no type annotations
    if path.stat().st_size > MOST_BYTES:
        raise InvalidInput(f"machine.path={path}: has more than {MOST_BYTES:,} bytes, too many for a machine file")
    try:
        text = path.read_text(encoding="utf-8")
        # Check the structure before building anything: an alias can stand for far more than its own length.
        _check_structure(yaml, text, path)
        return yaml.load(text, Loader=_loader(yaml))
    except OSError as error:
        raise InvalidInput(f"machine.path={path}: cannot be read ({error.strerror})") from error
    except InvalidInput:
        raise
    # A text with an explicit tag can raise the last three.
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InvalidInput(f"machine.path={path}: is not valid YAML ({problem})") from error


def _parser(yaml: Any) -> Any:
    """The safe loader of PyYAML, in C where PyYAML was built with it."""
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _check_structure(yaml: Any, text: str, path: Path) -> None:
    """Raise InvalidInput where a YAML text has an alias or is nested too deep."""
    level = 0
    for event in yaml.parse(text, Loader=_parser(yaml)):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > MOST_LEVELS:
            raise InvalidInput(f"machine.path={path}: is nested more than {MOST_LEVELS} deep, unlike any machine file")
        if isinstance(event, yaml.AliasEvent):
            raise InvalidInput(f"machine.path={path}: has an alias, *{event.anchor}, unlike any machine file")


def _loader(yaml: Any) -> Any:
    """A loader that reads 1e9 as a number, leaves dates as texts, and refuses a key that a mapping has twice."""
    parser: Any = _parser(yaml)

    class Loader(parser):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar[Any] = {
            first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
            for first, resolvers in parser.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if len({*keys}) < len(keys):
                raise yaml.constructor.ConstructorError(None, None, "a key is there twice", node.start_mark)
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    exponent_number = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent_number, [*"-+0123456789"])
    return Loader


def _build_machine(record: dict[str, Any]) -> Machine:
    """The machine of a file's content. Raises InvalidInput, or KeyError, TypeError and the like for broken parts."""
    values: dict[str, Any] = {}
    sources: list[tuple[str, str]] = []
    for name, entry in record["values"].items():
        if name not in MACHINE_NUMBERS:
            hint = did_you_mean(name, MACHINE_NUMBERS)
            raise InvalidInput(f"values: unknown number {name!r}; {hint}expected {', '.join(MACHINE_NUMBERS)}")
        unit = MACHINE_NUMBERS[name].unit
        if entry["unit"] != unit:
            raise InvalidInput(f"values: {name} is in {entry['unit']!r}; convert the number to {unit!r}")
        values[name] = entry["value"]
        if entry["source"] != "assumed":
            sources.append((name, entry["source"]))
    missing = [name for name in REQUIRED_NUMBERS if name not in values]
    if missing:
        raise InvalidInput(f"values: {', '.join(missing)} missing; every machine has {', '.join(REQUIRED_NUMBERS)}")
    kernel = _build_kernel_times(record["kernel"]) if "kernel" in record else None
    if kernel is not None:
        sources.append(("kernel", record["kernel"]["source"]))
    rates = dict(record["kernel_rates"]) if "kernel_rates" in record else None
    if rates is not None:
        sources.append(("kernel_rates", rates.pop("source")))
    pairs = record["residuals"]["values"] if "residuals" in record else ()
    residuals = tuple((float(modelled), float(ratio)) for modelled, ratio in pairs)
    if residuals:
        sources.append(("residuals", record["residuals"]["source"]))
    dtype = record.get("flops_dtype")
    return Machine(
        **values,
        kernel=kernel,
        kernel_rates=None if rates is None else KernelRates(**rates),
        residuals=residuals,
        sources=tuple(sources),
        flops_dtype=dtype,
    )


def _build_kernel_times(part: dict[str, Any]) -> KernelTimes:
    """The kernel times of the part `kernel` of a file."""
    forward, backward = part["overhead"]
    grids = tuple(
        TimeGrid(
            grid["shape"],
            grid["backward"],
            tuple(grid["rows"]),
            tuple(grid["keys"]),
            tuple(tuple(float(rate) for rate in rates_of_row) for rates_of_row in grid["rates"]),
            None if grid.get("ragged") is None else tuple(map(float, grid["ragged"])),
        )
        for grid in part["grids"]
    )
    overhead = (float(forward), float(backward))
    return KernelTimes(part["head_dim"], part["dtype"], overhead, grids, heads=part.get("heads"))
