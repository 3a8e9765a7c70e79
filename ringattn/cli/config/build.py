"""Builds plans and simulation options from a configuration."""

from __future__ import annotations

from typing import Any

from msgspec import ValidationError, convert

from ...call.planner import make_plans
from ...errors import InvalidInput
from ...machine.machine import Machine
from ...pattern import parse_pattern, parse_patterns
from ...plan.plan import Plan
from .schema import ProblemSizes, SimulateConfig

#: The largest sizes accepted for a plan, and the reason for each limit. Models have a few hundred heads.
LIMITS = {
    "heads": (4096, "planning visits every head; batch= costs nothing"),
    "head_dim": (1 << 16, "no kernel supports more"),
    "value_dim": (1 << 16, "no kernel supports more"),
    "batch": (1 << 31, "bytes are counted in 64 bits"),
}


def plan_from_config(config: ProblemSizes, machine: Machine | None = None, **replaced: Any) -> Plan:
    """The plan of a configuration with a single pattern, see `plans_from_config`. Raises InvalidInput."""
    parse_pattern(config.pattern.spec)
    return plans_from_config(config, machine, **replaced)[0]


def plans_from_config(config: ProblemSizes, machine: Machine | None = None, **replaced: Any) -> tuple[Plan, ...]:
    """One plan for each pattern of a configuration. Raises InvalidInput.

    Pass `machine` if the machine of the configuration is already built. `replaced` are arguments of `make_plan` that
    override the configuration, such as the sizes of an input file.
    """
    arguments: dict[str, Any] = {
        "tokens": config.size(),
        "layout": config.layout.spec,
        "schedule": config.schedule.spec,
        "ranks": config.ranks,
        **config.sizes(),
        **config.queries(),
        **replaced,
    }
    for name, (limit, why) in LIMITS.items():
        if (arguments.get(name) or 0) > limit:
            raise InvalidInput(f"{name}={arguments[name]:,}: must be at most {limit:,}: {why}")
    if machine is None:
        machine = config.machine.made(ranks=config.ranks)
    return make_plans(parse_patterns(config.pattern.spec), config.pattern.weights, machine=machine, **arguments)


def simulate_options(config: SimulateConfig) -> dict[str, Any]:
    """Keyword arguments for `timing.simulate` from a configuration. Raises InvalidInput for malformed stalls."""
    from ...simulator.timing.solvers.recurrence import Stall  # only simulate needs the timing model

    try:
        stalls = convert(config.stalls or [], list[tuple[int, int, float]])
    except ValidationError as error:
        raise InvalidInput(
            f"stalls={config.stalls}: expected a list of [rank, step, seconds] ({error}); try 'stalls=[[3, 0, 0.5]]'"
        ) from None
    names = ("slow", "slow_links", "passes", "solver")
    return {**{name: getattr(config, name) for name in names}, "stalls": [Stall(*stall) for stall in stalls]}
