"""81 published training steps, read from the file beside this module, and the model's errors on them."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from msgspec import convert

from ...machine.presets import get_machine
from ..models.config import ModelConfig
from ..models.parallel import TORCHTITAN, Parallel, Software
from ..models.training import training_step
from .errors import Errors, ErrorStatistics
from .predictions import NOTES

#: The group of all steps.
ALL = "all"
#: The preset of each GPU.
MACHINES = {"a100": "a100_nvlink_ib", "h100": "h100_nvlink_ib", "h200": "h200_nvlink_ib", "b200": "b200_nvlink_ib"}
#: By the first word of a source's name: its attention kernel, and what its software does unlike torchtitan.
SOURCES: dict[str, dict[str, Any]] = NOTES["steps"]


def step_errors() -> tuple[dict[str, Errors], dict[str, dict[str, list[float]]]]:
    """Errors of the predicted training steps: (by source and precision and over all, measured / predicted values).

    The values are by kind and source. Both cover tokens/s and, if the source gives peak memory, the bytes needed and
    reserved.
    """
    found: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    ratios: dict[str, dict[str, list[float]]] = {"seconds": {}, "reserved": {}}
    with (Path(__file__).parent / "steps.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            speed, needed, reserved = _predict(row)
            source = row["source"].partition(" ")[0]
            ratios["seconds"].setdefault(source, []).append(speed / float(row["tokens_per_s_per_gpu"]))
            if row["peak_GiB"]:
                ratios["reserved"].setdefault(source, []).append(2**30 * float(row["peak_GiB"]) / reserved)
            for group in (f"{source}, {row['precision']}", ALL):
                found[group]["tokens/s"].append(speed / float(row["tokens_per_s_per_gpu"]) - 1)
                if row["peak_GiB"]:
                    for name, size in (("needed", needed), ("reserved", reserved)):
                        found[group][name].append(size / 2**30 / float(row["peak_GiB"]) - 1)
    ordered = sorted(found, key=ALL.__eq__)
    return {name: {x: ErrorStatistics.of(errors) for x, errors in found[name].items()} for name in ordered}, ratios


def _predict(row: dict[str, str]) -> tuple[float, int, int]:
    """Modelled tokens/s per GPU, bytes that it needs, and bytes that an allocator reserves."""
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
    machine = get_machine(("h100_500w_ib" if limited else MACHINES[row["gpu"]]) + f"/{library}")
    node, links = sizes["gpus_per_node"], machine.node_bandwidth or 0.0
    ring = sizes["tp"] if sizes["tp"] > 1 else min(sizes["dp"], node)
    if node == 4 and ring > 1:  # HGX boards of 4 join each pair of GPUs by a third of their links
        links *= (ring - 1) / 3
    machine = replace(machine, ranks_per_node=node, node_bandwidth=links)
    step = training_step(model, machine, sizes["seq"], parallel)
    return step.tokens_per_second, step.needed, step.reserved
