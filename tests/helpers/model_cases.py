"""What the ranks of test_transformers.py run: tiny random models of the real classes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Sequence
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any

import peft
import pytest
import sweep
import torch
import torch.distributed as dist
import transformers as hf
from rank_pool import of_first, told_by
from torch._dynamo.utils import counters

import ringattn as ra
from ringattn.integrations import generation
from ringattn.integrations.transformers import (
    LayerMasks,
    check,
    gather_logits,
    parallelize,
    pool,
    shard_batch,
    unparallelize,
)
from ringattn.train import mean_over_ranks

BASE = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "max_position_embeddings": 512},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
}
MIXED = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CHUNKS = {"attention_chunk_size": 9, "floor_scale": 6, "attn_scale": 1.0}
BART = {
    "d_model": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
}
QWEN2 = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
GEMMA2 = {"sliding_window": 9, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}
GPT_OSS = {**MIXED, **EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
LLAMA4 = {**EXPERTS, **CHUNKS, "no_rope_layers": [1, 0], "intermediate_size_mlp": 48, "pad_token_id": 0}
#: Models of every family by name: the class of the model, and settings of its configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}),
    "Mistral, window": ("MistralForCausalLM", {"sliding_window": 9}),
    "Qwen2, window": ("Qwen2ForCausalLM", QWEN2),
    "Qwen3": ("Qwen3ForCausalLM", {}),
    "Gemma 2, softcap": ("Gemma2ForCausalLM", GEMMA2),
    "Gemma 3, hybrid": ("Gemma3ForCausalLM", MIXED),
    "GPT-OSS, sinks": ("GptOssForCausalLM", GPT_OSS),
    "Llama 4, chunks": ("Llama4ForCausalLM", LLAMA4),
    "Mixtral": ("MixtralForCausalLM", EXPERTS),
    "ModernBERT, two sides": ("ModernBertForMaskedLM", {"local_attention": 12, "pad_token_id": 0}),
    "Phimoe, window of the mask": ("PhimoeForCausalLM", {"sliding_window": 9, **EXPERTS}),
    "RoBERTa, positions from 2": ("RobertaForMaskedLM", {"pad_token_id": 1}),
    "Llama, no head": ("LlamaModel", {}),
    "Llama, rewards": ("LlamaForSequenceClassification", {"num_labels": 1, "pad_token_id": 0}),
    "BERT, classes": ("BertForSequenceClassification", {}),
    "EuroBERT, mean of classes": ("EuroBertForSequenceClassification", {"pad_token_id": 0}),
    "BART": ("BartForConditionalGeneration", BART),
    "Llama, answers": ("LlamaForQuestionAnswering", {}),
}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
SCALES = {"short_mscale": 1.0, "long_mscale": 1.5, "original_max_position_embeddings": 32}
STILL = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
#: Models whose rope depends on the length of the batch.
LENGTHS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (
        model,
        {
            **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), 32),
            **{"rope_parameters": {"rope_theta": 1e4, **rope}, "pad_token_id": 0, **STILL},
        },
    )
    for name, model, rope in (
        ("longrope", "Phi3ForCausalLM", {"rope_type": "longrope", **FACTORS}),
        ("dynamic", "LlamaForCausalLM", {"rope_type": "dynamic", "factor": 2.0}),
        ("yarn, scaled", "PhimoeForCausalLM", {"rope_type": "yarn", "factor": 2.0, **SCALES}),
    )
}
#: Layouts and kinds of batches that those models are given.
CUTS = (("contiguous", "plain"), ("zigzag", "packed"), ("zigzag", "padded"))


def make(name: str, **changes: Any) -> Any:
    """A model of random weights, the same on every rank."""
    model, settings = {**MODELS, **LENGTHS}[name]
    return make_class(model, **{**BASE, **settings, **changes})


def make_class(name: str, **settings: Any) -> Any:
    """A model of a class with these settings, and with random weights, the same on every rank."""
    kind = getattr(hf, name)
    torch.manual_seed(1)
    made = kind(kind.config_class(**settings))
    for parameter_name, parameter in made.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return made


def largest(differences: Iterable[torch.Tensor]) -> float:
    """The largest number of all."""
    return max(float(x.detach().abs().max()) for x in differences)


def wrong_gradients(model: Any, gradients: Sequence[torch.Tensor]) -> float:
    """How far the sums of gradients over the ranks are from these, relative to the largest of all."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    pairs = zip(model.parameters(), gradients, strict=True)
    return largest(parameter.grad - gradient for parameter, gradient in pairs) / largest(gradients)


def agreements(rank: int, names: list[str], tokens: int) -> dict[str, float]:
    """How far each model on these ranks is from its eager self, with two packed documents."""
    found = {}
    for name in names:
        agreement = check(parallelize(make(name), layout="zigzag"), tokens)
        found |= {f"{name}, logits": agreement.logits, f"{name}, gradients": agreement.gradients}
    return found


def batches(rank: int, name: str, bound: float) -> dict[str, str]:
    """What `sweep` finds for each kind of batch, with differences of at most `bound`."""
    eager = make(name, attn_implementation="eager")
    ids = torch.randint(1, 61, (2, sweep.TOKENS), generator=torch.Generator().manual_seed(2))
    expected = of_first(lambda: sweep.run_all_alone(eager, ids, sweep.PARTS))
    model, layout = parallelize(make(name), layout="striped(3)"), "striped(3)"
    return {mode: sweep.compare(model, None, layout, mode, right, ids, bound) for mode, right in expected.items()}


def by_length(rank: int, name: str, layout: str, kind: str) -> dict[str, float]:
    """Largest differences of logits and gradients from one eager call of the whole batch, in two calls.

    The first call is longer than the second one, which fits the original length on the second rank only.
    """
    eager, model = make(name, attn_implementation="eager"), parallelize(make(name), layout=layout).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = {}
    for tokens in (60, 41):
        ids = torch.randint(61, (2, tokens), generator=torch.Generator().manual_seed(2))
        weight = torch.randn(2, tokens, 61, generator=torch.Generator().manual_seed(4))
        whole, more = {"input_ids": ids}, {"position_ids": torch.arange(tokens).expand_as(ids)}
        if kind == "padded":
            whole["attention_mask"] = more["attention_mask"] = (torch.arange(tokens) >= 6).long().expand_as(ids)
            more["position_ids"] = (more["position_ids"] - 6).clamp(min=0)
            weight[:, :6] = 0
        if kind == "packed":
            more["position_ids"] = torch.cat([torch.arange(5), torch.arange(tokens - 5)]).expand_as(ids)
        right = eager(ids, use_cache=False, **more).logits
        gradients = torch.autograd.grad((right * weight).sum(), list(eager.parameters()))
        borders = [0, 5, tokens] if kind == "packed" else None
        local = model(**shard_batch(whole, layout=layout, cu_seqlens=borders), use_cache=False).logits
        cut = ra.make_layout(layout, tokens=tokens, ranks=dist.get_world_size())
        model.zero_grad()
        (local * cut.shard_tensor(weight, rank, dim=1)).sum().backward()
        wrong = (gather_logits(local, layout=layout) - right).detach().abs() * (weight != 0)
        found[f"{tokens}, logits"] = float(wrong.max() / right.abs().max())
        found[f"{tokens}, gradients"] = wrong_gradients(model, gradients)
    return found


def sequences(rank: int, side: str, name: str) -> dict[str, float]:
    """Largest differences from each sequence alone of rewards, of a loss of them, of embeddings, and of gradients.

    Gradients are those of the mean over the ranks, as DDP has them. The sequences are padded on one side.
    """
    eager = make("Llama, rewards", attn_implementation="eager")
    layout: Any = LayerMasks.of(eager) if name == "layers" else name
    ours = parallelize(copy.deepcopy(eager), layout=layout)
    ids = torch.randint(1, 61, (2, 37), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    (mask[0, :11] if side == "left" else mask[0, -11:]).zero_()
    alone = [row[real.bool()][None] for row, real in zip(ids, mask, strict=True)]
    given = {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.tensor([0.5, -1.0])}
    batch = shard_batch(given, layout=layout)
    labels, found, parameters = batch.pop("labels"), {}, list(ours.parameters())

    def add(name: str, mine: torch.Tensor, right: torch.Tensor) -> None:
        gradients = torch.autograd.grad(right, list(eager.parameters()), retain_graph=True, allow_unused=True)
        own = torch.autograd.grad(mine, parameters, allow_unused=True)
        assert [g is None for g in own] == [g is None for g in gradients]
        some = [(p, g) for p, g in zip(own, gradients, strict=True) if g is not None]
        wrong = largest(mean_over_ranks(p) - g for p, g in some) / largest(g for _, g in some)
        found[name] = max(wrong, largest([mine - right]))

    rewards, right = ours(**batch).logits, torch.cat([eager(x).logits for x in alone])
    found["rewards"] = largest([rewards - right])
    squares = ((right[:, 0] - labels) ** 2).mean()
    add("pair", *(-torch.nn.functional.logsigmoid(x[0] - x[1]).mean() for x in (rewards, right)))
    add("loss", ours(**batch, labels=labels).loss, squares)
    ranks = dist.get_world_size()  # as the Trainer counts and divides
    add("items", ours(**batch, labels=labels, num_items_in_batch=torch.tensor(2 * ranks)).loss * ranks, squares)
    body = parallelize(copy.deepcopy(eager.model), layout=layout)
    parameters = [*body.parameters(), *ours.score.parameters()]
    whole = [eager.model(x).last_hidden_state[0] for x in alone]
    for how, take in (("first", lambda x: x[0]), ("last", lambda x: x[-1]), ("mean", lambda x: x.mean(0))):
        mine = pool(body(**batch, use_cache=False).last_hidden_state, batch, layout=layout, how=how)
        add(how, *(x.sin().sum() for x in (mine, torch.stack([take(x) for x in whole]))))
    return found


#: Rows of 8 tokens by what tells their documents: the mask, position_ids, and the first and last token of each.
TOLD: dict[str, tuple[list[int], list[int] | None, list[tuple[int, int]]]] = {
    "padded end": ([1] * 6 + [0] * 2, [0, 1, 2, 3, 0, 1, 0, 0], [(0, 4), (4, 6)]),
    "padded front": ([0] * 2 + [1] * 6, [1, 1, 0, 1, 2, 3, 0, 1], [(2, 6), (6, 8)]),
    "padded between, counted": ([1, 1, 1, 0, 0, 1, 1, 1], [0, 1, 2, 3, 4, 0, 1, 2], [(0, 3), (5, 8)]),
    "ones": ([1] * 8, [0, 1, 2, 3] * 2, [(0, 4), (4, 8)]),
    "numbers": ([1] * 4 + [2] * 3 + [0], None, [(0, 4), (4, 7)]),
    "numbers, padded front": ([0] * 2 + [1] * 3 + [2] * 3, None, [(2, 5), (5, 8)]),
    "numbers and places": ([1] * 4 + [2] * 4, [*range(8)], [(0, 4), (4, 8)]),
    "a hole, not counted": ([1, 1, 0, 1, 1, 1, 1, 1], [0, 1, 1, 2, 3, 4, 0, 1], [(0, 6), (6, 8)]),
}


def difference(mine: torch.Tensor, model: Any, right: torch.Tensor, eager: Any, parts: bool = False) -> float:
    """The largest difference of a loss, whose mean over the ranks is right, and of its gradients.

    parts: whether some parameters may have no part in the loss.
    """
    found = [float(mean_over_ranks(mine) - right)]
    options = {"allow_unused": parts, "materialize_grads": parts}
    expected = torch.autograd.grad(right, list(eager.parameters()), retain_graph=True, **options)
    for g, e in zip(torch.autograd.grad(mine, list(model.parameters()), **options), expected, strict=True):
        found.append(float((mean_over_ranks(g) - e).abs().max() / (1e-3 + e.abs().max())))
    return max(map(abs, found))


def told_documents(rank: int) -> dict[str, float]:
    """How far the losses of packed rows with a mask are from those of their documents alone, by both ways to cut."""
    eager = make("Llama").double().eval()
    cut, whole = (parallelize(copy.deepcopy(eager), layout="zigzag", whole=x) for x in (False, True))
    found = {}
    for name, (mask, positions, parts) in TOLD.items():
        ids = torch.randint(1, 61, (1, 8), generator=torch.Generator().manual_seed(2))
        real = torch.tensor([mask])
        batch = {"input_ids": ids, "attention_mask": real, "labels": ids.masked_fill(real == 0, -100)}
        if positions is not None:
            batch["position_ids"] = torch.tensor([positions])
        rows = [x for a, b in parts for x in range(a, b) if real[0, x]]
        alone = [ids[:, [x for x in rows if a <= x < b]] for a, b in parts]
        right = torch.cat([eager(x).logits for x in alone], 1)
        logits = whole(**{x: y for x, y in batch.items() if x != "labels"}).logits[:, rows]
        found[f"{name}, logits"] = float((logits - right).detach().abs().max())
        if "hole" in name:  # which has no label, and is none
            continue
        loss = sum(eager(x, labels=x).loss * (x.shape[1] - 1) for x in alone) / (len(rows) - len(parts))
        found[name] = difference(cut(**shard_batch(batch, layout="zigzag")).loss, cut, loss, eager)
        found[f"{name}, whole"] = difference(whole(**batch).loss, whole, loss, eager)
    return found


def labelled_padding(rank: int) -> dict[str, float]:
    """How far whole=True is from one process where padding has labels; with eager attention it is refused."""
    eager, found = make("Llama").double().eval(), {}
    ours = parallelize(copy.deepcopy(eager), layout="zigzag", whole=True)
    ids = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(3))
    for side in ("left", "right"):
        mask = torch.ones_like(ids)
        (mask[0, :3] if side == "left" else mask[0, -3:]).zero_()
        for name, labels in (("all", ids), ("real", ids.masked_fill(mask == 0, -100))):
            batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
            found[f"{side}, {name}"] = difference(ours(**batch).loss, ours, eager(**batch).loss, eager)
    other = parallelize(make("Llama", attn_implementation="eager"), layout="zigzag", whole=True)
    refused = "Unsupported: some labels belong to padding, whose outputs with attn_implementation='eager'"
    says(refused, lambda: other(**{**batch, "labels": ids}))
    says("fine", lambda: other(**batch))  # padded on the right, without labels there
    return found


#: Models with heads of sequences and the labels of three rows: numbers, classes, and some of several classes.
WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor]]] = {
    "numbers": ("LlamaForSequenceClassification", {"num_labels": 1}, {"labels": torch.tensor([0.5, -1.0, 2.0])}),
    "classes": ("LlamaForSequenceClassification", {"num_labels": 4}, {"labels": torch.tensor([3, -100, 0])}),
    "column": ("LlamaForSequenceClassification", {"num_labels": 4}, {"labels": torch.tensor([[3], [1], [0]])}),
    "several": ("LlamaForSequenceClassification", {"num_labels": 2}, {"labels": torch.eye(3)[:, :2].double()}),
    "first": ("BertForSequenceClassification", {"num_labels": 4}, {"labels": torch.tensor([3, 1, 0])}),
    "mean": ("EuroBertForSequenceClassification", {"classifier_pooling": "mean"}, {"labels": torch.tensor([1, 1, 0])}),
    "answers": (
        *("LlamaForQuestionAnswering", {}),
        {"start_positions": torch.tensor([0, 3, 40]), "end_positions": torch.tensor([8, 3, 5])},
    ),
}


def whole_heads(rank: int) -> dict[str, float]:
    """How far heads of sequences with whole=True are from one process, whichever padding ids and mask show.

    Token 5 pads and also ends sequences, as where pad = eos. A row has nothing else.
    """
    found = {}
    ids = torch.randint(6, 61, (3, 9), generator=torch.Generator().manual_seed(3))
    right, left = (torch.arange(9) < 6).long().expand(3, -1), (torch.arange(9) >= 3).long().expand(3, -1)
    padded = ids.masked_fill((right == 0) & (torch.arange(3) != 1)[:, None], 5)
    batches = {
        "plain": {"input_ids": ids},
        "no mask": {"input_ids": padded},
        "mask of one row": {"input_ids": padded, "attention_mask": (padded != 5).long()},
        "ends in padding": {"input_ids": ids.masked_fill(torch.arange(9) > 4, 5), "attention_mask": right},
        "left": {"input_ids": padded.flip(1), "attention_mask": (padded.flip(1) != 5).long()},
        "left, other ids": {"input_ids": ids, "attention_mask": left},
        "right, other ids": {"input_ids": ids, "attention_mask": right},
        "nothing else": {"input_ids": ids.masked_fill(torch.arange(3)[:, None] == 0, 5)},
    }
    for name, (kind, settings, labels) in WHOLE.items():
        one = make_class(kind, **{**BASE, "pad_token_id": 5, **settings}).double().eval()
        ours = parallelize(copy.deepcopy(one), layout="zigzag", whole=True)
        for how, batch in batches.items():
            expected, mine = one(**batch, **labels), ours(**batch, **labels)
            found[f"{name}, {how}"] = difference(mine.loss, ours, expected.loss, one, parts=True)
            names = ("start_logits", "end_logits") if "answers" in name else ("logits",)
            found[f"{name}, {how}, logits"] = largest(mine[x] - expected[x] for x in names)
    moved = {**batches["plain"], "start_positions": labels["start_positions"] + rank, "end_positions": ids[:, 0]}
    says("Mismatch: start_positions of the whole batch differ", lambda: ours(**moved))
    return found


def holes(rank: int) -> dict[str, float]:
    """How far rows whose masks have holes are from one process, whole and cut, also where holes have other ids.

    RoBERTa does not count token 1, which pads.
    """
    ids, found = torch.randint(6, 61, (3, 9), generator=torch.Generator().manual_seed(3)), {}
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 0, 1, 0, 0], [0, 0, 1, 1, 1, 0, 1, 1, 1]])
    weight = torch.randn(3, 9, 61, generator=torch.Generator().manual_seed(4)) * mask[..., None]
    for name in ("Llama", "RoBERTa, positions from 2"):
        one = make(name).double().eval()
        whole, cut = (parallelize(copy.deepcopy(one), layout="zigzag", whole=x) for x in (True, False))
        for how, tokens in (("other ids", ids), ("padding", ids.masked_fill(mask == 0, 1))):
            batch = {"input_ids": tokens, "attention_mask": mask}
            expected = (one(**batch).logits * weight).sum()
            found[f"{name}, {how}, whole"] = difference((whole(**batch).logits * weight).sum(), whole, expected, one)
            part = shard_batch(batch, layout="zigzag")
            if name != "Llama":
                says("InvalidInput: RobertaForMaskedLM gives padding between tokens no position", lambda: cut(**part))
                if how == "other ids":
                    continue
                part = shard_batch({**batch, "position_ids": one_counts(tokens).clamp(min=2) - 2}, layout="zigzag")
            mine = gather_logits(cut(**part).logits, layout="zigzag")
            found[f"{name}, {how}, cut"] = largest([(mine - one(**batch).logits) * (weight != 0)])
        if name != "Llama":
            given = {"input_ids": ids, "position_ids": one_counts(ids)}
            found[f"{name}, given"] = largest([whole(**given).logits - one(**given).logits])
            found[f"{name}, no mask"] = largest([whole(input_ids=tokens).logits - one(input_ids=tokens).logits])
    return found


def one_counts(ids: torch.Tensor) -> torch.Tensor:
    """The positions that RoBERTa gives to ids of which 1 is padding."""
    return 1 + (ids != 1).cumsum(-1) * (ids != 1)


def both_ways(rank: int) -> dict[str, float]:
    """How far a model with sdpa, whose attention modules are told is_causal=False, is from one process."""
    ids = torch.randint(6, 61, (2, 17), generator=torch.Generator().manual_seed(3))
    weight, mask = torch.randn(2, 17, 61, generator=torch.Generator().manual_seed(4)), torch.ones_like(ids)
    mask[0, 14:] = 0
    causal, one = (make("Llama", attn_implementation="sdpa").double().eval() for _ in range(2))
    for layer in one.model.layers:
        layer.self_attn.is_causal = False
    assert largest([causal(ids).logits - one(ids).logits]) > 1e-2
    whole, cut = (parallelize(copy.deepcopy(one), layout="zigzag", whole=x) for x in (True, False))
    found = {}
    for name, more in (("plain", {}), ("padded", {"attention_mask": mask})):
        right = (one(ids, **more).logits * weight).sum()
        found[name] = difference((whole(input_ids=ids, **more).logits * weight).sum(), whole, right, one)
    packed = shard_batch({"input_ids": ids}, layout="zigzag", cu_seqlens=[0, 6, 17])
    mine = gather_logits(cut(**packed).logits, layout="zigzag")
    found["packed"] = largest([mine - alone(one, ids, [[0, 6, 17]] * 2)])
    check(whole)
    agreement = check(cut)
    found["check"] = max(agreement.logits, agreement.gradients)
    says("Unsupported: generate: LlamaAttention has attention to later tokens", lambda: whole.generate(ids))
    window = make("Mistral, window", attn_implementation="sdpa")
    for layer in window.model.layers:
        layer.self_attn.is_causal = False
    window = parallelize(window, layout="zigzag", whole=True)
    says("Unsupported: MistralAttention has is_causal=False, which sdpa reads only", lambda: window(input_ids=ids))
    return found


def alone(eager: Any, ids: torch.Tensor, borders: list[list[int]]) -> torch.Tensor:
    """The logits of each document by itself, of rows with their own borders."""
    rows = [[eager(ids[i : i + 1, a:b]).logits for a, b in pairwise(row) if a < b] for i, row in enumerate(borders)]
    return torch.cat([torch.cat(row, 1) for row in rows])


def far_labels(rank: int) -> dict[str, float]:
    """How far labels and weights k tokens on, and a weighted loss of them, are from a loop over documents."""
    eager = make("Llama").double().eval()
    ours, found, tokens = parallelize(copy.deepcopy(eager), layout="zigzag"), {}, 11
    source = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 61, (2, tokens), generator=source)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=source) < 0.2, -100)
    weights = torch.rand(ids.shape, generator=source, dtype=torch.float64)
    mask, borders = torch.ones_like(ids), [[0, 4, 9, 11], [0, 9, 11, 11]]
    mask[0, 7:9] = 0
    right = alone(eager, ids, borders)
    given = {"input_ids": ids, "labels": labels, "attention_mask": mask, "loss_weights": weights}
    cut = ra.make_layout("zigzag", tokens=tokens, ranks=dist.get_world_size())
    for k in (True, 2, 5, 40):
        expected, of_labels = torch.full_like(labels, -100), torch.zeros_like(weights)
        for i, row in enumerate(borders):
            for a, b in pairwise(row):
                for p in range(a, b - k):
                    if mask[i, p] and mask[i, p + k] and labels[i, p + k] != -100:
                        expected[i, p], of_labels[i, p] = labels[i, p + k], weights[i, p + k]
        batch = shard_batch(given, layout="zigzag", cu_seqlens=borders, shift=k)
        assert torch.equal(batch["shift_labels"], cut.shard_tensor(expected, rank, -1))
        assert torch.equal(batch["labels"], batch["shift_labels"])
        own, mine = batch.pop("loss_weights"), batch.pop("labels")
        assert torch.equal(own, cut.shard_tensor(of_labels, rank, -1))
        total = mean_over_ranks(own.sum())
        if k == 40:
            assert total == 0
            continue
        del batch["shift_labels"]
        logits = ours(**batch, use_cache=False).logits
        loss = (torch.nn.functional.cross_entropy(logits.mT, mine, reduction="none") * own).sum() / total
        truth = torch.nn.functional.cross_entropy(right.mT, expected, reduction="none") * of_labels
        found[str(k)] = difference(loss, ours, truth.sum() / of_labels.sum(), eager)
    says("Unsupported: loss_weights", lambda: ours(**shard_batch(given, layout="zigzag"), use_cache=False))
    for shift in (2.5, -1):
        says(
            f"InvalidInput: the distance of a label={shift} must",
            lambda: shard_batch(given, layout="zigzag", shift=shift),
        )
    lacking = {name: x for name, x in given.items() if name != "labels"}
    says("InvalidInput: the batch has loss_weights but no labels", lambda: shard_batch(lacking, layout="zigzag"))
    moved = shard_batch({**given, "loss_weights": weights + rank}, layout="zigzag")
    del moved["loss_weights"]
    says("Mismatch: loss_weights of the whole batch differ", lambda: ours(**moved, use_cache=False))
    return found


def other_inputs(rank: int) -> dict[str, float]:
    """Largest differences from the eager models where a batch has embeddings and positions on three axes, or types."""
    ids = torch.randint(1, 61, (2, 37), generator=torch.Generator().manual_seed(2))
    cut = ra.make_layout("zigzag", tokens=37, ranks=dist.get_world_size())
    text = hf.Qwen2VLConfig(
        text_config={**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    ).text_config
    torch.manual_seed(1)
    found = {}
    axes = torch.stack([torch.arange(37) // n for n in (1, 2, 3)])[:, None]
    packed = torch.cat([torch.arange(37).remainder(20)[None, None], axes])  # two documents by those of the text
    for what, eager, more in (
        ("axes", hf.Qwen2VLTextModel(text), {"position_ids": axes}),
        ("documents", hf.Qwen2VLTextModel(text), {"position_ids": packed}),
        ("types", hf.BertModel(hf.BertConfig(**BASE)), {"token_type_ids": (ids % 2)}),
    ):
        eager.eval().config.use_cache = False  # with a cache transformers reads no documents
        batch = {"input_ids": ids, **{name: x.expand(*x.shape[:-2], 2, -1) for name, x in more.items()}}
        embeds = eager.get_input_embeddings()(ids).detach().requires_grad_()
        alone = {name: x for name, x in batch.items() if name != "input_ids"}
        right = eager(inputs_embeds=embeds, **alone).last_hidden_state
        (gradient,) = torch.autograd.grad(right.sin().sum(), embeds)
        ours = parallelize(copy.deepcopy(eager), layout="zigzag")
        mine = ours(**shard_batch({**batch, "inputs_embeds": embeds}, layout="zigzag")).last_hidden_state
        (rows,) = torch.autograd.grad(mine.sin().sum(), embeds)
        dist.all_reduce(rows)
        whole = parallelize(copy.deepcopy(eager), layout="zigzag", whole=True)
        found[what] = largest([cut.shard_tensor(right, rank, dim=1) - mine])
        found[f"{what}, whole"] = largest([whole(input_ids=ids, **more).last_hidden_state - right])
        found[f"{what}, gradients"] = largest([rows - gradient]) / largest([gradient])
    return found


def balanced_layers(rank: int, name: str) -> dict[str, float]:
    """Errors of logits and gradients of three batches, whose backwards come last.

    A layout is made for the documents of each batch and the masks of all layers; without documents it is zigzag.
    """
    eager, ranks, tokens = make(name, attn_implementation="eager"), dist.get_world_size(), 60
    layout = LayerMasks.of(eager)
    model = parallelize(make(name), layout=layout).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss, right, found, cuts = torch.zeros(()), torch.zeros(()), {}, []
    for borders in ([0, 50, tokens], [[0, 8, tokens], [0, 31, tokens]], None):
        ids = torch.randint(1, 61, (2, tokens), generator=torch.Generator().manual_seed(len(cuts)))
        weight = torch.randn(2, tokens, 61, generator=torch.Generator().manual_seed(4))
        batch = shard_batch({"input_ids": ids}, layout=layout, cu_seqlens=borders)
        packed = batch.get("cu_seq_lens_q")
        cut = ra.make_layout("zigzag", tokens=tokens, ranks=ranks) if packed is None else layout.cut(packed, ranks)
        local = model(**batch, use_cache=False).logits
        loss = loss + (local * cut.shard_tensor(weight, rank, dim=1)).sum()
        expected = alone(eager, ids, [[0, tokens]] * 2 if packed is None else packed.expand(2, -1).tolist())
        right = right + (expected * weight).sum()
        found[f"batch {len(cuts)}"] = largest([gather_logits(local, layout=cut) - expected]) / largest([expected])
        cuts.append(cut)
    gradients = torch.autograd.grad(right, list(eager.parameters()))
    loss.backward()
    found["gradients"] = wrong_gradients(model, gradients)
    lacking = shard_batch({"input_ids": ids}, layout=layout, cu_seqlens=[0, 50, tokens]) | {"cu_seq_lens_q": None}
    says("InvalidInput: position_ids of rank", lambda: model(**lacking, use_cache=False))
    assert torch.equal(eager.eval().generate(ids, max_new_tokens=2), model.eval().generate(ids, max_new_tokens=2))
    model = parallelize(model, layout=cuts[0])  # a Layout is for batches of its length
    batch = shard_batch({"input_ids": ids}, layout=cuts[0])
    found["a Layout"] = largest([gather_logits(model(**batch).logits, layout=cuts[0]) - expected])
    words = "InvalidInput: the layout balanced(1) was made for 60 tokens over 2 ranks"
    says(words, lambda: shard_batch({"input_ids": ids[:, 1:]}, layout=cuts[0]))
    assert len(set(cuts)) == 3
    return found


ESM = {**BASE, "token_dropout": True, "mask_token_id": 7, "pad_token_id": 0}
VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
BLOOM = {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20}
#: Models that are refused: the class of the model, settings of its configuration, and what the model has.
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("BloomForCausalLM", BLOOM, "ALiBi"),
    ("EsmForMaskedLM", ESM, "embeddings scaled by the share of masked tokens (token_dropout)"),
    ("ViTModel", VIT, "inputs other than tokens"),
    ("BertForNextSentencePrediction", BASE, "a head whose loss is not of tokens, classes or answers"),
    ("AlbertModel", {**BASE, "embedding_size": 8}, "a pooler that reads rows, not the first row"),
)
#: Classes of models with a loss.
LOSSES = {"causal": "LlamaForCausalLM", "masked": "BertForMaskedLM", "tokens": "LlamaForTokenClassification"}


def losses(rank: int, name: str) -> dict[str, float]:
    """Largest differences, from transformers' own of the whole batch, of the loss and of gradients averaged over ranks.

    All labels but one are in the rows of the first rank, so the last rank has none. Both ways to count the labels.
    """
    settings = {"num_labels": 61, "attn_implementation": "eager", "pad_token_id": 0}
    eager = make_class(LOSSES[name], **BASE, **settings).eval()
    ids = torch.randint(1, 61, (1, 37), generator=torch.Generator().manual_seed(2))
    labels = torch.full_like(ids, -100)
    labels[:, 2:9] = ids[:, 2:9] if name == "causal" else (ids[:, 2:9] * 7) % 61
    right = eager(ids, labels=labels).loss
    right.backward()
    ours = parallelize(copy.deepcopy(eager), layout="contiguous")
    ours.zero_grad()
    batch = shard_batch({"input_ids": ids, "labels": labels}, layout="contiguous", shift=name == "causal")
    loss, ranks = ours(**batch).loss, dist.get_world_size()
    loss.backward()
    counted = ours(**batch, num_items_in_batch=torch.tensor(7)).loss * ranks  # as the Trainer does
    pairs = [(p.grad, q.grad) for p, q in zip(ours.parameters(), eager.parameters(), strict=True) if q.grad is not None]
    return {
        "loss": largest(mean_over_ranks(x) - right for x in (loss, counted)),
        "gradients": largest(mean_over_ranks(mine) - whole for mine, whole in pairs),
    }


def adapters(rank: int) -> dict[str, float]:
    """By what is done, the largest difference of logits and gradients from PEFT's model on one process."""
    ids = torch.randint(61, (2, 37), generator=torch.Generator().manual_seed(2))
    weight = torch.randn(2, 37, 61, generator=torch.Generator().manual_seed(4))
    found, names = {}, {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    part = ra.make_layout("zigzag", tokens=37, ranks=dist.get_world_size()).shard_tensor(weight, rank, dim=1)

    def wrap(model: Any, kind: Any = peft.LoraConfig, **changes: Any) -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(model, kind(**names, **changes))

    def ring(model: Any) -> Any:
        return parallelize(model, layout="zigzag")

    lora = {"init_lora_weights": False, "use_dora": True, "modules_to_save": ["lm_head"]}
    eager = wrap(make("Llama", attn_implementation="eager"), **lora)
    with TemporaryDirectory() as folder:
        eager.save_pretrained(folder)
        loaded = peft.PeftModel.from_pretrained(ring(make("Llama")), folder, is_trainable=True)
    right = eager(ids, use_cache=False).logits
    (right * weight).sum().backward()
    expected = [p.grad for p in eager.parameters() if p.grad is not None]
    batch = shard_batch({"input_ids": ids}, layout="zigzag")
    for how, model in (
        ("wrapped, parallelized", ring(wrap(make("Llama"), **lora))),
        ("parallelized, wrapped", wrap(ring(make("Llama")), **lora)),
        ("parallelized, loaded", loaded),
    ):
        local = model(**batch, use_cache=False).logits
        (local * part).sum().backward()
        found[how] = largest([gather_logits(local, layout="zigzag") - right])
        for mine, whole in zip([p.grad for p in model.parameters() if p.grad is not None], expected, strict=True):
            dist.all_reduce(mine)
            found[how] = max(found[how], largest([mine - whole]) / largest([whole]))
    check(loaded)
    with torch.no_grad():
        with loaded.disable_adapter(), eager.disable_adapter():
            plain = gather_logits(loaded(**batch).logits, layout="zigzag") - eager(ids).logits
        merged = gather_logits(loaded.merge_and_unload()(**batch).logits, layout="zigzag") - right
    found |= {"disabled": largest([plain]), "merged": largest([merged])}
    says("fine", lambda: unparallelize(wrap(ring(make("Llama"))))(ids))
    text = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
    for kind in (peft.PromptTuningConfig, peft.PrefixTuningConfig, peft.PromptEncoderConfig):
        prompted = peft.get_peft_model(make("Llama"), kind(**text))
        says(f"Unsupported: adapter 'default' ({kind(**text).peft_type.value}) adds tokens", lambda: ring(prompted))
    words = "Unsupported: adapter 'default' (aLoRA) is not computed row by row"
    says(words, lambda: wrap(ring(make("Llama")), alora_invocation_tokens=[1])(**batch))
    says(words.replace("aLoRA", "ADALORA"), lambda: ring(wrap(make("Llama"), peft.AdaLoraConfig, total_step=9)))
    return found


#: The classes whose loss of routers is compared.
ROUTED = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM")


def routers(rank: int, names: tuple[str, ...]) -> dict[str, float]:
    """By class and kind of call, the largest difference of loss, loss of routers and gradients from one eager model.

    The batch is padded: a rank of some layouts has hardly anything else.
    """
    ids = torch.randint(1, 61, (1, 37), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(37) < 20).long()[None]
    batch, found, ranks = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}, {}, 2
    more = {"num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 1, "router_aux_loss_coef": 0.5}
    for name in names:
        eager = make_class(name, **{**BASE, **EXPERTS, **more}, attn_implementation="eager").float()
        right = eager(**batch, use_cache=False, output_router_logits=True)
        right.loss.backward()
        expected = [0 if p.grad is None else p.grad for p in eager.parameters()]
        for how, whole in (("mean", False), ("sum", False), ("whole", True)):
            ours = parallelize(copy.deepcopy(eager), layout="contiguous", whole=whole)
            ours.zero_grad()
            given = batch if whole else shard_batch(batch, layout="contiguous")
            if how == "sum":  # as the Trainer counts and divides
                given["num_items_in_batch"] = torch.tensor(19)
            result = ours(**given, use_cache=False, output_router_logits=True)
            (result.loss * (ranks if how == "sum" else 1)).backward()
            loss = mean_over_ranks(result.loss) * (ranks if how == "sum" else 1)
            pairs = zip(ours.parameters(), expected, strict=True)
            wrong = [mean_over_ranks(p.grad) - g for p, g in pairs if p.grad is not None]
            found[f"{name}, {how}"] = largest([loss - right.loss, result.aux_loss - right.aux_loss, *wrong])
            assert (result.router_logits is None) == whole
    return found


def dropped(rank: int) -> dict[str, float]:
    """Largest differences of logits and gradients of a model with attention dropout, checkpointed, from one rank that
    does not checkpoint. A model that drops nothing has other logits."""
    groups = [dist.new_group([other]) for other in range(dist.get_world_size())]
    ids = torch.randint(61, (2, 37), generator=torch.Generator().manual_seed(3))
    weight = torch.randn(2, 37, 61, generator=torch.Generator().manual_seed(4))
    results = []
    for group, seed, dropout in ((dist.group.WORLD, 7 + rank, 0.3), (groups[rank], 7, 0.3), (groups[rank], 7, 0.0)):
        model = parallelize(make("Llama", attention_dropout=dropout), group, layout="zigzag").train()
        if group is dist.group.WORLD:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(seed)
        local = model(**shard_batch({"input_ids": ids}, group, layout="zigzag"), use_cache=False).logits
        place = dist.get_rank(group), dist.get_world_size(group)
        cut = ra.make_layout("zigzag", tokens=37, ranks=place[1])
        (local * cut.shard_tensor(weight, place[0], dim=1)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        results.append((gather_logits(local, group, layout="zigzag"), [p.grad for p in model.parameters()]))
    (logits, gradients), (alone, expected), (plain, _) = results
    wrong = largest(a - b for a, b in zip(gradients, expected, strict=True)) / largest(expected)
    assert largest([alone - plain]) > 1e-3
    return {"logits": largest([logits - alone]), "gradients": wrong}


def passed_keywords() -> tuple[set[str], set[str]]:
    """The keywords that transformers passes to attention functions, and to mask functions, for all `MODELS`."""
    attention: set[str] = set()
    masks: set[str] = set()

    def attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **keywords: Any) -> Any:
        attention.update(keywords)
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]), None

    def mask(**keywords: Any) -> None:
        masks.update(keywords)

    hf.AttentionInterface.register("recorder", attend)
    hf.AttentionMaskInterface.register("recorder", mask)
    batch = {"input_ids": torch.zeros(1, 5, dtype=torch.long), "position_ids": torch.arange(5).unsqueeze(0)}
    for name in MODELS:
        model = make(name)
        model.set_attn_implementation("recorder")
        model(**batch, use_cache=False, cu_seq_lens_q=torch.tensor([0, 5], dtype=torch.int32))
    return attention, masks


def says(words: str, call: Any) -> None:
    """Assert that what a call raised begins with these words, "fine" where it raised nothing."""
    text = told_by(call)
    assert text.startswith(words), text


def refused_batches(rank: int) -> None:
    """What `shard_batch` says to batches that it cannot cut, and that a config stays that of its other model."""
    cut = functools.partial(shard_batch, layout="zigzag")
    ids, ramp = torch.zeros(1, 8, dtype=torch.long), torch.arange(8).unsqueeze(0)
    for batch, words in (
        ({"input_ids": ids[:, :1]}, "under layout 'zigzag', 1 tokens leave at least one of 2 ranks without rows"),
        (
            {"input_ids": ids[:, :0], "attention_mask": ids[:, :0]},
            "under layout 'zigzag', 0 tokens leave at least one of 2 ranks without rows",
        ),
        ({"input_ids": [[1, 2, 3]]}, "input_ids must be a tensor [batch, tokens], got list"),
        ({"input_ids": ids, "labels": None}, "labels must be a tensor [batch, tokens], got NoneType"),
        ({"labels": ids}, "a batch needs input_ids"),
        (ids, "a batch is a dict of tensors"),
        ({"input_ids": ids, "pixels": ids}, "['pixels'] cannot be cut"),
        ({"input_ids": ids, "cu_seqlens": [0, 3, 8]}, "['cu_seqlens'] cannot be cut"),
        ({"input_ids": ramp, "labels": ramp + 1}, "labels are shifted already"),
    ):
        says(f"InvalidInput: {words}", lambda: cut(batch))
    by_index = {"input_ids": ramp, "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]], dtype=torch.int32)}
    one, other = cut(by_index), cut({"input_ids": ramp}, cu_seqlens=[0, 3, 8])
    assert all(torch.equal(one[name], other[name]) for name in other)
    first = make("Llama")
    second = hf.LlamaForCausalLM(first.config)
    parallelize(first, layout="zigzag")
    assert second.config._attn_implementation == "sdpa"
    says("fine", lambda: second(ids))
    for name, batch, borders in (
        ("input_ids", {"input_ids": ramp + rank}, None),
        ("labels", {"input_ids": ramp, "labels": ramp.roll(rank)}, None),
        ("cu_seqlens", {"input_ids": ramp}, [0, 5 - rank, 8]),
    ):
        words = f"Mismatch: {name} of the whole batch differ between rank 0 and rank 1: all ranks"
        says(words, lambda: first(**cut(batch, cu_seqlens=borders)))
    says("fine", lambda: first(**cut({"input_ids": ramp, "labels": ramp}, cu_seqlens=[0, 5, 8])))
    says("Mismatch: input_ids of the whole batch differ", lambda: check(first, seed=rank))
    # Of what one rank alone gets wrong the other rank hears.
    kind = "InvalidInput: " if rank else "Mismatch: rank 1 cannot take part: "
    words = "logits must be [batch, tokens, classes], got (1, 8)"
    says(kind + words, lambda: gather_logits(ids if rank else ids[..., None], layout="zigzag"))
    words, borders = "Documents: the 2 lengths sum to 9, the sequence has 8 tokens", [0, 4, 9 if rank else 8]
    says(kind + words, lambda: first(**cut({"input_ids": ids}, cu_seqlens=borders)))


def refusals(rank: int) -> None:
    """What is said to models and calls that cannot be honoured."""

    def ring(name: str, **changes: Any) -> Any:
        return parallelize(make(name, **changes), layout="zigzag")

    ids = torch.zeros(1, 40, dtype=torch.long)
    batch = shard_batch({"input_ids": ids}, layout="zigzag")
    model = ring("Mistral, window")
    with pytest.MonkeyPatch.context() as patch:  # as if a window of W keys meant W keys before the row's own
        patch.setattr(generation, "Window", lambda left, right: ra.Window(left + 1, right))
        says("Mismatch: the parallelized model does not compute what it computed before", lambda: check(model))
    words = "InvalidInput: check: a window of 9 keys hides nothing"
    says(words, lambda: check(ring("Mistral, window"), 12))
    dropping = parallelize(make("Llama", attention_dropout=0.1), layout="zigzag", kernel="aten_cpu").train()
    says("Unsupported: kernel aten_cpu has no dropout", lambda: dropping(**batch))
    llama = ring("Llama")
    missing = "InvalidInput: position_ids is missing"
    says(missing, lambda: llama(batch["input_ids"]))
    alone = "Mismatch: rank 0 cannot take part: position_ids is missing" if rank else missing
    says(alone, lambda: llama(**batch) if rank else llama(batch["input_ids"]))
    moved = {**batch, "position_ids": batch["position_ids"] + rank}
    words = "position_ids of rank 1 do not match its rows under layout 'zigzag' of 40 tokens"
    says(f"{'InvalidInput' if rank else 'Mismatch: rank 1 cannot take part'}: {words}", lambda: llama(**moved))
    linear = make("Gemma 3, hybrid")
    linear.config.layer_types = ["full_attention", "linear_attention"]
    words = "Unsupported: Gemma3ForCausalLM has layers of type linear_attention"
    says(words, lambda: parallelize(linear, layout="zigzag"))
    chunked, mask = ring("Llama 4, chunks"), torch.ones_like(ids)
    mask[:, :3] = 0
    words, padded = (
        "left padding is not supported if tokens attend in chunks",
        {"input_ids": ids, "attention_mask": mask},
    )
    padded = shard_batch(padded, layout="zigzag")
    says(f"{'Mismatch: rank 0 cannot take part' if rank else 'Unsupported'}: {words}", lambda: chunked(**padded))
    says("Unsupported: generate: attention in chunks", lambda: chunked.generate(ids[:, :9]))
    says("fine", lambda: chunked(**batch))
    router = "Unsupported: output_router_logits=True: this model has no router loss"
    body = parallelize(make("Mixtral").model, layout="zigzag")
    says(router, lambda: body(**batch, output_router_logits=True))
    says("Unsupported: output_attentions=True", lambda: llama(**batch, output_attentions=True))
    words = "Unsupported: LlamaAttention gives its attention attn_bias=, block_indices= which"
    says(words, lambda: llama(**batch, attn_bias=ids, block_indices=ids, indices=None))
    mixed(batch)
    for options, words in (({"group": 2}, "group=2: expected a"), ({"softcap": 3.0}, "unknown option 'softcap'")):
        says(f"InvalidInput: {words}", lambda: parallelize(make("Llama"), **{"layout": "zigzag", **options}))
    for option, value in (("schedule", "rong"), ("layout", "zagzig"), ("kernel", "atencpu"), ("machine", "cqu")):
        wrong = parallelize(make("Llama"), **{"layout": "zigzag", option: value})
        says(f"InvalidInput: unknown {option} '{value}'", lambda: wrong(**batch))
    says("InvalidInput: Linear is not a", lambda: parallelize(torch.nn.Linear(2, 2), layout="zigzag"))  # type: ignore[arg-type]
    text = parallelize(hf.CLIPTextModel(hf.CLIPTextConfig(**BASE)), layout="zigzag")
    says("Unsupported: CLIPTextModel computes pooler_output from the whole sequence", lambda: text(**batch))
    says("Unsupported: LlamaForCausalLM returns a tuple", lambda: llama(**batch, return_dict=False))
    says("Unsupported: logits_to_keep=8 would keep rows of this rank", lambda: llama(**batch, logits_to_keep=8))
    both = {"input_ids": ids, "labels": ids}
    labelled, aligned = (shard_batch(both, layout="zigzag", shift=x) for x in (True, False))
    words = "InvalidInput: labels are not shifted to the next token, which gives LlamaForCausalLM"
    says(words, lambda: llama(**aligned))
    words = "InvalidInput: labels are shifted to the next token, which gives RobertaForMaskedLM"
    says(words, lambda: ring("RoBERTa, positions from 2")(**labelled))
    undigested = {name: x for name, x in labelled.items() if name != "batch_digest"}
    says("InvalidInput: num_items_in_batch is missing", lambda: llama(**undigested))
    by_hand = {name: x for name, x in batch.items() if name != "batch_digest"}
    says("InvalidInput: batch_digest is missing: this model's rope", lambda: ring("longrope")(**by_hand))
    llama.set_attn_implementation("sdpa")
    says("InvalidInput: attention 'sdpa' was set after parallelize", lambda: llama(**batch))
    pair = unparallelize(llama), make("Llama")
    assert torch.equal(*(x.generate(ids[:, :5], max_new_tokens=3, do_sample=False) for x in pair))
    for kind, settings, words in REFUSED:
        model = make_class(kind, **settings)
        says(f"Unsupported: {kind} has {words}", lambda: parallelize(model, layout="zigzag"))


class Mixing(torch.nn.Module):
    """A layer of a model of the user's own, whose rows depend on others outside of attention functions."""

    def __init__(self, inner: torch.nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how
        self.conv = torch.nn.Conv1d(32, 32, 3, padding=2, groups=32)
        self.places = torch.nn.Embedding(512, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + getattr(self, self.how)(x)

    def shift(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 0, 1, 0))[:, : x.shape[1]]

    def convolution(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)

    def running_mean(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]

    def top_k_over_tokens(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x.norm(dim=-1).topk((x.shape[1] + 1) // 2)[1]
        return x * torch.zeros(x.shape[:2]).scatter(1, chosen, 1.0)[..., None]

    def own_positions(self, x: torch.Tensor) -> torch.Tensor:
        return self.places(torch.arange(x.shape[1])).to(x)

    def own_attention(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def mixed(batch: dict[str, torch.Tensor]) -> None:
    """That models which mix rows are refused, and what `parallelize` leaves as it was."""
    words = "Unsupported: LlamaForCausalLM mixes rows outside of attention functions"
    for how in ("shift", "convolution", "running_mean", "top_k_over_tokens", "own_positions", "own_attention"):
        for dtype in (torch.float32, torch.bfloat16):
            model = make("Llama")
            model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp, how)
            model.to(dtype)
            says(words, lambda: parallelize(model, layout="zigzag"))
    ids, before = torch.arange(8)[None], torch.get_rng_state()
    says("fine", lambda: model(ids))  # one that was refused computes whole sequences
    says("fine", lambda: parallelize(model, layout="zigzag", compare=False))
    model = make("Llama", torch_dtype=torch.bfloat16).to(torch.bfloat16).train()
    model.model.layers[0].eval()
    modes, before = [module.training for module in model.modules()], torch.get_rng_state()
    weights = [(p, p.data_ptr(), p.dtype) for p in model.parameters()]
    parallelize(model, layout="zigzag")
    assert [module.training for module in model.modules()] == modes and torch.equal(torch.get_rng_state(), before)
    assert all(p.data_ptr() == place and p.dtype == dtype and p.grad is None for p, place, dtype in weights)
    with torch.device("meta"):
        late = make("Llama")
        late.model.layers[1].mlp = Mixing(late.model.layers[1].mlp, "shift")
    parallelize(late, layout="zigzag").to_empty(device="cpu")
    for module in late.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = make("Llama").model.rotary_emb.inv_freq
    for p in late.parameters():
        torch.nn.init.normal_(p, std=0.1)
    says(words, lambda: late(**batch))
    says(words, lambda: late(**batch))


def compiled(rank: int, packings: int) -> tuple[bool, int]:
    """Whether a whole Llama compiled is its eager self, bit for bit, in every packing, and how often it compiled."""
    model = parallelize(make("Llama", num_hidden_layers=1), layout="zigzag")
    torch._dynamo.reset()
    counters.clear()
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids, same = torch.randint(61, (1, 41)), True
    for first in range(3, 3 + packings):
        borders = [0, first, 41] if first % 2 else [0, first, 2 * first, 41]
        batch = shard_batch({"input_ids": ids, "labels": ids}, layout="zigzag", cu_seqlens=borders)
        results = []
        for run in (model, fast):
            result = run(**batch, use_cache=False, num_items_in_batch=40)
            gradients = torch.autograd.grad(result.loss, list(model.parameters()))
            results.append((result.logits, *gradients))
        same = same and all(map(torch.equal, *results))
    return same, counters["stats"]["unique_graphs"]
