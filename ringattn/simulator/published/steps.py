"""81 published steps of training, read from the file beside this module, and their errors by the model.

No row set a number of the model; its share of the peak for products was chosen with other rows of torchtitan in sight.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...machine.presets import get_machine
from ..models.config import ModelConfig
from ..models.parallel import Parallel
from ..models.pipeline import Pipeline, pipelined_step
from .errors import ErrorStatistics

#: The machine of a GPU, and what a source computes attention with where that is not the preset's first kernel.
MACHINES = {"h100": "h100_nvlink_ib", "h200": "h200_nvlink_ib"}
KERNELS = {"llm-foundry training benchmarks (MPT, FSDP)": "/fa2"}
#: What of a layer is kept, by the word of a source; "selective" keeps about the outputs of attention.
CHECKPOINTING = {"none": "none", "selective": "attention", "full": "full"}


@dataclass(frozen=True)
class StepErrors:
    """Errors of tokens/s of the steps of a source in one precision, and of the memory where the source tells a peak."""

    source: str
    precision: str
    speed: ErrorStatistics
    memory: ErrorStatistics | None


def step_errors() -> list[StepErrors]:
    """The errors by source and precision, then of all sources by precision. Steps in fp8 are modelled as if in bf16."""
    speeds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    memories: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    with (Path(__file__).parent / "steps.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            speed, memory = _predict(row)
            for source in (row["source"], "all sources"):
                key = source, row["precision"]
                speeds[key].append(speed / float(row["tokens_per_s_per_gpu"]) - 1)
                if row["peak_GiB"]:
                    memories[key].append(memory / 2**30 / float(row["peak_GiB"]) - 1)
    return [
        StepErrors(*key, ErrorStatistics.of(errors), ErrorStatistics.of(memories[key]) if key in memories else None)
        for key, errors in sorted(speeds.items(), key=lambda entry: entry[0][0] == "all sources")
    ]


def _predict(row: dict[str, str]) -> tuple[float, int]:
    """Tokens/s of a GPU, and its bytes, by the model."""
    names = "layers hidden heads kv_heads mlp vocab gpus_per_node dp cp tp pp micro_batches interleaved seq rows_per_dp"
    sizes = {name: int(row[name]) for name in names.split()}
    shape: dict[str, Any] = {name: sizes[name] for name in ("layers", "hidden", "heads", "kv_heads", "mlp", "vocab")}
    head_dim = sizes["hidden"] // sizes["heads"]
    model = ModelConfig(name=row["model"], **shape, head_dim=head_dim, gated=row["gated"] == "True")
    machine = get_machine(MACHINES[row["gpu"]] + KERNELS.get(row["source"], ""))
    parallel = Parallel(
        cp=sizes["cp"],
        dp=sizes["dp"],
        tp=sizes["tp"],
        rows=sizes["rows_per_dp"],
        checkpointing=CHECKPOINTING[row["checkpointing"]],
        shard="optimizer" if row["source"].startswith("NeMo") else "weights",
    )
    pipeline = Pipeline(sizes["pp"], sizes["micro_batches"] if sizes["pp"] > 1 else None, sizes["interleaved"])
    step = pipelined_step(
        model, replace(machine, ranks_per_node=sizes["gpus_per_node"]), sizes["seq"], parallel, pipeline
    )
    return step.tokens_per_second, sum(step.memory.values())
