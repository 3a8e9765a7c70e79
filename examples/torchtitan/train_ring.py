"""torchtitan's trainer with ring attention in place of its context parallelism; its configuration stays as it is.

    torchrun --nproc-per-node 8 examples/torchtitan/train_ring.py --job.config_file llama3_8b.toml \\
        --parallelism.context_parallel_degree 4

Works for models with scaled_dot_product_attention or flex_attention, including packed documents and the masks of Qwen3
and GPT-OSS; not for attn_type="varlen". Tested with torchtitan 0.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import torchtitan.train as titan
from torchtitan.distributed import ParallelDims, context_parallel

import ringattn as ra
from ringattn.integrations.context_parallel import read_mask

LAYOUT = "zigzag"


def cut(mesh: Any, tensors: tuple[torch.Tensor, ...], masks: Any, *_: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    """(this rank's rows of tensors [batch, tokens], masks); masks stay those of whole sequences."""
    for mask in masks.values() if isinstance(masks, dict) else [] if masks is None else [masks]:
        read_mask(mask)  # compiled layers cannot read it
    layout = ra.make_layout(LAYOUT, tokens=tensors[0].shape[1], ranks=mesh.size())
    return tuple(layout.shard_tensor(x, mesh.get_local_rank(), dim=1).contiguous() for x in tensors), masks


context_parallel.cp_shard = cut
context_parallel.parallelize_module = context_parallel._enable_context_parallel_dispatcher = lambda *_, **__: None
# Sequences of any length can be cut; only tensor parallelism needs equal shards.
ParallelDims.seq_len_divisor = property(lambda dims: dims.tp if dims.tp == 1 else dims.tp * 2 * dims.cp)


class RingTrainer(titan.Trainer):
    """torchtitan's Trainer, whose attention runs over the ranks of its mesh "cp"."""

    def __init__(self, job_config: Any) -> None:
        self.degree = job_config.parallelism.context_parallel_degree
        job_config.parallelism.context_parallel_degree = 1  # otherwise models refuse it, as torch's own
        super().__init__(job_config)
        if self.degree == 1:
            return
        within, mesh = self.train_context, self.parallel_dims.get_mesh("cp")
        tables = [m.rope_cache for m in self.model_parts if not self.takes_positions(m)]

        @contextmanager
        def context() -> Iterator[None]:
            ring = ra.context_parallel(mesh, buffers=tables, buffer_seq_dims=[0] * len(tables), layout=LAYOUT)
            with within(), ring:
                yield

        self.train_context = context
        if job_config.validation.enable:
            self.validator.validation_context = context

    @staticmethod
    def takes_positions(model: torch.nn.Module) -> bool:
        """Whether the model takes the positions of its rows; otherwise it reads the first rows of its table."""
        return "positions" in signature(model.forward).parameters

    def init_distributed(self) -> ParallelDims:
        self.job_config.parallelism.context_parallel_degree = self.degree
        dims = super().init_distributed()
        self.job_config.parallelism.context_parallel_degree = 1
        return dims

    def post_dataloading_process(self, *batch: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        inputs, labels, extra_inputs, extra = super().post_dataloading_process(*batch)
        if not self.takes_positions(self.model_parts[0]):
            extra.pop("positions", None)
        return inputs, labels, extra_inputs, extra


if __name__ == "__main__":
    titan.main(RingTrainer)
