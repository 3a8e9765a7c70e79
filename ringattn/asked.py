"""The plan that a command line asks for, whatever the verb."""

from __future__ import annotations

from typing import Any

from .config import Shape
from .pattern import parse_pattern
from .plan import Plan, make_plan
from .timing import Machine


def asked_machine(config: Shape) -> Machine:
    """The machine of a configuration. Raises InvalidInput where the nodes that it asks for do not fit its ranks."""
    return config.machine.made(ranks=config.ranks)


def asked_plan(config: Shape, machine: Machine | None = None, **others: Any) -> Plan:
    """The plan of a configuration; `machine` is the one that it names, where that is made already. `others` are arguments
    of `make_plan` that replace those of the configuration, such as what an input says of itself."""
    asked: dict[str, Any] = {
        "ranks": config.ranks, "layout": config.layout.spec, "schedule": config.schedule.spec, "heads": config.heads,
        "kv_heads": config.kv_heads, "head_dim": config.head_dim, "dtype": config.dtype, "batch": config.batch,
        "wire_dtype": config.wire_dtype, "rotate": config.rotate,
    }  # fmt: skip
    machine = asked_machine(config) if machine is None else machine
    return make_plan(
        parse_pattern(config.pattern.spec), machine=machine, **{"tokens": config.size(), **asked, **others}
    )
