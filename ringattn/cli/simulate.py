"""ringattn simulate: a plan's time on a machine, by models, without torch; other modes execute."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from rich.console import Console

from ..config.build import asked_machine, asked_plan
from ..config.checks import MODES, check_needs
from ..config.schema import SimulateConfig
from ..errors import InvalidInput, did_you_mean, plural
from ..experiments.study.checks import refuse_settings_without_study
from ..experiments.study.point import simulate_options, simulate_passes
from ..files import STDOUT, check_json, write_json
from ..machine.machine import MACHINE_NUMBERS, Machine
from ..plan.plan import Plan
from ..progress import listening
from ..reporting.console import Number, choice_data, head, quantity, say, show, show_choice
from ..text import digits, duration, size
from ..timing.costs import JOULES_PER_KWH
from ..timing.timeline import CAUSES, Timeline
from .progress import progress


def main(config: SimulateConfig) -> None:
    """Print the timeline of a forward, and of a backward where asked; write the numbers as JSON where asked."""
    if config.mode not in MODES:
        raise InvalidInput(
            f"mode={config.mode}: {did_you_mean(config.mode, MODES)}expected {', '.join(MODES)}; attention over virtual "
            "ranks on inputs of your own runs with ringattn run transport=virtual"
        )
    if config.mode != "timing":  # the others execute, and so need torch
        import_module(f".{config.mode}", __package__).main(config)
        return
    if config.study.axes or config.study.together:
        import_module(".study", __package__).main(config)
        return
    refuse_settings_without_study(config.study)
    check_json(config.output.path)
    check_needs("timing", config)
    machine = asked_machine(config)
    plan, options = asked_plan(config, machine), simulate_options(config)
    with progress(Console(stderr=True)) as tell, listening(tell):
        found = simulate_passes(plan, machine, config.backward, options)
    tables = {one.direction: _numbers(one) for one in found}
    if config.output.path:
        write_json(config.output.path, _written(plan, machine, found, tables))
    if config.output.path == STDOUT:
        return
    say(head(plan))
    if plan.choice is not None:
        show_choice(plan.choice)
    show("machine", _machine(machine))
    for one in found:
        show(one.direction, tables[one.direction])
    if len(found) > 1:
        kind = "extrapolated" if any(one.extrapolated for one in found) else "modelled"
        show("", [Number("forward and backward", duration(sum(one.seconds for one in found)), kind)])
    for note in found[0].notes:
        say(f"note: {note}")
    say("not modelled: " + "; ".join(found[0].unmodelled))


def _machine(machine: Machine) -> list[Number]:
    """The numbers of a machine that are given, each with its source."""
    given = [(name, getattr(machine, name)) for name in MACHINE_NUMBERS]
    of = f" of {machine.flops_dtype}" if machine.flops_dtype else ""
    numbers = [
        Number(name, quantity(name, value) + (of if name == "flops" else ""), machine.source(name))
        for name, value in given if value not in (None, False)
    ]  # fmt: skip
    if machine.kernel is not None:
        known = machine.kernel
        text = f"of {known.dtype} tiles with head_dim={known.head_dim}, which replace flops"
        numbers.append(Number("kernel times", text, machine.source("kernel")))
    return numbers


def _numbers(one: Timeline) -> list[Number]:
    """What a timeline says, each number with its word."""
    numbers = [
        Number("solver", f"{one.solver}: {one.why}"),
        *([Number("compared", one.compared, "counted")] if one.compared else []),
        Number("time", duration(one.seconds), one.kind),
        Number("  compute, mean", _share(one.compute, one), "modelled"),
        *(_cause(name, one) for name in one.exposed),
    ]
    if one.interval is not None:
        low, high = one.interval
        numbers.append(
            Number("  95 % interval", f"{duration(low)} .. {duration(high)}, of the mean of sampled runs", one.kind)
        )
    inside = one.machine.interval(one.seconds)
    if inside is not None:
        text = f"{duration(inside[0])} .. {duration(inside[1])}, by {plural(len(one.machine.residuals), 'pass')} of the calibration"
        numbers.append(Number("  90 % of measured passes", text, one.kind))
    if one.finish is not None and one.ranks > 1:
        calm = "" if one.interval is None else ", without jitter"
        numbers.append(Number("first rank done", duration(float(one.finish.min())) + calm, "modelled"))
    if one.traffic is not None:
        links = one.traffic
        numbers += [
            Number("messages", f"{plural(links.messages, 'message')} on {plural(links.links, 'link')}", "counted"),
            Number("bytes", f"{size(links.total)}, {size(links.busiest)} on the busiest link", "counted"),
        ]
    else:
        numbers.append(Number("bytes", "not counted by this solver; ringattn plan counts those of a rank"))
    numbers += [Number(f"  {name}", size(value), "modelled") for name, value in one.memory.items()]
    fits = {None: "", True: ", fits", False: ", does not fit"}[one.fits]
    numbers.append(Number("memory of a rank", size(sum(one.memory.values())) + fits, "modelled"))
    return [*numbers, *_budget(one)]


def _share(seconds: float, one: Timeline) -> str:
    return f"{duration(seconds)} = {seconds / one.seconds:.2%}" if one.seconds else "0"


def _cause(name: str, one: Timeline) -> Number:
    """What a cause exposes, or that the machine says nothing of it."""
    field = CAUSES.get(name)
    if field is not None and getattr(one.machine, field) is None:
        return Number(f"  {name}", "not modelled")
    return Number(f"  {name}", _share(one.exposed[name], one), one.kind if name == "jitter" else "modelled")


def _budget(one: Timeline) -> list[Number]:
    numbers = []
    if one.machine.mtbf is not None:
        numbers.append(Number("a failure every", duration(one.machine.mtbf / one.ranks), "modelled"))
    if one.passes is not None:
        risky, found = "", one.failures
        if found is not None:
            text = f"{duration(found.write)} after every {duration(found.interval)} of work"
            numbers.append(
                Number("checkpoint", text if found.checkpoints else "none: the job is too short", "modelled")
            )
            risky = ", with failures and checkpoints"
        numbers.append(Number("job", f"{plural(one.passes, 'pass')} in {duration(one.total)}{risky}", one.kind))
    of = "pass" if one.passes is None else "job"
    if one.joules is not None:
        numbers.append(Number(f"energy of the {of}", f"{digits(one.joules / JOULES_PER_KWH)} kWh", one.kind))
    if one.price is not None:
        numbers.append(Number(f"cost of the {of}", f"{digits(one.price)} in the currency of machine.price", one.kind))
    return numbers


def _written(
    plan: Plan, machine: Machine, found: list[Timeline], tables: dict[str, list[Number]]
) -> dict[str, Any]:  # fmt: skip
    """The numbers as plain data: seconds, bytes and joules, with the words as printed."""
    return {
        "plan": json.loads(plan.to_json()),
        "machine": {name: {"value": getattr(machine, name), "source": machine.source(name)} for name in MACHINE_NUMBERS},
        "passes": {
            one.direction: {
                "solver": one.solver, "why": one.why, "compared": one.compared, "kind": one.kind,
                "seconds": one.seconds, "compute": one.compute, "exposed": one.exposed, "interval": one.interval,
                "traffic": None if one.traffic is None else vars(one.traffic), "memory": one.memory,
                "job": one.passes, "failures": None if one.failures is None else vars(one.failures), "total": one.total,
                "joules": one.joules, "price": one.price,
                "words": {number.name.strip(): number.kind for number in tables[one.direction] if number.kind},
            }
            for one in found
        },
        "not modelled": found[0].unmodelled, "notes": found[0].notes, "choice": choice_data(plan.choice),
    }  # fmt: skip
