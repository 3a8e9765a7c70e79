"""`Pipeline`: a training step whose layers are cut into stages, which micro-batches pass in turn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from ...errors import InvalidInput
from .config import ModelConfig
from .parallel import check_counts


@dataclass(frozen=True)
class Pipeline:
    """Stages of a pipeline (1F1B), micro-batches per step, and parts of the layers that each stage holds, interleaved.

    Raises InvalidInput for values out of range.
    """

    stages: int = 1
    #: Micro-batches per dp group and step; None: one per sequence, or one in all without stages.
    micro_batches: int | None = None
    interleaved: int = 1

    def __post_init__(self) -> None:
        micro_batches = 1 if self.micro_batches is None else self.micro_batches
        check_counts(pp=self.stages, micro_batches=micro_batches, interleaved=self.interleaved)

    def count(self, rows: int) -> int:
        """Micro-batches of a step whose dp groups have `rows` sequences each."""
        return self.micro_batches or (rows if self.stages > 1 else 1)

    def check(self, model: ModelConfig, rows: int) -> None:
        """Raise InvalidInput where the layers or the `rows` sequences of a dp group cannot be split this way."""
        if self.stages * self.interleaved > model.layers:
            raise InvalidInput(
                f"pp={self.stages} interleaved={self.interleaved}: {model.name} has {model.layers} layers, and each "
                "part of a stage needs one; give fewer stages or parts"
            )
        if self.stages > 1 and model.recurrence is not None:
            raise InvalidInput(f"pp={self.stages}: stages of layers that differ, as in {model.name}, are not modelled")
        if self.micro_batches is not None and rows % self.micro_batches:
            raise InvalidInput(
                f"micro_batches={self.micro_batches} must divide the batch={rows} sequences of a dp group; try "
                f"batch={self.micro_batches}"
            )
        if self.interleaved > 1 and self.count(rows) % self.stages:
            raise InvalidInput(
                f"interleaved={self.interleaved} needs a multiple of pp={self.stages} micro-batches, but there are "
                f"{self.count(rows)}; try batch={self.stages}"
            )

    def busiest_stage(self, model: ModelConfig, tokens: int) -> ModelConfig:
        """The model of the busiest stage: it has the most layers and keys, and one table, the embedding or the output.

        Its weights are stored as in training, without a dtype of their own.
        """
        layers = ceil(model.layers / self.stages)
        cuts = [model.windows[start : start + layers] for start in range(0, model.layers - layers + 1, layers)]
        windows = max(cuts, key=lambda cut: sum(tokens if window is None else min(window, tokens) for window in cut))
        tied = model.tied or self.stages > 1
        return replace(model, layers=layers, windows=windows, tied=tied, mlp_item=None, attention_item=None)

    def kept(self, count: int) -> float:
        """How many of `count` micro-batches have activations on the first stage at once (Narayanan et al. 2021)."""
        stages, parts = self.stages, self.interleaved
        return min(count, stages if parts == 1 else stages + (stages - 1) / parts)


#: No pipeline: one stage, and one micro-batch.
ONE_STAGE = Pipeline()
