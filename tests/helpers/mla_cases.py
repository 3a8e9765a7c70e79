"""What the ranks of test_mla.py run: tiny models of transformers that attend through latents, or choose their keys."""

from __future__ import annotations

import contextlib
import copy
import io
import runpy
from pathlib import Path
from typing import Any

import peft
import pytest
import sweep
import torch
import torch.distributed as dist
from hybrid_cases import pair, tiny
from rank_pool import told_by

import ringattn as ra
from ringattn.call.functional import get_transport
from ringattn.inference import choice
from ringattn.integrations.transformers import RingCache, check, parallelize, shard_batch

YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


#: The largest difference of models in fp64, whose eager attention has its softmax in fp32.
BOUND = 2e-6


def exact(rank: int, name: str, yarn: bool = False) -> dict[str, str]:
    """`sweep.one` in fp64; with yarn, whose mscale enters the model's scale of logits squared."""
    rope = {"rope_parameters": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.7}} if yarn else None
    try:
        # transformers takes losses in fp32, and those of MiniCPM3 are large.
        return sweep.one(rank, name, 4 * BOUND if "MiniCPM3" in name else BOUND, rope, torch.float64)
    finally:
        torch.set_default_dtype(torch.float32)


def sent(rank: int, name: str) -> tuple[int, int]:
    """Bytes that rank 0 of two sends in the forward of a batch of 2 x 41 tokens, and those of latents in all layers."""
    model = parallelize(tiny(name), layout="contiguous", schedule="ring")
    batch, counters = shard_batch({"input_ids": sweep.make_ids()}, layout="contiguous"), get_transport().counters
    counters.reset()
    with torch.no_grad():
        model(**batch, use_cache=False)
    config, rows = model.config, ra.make_layout("contiguous", tokens=sweep.TOKENS, ranks=2).rows(0)
    width = (config.kv_lora_rank + config.qk_rope_head_dim) * 4
    return counters.sent_bytes, config.num_hidden_layers * 2 * rows * width


def adapted(rank: int, name: str) -> dict[str, float]:
    """The largest differences of gradients from one process where the projection of latents has adapters."""
    ids, found = sweep.make_ids(), {}
    for dropout in (0.0, 0.5):
        torch.manual_seed(3)
        options = {"target_modules": ["kv_b_proj", "o_proj"], "init_lora_weights": False, "lora_dropout": dropout}
        alone = peft.get_peft_model(tiny(name).double(), peft.LoraConfig(**options)).eval()
        alone.config._experts_implementation = "eager"
        ours = parallelize(copy.deepcopy(alone), layout="zigzag")
        local = ours(**shard_batch({"input_ids": ids}, layout="zigzag"), use_cache=False).logits
        cut = ra.make_layout("zigzag", tokens=sweep.TOKENS, ranks=dist.get_world_size())
        weight = torch.randn(*ids.shape, sweep.CLASSES, generator=torch.Generator().manual_seed(4)).double()
        (local * cut.shard_tensor(weight, rank, dim=1)).sum().backward()
        (alone(ids, use_cache=False).logits * weight).sum().backward()
        pairs = [
            (p.grad, q.grad) for p, q in zip(ours.parameters(), alone.parameters(), strict=True) if p.requires_grad
        ]
        for mine, _ in pairs:
            dist.all_reduce(mine)
        largest = max(float(g.abs().max()) for _, g in pairs)
        found[f"dropout {dropout}"] = max(float((p - g).abs().max()) for p, g in pairs) / largest
        layer = next(x for x in ours.train().modules() if hasattr(x, "expand_kv"))
        taken, _ = layer.expand_kv(torch.zeros(1, 1, 3, 16).double(), torch.zeros(1, 1, 3, 8).double())
        assert isinstance(taken, ra.Rows) == (not dropout)
    return found


def in_graphs_and_autocast(rank: int, name: str) -> dict[str, float]:
    """How far a compiled model is from the eager one, and one under autocast from one process, with its gradients."""
    alone, model = pair(name)
    batch, found = shard_batch({"input_ids": sweep.make_ids()}, layout="zigzag"), {}
    plain = model(**batch, use_cache=False).logits
    if torch.__version__ >= "2.12":
        fast = torch.compile(model, backend="aot_eager", fullgraph=True)
        found["compiled"] = float((fast(**batch, use_cache=False).logits - plain).detach().abs().max())
    cut = ra.make_layout("zigzag", tokens=sweep.TOKENS, ranks=dist.get_world_size())
    with torch.autocast("cpu", torch.bfloat16):
        local = model(**batch, use_cache=False).logits
        right = alone(sweep.make_ids(), use_cache=False).logits
    found["autocast"] = float((local - cut.shard_tensor(right, rank, dim=1)).detach().abs().max() / right.abs().max())
    local.float().square().sum().backward()
    right.float().square().sum().backward()
    for (word, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        if "kv_b_proj" in word and p.grad is not None:
            dist.all_reduce(p.grad)
            found[word] = float((p.grad - q.grad).abs().max() / q.grad.abs().max())
    return found


def choices(rank: int, name: str) -> dict[str, Any]:
    """How far logits are with scores made in parts, and where every key is chosen; what `check` says."""
    model = parallelize(tiny(name), layout="zigzag")
    batch = shard_batch({"input_ids": sweep.make_ids()}, layout="zigzag")
    few = model(**batch, use_cache=False).logits
    agreement = check(model)
    with pytest.MonkeyPatch.context() as patch:  # scores of five rows at once
        patch.setattr(choice, "SCORE_BYTES", 5 * 4 * 2 * 16 * sweep.TOKENS)
        parts = model(**batch, use_cache=False).logits
    for layer in model.modules():
        if getattr(layer, "indexer", None) is not None:
            layer.indexer.index_topk = sweep.TOKENS
    every = model(**batch, use_cache=False).logits
    return {
        "parts": float((few - parts).detach().abs().max()),
        "check": max(agreement.logits, agreement.gradients),
        "every": float((few - every).detach().abs().max()),
    }


def example(rank: int) -> list[float]:
    """The losses of examples/latents.py."""
    train = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples/latents.py"))["train"]
    with contextlib.redirect_stdout(io.StringIO()):
        return train(6)


def generate_by_blocks(rank: int) -> str:
    """What `generate()` says of a model that chooses blocks of keys."""
    model = parallelize(tiny("MiniMaxM3VLForCausalLM"), layout="zigzag")
    return told_by(lambda: model.generate(sweep.make_ids(), max_new_tokens=2))


def held(rank: int, name: str) -> tuple[int, int]:
    """Bytes of the cache of a generation, and those of latents for as many rows in all layers, and of indexer keys."""
    _, model = pair(name)
    past = RingCache(model, page=1)
    model.generate(sweep.make_ids(), max_new_tokens=4, past_key_values=past)
    rows = sum(len(run) for run in past.cache.rows(0))
    indexers = sum(getattr(layer, "indexer", None) is not None for layer in model.modules())
    width = len(past.windows) * (model.config.kv_lora_rank + model.config.qk_rope_head_dim)
    width += indexers * getattr(model.config, "index_head_dim", 0)
    return past.cache.nbytes, 2 * rows * width * 4


def latent_caches(rank: int) -> dict[str, float]:
    """How far a cache of latents is from one of the keys and values of all heads, on virtual ranks."""
    source, found = torch.Generator().manual_seed(6), {}

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    of_keys, of_values, latents, q = draw(3, 12, 8), draw(3, 12, 5), draw(2, 1, 30, 12), draw(2, 3, 30, 8)
    rows = [ra.Rows(x, expand=lambda x: (x @ of_keys, x @ of_values)) for x in latents.split((17, 9, 4), 2)]
    for options in ({}, {"dtype": torch.float32}, {"windows": "copy"}):
        pattern = ra.Causal() & ra.Window(11) if "windows" in options else ra.Causal()
        caches = [ra.KVCache(pattern, layers=1, ranks=3, page=4, **options) for _ in range(2)]
        for part, queries in zip(rows[:2], q.split((17, 9, 4), 2), strict=False):
            (x,) = part.tensors
            mine = caches[0].prefill(0, queries, part)
            right = caches[1].prefill(0, queries, x @ of_keys, x @ of_values)
            found[f"prefill {options} {len(found)}"] = float((mine - right).abs().max())
        (x,), queries = rows[2].tensors, q[:, :, 26:]
        mine = caches[0].step(0, queries @ of_keys.mT, x, scale=8**-0.5) @ of_values
        right = caches[1].step(0, queries, x @ of_keys, x @ of_values, scale=8**-0.5)
        found[f"step {options}"] = float((mine - right).abs().max())
    return found
