"""Train a tiny Qwen3-Next on packed documents, each sequence over all ranks.

    torchrun --nproc-per-node 2 examples/hybrid.py
    torchrun --nproc-per-node 3 examples/hybrid.py --layout contiguous --steps 20

Its documents are topics of Python's help, byte by byte. Losses do not depend on the number of ranks, or on the layout,
except for rounding: gated delta rules, convolutions and attention all stop at the borders of documents.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
from itertools import cycle, islice

import torch
import torch.distributed as dist
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from ringattn.integrations.transformers import parallelize, shard_batch
from ringattn.train import mean_over_ranks, pack


def make_model() -> Qwen3NextForCausalLM:
    """Two gated delta rules, then attention; the same random weights on every rank."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        layer_types=["linear_attention", "linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


def train(layout: str, steps: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step, the same on every rank."""
    model = parallelize(make_model(), layout=layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches, log = pack(cycle(pydoc_data.topics.topics.values()), 1024), []
    for step, batch in enumerate(islice(batches, steps)):
        loss = model(**shard_batch(batch, layout=layout)).loss
        loss.backward()
        for parameter in model.parameters():  # the mean over the ranks, as DDP takes it
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        log.append((float(mean_over_ranks(loss.detach())), float(norm)))
        if dist.get_rank() == 0:
            print(f"step {step}: loss {log[-1][0]:.6f}, gradient norm {log[-1][1]:.6f}")
    return log


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="zigzag", help="zigzag or contiguous")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/hybrid.py")
    dist.init_process_group("gloo")
    train(options.layout, options.steps)
    dist.destroy_process_group()
