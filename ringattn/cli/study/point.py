"""One point of a study: a plan on a machine, and the numbers that `simulate` gives for it, by name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidInput, Unsupported
from ...machine.machine import MACHINE_NUMBERS, Machine
from ...plan.plan import Plan
from ...simulator.timing.simulation import simulate_passes
from ...simulator.timing.timeline import CAUSES, Timeline
from ..config.build import machine_from_config, plan_from_config, simulate_options
from ..config.schema import SimulateConfig

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Column:
    """A column of the tables: name, unit, and the word of its numbers; the word "kind" refers to the column `kind`."""

    name: str
    unit: str = ""
    word: str = ""

    @property
    def title(self) -> str:
        """The name, with the unit in brackets."""
        return f"{self.name} [{self.unit}]" if self.unit else self.name


#: Units of the columns that describe a point.
_UNITS_OF_SIZES = {"tokens": "tokens", "shard": "tokens per rank", "head_dim": "elements"}
#: Columns of a pass: seconds of waiting, by what a pass waits for.
WAITS = ("wait for peers", "wait for messages")
#: Columns of a pass in seconds whose numbers are modelled; an extrapolation of passes does not change them.
_MODELLED_SECONDS = ("compute", "imbalance", "merge", "interference", "stalls", *WAITS, "host", "call", "failure every")
#: Columns of a pass in seconds whose numbers are modelled or extrapolated, as the column `kind` says.
_SECONDS = ("time", "time low", "time high", "jitter", "total")
#: (unit, word) of the other columns of a pass.
_OF_PASS = {
    "rate": ("tokens/s", "kind"),
    "efficiency": ("compute / time", "kind"),
    "bytes": ("bytes", "counted"),
    "busiest link": ("bytes", "counted"),
    "messages": ("messages", "counted"),
    "memory": ("bytes per rank", "modelled"),
    "energy": ("J", "kind"),
    "cost": ("currency of machine.price", "kind"),
    "kind": ("", ""),
    "solver": ("", ""),
    "fits": ("", "modelled"),
}
#: (unit, word) of the columns of an execution.
_OF_EXECUTION = {
    "turn": ("", ""),
    "how": ("", ""),
    "ranks": ("ranks", "counted"),
    "rows": ("query rows", "counted"),
    "rows compared": ("query rows", "counted"),
    "visits": ("visits", "counted"),
    "visits expected": ("visits", "counted"),
    "pairs": ("(query, key, head) pairs", "counted"),
    "part of all pairs": ("", "counted"),
    "ledger": ("", "counted"),
    "error": ("", "measured"),
    "error of lse": ("", "measured"),
    "most allowed": ("", ""),
    "why not": ("", ""),
}


def make_column(name: str) -> Column:
    """The column of a recorded value, or of an axis."""
    first, _, rest = name.partition(" ")
    if first in DIRECTIONS and rest:  # `backward` alone is an axis
        if rest in _MODELLED_SECONDS or rest in _SECONDS:
            return Column(name, "s", "modelled" if rest in _MODELLED_SECONDS else "kind")
        if rest.startswith("memory: "):
            return Column(name, "bytes per rank", "modelled")
        return Column(name, *_OF_PASS[rest])
    if first == "executed":
        return Column(name, *_OF_EXECUTION[rest])
    if name == "pairs":
        return Column(name, "(query, key, head) pairs", "counted")
    number = re.sub(r"^machine\.", "", name)
    if number != name:
        return Column(name, MACHINE_NUMBERS[number].unit if number in MACHINE_NUMBERS else "")
    return Column(name, _UNITS_OF_SIZES.get(name, ""))


#: Recorded values by (plan hash, machine, backward, options): points with equal keys are simulated once.
SimulationCache = dict[tuple[Any, ...], dict[str, Any]]


def evaluate(config: SimulateConfig, cache: SimulationCache) -> dict[str, Any]:
    """The record of a point; simulations are taken from `cache`, or added to it.

    {"status": "ok", "values": by column name, "not modelled": texts}, or {"status": "refused", "why": text}, with the
    counted values where a plan exists.
    """
    try:
        machine = machine_from_config(config)
        plan = plan_from_config(config, machine)
    except (InvalidInput, Unsupported) as error:
        return {"status": "refused", "why": str(error)}
    values: dict[str, Any] = {
        "tokens": plan.tokens,
        "ranks": plan.ranks,
        "shard": -(-plan.tokens // plan.ranks),
        "pattern": repr(plan.pattern),
        "layout": plan.layout.name,
        "schedule": plan.schedule,
        "heads": plan.heads,
        "kv_heads": plan.kv_heads,
        "head_dim": plan.head_dim,
        "dtype": plan.dtype,
        "batch": plan.batch,
        "machine": config.machine.spec,
        "pairs": plan.cache.answer("study.pairs", plan.pairs),
    }
    try:
        options = simulate_options(config)
        if not machine.jitter:
            options["seed"] = 0  # the seed has no effect without jitter
        key = plan.hash, machine, config.backward, repr(options)
        if key not in cache:
            cache[key] = _simulate_values(plan, machine, config.backward, options)
    except (InvalidInput, Unsupported) as error:
        return {"status": "refused", "why": str(error), "values": values}
    simulated = cache[key]
    return {"status": "ok", "values": {**values, **simulated["values"]}, "not modelled": simulated["not modelled"]}


def _simulate_values(plan: Plan, machine: Machine, backward: bool, options: dict[str, Any]) -> dict[str, Any]:
    """The values of all passes by column name, and what the model leaves out."""
    timelines = simulate_passes(plan, machine, backward, options)
    values = {
        f"{timeline.direction} {name}": value
        for timeline in timelines
        for name, value in _pass_values(timeline, plan).items()
    }
    return {"values": values, "not modelled": [*timelines[0].unmodelled, *timelines[0].notes]}


def _pass_values(timeline: Timeline, plan: Plan) -> dict[str, Any]:
    """The numbers of a pass by name; None where they are not modelled."""
    low, high = timeline.interval or (None, None)
    traffic, machine = timeline.traffic, timeline.machine
    return {
        "time": timeline.seconds,
        "rate": plan.batch * plan.tokens / timeline.seconds if timeline.seconds else None,
        "kind": timeline.kind,
        "solver": timeline.solver,
        "compute": timeline.compute,
        **{cause: value if _is_modelled(cause, machine) else None for cause, value in timeline.exposed.items()},
        "time low": low,
        "time high": high,
        "efficiency": timeline.compute / timeline.seconds if timeline.seconds else None,
        "bytes": traffic.total,
        "busiest link": traffic.busiest,
        "messages": traffic.messages,
        "memory": sum(timeline.memory.values()),
        "fits": timeline.fits,
        **{f"memory: {name}": value for name, value in timeline.memory.items()},
        "total": timeline.total,
        "failure every": None if machine.mtbf is None else machine.mtbf / timeline.ranks,
        "energy": timeline.joules,
        "cost": timeline.price,
    }


def _is_modelled(cause: str, machine: Machine) -> bool:
    return cause not in CAUSES or getattr(machine, CAUSES[cause]) is not None
