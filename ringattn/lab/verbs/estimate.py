"""ringattn estimate: a training step, a prefill or a decode of a whole model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from ...cli.config.groups import check_choice
from ...cli.config.schema import parse_size
from ...cli.simulate import machine_record
from ...files import STDOUT, check_json, write_json
from ...inference import MERGES, WINDOWS
from ...machine.bands import MEMORY, describe_steps
from ...machine.presets import CURRENCY
from ...simulator.progress import listening
from ...simulator.reporting.console import Number, print_grid, print_numbers, print_paragraph, show_progress
from ...simulator.timing.costs import JOULES_PER_KWH, SECONDS_PER_HOUR
from ...text import digits, duration, plural, rate, size
from ..models.config import ModelConfig, load_model
from ..models.inference import ERRORS, decode, prefill
from ..models.layer import ModelEstimate
from ..models.parallel import Parallel
from ..models.training import StepEstimate, training_step
from .settings import EstimateConfig, read_documents, read_software

#: Effects that no formula of models/ covers.
NOT_MODELLED = (
    "unequal load of experts, reading data, kernel launches outside attention, collectives that slow down each "
    "other or the ring's messages (docs/cluster.md)"
)


def estimate_model(config: EstimateConfig) -> tuple[ModelConfig, ModelEstimate]:
    """Predict what `phase` asks for: a training step, a prefill or a decoded token; returns the model and the estimate.

    Raises InvalidInput and Unsupported.
    """
    config.check()
    check_choice("merge", config.merge, MERGES)
    check_choice("windows", config.windows, WINDOWS)
    model = load_model(config.model)
    parallel = Parallel(
        **{name: getattr(config, name) for name in ("cp", "dp", "tp", "ep", "pp", "micro_batches", "interleaved")},
        layout=config.layout.spec,
        schedule=config.schedule.spec,
        checkpointing=config.checkpointing,
        shard=config.sharding,
        rows=config.batch,
        software=read_software(config),
        documents=read_documents(config),
    )
    machine, tokens = config.machine.made(ranks=parallel.gpus), config.length()
    if config.phase == "training":
        return model, training_step(model, machine, tokens, parallel)
    if config.phase == "prefill":
        chunk = None if config.chunk is None else parse_size(config.chunk, "chunk")
        return model, prefill(model, machine, tokens, parallel, chunk=chunk)
    return model, decode(model, machine, tokens, parallel, merge=config.merge, windows=config.windows)


def main(config: EstimateConfig) -> None:
    """Print the predicted times and memory of a model for `phase`; also write them to `output.path` as JSON, if set."""
    check_json(config.output.path)
    with show_progress(Console(stderr=True)) as tell, listening(tell):
        model, estimate = estimate_model(config)
    if isinstance(estimate, StepEstimate):
        numbers = [*_step_numbers(estimate), *_cost_numbers(estimate)]
    else:
        waits_for = "time to first token" if config.phase == "prefill" else "time per token"
        numbers = [
            Number(waits_for, duration(estimate.seconds), "modelled"),
            Number("tokens of a GPU", rate(estimate.tokens_per_second, "tokens/s"), "modelled"),
            Number("keys and values of a GPU", size(estimate.memory["keys and values"]), "modelled"),
            *_fits(estimate),
        ]
    if config.output.path is not None:
        write_json(config.output.path, _record(config, model, estimate))
    if config.output.path != STDOUT:
        _print(config, model, estimate, numbers)


def _print(config: EstimateConfig, model: ModelConfig, estimate: ModelEstimate, numbers: list[Number]) -> None:
    """Print the request, the tables of time and memory, and the derived numbers."""
    parallel = estimate.parallel
    name = config.machine.path or config.machine.spec
    print_paragraph(
        f"{config.phase} of {model.name}: {plural(parallel.rows * parallel.dp, 'sequence')} of "
        f"{plural(config.length(), 'token')} on {plural(estimate.gpus, 'GPU')} of {name}, cp={parallel.cp} "
        f"dp={parallel.dp} tp={parallel.tp} ep={parallel.ep} pp={parallel.pp}, {config.dtype}"
        + (f", sharding={parallel.shard} checkpointing={parallel.checkpointing}" if config.phase == "training" else "")
    )
    if estimate.plan:
        print_paragraph(f"attention: {estimate.plan}")
    parts = [(name, duration(part), f"{part / estimate.seconds:.1%}") for name, part in estimate.parts.items() if part]
    print_grid("", ("time [modelled]", "adds", "share"), parts)
    memory = [(name, size(count)) for name, count in estimate.memory.items() if count]
    print_grid("", ("memory of a GPU [modelled]", "bytes"), [*memory, ("sum", size(estimate.bytes))])
    counted = Number("parameters", f"{model.parameters:,}, {model.active_parameters:,} with each token", "counted")
    print_numbers("", [counted, *numbers])
    if model.mlp_item is not None:
        kept = "weights are trained" if config.phase == "training" else "weights are stored as quantized, and compute"
        print_paragraph(f"note: the config is quantized; {kept} in {config.dtype} [assumed]")
    print_paragraph(f"note: {describe_errors(config.phase, estimate)}")
    print_paragraph(f"not modelled: {NOT_MODELLED}")


def describe_errors(phase: str, estimate: ModelEstimate) -> str:
    """How far such predictions were from published measurements."""
    if isinstance(estimate, StepEstimate):
        return describe_steps(estimate.outside)
    return ERRORS[phase]


def _fits(estimate: ModelEstimate) -> list[Number]:
    """Whether a GPU has enough memory; empty if the machine does not specify its memory."""
    has = estimate.machine.memory
    if has is None:
        return []
    return [Number("memory", f"{'fits' if estimate.fits else 'does not fit'} into {size(has)}", "modelled")]


def _step_numbers(step: StepEstimate) -> list[Number]:
    """Time, rates and memory of a training step."""
    band = ""
    if step.seconds_band is not None:
        band = f", {' .. '.join(map(duration, step.seconds_band))} by the band of published steps"
    mfu = "" if step.mfu is None else f", {step.mfu:.1%} of the peak (MFU)"
    return [
        Number("step", duration(step.seconds) + band, "modelled"),
        *([Number("packed", step.packed, "counted")] if step.packed else []),
        *([Number("unequal", step.unequal, "modelled")] if step.unequal else []),
        Number("FLOPs of the model", f"{step.flops:.4g} in a step, without computing again", "counted"),
        Number("rate of a GPU", f"{digits(step.tflops)} TFLOP/s{mfu}", "modelled"),
        Number("tokens of a GPU", rate(step.tokens_per_second, "tokens/s"), "modelled"),
        *_fits(step),
        Number("memory needed", f"{size(step.needed)}; an allocator shows about {size(step.reserved)}", "modelled"),
        *(
            [Number("memory of the host", f"{size(step.host_bytes)} of each GPU", "modelled")]
            if step.host_bytes
            else []
        ),
        Number("  published peaks", f"{MEMORY.low:g} to {MEMORY.high:g} times what an allocator shows", "cited"),
    ]


def _cost_numbers(step: StepEstimate) -> list[Number]:
    """Cost, energy and time with failures, as far as the machine specifies price, watts and failures."""
    machine, numbers = step.machine, []
    if machine.price is not None:
        cost = machine.price * step.gpus * step.seconds / SECONDS_PER_HOUR
        text = f"{digits(cost)} a step, {digits(machine.price * step.gpu_hours)} for 1e9 tokens"
        rate_of_cost = f"at machine.price={machine.price:g} for a GPU hour, {CURRENCY} in presets"
        numbers.append(Number("cost", f"{text}, {rate_of_cost}", "modelled"))
    if machine.watts is not None:
        energy = machine.watts * step.gpus * step.seconds / JOULES_PER_KWH
        text = f"{digits(energy)} kWh a step, {digits(machine.watts * step.gpu_hours / 1000)} for 1e9 tokens"
        numbers.append(Number("energy", f"{text}, at {machine.watts:g} W", "modelled"))
    if (effective := step.effective_seconds) is not None:
        text = f"{effective / step.seconds:.4g} times as long in a long job: {duration(effective)} a step"
        numbers.append(Number("with failures", text, "modelled"))
    return numbers


def _record(config: EstimateConfig, model: ModelConfig, estimate: ModelEstimate) -> dict[str, Any]:
    """The numbers as plain data, in seconds and bytes."""
    record: dict[str, Any] = {
        "model": {**asdict(model), "parameters": model.parameters, "active_parameters": model.active_parameters},
        "phase": config.phase,
        "tokens": config.length(),
        "parallel": {**asdict(estimate.parallel), "gpus": estimate.gpus},
        "machine": machine_record(estimate.machine),
        **{name: getattr(estimate, name) for name in ("plan", "seconds", "parts", "memory", "fits")},
        "tokens per second and GPU": estimate.tokens_per_second,
        "kinds": {"parameters": "counted", "flops": "counted", "all else": "modelled"},
        "not modelled": NOT_MODELLED,
    }
    if isinstance(estimate, StepEstimate):
        price, watts = estimate.machine.price, estimate.machine.watts
        record |= {
            "seconds, band": estimate.seconds_band,
            "imbalance": estimate.imbalance,
            "bytes": {"needed": estimate.needed, "reserved": estimate.reserved},
            **{name: getattr(estimate, name) for name in ("flops", "mfu", "tflops")},
            "cost per 1e9 tokens": None if price is None else price * estimate.gpu_hours,
            "kWh per 1e9 tokens": None if watts is None else watts * estimate.gpu_hours / 1000,
            "seconds with failures": estimate.effective_seconds,
        }
    return record
