"""The plan and the machine that a configuration of `run`, `plan` or `simulate` describes."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidInput
from ..machine.machine import Machine
from ..pattern import parse_pattern
from ..plan.plan import Plan
from ..planner import make_plan
from .schema import ProblemSizes

#: The largest sizes that plans are made for, and why. Models have some hundred heads.
LIMITS = {
    "heads": (4096, "a plan looks at every head; batch= costs it nothing"),
    "head_dim": (1 << 16, "no kernel takes more"),
    "batch": (1 << 31, "bytes are counted in 64 bits"),
}


def machine_from_config(config: ProblemSizes) -> Machine:
    """The machine of a configuration. Raises InvalidInput where its nodes do not fit the number of ranks."""
    return config.machine.made(ranks=config.ranks)


def plan_from_config(config: ProblemSizes, machine: Machine | None = None, **replaced: Any) -> Plan:
    """The plan of a configuration. Raises InvalidInput.

    `machine` saves making the machine of the configuration again. `replaced` are arguments of `make_plan` that take
    the place of settings, such as the sizes of an input file.
    """
    arguments: dict[str, Any] = {
        "tokens": config.size(),
        "ranks": config.ranks,
        "layout": config.layout.spec,
        "schedule": config.schedule.spec,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "dtype": config.dtype,
        "batch": config.batch,
        "comm_dtype": config.comm_dtype,
        "rotate": config.rotate,
        **replaced,
    }
    for name, (limit, why) in LIMITS.items():
        if arguments[name] > limit:
            raise InvalidInput(f"{name}={arguments[name]:,}: {limit:,} is the most that is planned for: {why}")
    if machine is None:
        machine = machine_from_config(config)
    return make_plan(parse_pattern(config.pattern.spec), machine=machine, **arguments)
