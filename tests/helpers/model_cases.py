"""What the ranks of test_transformers.py run: tiny random models of the real classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf

import ringattn as ra
from ringattn.integrations import transformers as adapter
from ringattn.integrations.transformers import check, gather_logits, parallelize, shard_batch

BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
MIXED = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
#: Models of every family by name: the class of the model, that of its configuration, and settings.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "Mistral, window": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 9}),
    "Qwen2, window": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "Gemma 2, softcap": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {"sliding_window": 9, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    ),
    "Gemma 3, hybrid": ("Gemma3ForCausalLM", "Gemma3TextConfig", MIXED),
    "GPT-OSS, sinks": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**MIXED, **EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", EXPERTS),
}


def make(name: str, **changes: Any) -> Any:
    """A model of random weights, the same on every rank."""
    model, config, settings = MODELS[name]
    torch.manual_seed(1)
    made = getattr(hf, model)(getattr(hf, config)(**{**BASE, **settings, **changes}))
    for parameter_name, parameter in made.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return made


def agreements(rank: int, names: list[str], tokens: int) -> list[tuple[float, float]]:
    """How far each model on these ranks is from its eager self, with two packed documents."""
    found = []
    for name in names:
        agreement = check(parallelize(make(name), layout="zigzag"), tokens)
        found.append((agreement.logits, agreement.gradients))
    return found


def told(call: Callable[[], Any]) -> str:
    """The error of a call."""
    try:
        call()
    except ra.RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def batches(rank: int, name: str, checkpointing: bool, packed: bool) -> tuple[float, float]:
    """Largest differences of logits and gradients from each sequence run alone, eagerly.

    The second row of the batch has left padding; with `packed` the rows have different documents instead.
    """
    tokens, layout = 37, "striped(3)"
    alone = [(0, 0, 9), (0, 9, tokens), (1, 0, tokens)] if packed else [(0, 0, tokens), (1, 14, tokens)]
    ids = torch.randint(61, (2, tokens), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    whole = {"input_ids": ids, "labels": labels}
    if not packed:
        mask = whole["attention_mask"] = torch.ones_like(ids)
        mask[1, :14], labels[1, :14] = 0, -100
    eager = make(name, attn_implementation="eager")
    total = sum(stop - start - 1 for _, start, stop in alone)
    loss, expected = torch.zeros(()), []
    for row, start, stop in alone:
        part = ids[row : row + 1, start:stop]
        expected.append(eager(part, use_cache=False).logits[0])
        loss = loss + torch.nn.functional.cross_entropy(expected[-1][:-1], part[0, 1:], reduction="sum") / total
    gradients = torch.autograd.grad(loss, list(eager.parameters()))
    model = parallelize(make(name), layout=layout).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = shard_batch(whole, layout=layout, cu_seqlens=[[0, 9, tokens], [0, tokens]] if packed else None)
    result = model(**batch, use_cache=False, num_items_in_batch=total)
    result.loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    logits = gather_logits(result.logits, layout=layout)
    wrong = max(
        float((logits[row, start:stop] - right).detach().abs().max())
        for (row, start, stop), right in zip(alone, expected, strict=True)
    )
    pairs = zip(model.parameters(), gradients, strict=True)
    return wrong, max(float((p.grad - g).abs().max()) for p, g in pairs)


def refusals(rank: int) -> dict[str, str]:
    """What is said to models and calls that cannot be honoured."""
    found = {}
    batch = shard_batch({"input_ids": torch.zeros(1, 40, dtype=torch.long)}, layout="zigzag")
    model = parallelize(make("Mistral, window"), layout="zigzag")
    with pytest.MonkeyPatch.context() as patch:  # as if a window of W keys meant W keys before the row's own
        patch.setattr(adapter, "Window", lambda left: ra.Window(left + 1))
        found["off by one"] = told(lambda: check(model))
    found["short"] = told(lambda: check(parallelize(make("Mistral, window"), layout="zigzag"), 12))
    dropping = parallelize(make("Llama", attention_dropout=0.1), layout="zigzag").train()
    found["dropout"] = told(lambda: dropping(**batch))
    llama = parallelize(make("Llama"), layout="zigzag")
    found["positions"] = told(lambda: llama(batch["input_ids"]))
    moved = {**batch, "position_ids": batch["position_ids"] + rank}
    found["moved"] = told(lambda: llama(**moved))
    found["on one rank"] = told(lambda: llama(batch["input_ids"]) if rank == 0 else llama(**batch))
    found["generate"] = told(lambda: llama.generate(**batch, max_new_tokens=2))
    found["group"] = told(lambda: parallelize(make("Llama"), 2, layout="zigzag"))  # type: ignore[arg-type]
    chunked = make("Gemma 3, hybrid")
    chunked.config.layer_types = ["full_attention", "chunked_attention"]
    found["layers"] = told(lambda: parallelize(chunked, layout="zigzag"))
    found["router"] = told(lambda: parallelize(make("Mixtral", output_router_logits=True), layout="zigzag"))
    found["option"] = told(lambda: parallelize(make("Llama"), layout="zigzag", softcap=3.0))  # type: ignore[call-arg]
    small = {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20}
    found["alibi"] = told(lambda: parallelize(hf.BloomForCausalLM(hf.BloomConfig(**small)), layout="zigzag"))
    return found
