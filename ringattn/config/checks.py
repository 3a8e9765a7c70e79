"""The modes of `ringattn simulate`, and which settings have a meaning in each, and beside what."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import reduce
from typing import Any

from ..errors import InvalidInput
from ..machine.machine import MACHINE_NUMBERS
from .folders import ConfigFolders
from .groups import MachineGroup

#: What only timing gives a meaning to, and what each mode of `simulate` leaves without one.
_TIMED = ("slow", "slow_links", "stalls", "passes", "solver")
MODES: dict[str, tuple[str, ...]] = {
    "timing": ("validate", "numerics"),
    "validate": ("numerics", "study", "shard", "pattern", "layout", "schedule", "ranks", "tokens", "kv_heads", "batch", "comm_dtype",
                 "rotate", "backward", "seed", *_TIMED),
    "numerics": ("validate", "study", "batch", *_TIMED),
}  # fmt: skip
#: What a machine file says of its calibration, and so of the validation that reads it.
FILED = ("heads", "head_dim", "dtype")


@dataclass(frozen=True)
class Need:
    """A key that has no meaning unless `there` holds of the configuration; `where`: in which case it has none."""

    key: str
    there: Callable[[Any], Any]
    where: str
    #: The value that is not asked for; ...: that of the schema.
    default: Any = ...


def _each(keys: Sequence[str], there: Callable[[Any], Any], where: str) -> tuple[Need, ...]:
    return tuple(Need(key, there, where) for key in keys)


_ROTATE = Need("rotate", lambda c: c.backward, "without backward=true")
#: Numbers of a machine that every calibration measures, and numbers that only a calibration of several ranks measures.
_ALONE = tuple(name for name, number in MACHINE_NUMBERS.items() if number.measured_by == "every")
_LINKS = tuple(name for name, number in MACHINE_NUMBERS.items() if number.measured_by == "ranks")
#: By what a command does: the keys that it reads in some cases only.
NEEDS: dict[str, tuple[Need, ...]] = {
    "timing": (
        _ROTATE,
        Need("seed", lambda c: c.machine.made().jitter, "without machine.jitter=..., whose samples it is of"),
        *_each(("machine.checkpoint", "machine.restart"), lambda c: c.machine.made().mtbf, "without machine.mtbf=..."),
        *_each(("machine.checkpoint", "machine.restart"), lambda c: c.passes, "without a job: passes=..."),
        Need("machine.extrapolate", lambda c: c.machine.made().kernel, "without kernel times, which machine=file brings"),
    ),
    "numerics": (
        _ROTATE,
        Need("machine", lambda c: "auto" in (c.layout.spec, c.schedule.spec),
             "with mode=numerics, unless layout=auto or schedule=auto choose by it", MachineGroup("auto")),
    ),
    "validate": (
        *_each([f"validate.{name}" for name in ("rows", "widths", "messages")], lambda c: c.machine.path is None,
               "beside machine.path=..., whose file says what was calibrated"),
        *_each([f"machine.{name}" for name in (*MACHINE_NUMBERS, "extrapolate")], lambda c: False,
               "with mode=validate: the machine is measured, or is that of machine.path"),
        Need("machine.spec", lambda c: c.machine.spec in ("auto", "file"), "with mode=validate, which measures this machine"),
    ),
    "calibrate": (
        *_each(("ranks", "messages", "timeout"), lambda c: c.transport.spec != "none", "with transport=none, one process alone"),
        *_each([f"machine.{name}" for name in _ALONE], lambda c: False, "here: a calibration measures it"),
        *_each([f"machine.{name}" for name in _LINKS], lambda c: c.transport.spec == "none",
               "here: a calibration of ranks measures it"),
        Need("machine.extrapolate", lambda c: False, "here: kernel times are measured"),
    ),
}  # fmt: skip


def of_experiment(name: str, key: str, folders: ConfigFolders) -> str | None:
    """What an experiment sets a plain key to; None where it does not."""
    found = re.search(rf"^{key}: *(\w+)", folders.text("experiment", name), re.MULTILINE)
    return found[1] if found else None


def check_mode(given: Mapping[str, str], folders: ConfigFolders) -> None:
    """Refuse keys that the chosen mode of `simulate` would not look at."""
    names = given.get("experiment", "null").split(",")
    set_there = [found for name in names if (found := of_experiment(name, "mode", folders))]
    for mode in given["mode"].split(",") if "mode" in given else set_there or ["timing"]:
        for key in given:
            name = re.split(r"[./@]", key)[0]
            if name in MODES.get(mode, ()):
                takers = [other for other, without in MODES.items() if name not in without]
                raise InvalidInput(
                    f"{key}={given[key]} has no meaning with mode={mode}; leave it out, or try mode={' or '.join(takers)}"
                )
            if mode == "validate" and name in FILED and "machine.path" in given:
                raise InvalidInput(
                    f"{key}={given[key]} has no meaning beside machine.path: the file says it; leave it out"
                )


def check_needs(what: str, *configs: Any) -> None:
    """Refuse a setting, other than the default, that none of some configurations gives a meaning to.

    `what` is one of `NEEDS`. Raises InvalidInput.
    """
    for need in NEEDS[what]:
        default = _value(type(configs[0])(), need.key) if need.default is ... else need.default
        set_there = [config for config in configs if _value(config, need.key) != default]
        if set_there and not any(need.there(config) for config in set_there):
            value = _value(set_there[0], need.key)
            text = f"{need.key}.*" if is_dataclass(value) else f"{need.key}={_text(value)}"
            raise InvalidInput(f"{text} has no meaning {need.where}; leave it out")


def _value(config: Any, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _text(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, bool | float):
        return str(value).lower() if isinstance(value, bool) else f"{value:g}"
    return str(value).replace("'", "").replace(", ", ",")
