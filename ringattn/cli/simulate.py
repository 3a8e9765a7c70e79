"""ringattn simulate: predict the time of a plan on a machine, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from ..files import STDOUT, check_json, write_json
from ..machine.machine import MACHINE_NUMBERS, Machine
from ..plan.choice import choice_record
from ..plan.plan import Plan
from ..simulator.progress import listening
from ..simulator.reporting.console import (
    Number,
    describe_plan,
    format_quantity,
    print_choice,
    print_numbers,
    print_paragraph,
    show_progress,
)
from ..simulator.reporting.trace import Row, modelled_spans, write_trace
from ..simulator.timing.costs import JOULES_PER_KWH
from ..simulator.timing.simulation import simulate_passes
from ..simulator.timing.timeline import CAUSES, Timeline
from ..simulator.timing.window import window
from ..text import digits, duration, plural, size
from .comparison import Cells, print_jobs
from .config.build import plans_from_config, simulate_options
from .config.groups import refuse
from .config.schema import SimulateConfig
from .counts import record_pass

#: The most ranks and steps in a trace.
TRACED_RANKS, TRACED_STEPS = 64, 256


def main(config: SimulateConfig) -> None:
    """Print the timeline of a forward, and with backward=true of a backward; write the numbers as JSON if asked."""
    config.check()
    check_json(config.output.path)
    check_json(config.trace)
    machine = config.machine.made(ranks=config.ranks)
    plans, jobs = plans_from_config(config, machine), list[tuple[Cells, Cells]]()
    if len(plans) > 1:
        refuse(config, "trace output.path", "with several patterns")
    options = simulate_options(config)
    for plan in plans:
        with show_progress(Console(stderr=True)) as tell, listening(tell):
            timelines = simulate_passes(plan, machine, config.backward, options)
            if config.trace is not None:
                faults = {name: options[name] for name in ("slow", "slow_links", "stalls")}
                write_trace(config.trace, "modelled", _trace_spans(plan, machine, timelines, faults))
        tables = {timeline.direction: _timeline_numbers(timeline) for timeline in timelines}
        if config.output.path is not None:
            write_json(config.output.path, _record(plan, machine, timelines, tables))
        if config.output.path != STDOUT:
            _print(plan, machine, timelines, tables)
        if len(plans) > 1:
            passes = {timeline.direction: duration(timeline.seconds) for timeline in timelines}
            jobs.append(({"mask": f"{len(jobs) + 1}"}, {"imbalance": f"{plan.imbalance:.4f}", **passes}))
    print_jobs(jobs, "masks: imbalance [counted], times [modelled]")


def _trace_spans(plan: Plan, machine: Machine, timelines: list[Timeline], faults: dict[str, Any]) -> Iterator[Row]:
    """Trace rows of the first steps and messages of the first ranks, one pass after the other."""
    since = 0.0
    for timeline in timelines:
        backward = timeline.direction == "backward"
        shown = window(plan, machine, ranks=TRACED_RANKS, steps=TRACED_STEPS, backward=backward, **faults)
        yield from modelled_spans(shown, timeline.direction, since)
        since += timeline.seconds


def _print(plan: Plan, machine: Machine, timelines: list[Timeline], tables: dict[str, list[Number]]) -> None:
    """Print the plan, the machine, and a table for each pass."""
    print_paragraph(describe_plan(plan))
    if plan.choice is not None:
        print_choice(plan.choice)
    print_numbers("machine", _machine_numbers(machine))
    for direction, numbers in tables.items():
        print_numbers(direction, numbers)
    if len(timelines) > 1:
        seconds = sum(timeline.seconds for timeline in timelines)
        print_numbers("", [Number("forward and backward", duration(seconds), "modelled")])
    for note in timelines[0].notes:
        print_paragraph(f"note: {note}")
    print_paragraph("not modelled: " + "; ".join(timelines[0].unmodelled))


def _machine_numbers(machine: Machine) -> list[Number]:
    """The numbers of a machine that are set, each with its source."""
    numbers = []
    replaced = machine.kernel is not None or machine.kernel_rates is not None
    for name in MACHINE_NUMBERS:
        value = getattr(machine, name)
        if value is not None and value is not False and not (name == "flops" and replaced):
            dtype = f" of {machine.flops_dtype}" if name == "flops" and machine.flops_dtype else ""
            numbers.append(Number(name, format_quantity(name, value) + dtype, machine.source(name)))
    if machine.kernel is not None:
        text = f"of {machine.kernel.dtype} tiles with head_dim={machine.kernel.head_dim}"
        numbers.append(Number("kernel times", text, machine.source("kernel")))
    elif machine.kernel_rates is not None:
        text = f"of {machine.kernel_rates.library} by the size of a call"
        numbers.append(Number("kernel rates", text, machine.source("kernel_rates")))
    return numbers


def _timeline_numbers(timeline: Timeline) -> list[Number]:
    """The numbers of a pass, each with its kind ("counted", "modelled", ...)."""

    def share(seconds: float) -> str:
        return f"{duration(seconds)} = {seconds / timeline.seconds:.2%}" if timeline.seconds else "0"

    machine, traffic = timeline.machine, timeline.traffic
    numbers = [Number("solver", f"{timeline.solver}: {timeline.why}")]
    numbers.append(Number("time", duration(timeline.seconds), "modelled"))
    numbers.append(Number("  compute, mean", share(timeline.compute), "modelled"))
    for cause, seconds in timeline.exposed.items():
        if cause in CAUSES and getattr(machine, CAUSES[cause]) is None:
            numbers.append(Number(f"  {cause}", "not modelled"))
        else:
            numbers.append(Number(f"  {cause}", share(seconds), "modelled"))
    measured = machine.interval(timeline.seconds)
    if measured is not None:
        text = f"{' .. '.join(map(duration, measured))}, by {plural(len(machine.residuals), 'pass')} of the calibration"
        numbers.append(Number("  90 % of measured passes", text, "modelled"))
    if timeline.ranks > 1:
        numbers.append(Number("first rank done", duration(float(timeline.finish.min())), "modelled"))
    messages = f"{plural(traffic.messages, 'message')} on {plural(traffic.links, 'link')}"
    numbers.append(Number("messages", messages, "counted"))
    numbers.append(Number("bytes", f"{size(traffic.total)}, {size(traffic.busiest)} on the busiest link", "counted"))
    fits = {None: "", True: ", fits", False: ", does not fit"}[timeline.fits]
    numbers.append(Number("memory of a rank", size(sum(timeline.memory.values())) + fits, "modelled"))
    numbers += [Number(f"  {name}", size(value), "modelled") for name, value in timeline.memory.items()]
    return [*numbers, *_job_numbers(timeline)]


def _job_numbers(timeline: Timeline) -> list[Number]:
    """Failures, checkpoints, energy and cost of the job, or of one pass if `passes` is not set."""
    numbers, unit, included = [], "pass" if timeline.passes is None else "job", ""
    if timeline.machine.mtbf is not None:
        numbers.append(Number("a failure every", duration(timeline.machine.mtbf / timeline.ranks), "modelled"))
    if timeline.failures is not None:
        text = f"{duration(timeline.failures.write)} after every {duration(timeline.failures.interval)} of work"
        text = text if timeline.failures.checkpoints else "none: the job is too short"
        numbers.append(Number("checkpoint", text, "modelled"))
        included = ", with failures and checkpoints"
    if timeline.passes is not None:
        text = f"{plural(timeline.passes, 'pass')} in {duration(timeline.total)}{included}"
        numbers.append(Number("job", text, "modelled"))
    if timeline.joules is not None:
        numbers.append(Number(f"energy of the {unit}", f"{digits(timeline.joules / JOULES_PER_KWH)} kWh", "modelled"))
    if timeline.price is not None:
        text = f"{digits(timeline.price)} in the currency of machine.price"
        numbers.append(Number(f"cost of the {unit}", text, "modelled"))
    return numbers


def machine_record(machine: Machine) -> dict[str, Any]:
    """The value and source of each number of a machine, as plain data."""
    return {name: {"value": getattr(machine, name), "source": machine.source(name)} for name in MACHINE_NUMBERS}


def _record(plan: Plan, machine: Machine, timelines: list[Timeline], tables: dict[str, list[Number]]) -> dict[str, Any]:
    """The JSON record: seconds, bytes and joules, with the kind of each printed number."""
    return {
        "plan": json.loads(plan.to_json()),
        "machine": machine_record(machine),
        "passes": {
            timeline.direction: {
                **record_pass(timeline),
                "job": timeline.passes,
                "failures": None if timeline.failures is None else vars(timeline.failures),
                "words": {number.name.strip(): number.kind for number in tables[timeline.direction] if number.kind},
            }
            for timeline in timelines
        },
        "not modelled": timelines[0].unmodelled,
        "notes": timelines[0].notes,
        "choice": choice_record(plan.choice),
    }
