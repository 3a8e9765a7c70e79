"""The plan that a command line asks for, whatever the verb."""

from __future__ import annotations

from .config import Shape
from .pattern import parse_pattern
from .plan import Plan, make_plan
from .timing import Machine


def asked_plan(config: Shape, machine: Machine | None = None) -> Plan:
    """The plan of a configuration; `machine` is the one that it names, where that is made already."""
    return make_plan(
        parse_pattern(config.pattern.spec),
        tokens=config.size(),
        ranks=config.ranks,
        layout=config.layout.spec,
        schedule=config.schedule.spec,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=config.dtype,
        batch=config.batch,
        wire_dtype=config.wire_dtype,
        machine=config.machine.made(ranks=config.ranks) if machine is None else machine,
        rotate=config.rotate,
    )
