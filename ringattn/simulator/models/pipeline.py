"""`pipelined_step`: a step of training whose layers are cut into stages, which micro-batches pass in turn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from ...dtypes import ITEM_BYTES
from ...errors import InvalidInput
from ...machine.machine import Machine
from .attention import attention_of_layers
from .config import ModelConfig
from .layer import LayerCosts, message_seconds
from .parallel import Parallel, check_counts
from .training import CHECKPOINT, Attend, StepEstimate, training_step

#: Parts of a step that are not repeated in each layer.
BESIDE_LAYERS = ("loss", "optimiser", "fsdp")


@dataclass(frozen=True)
class Pipeline:
    """Stages of a pipeline (1F1B), micro-batches of a step, and parts of the layers that each stage holds, interleaved.

    Raises InvalidInput for values out of range.
    """

    stages: int = 1
    #: Micro-batches of the sequences of a dp group; None: one for each sequence, and one in all without stages.
    micro_batches: int | None = None
    interleaved: int = 1

    def __post_init__(self) -> None:
        micro_batches = 1 if self.micro_batches is None else self.micro_batches
        check_counts(pp=self.stages, micro_batches=micro_batches, interleaved=self.interleaved)

    def count(self, rows: int) -> int:
        """Micro-batches of a step in which a dp group has `rows` sequences."""
        return self.micro_batches or (rows if self.stages > 1 else 1)

    def check(self, model: ModelConfig, rows: int) -> None:
        """Raise InvalidInput where the layers or the `rows` sequences of a dp group cannot be cut like this."""
        if self.stages * self.interleaved > model.layers:
            raise InvalidInput(
                f"pp={self.stages} interleaved={self.interleaved}: {model.name} has {model.layers} layers, and each "
                "part of a stage needs one; give fewer stages or parts"
            )
        if self.micro_batches is not None and rows % self.micro_batches:
            raise InvalidInput(
                f"micro_batches={self.micro_batches} must divide the batch={rows} sequences of a dp group; try "
                f"batch={self.micro_batches}"
            )
        if self.interleaved > 1 and self.count(rows) % self.stages:
            raise InvalidInput(
                f"interleaved={self.interleaved} needs a multiple of pp={self.stages} micro-batches, and there are "
                f"{self.count(rows)}; try batch={self.stages}"
            )


def pipelined_step(
    model: ModelConfig,
    machine: Machine,
    tokens: int,
    parallel: Parallel,
    pipeline: Pipeline,
    dtype: str = "bfloat16",
    attend: Attend = attention_of_layers,
) -> StepEstimate:
    """The modelled step where `parallel` spreads each stage, and `parallel.rows` sequences are cut into micro-batches.

    All stages take as long as the one with the most layers and keys. Where layers are left over, the stage with the
    output matrix has one layer fewer, and its loss counts as far as it takes longer than a layer. The first
    micro-batch fills the pipeline and the last one drains it: stages - 1 micro-batches more than there are, divided by
    the interleaved parts (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", 2021, section 2.2). Messages between stages add what takes longer than computing the part of a stage
    beside them. Arguments and errors are those of `training_step`.
    """
    pipeline.check(model, parallel.rows)
    count = pipeline.count(parallel.rows)
    micro = replace(parallel, rows=parallel.rows // count)
    stage = _busiest_stage(model, pipeline.stages, tokens)
    one = training_step(stage, machine, tokens, micro, dtype, attend)
    if pipeline.stages == count == 1:
        return replace(one, parts={**one.parts, "pp": 0.0, "bubble": 0.0})
    if model.layers % pipeline.stages:
        layer = sum(seconds for name, seconds in one.parts.items() if name not in BESIDE_LAYERS) / stage.layers
        one.parts["loss"] = max(one.parts["loss"] - layer, 0.0)
    # ZeRO 3 gathers and reduces for each micro-batch; else the gradients of all are summed first.
    once = ("optimiser",) if parallel.shard == "weights" else ("optimiser", "fsdp")
    parts = {name: seconds if name in once else count * seconds for name, seconds in one.parts.items()}
    repeated = sum(seconds for name, seconds in one.parts.items() if name not in once)
    costs = LayerCosts(stage, machine, micro, micro.rows * ceil(tokens / parallel.cp), ITEM_BYTES[dtype])
    sent = message_seconds(machine, costs.input_bytes, parallel.gpus, pipeline.stages)
    parts["pp"] = count * max(2 * pipeline.interleaved * sent - repeated, 0.0)
    parts["bubble"] = (pipeline.stages - 1) / pipeline.interleaved * repeated
    kept = ceil(_kept(pipeline, count) * (one.memory["activations"] - costs.again_bytes))
    memory = {**one.memory, "activations": kept + costs.again_bytes}
    if count > 1:
        memory["gradients"] = costs.gradient_bytes
    gpus, sequences = pipeline.stages * parallel.gpus, parallel.rows * parallel.dp
    pairs = sum(layers * each.pairs for layers, each in attend(model, machine, tokens, micro, dtype))
    return replace(
        one,
        gpus=gpus,
        tokens=sequences * tokens,
        parts=parts,
        memory=memory,
        flops=sequences * (6.0 * model.active_parameters * tokens + 12.0 * model.head_dim * model.heads * pairs),
        checkpoint_bytes=CHECKPOINT * model.parameters / gpus,
    )


def _busiest_stage(model: ModelConfig, stages: int, tokens: int) -> ModelConfig:
    """The model of a stage with the most layers and keys, and with one table: the embedding or the output matrix."""
    layers = ceil(model.layers / stages)
    cuts = [model.windows[start : start + layers] for start in range(0, model.layers - layers + 1, layers)]
    windows = max(cuts, key=lambda cut: sum(tokens if window is None else min(window, tokens) for window in cut))
    return replace(model, layers=layers, windows=windows, tied=model.tied or stages > 1)


def _kept(pipeline: Pipeline, count: int) -> float:
    """Micro-batches whose activations the first stage keeps at once, at most (Narayanan et al. 2021, section 2.2)."""
    stages, parts = pipeline.stages, pipeline.interleaved
    return min(count, stages if parts == 1 else stages + (stages - 1) / parts)
