"""81 published training steps, read from the file beside this module, and the model's errors on them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, replace
from typing import Any

from msgspec import convert

from ...machine.presets import get_machine
from ..models.config import ModelConfig
from ..models.parallel import TORCHTITAN, Parallel, Software
from ..models.training import training_step
from .errors import Errors, ErrorStatistics
from .predictions import NOTES, read_table

#: The group of all steps.
ALL = "all"
#: By the first word of a source's name: its attention kernel, and what its software does unlike torchtitan.
SOURCES: dict[str, dict[str, Any]] = NOTES["steps"]


def step_errors() -> tuple[dict[str, Errors], dict[str, dict[str, list[float]]]]:
    """Errors of the predicted training steps: (by source and precision and over all, measured / predicted values).

    The values are by kind and source. Both cover tokens/s and, if the source gives peak memory, the GiB needed and
    reserved; "null" are tokens/s with all FLOPs at half of the data sheet's peak.
    """
    found: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    ratios: dict[str, dict[str, list[float]]] = {"seconds": {}, "reserved": {}}
    for row in read_table("steps.csv"):
        told, source = predict(row), row["source"].partition(" ")[0]
        measured = dict.fromkeys(("tokens/s", "null"), float(row["tokens_per_s_per_gpu"]))
        if row["peak_GiB"]:
            measured |= dict.fromkeys(("needed", "reserved"), float(row["peak_GiB"]))
            ratios["reserved"].setdefault(source, []).append(measured["reserved"] / told["reserved"])
        ratios["seconds"].setdefault(source, []).append(told["tokens/s"] / measured["tokens/s"])
        for group in (f"{source}, {row['precision']}", ALL):
            for name, value in measured.items():
                found[group][name].append(told[name] / value - 1)
    ordered = sorted(found, key=ALL.__eq__)
    return {name: {x: ErrorStatistics.of(errors) for x, errors in found[name].items()} for name in ordered}, ratios


def predict(row: dict[str, str]) -> dict[str, float]:
    """Modelled tokens/s per GPU, the same by the null model, GiB that it needs, and GiB that an allocator reserves."""
    names = "layers hidden heads kv_heads mlp vocab gpus_per_node dp cp tp pp micro_batches interleaved seq rows_per_dp"
    sizes: dict[str, Any] = {name: int(row[name]) for name in names.split()}
    shape = {name: sizes[name] for name in ("layers", "hidden", "heads", "kv_heads", "mlp", "vocab")}
    model = ModelConfig(
        name=row["model"],
        **shape,
        head_dim=sizes["hidden"] // sizes["heads"],
        gated=row["gated"] == "True",
        tied=row["model"].startswith("mpt"),
    )
    name = next(name for name in SOURCES if row["source"].startswith(name))
    told = {**SOURCES[name]}
    library, software = told.pop("library"), convert(asdict(TORCHTITAN) | told, Software)
    software = replace(
        software,
        fp8=row["precision"] == "fp8",
        compiled=software.compiled and row["compiled"] != "no",
        hides_exchanges=software.hides_exchanges or "async" in row["run"].lower(),
    )
    # Pipeline stages of Megatron and torchtitan keep their weights unsharded between micro-batches.
    whole = name == "NeMo" or sizes["pp"] > 1
    if whole:
        software = replace(software, states=Software.states)
    parallel = Parallel(
        **{name: sizes[name] for name in ("cp", "dp", "tp", "pp", "micro_batches", "interleaved")},
        rows=sizes["rows_per_dp"],
        # Transformer Engine passes messages around a ring; torch gathers all keys and values at once.
        schedule="ring" if name == "NeMo" else "allgather",
        checkpointing=row["checkpointing"],
        shard="optimizer" if whole else "weights",
        software=software,
    )
    limited = name == "torchtitan" and row["gpu"] == "h100"
    machine = get_machine(("h100_500w_ib" if limited else f"{row['gpu']}_nvlink_ib") + f"/{library}")
    node, links = sizes["gpus_per_node"], machine.node_bandwidth or 0.0
    ring = sizes["tp"] if sizes["tp"] > 1 else min(sizes["dp"], node)
    if node == 4 and ring > 1:  # HGX boards of 4 join each pair of GPUs by a third of their links
        links *= (ring - 1) / 3
    machine = replace(machine, ranks_per_node=node, node_bandwidth=links)
    step = training_step(model, machine, sizes["seq"], parallel)
    null = (machine.peak or 0.0) * (1 + software.fp8) / 2 * step.tokens / step.flops
    memory = {"needed": step.needed / 2**30, "reserved": step.reserved / 2**30}
    return {"tokens/s": step.tokens_per_second, "null": null, **memory}
