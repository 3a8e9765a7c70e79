"""The plan that a command line asks for, whatever the verb."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidInput
from ..machine.machine import Machine
from ..pattern import parse_pattern
from ..plan.plan import Plan
from ..planner import make_plan
from .schema import ProblemSizes

#: The most that plans are made for, and why. Models have some hundred heads.
MOST = {
    "heads": (4096, "a plan looks at every head; batch= costs it nothing"),
    "head_dim": (1 << 16, "no kernel takes more"),
    "batch": (1 << 31, "bytes are counted in 64 bits"),
}


def asked_machine(config: ProblemSizes) -> Machine:
    """The machine of a configuration. Raises InvalidInput where the nodes that it asks for do not fit its ranks."""
    return config.machine.made(ranks=config.ranks)


def asked_plan(config: ProblemSizes, machine: Machine | None = None, **others: Any) -> Plan:
    """The plan of a configuration; `machine` is the one that it names, where that is made already. `others` are arguments
    of `make_plan` that replace those of the configuration, such as what an input says of itself."""
    asked: dict[str, Any] = {
        "ranks": config.ranks, "layout": config.layout.spec, "schedule": config.schedule.spec, "heads": config.heads,
        "kv_heads": config.kv_heads, "head_dim": config.head_dim, "dtype": config.dtype, "batch": config.batch,
        "comm_dtype": config.comm_dtype, "rotate": config.rotate,
    }  # fmt: skip
    asked = {"tokens": config.size(), **asked, **others}
    for name, (most, why) in MOST.items():
        if asked[name] > most:
            raise InvalidInput(f"{name}={asked[name]:,}: {most:,} is the most that is planned for: {why}")
    machine = asked_machine(config) if machine is None else machine
    return make_plan(parse_pattern(config.pattern.spec), machine=machine, **asked)
