"""The plan, the machine and the options of a simulation that a configuration describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import InvalidInput
from ...machine.machine import Machine
from ...pattern import parse_pattern
from ...plan.plan import Plan
from ...planner import make_plan
from .schema import ProblemSizes, SimulateConfig

if TYPE_CHECKING:
    from ...simulator.timing.solvers.recurrence import Stall

#: The largest sizes that plans are made for, and why. Models have some hundred heads.
LIMITS = {
    "heads": (4096, "a plan looks at every head; batch= costs it nothing"),
    "head_dim": (1 << 16, "no kernel takes more"),
    "batch": (1 << 31, "bytes are counted in 64 bits"),
}


def plan_from_config(config: ProblemSizes, machine: Machine | None = None, **replaced: Any) -> Plan:
    """The plan of a configuration. Raises InvalidInput.

    `machine` saves making the machine of the configuration again. `replaced` are arguments of `make_plan` that take
    the place of settings, such as the sizes of an input file.
    """
    names = ("ranks", "heads", "kv_heads", "head_dim", "dtype", "batch", "comm_dtype", "rotate")
    arguments: dict[str, Any] = {
        "tokens": config.size(),
        "layout": config.layout.spec,
        "schedule": config.schedule.spec,
        **{name: getattr(config, name) for name in names},
        **replaced,
    }
    for name, (limit, why) in LIMITS.items():
        if arguments[name] > limit:
            raise InvalidInput(f"{name}={arguments[name]:,}: {limit:,} is the most that is planned for: {why}")
    if machine is None:
        machine = config.machine.made(ranks=config.ranks)
    return make_plan(parse_pattern(config.pattern.spec), machine=machine, **arguments)


def simulate_options(config: SimulateConfig) -> dict[str, Any]:
    """The options of `timing.simulate` in a configuration. Raises InvalidInput for stalls that cannot be read."""
    return {
        "slow": config.slow,
        "slow_links": config.slow_links,
        "stalls": _read_stalls(config.stalls),
        "passes": config.passes,
        "solver": config.solver,
        "seed": config.seed,
    }


def _read_stalls(stalls: Any) -> list[Stall]:
    from ...simulator.timing.solvers.recurrence import Stall  # only simulate needs the timing model

    if stalls is not None and not isinstance(stalls, list):
        raise InvalidInput(f"stalls={stalls!r}: expected a list of [rank, step, seconds]; try 'stalls=[[3, 0, 0.5]]'")
    for stall in stalls or ():
        if not isinstance(stall, list) or len(stall) != 3 or [type(x) for x in stall[:2]] != [int, int]:
            raise InvalidInput(f"stalls: {stall!r} is not [rank, step, seconds]; try 'stalls=[[3, 0, 0.5]]'")
        if not isinstance(stall[2], int | float):
            raise InvalidInput(f"stalls: {stall[2]!r} in {stall!r} is not a number of seconds")
    return [Stall(rank, step, float(seconds)) for rank, step, seconds in stalls or ()]
