"""The plan, the machine and the options of a simulation that a configuration describes."""

from __future__ import annotations

from typing import Any

from msgspec import ValidationError, convert

from ...call.planner import make_plans
from ...errors import InvalidInput
from ...machine.machine import Machine
from ...pattern import parse_pattern, parse_patterns
from ...plan.plan import Plan
from .schema import ProblemSizes, SimulateConfig

#: The largest sizes that plans are made for, and why. Models have some hundred heads.
LIMITS = {
    "heads": (4096, "a plan looks at every head; batch= costs it nothing"),
    "head_dim": (1 << 16, "no kernel takes more"),
    "batch": (1 << 31, "bytes are counted in 64 bits"),
}


def plan_from_config(config: ProblemSizes, machine: Machine | None = None, **replaced: Any) -> Plan:
    """The plan of a configuration, see `plans_from_config`. Raises InvalidInput, also for several patterns."""
    parse_pattern(config.pattern.spec)
    return plans_from_config(config, machine, **replaced)[0]


def plans_from_config(config: ProblemSizes, machine: Machine | None = None, **replaced: Any) -> tuple[Plan, ...]:
    """The plan of each pattern of a configuration. Raises InvalidInput.

    `machine` saves making the machine of the configuration again. `replaced` are arguments of `make_plan` that take
    the place of settings, such as the sizes of an input file.
    """
    names = ("ranks", "heads", "kv_heads", "head_dim", "dtype", "batch", "comm_dtype", "rotate")
    arguments: dict[str, Any] = {
        "tokens": config.size(),
        "layout": config.layout.spec,
        "schedule": config.schedule.spec,
        **{name: getattr(config, name) for name in names},
        **config.queries(),
        **replaced,
    }
    for name, (limit, why) in LIMITS.items():
        if arguments[name] > limit:
            raise InvalidInput(f"{name}={arguments[name]:,}: {limit:,} is the most that is planned for: {why}")
    if machine is None:
        machine = config.machine.made(ranks=config.ranks)
    return make_plans(parse_patterns(config.pattern.spec), config.pattern.weights, machine=machine, **arguments)


def simulate_options(config: SimulateConfig) -> dict[str, Any]:
    """The options of `timing.simulate` in a configuration. Raises InvalidInput for stalls that cannot be read."""
    from ...simulator.timing.solvers.recurrence import Stall  # only simulate needs the timing model

    try:
        stalls = convert(config.stalls or [], list[tuple[int, int, float]])
    except ValidationError as error:
        raise InvalidInput(
            f"stalls={config.stalls}: expected a list of [rank, step, seconds] ({error}); try 'stalls=[[3, 0, 0.5]]'"
        ) from None
    names = ("slow", "slow_links", "passes", "solver", "seed")
    return {**{name: getattr(config, name) for name in names}, "stalls": [Stall(*stall) for stall in stalls]}
