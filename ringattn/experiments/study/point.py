"""One point of a study: a plan on a machine, and what `simulate` says of it as named numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ...config.build import machine_from_config, plan_from_config
from ...config.schema import SimulateConfig
from ...errors import InvalidInput, Unsupported
from ...machine.file import UNITS
from ...machine.machine import Machine
from ...plan.plan import Plan
from ...timing.simulation import simulate
from ...timing.solvers.recurrence import Stall
from ...timing.timeline import CAUSES, Timeline

#: Units of axes and of what a point is, where they have one.
_INPUTS = {"tokens": "tokens", "shard": "tokens per rank", "head_dim": "elements"}
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Column:
    """A column of the tables: a name, its unit, and the word that belongs to its numbers; `kind`: the row says which."""

    name: str
    unit: str = ""
    word: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} [{self.unit}]" if self.unit else self.name


def asked_options(config: SimulateConfig) -> dict[str, Any]:
    """The options of `timing.simulate` that a configuration asks for."""
    return {
        "slow": config.slow, "slow_links": config.slow_links, "stalls": _stalls(config.stalls), "passes": config.passes,
        "solver": config.solver, "seed": config.seed,
    }  # fmt: skip


def _stalls(given: Any) -> list[Stall]:
    if given is not None and not isinstance(given, list):
        raise InvalidInput(f"stalls={given!r}: expected a list of [rank, step, seconds]; try 'stalls=[[3, 0, 0.5]]'")
    for stall in given or ():
        if not isinstance(stall, list) or len(stall) != 3 or [type(x) for x in stall[:2]] != [int, int]:
            raise InvalidInput(f"stalls: {stall!r} is not [rank, step, seconds]; try 'stalls=[[3, 0, 0.5]]'")
        if not isinstance(stall[2], int | float):
            raise InvalidInput(f"stalls: {stall[2]!r} in {stall!r} is not a number of seconds")
    return [Stall(rank, step, float(seconds)) for rank, step, seconds in given or ()]


#: What was recorded of plans on machines, by all that it depends on: equal for points that come to the same.
Timed = dict[tuple[Any, ...], dict[str, Any]]


def evaluate(config: SimulateConfig, timed: Timed) -> dict[str, Any]:
    """What is recorded of a point: {"status": "ok", "values": by column name}, or {"status": "refused", "why": text},
    with the values that are counted where there is a plan. What is in `timed` is not simulated again."""
    try:
        machine = machine_from_config(config)
        plan = plan_from_config(config, machine)
    except (InvalidInput, Unsupported) as error:
        return {"status": "refused", "why": str(error)}
    values: dict[str, Any] = {
        "tokens": plan.tokens, "ranks": plan.ranks, "shard": -(-plan.tokens // plan.ranks), "pattern": repr(plan.pattern),
        "layout": plan.layout.name, "schedule": plan.schedule, "heads": plan.heads, "kv_heads": plan.kv_heads,
        "head_dim": plan.head_dim, "dtype": plan.dtype, "batch": plan.batch, "machine": config.machine.spec, "pairs": _pairs(plan),
    }  # fmt: skip
    try:
        options = asked_options(config)
        if not machine.jitter:
            options["seed"] = 0  # of jitter alone
        same = plan.hash, machine, config.backward, repr(options)
        if same not in timed:
            timed[same] = _simulated(plan, machine, config.backward, options)
    except (InvalidInput, Unsupported) as error:
        return {"status": "refused", "why": str(error), "values": values}
    found = timed[same]
    return {"status": "ok", "values": {**values, **found["values"]}, "not modelled": found["not modelled"]}


def passes(plan: Plan, machine: Machine, backward: bool, options: dict[str, Any]) -> list[Timeline]:
    """The forward, and the backward where asked for."""
    return [simulate(plan, machine, backward=back, **options) for back in ((False, True) if backward else (False,))]


def _simulated(plan: Plan, machine: Machine, backward: bool, options: dict[str, Any]) -> dict[str, Any]:
    """The values of all passes, and what is not modelled."""
    found = passes(plan, machine, backward, options)
    values = {f"{one.direction} {name}": value for one in found for name, value in numbers(one, plan).items()}
    return {"values": values, "not modelled": [*found[0].unmodelled, *found[0].notes]}


def _pairs(plan: Plan) -> int:
    return plan.memory.answer("pairs", plan.pairs)


def numbers(one: Timeline, plan: Plan) -> dict[str, Any]:
    """The numbers of a pass of a plan by name; None: not modelled. `column` has their units and words."""
    low, high = one.interval or (None, None)
    links = one.traffic
    found: dict[str, Any] = {
        "time": one.seconds, "rate": plan.batch * plan.tokens / one.seconds if one.seconds else None, "kind": one.kind, "solver": one.solver, "compute": one.compute,
        **{name: value if _modelled(name, one.machine) else None for name, value in one.exposed.items()},
        "time low": low, "time high": high,
        "efficiency": one.compute / one.seconds if one.seconds else None,
        "bytes": None if links is None else links.total,
        "busiest link": None if links is None else links.busiest,
        "messages": None if links is None else links.messages,
        "memory": sum(one.memory.values()), "fits": one.fits,
        **{f"memory: {name}": value for name, value in one.memory.items()},
        "total": one.total, "failure every": None if one.machine.mtbf is None else one.machine.mtbf / one.ranks,
        "energy": one.joules, "cost": one.price,
    }  # fmt: skip
    return found


def _modelled(cause: str, machine: Machine) -> bool:
    return cause not in CAUSES or getattr(machine, CAUSES[cause]) is not None


_SECONDS = {"time", "time low", "time high", "compute", "imbalance", "merge", "interference", "stalls", "wait", "jitter",
            "call", "total", "failure every"}  # fmt: skip
#: (unit, word) of a pass's other numbers; "kind": as the pass's column `kind` says.
_OTHERS = {
    "rate": ("tokens/s", "kind"), "efficiency": ("compute / time", "kind"), "bytes": ("bytes", "counted"), "busiest link": ("bytes", "counted"),
    "messages": ("messages", "counted"), "memory": ("bytes per rank", "modelled"), "energy": ("J", "kind"),
    "cost": ("currency of machine.price", "kind"), "kind": ("", ""), "solver": ("", ""), "fits": ("", "modelled"),
}  # fmt: skip
#: Seconds that jitter, and so an extrapolation, has no part in.
_PLAIN = {"compute", "imbalance", "merge", "interference", "stalls", "wait", "call", "failure every"}


def column(name: str) -> Column:
    """The column of a recorded value, or of an axis."""
    first, _, rest = name.partition(" ")
    if first in PASSES:
        if rest in _SECONDS:
            return Column(name, "s", "modelled" if rest in _PLAIN else "kind")
        if rest.startswith("memory: "):
            return Column(name, "bytes per rank", "modelled")
        return Column(name, *_OTHERS[rest])
    if first == "executed":
        return Column(name, *EXECUTED[rest])
    if name == "pairs":
        return Column(name, "(query, key, head) pairs", "counted")
    inner = re.sub(r"^machine\.", "", name)
    return Column(name, UNITS.get(inner, "") if inner != name else _INPUTS.get(name, ""))


#: (unit, word) of what was executed.
EXECUTED = {
    "turn": ("", ""), "how": ("", ""), "ranks": ("ranks", "counted"), "rows": ("query rows", "counted"),
    "rows compared": ("query rows", "counted"), "visits": ("visits", "counted"), "visits expected": ("visits", "counted"),
    "pairs": ("(query, key, head) pairs", "counted"), "part of all pairs": ("", "counted"), "ledger": ("", "counted"),
    "error": ("", "measured"), "error of lse": ("", "measured"), "most allowed": ("", ""), "why not": ("", ""),
}  # fmt: skip
