"""ringattn simulate: a plan's time on a machine, by models, without torch. Other modes execute the plan."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from rich.console import Console

from ..errors import InvalidInput
from ..files import STDOUT, check_json, write_json
from ..machine.machine import MACHINE_NUMBERS, Machine
from ..plan.plan import Plan
from ..simulator.progress import listening
from ..simulator.reporting.console import (
    Number,
    choice_record,
    describe_plan,
    format_quantity,
    print_choice,
    print_numbers,
    print_paragraph,
)
from ..simulator.reporting.progress_bar import show_progress
from ..simulator.timing.costs import JOULES_PER_KWH
from ..simulator.timing.simulation import simulate_passes
from ..simulator.timing.timeline import CAUSES, Timeline
from ..text import did_you_mean, digits, duration, plural, size
from .config.build import machine_from_config, plan_from_config, simulate_options
from .config.schema import SimulateConfig

MODES = ("timing", "validate", "numerics", "published")


def main(config: SimulateConfig) -> None:
    """Print the timeline of a forward, and with backward=true of a backward; write the numbers as JSON to a path."""
    if config.mode not in MODES:
        raise InvalidInput(
            f"mode={config.mode}: {did_you_mean(config.mode, MODES)}expected {', '.join(MODES)}; for attention over "
            "virtual ranks on your own inputs, use ringattn run transport=virtual"
        )
    is_study = config.mode == "timing" and config.model.spec is None and (config.study.axes or config.study.together)
    if is_study:  # its points are checked
        import_module(".simulate_study", __package__).main(config)
        return
    config.check()
    if config.model.spec is not None or config.mode != "timing":
        name = "model" if config.model.spec is not None else config.mode
        # Modes execute, and so import torch.
        import_module(f".simulate_{name}", __package__).main(config)
        return
    check_json(config.output.path)
    machine = machine_from_config(config)
    plan, options = plan_from_config(config, machine), simulate_options(config)
    with show_progress(Console(stderr=True)) as tell, listening(tell):
        timelines = simulate_passes(plan, machine, config.backward, options)
    tables = {timeline.direction: _timeline_numbers(timeline) for timeline in timelines}
    if config.output.path is not None:
        write_json(config.output.path, _record(plan, machine, timelines, tables))
    if config.output.path != STDOUT:
        _print(plan, machine, timelines, tables)


def _print(plan: Plan, machine: Machine, timelines: list[Timeline], tables: dict[str, list[Number]]) -> None:
    """Print the plan, the machine, and a table for each pass."""
    print_paragraph(describe_plan(plan))
    if plan.choice is not None:
        print_choice(plan.choice)
    print_numbers("machine", _machine_numbers(machine))
    for direction, numbers in tables.items():
        print_numbers(direction, numbers)
    if len(timelines) > 1:
        kind = "extrapolated" if any(timeline.extrapolated for timeline in timelines) else "modelled"
        seconds = sum(timeline.seconds for timeline in timelines)
        print_numbers("", [Number("forward and backward", duration(seconds), kind)])
    for note in timelines[0].notes:
        print_paragraph(f"note: {note}")
    print_paragraph("not modelled: " + "; ".join(timelines[0].unmodelled))


def _machine_numbers(machine: Machine) -> list[Number]:
    """The numbers that a machine has, each with its source."""
    numbers = []
    for name in MACHINE_NUMBERS:
        value = getattr(machine, name)
        if value is not None and value is not False:
            dtype = f" of {machine.flops_dtype}" if name == "flops" and machine.flops_dtype else ""
            numbers.append(Number(name, format_quantity(name, value) + dtype, machine.source(name)))
    if machine.kernel is not None:
        text = f"of {machine.kernel.dtype} tiles with head_dim={machine.kernel.head_dim}, which replace flops"
        numbers.append(Number("kernel times", text, machine.source("kernel")))
    elif machine.kernel_rates is not None:
        text = f"of {machine.kernel_rates.library} by the size of a call, which replace flops"
        numbers.append(Number("kernel rates", text, machine.source("kernel_rates")))
    return numbers


def _timeline_numbers(timeline: Timeline) -> list[Number]:
    """The numbers of a pass, each with its kind."""
    numbers = [
        Number("solver", f"{timeline.solver}: {timeline.why}"),
        *([Number("compared", timeline.compared, "counted")] if timeline.compared else []),
        Number("time", duration(timeline.seconds), timeline.kind),
        Number("  compute, mean", _format_share(timeline.compute, timeline), "modelled"),
        *(_cause_number(cause, timeline) for cause in timeline.exposed),
    ]
    if timeline.interval is not None:
        low, high = timeline.interval
        text = f"{duration(low)} .. {duration(high)}, of the mean of sampled runs"
        numbers.append(Number("  95 % interval", text, timeline.kind))
    measured = timeline.machine.interval(timeline.seconds)
    if measured is not None:
        count = plural(len(timeline.machine.residuals), "pass")
        text = f"{duration(measured[0])} .. {duration(measured[1])}, by {count} of the calibration"
        numbers.append(Number("  90 % of measured passes", text, timeline.kind))
    if timeline.ranks > 1:
        without = "" if timeline.interval is None else ", without jitter"
        numbers.append(Number("first rank done", duration(float(timeline.finish.min())) + without, "modelled"))
    traffic = timeline.traffic
    messages = f"{plural(traffic.messages, 'message')} on {plural(traffic.links, 'link')}"
    numbers.append(Number("messages", messages, "counted"))
    numbers.append(Number("bytes", f"{size(traffic.total)}, {size(traffic.busiest)} on the busiest link", "counted"))
    numbers += [Number(f"  {name}", size(value), "modelled") for name, value in timeline.memory.items()]
    fits = {None: "", True: ", fits", False: ", does not fit"}[timeline.fits]
    numbers.append(Number("memory of a rank", size(sum(timeline.memory.values())) + fits, "modelled"))
    return [*numbers, *_job_numbers(timeline)]


def _format_share(seconds: float, timeline: Timeline) -> str:
    """Seconds, and their share of the pass."""
    return f"{duration(seconds)} = {seconds / timeline.seconds:.2%}" if timeline.seconds else "0"


def _cause_number(cause: str, timeline: Timeline) -> Number:
    """The time that a cause exposes; "not modelled" where the machine has no number for it."""
    field = CAUSES.get(cause)
    if field is not None and getattr(timeline.machine, field) is None:
        return Number(f"  {cause}", "not modelled")
    kind = timeline.kind if cause == "jitter" else "modelled"
    return Number(f"  {cause}", _format_share(timeline.exposed[cause], timeline), kind)


def _job_numbers(timeline: Timeline) -> list[Number]:
    """Failures, checkpoints, energy and cost, of the job or of one pass."""
    numbers = []
    if timeline.machine.mtbf is not None:
        numbers.append(Number("a failure every", duration(timeline.machine.mtbf / timeline.ranks), "modelled"))
    if timeline.passes is not None:
        failures, included = timeline.failures, ""
        if failures is not None:
            text = f"{duration(failures.write)} after every {duration(failures.interval)} of work"
            text = text if failures.checkpoints else "none: the job is too short"
            numbers.append(Number("checkpoint", text, "modelled"))
            included = ", with failures and checkpoints"
        text = f"{plural(timeline.passes, 'pass')} in {duration(timeline.total)}{included}"
        numbers.append(Number("job", text, timeline.kind))
    unit = "pass" if timeline.passes is None else "job"
    if timeline.joules is not None:
        text = f"{digits(timeline.joules / JOULES_PER_KWH)} kWh"
        numbers.append(Number(f"energy of the {unit}", text, timeline.kind))
    if timeline.price is not None:
        text = f"{digits(timeline.price)} in the currency of machine.price"
        numbers.append(Number(f"cost of the {unit}", text, timeline.kind))
    return numbers


def _record(plan: Plan, machine: Machine, timelines: list[Timeline], tables: dict[str, list[Number]]) -> dict[str, Any]:
    """The numbers as plain data: seconds, bytes and joules, with the kinds that are printed."""
    return {
        "plan": json.loads(plan.to_json()),
        "machine": {
            name: {"value": getattr(machine, name), "source": machine.source(name)} for name in MACHINE_NUMBERS
        },
        "passes": {
            timeline.direction: {
                "solver": timeline.solver,
                "why": timeline.why,
                "compared": timeline.compared,
                "kind": timeline.kind,
                "seconds": timeline.seconds,
                "compute": timeline.compute,
                "exposed": timeline.exposed,
                "interval": timeline.interval,
                "traffic": vars(timeline.traffic),
                "memory": timeline.memory,
                "job": timeline.passes,
                "failures": None if timeline.failures is None else vars(timeline.failures),
                "total": timeline.total,
                "joules": timeline.joules,
                "price": timeline.price,
                "words": {number.name.strip(): number.kind for number in tables[timeline.direction] if number.kind},
            }
            for timeline in timelines
        },
        "not modelled": timelines[0].unmodelled,
        "notes": timelines[0].notes,
        "choice": choice_record(plan.choice),
    }
