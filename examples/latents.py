"""Train a tiny DeepSeek-V3 on packed documents, each sequence over all ranks, whose latents travel.

    torchrun --nproc-per-node 2 examples/latents.py
    torchrun --nproc-per-node 1 examples/latents.py --steps 20

Its documents are topics of Python's help, byte by byte. A token sends its latent, 24 numbers here, not the 96 numbers
of its keys and values in all heads. Losses do not depend on the number of ranks, except for rounding.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
from itertools import cycle, islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from ringattn.integrations.transformers import parallelize, shard_batch
from ringattn.train import mean_over_ranks, pack


def make_model() -> DeepseekV3ForCausalLM:
    """A layer with an MLP, then one with experts; the same random weights on every rank."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=64,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def train(steps: int) -> list[float]:
    """The loss of each step, the same on every rank."""
    model = parallelize(make_model(), layout="zigzag")
    ddp = DistributedDataParallel(model, find_unused_parameters=True)  # a rank may send no token to an expert
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches, losses = pack(cycle(pydoc_data.topics.topics.values()), 1024), []
    for step, batch in enumerate(islice(batches, steps)):
        loss = ddp(**shard_batch(batch, layout="zigzag")).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(mean_over_ranks(loss.detach())))
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.6f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/latents.py")
    dist.init_process_group("gloo")
    train(options.steps)
    dist.destroy_process_group()
