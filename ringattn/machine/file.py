"""Machine files: what `ringattn calibrate` measured on a machine, and the Machine that a file describes. No torch."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from ..errors import InvalidInput, did_you_mean
from ..files import check_readable, writing
from .kernel_times import KernelTimes, TimeGrid
from .machine import Machine

#: The first key of a machine file; another number is another arrangement of the keys.
FORMAT = "ringattn machine 1"
#: Units of the values that a file may hold.
UNITS = {
    "flops": "flop/s", "latency": "s", "bandwidth": "bytes/s", "ranks_per_node": "ranks per node", "node_latency": "s",
    "node_bandwidth": "bytes/s", "shared_nic": "true or false", "merge": "bytes/s", "buffers": "receive slots",
    "gamma": "part of a message's time", "jitter": "standard deviation / mean", "call": "s", "memory": "bytes", "watts": "W",
    "price": "currency / h", "mtbf": "s", "checkpoint": "bytes/s", "restart": "s",
}  # fmt: skip
#: What a file is bounded to: a calibration writes some 100 kB, and 5 levels.
MOST_BYTES, MOST_DEEP = 1 << 24, 32
REQUIRED = ("flops", "latency", "bandwidth")
#: Keys that a file must have, and those it may.
NEEDED, ALLOWED = ("format", "values"), ("made", "flops_dtype", "kernel", "residuals", "samples", "fits")


def values_of(machine: Machine) -> dict[str, Any]:
    """The part of a file that holds a machine's numbers, each with its unit and source."""
    found = {}
    for name, unit in UNITS.items():
        value = getattr(machine, name)
        if value is not None:
            found[name] = {"value": value, "unit": unit, "source": machine.source(name)}
    return found


def kernel_of(times: KernelTimes) -> dict[str, Any]:
    """The part of a file that holds kernel times."""
    return {
        "unit": "useful flop/s, after an overhead of s per call (forward, backward)",
        "source": "measured",
        "head_dim": times.head_dim,
        "dtype": times.dtype,
        "heads": times.heads,
        "overhead": list(times.overhead),
        "grids": [
            {
                "shape": grid.shape,
                "backward": grid.backward,
                "rows": list(grid.rows),
                "keys": list(grid.keys),
                "rates": [list(line) for line in grid.rates],
            }
            for grid in times.grids
        ],
    }


def write_machine(path: Path, machine: Machine, **more: Any) -> None:
    """Write a machine as YAML, whole or not at all; `more` are further parts of the file, such as made and samples."""
    from omegaconf import OmegaConf

    record = {"format": FORMAT, "made": more.pop("made", {}), "values": values_of(machine)}
    if machine.flops_dtype is not None:
        record["flops_dtype"] = machine.flops_dtype
    if machine.kernel is not None:
        record["kernel"] = kernel_of(machine.kernel)
    if machine.residuals:
        record["residuals"] = {
            "unit": "measured s / modelled s", "source": "measured", "values": list(machine.residuals)
        }  # fmt: skip
    with writing(path) as temporary:
        OmegaConf.save(OmegaConf.create({**record, **more}), temporary)


def read_record(path: Path) -> dict[str, Any]:
    """A machine file as it stands. Raises InvalidInput where it is none."""
    try:
        check_readable(path, "machine.path")
        found = _load(path)
    except InvalidInput as error:
        raise InvalidInput(f"{error}; make one with ringattn calibrate output.path=machine.yaml") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InvalidInput(
            f"machine.path={path}: is no machine file (format: {FORMAT}); make one with ringattn calibrate"
        )
    return {str(key): value for key, value in found.items()}


def _load(path: Path) -> Any:
    """What a YAML file holds: numbers, texts, lists and mappings, in a time that grows as the file does. Raises InvalidInput."""
    yaml: Any = import_module("yaml")  # PyYAML, which has no types
    parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same in C, where PyYAML was built with it

    class Loader(parser):  # type: ignore[misc]
        """Also takes 1e9 as a number, leaves dates as texts, and refuses a key that a mapping has twice."""

        yaml_implicit_resolvers: ClassVar[Any] = {
            first: [(tag, known) for tag, known in resolvers if not tag.endswith(":timestamp")]
            for first, resolvers in parser.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if len({*keys}) < len(keys):
                raise yaml.constructor.ConstructorError(None, None, "a key is there twice", node.start_mark)
            made: dict[Any, Any] = super().construct_mapping(node, deep)
            return made

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"]
    )
    if path.stat().st_size > MOST_BYTES:
        raise InvalidInput(f"machine.path={path}: has over {MOST_BYTES:,} bytes, which no machine file has")
    try:
        text, depth = path.read_text(encoding="utf-8"), 0
        for event in yaml.parse(
            text, Loader=parser
        ):  # before anything is built: an alias can stand for far more than it is long
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > MOST_DEEP:
                what = (
                    f"is nested more than {MOST_DEEP} deep" if depth > MOST_DEEP else f"has an alias, *{event.anchor}"
                )
                raise InvalidInput(f"machine.path={path}: {what}, as no machine file is")
        return yaml.load(text, Loader=Loader)
    except OSError as error:
        raise InvalidInput(f"machine.path={path}: cannot be read ({error.strerror})") from error
    except InvalidInput:
        raise
    except (
        yaml.YAMLError,
        ValueError,
        TypeError,
        OverflowError,
    ) as error:  # the latter ones of a text with an explicit tag
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InvalidInput(f"machine.path={path}: is no YAML ({problem})") from error


def read_machine(path: Path) -> Machine:
    """The machine that a file describes. Raises InvalidInput, naming the file and the key, where it cannot be used."""
    record = read_record(path)
    for key in record:
        if key not in (*NEEDED, *ALLOWED):
            known = (*NEEDED, *ALLOWED)
            raise InvalidInput(f"{path}: unknown key {key!r}; {did_you_mean(key, known)}expected {', '.join(known)}")
    try:
        return _machine(record)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise InvalidInput(
            f"{path}: {type(error).__name__} {error}: a part is missing or of another type; make it again with ringattn "
            "calibrate"
        ) from error


def _machine(record: dict[str, Any]) -> Machine:
    values, sources = {}, []
    for name, entry in record["values"].items():
        if name not in UNITS:
            raise InvalidInput(
                f"values: unknown number {name!r}; {did_you_mean(name, UNITS)}expected {', '.join(UNITS)}"
            )
        if entry["unit"] != UNITS[name]:
            raise InvalidInput(f"values: {name} is in {entry['unit']!r}, expected {UNITS[name]!r}")
        values[name] = entry["value"]
        if entry["source"] != "assumed":
            sources.append((name, entry["source"]))
    missing = [name for name in REQUIRED if name not in values]
    if missing:
        raise InvalidInput(f"values: {', '.join(missing)} missing; every machine has {', '.join(REQUIRED)}")
    kernel = _kernel(record["kernel"]) if "kernel" in record else None
    if kernel is not None:
        sources.append(("kernel", record["kernel"]["source"]))
    residuals = tuple(float(x) for x in record["residuals"]["values"]) if "residuals" in record else ()
    if residuals:
        sources.append(("residuals", record["residuals"]["source"]))
    dtype = record.get("flops_dtype")
    return Machine(**values, kernel=kernel, residuals=residuals, sources=tuple(sources), flops_dtype=dtype)


def _kernel(part: dict[str, Any]) -> KernelTimes:
    forward, backward = part["overhead"]
    grids = tuple(
        TimeGrid(
            grid["shape"],
            grid["backward"],
            tuple(grid["rows"]),
            tuple(grid["keys"]),
            tuple(tuple(float(rate) for rate in line) for line in grid["rates"]),
        )
        for grid in part["grids"]
    )
    overhead = (float(forward), float(backward))
    return KernelTimes(part["head_dim"], part["dtype"], overhead, grids, heads=part.get("heads"))
