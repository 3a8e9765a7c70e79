"""Every text model of the installed transformers, tiny, over ranks and alone: none may be accepted that is not exact.

    PYTHONPATH=.:tests/helpers python tests/helpers/sweep.py [CLASS ...] > LINES    # without classes all of them
    PYTHONPATH=.:tests/helpers python tests/helpers/sweep.py --plain [CLASS ...]    # with the fields that they have
    PYTHONPATH=.:tests/helpers python tests/helpers/sweep.py --page < LINES         # docs/support.md

Writes a line for each class: exact, refused (in words), not buildable, no text, WRONG or crash. The status is 1 if some
are WRONG or crash. A class that is served has a line more for each set of fields of its configuration that changes its
numbers, `CLASS(field=value, ...)`, see `search_fields`. `test_transformers.py` runs a sample.
"""

from __future__ import annotations

import copy
import csv
import inspect
import logging
import multiprocessing
import re
import sys
import typing
import warnings
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from huggingface_hub.errors import StrictDataclassError
from rank_pool import Pool, of_first, told_by
from transformers.models.auto import configuration_auto, modeling_auto

import ringattn as ra
from ringattn.errors import LaunchFailure
from ringattn.integrations.supported import check_model
from ringattn.integrations.transformers import parallelize, shard_batch
from ringattn.train import mean_over_ranks
from ringattn.transport import launcher

PAGE = Path(__file__).resolve().parents[2] / "docs/support.md"
TABLE = PAGE.with_name("support_models.csv")
TOKENS, CLASSES = 41, 99
#: The sequences of each kind of batch: (row, first token, end). The rows of a packed batch have documents of their own.
PARTS = {
    "packed": [(0, 0, 17), (0, 17, TOKENS), (1, 0, TOKENS)],
    "padded": [(0, 0, TOKENS), (1, 11, TOKENS)],
    "padded right": [(0, 0, TOKENS), (1, 0, 30)],
}
PARTS["checkpointed"] = PARTS["packed"]
#: The tokens of the decoder beside an encoder's, in the whole batch and in each row.
DECODED, IN_ROW = 29, (29, 20)
#: Automatic mappings of transformers, and the fields of a result that are compared.
HEADS = "CAUSAL_LM MASKED_LM TOKEN_CLASSIFICATION SEQUENCE_CLASSIFICATION QUESTION_ANSWERING SEQ_TO_SEQ_CAUSAL_LM"
SEQ_TO_SEQ = set(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values())
KINDS = ("", *(f"_FOR_{head}" for head in HEADS.split()))
FIELDS = ("logits", "last_hidden_state", "pooler_output", "start_logits", "end_logits", "encoder_last_hidden_state")
#: Seconds in which a class must end, and what classes that are not made for such sizes and batches raise.
LIMIT = 90.0
FOREIGN = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, StrictDataclassError,
    TypeError, ValueError,
)  # fmt: skip
#: Largest error of a field or gradient, as a part of its largest value: gradients of CTRL have 5e-4 by rounding alone.
BOUND = 2e-3
#: The same in fp64, for a class whose fp32 numbers differ by more.
FINE = 1e-6
#: Sizes of a tiny model by the names that configurations have for them; a configuration takes those that it knows.
SIZES: tuple[tuple[Any, str], ...] = (
    (CLASSES, "vocab_size entity_vocab_size pronunciation_vocab_size shape_vocab_size vocab_size_per_layer_input"),
    (32, "hidden_size d_model n_embd dim embedding_size emb_dim moe_intermediate_size word_embed_proj_dim d_embed"),
    (32, "shared_expert_intermediate_size dense_intermediate_size expert_ffn_hidden_size"),
    (64, "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size d_inner hidden_dim"),
    (2, "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_key_value_heads"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk top_k_experts top_k moe_top_k moe_k num_hidden_groups"),
    (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num index_kpool"),
    (8, "head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim attention_head_dim kv_channels global_head_dim"),
    (8, "hidden_size_per_layer_input rotary_dim linear_key_head_dim linear_value_head_dim state_size mamba_d_state"),
    (8, "index_topk ssm_state_size mamba_head_dim time_step_rank mamba_dt_rank n_mamba_heads_"),
    (2, "linear_num_key_heads expand mamba_expand n_groups mamba_n_groups mamba_ngroups"),
    (4, "linear_num_value_heads conv_kernel mamba_d_conv linear_conv_kernel_dim"),
    (16, "kv_lora_rank q_lora_rank index_head_dim laurel_rank entity_emb_size pronunciation_embed_dim shape_embed_dim"),
    (16, "index_n_heads"),  # with few, whole scores are 0 and tie
    (1, "n_group topk_group max_window_layers first_k_dense_replace n_shared_experts"),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len"),
    (9, "sliding_window"),
    (18, "local_attention"),
    (True, "use_sliding_window"),
    (0, "pad_token_id num_kv_shared_layers"),
    (3, "bos_token_id"),
    (5, "eos_token_id"),
    (7, "mask_token_id"),
    (9, "attention_chunk_size"),
    (0.0, "attention_dropout hidden_dropout dropout attn_pdrop resid_pdrop embd_pdrop attention_probs_dropout_prob"),
    (0.0, "hidden_dropout_prob layerdrop activation_dropout classifier_dropout embedding_dropout mlp_dropout"),
    (0.0, "router_jitter_noise input_jitter_noise jitter_noise classifier_dropout_prob attn_dropout residual_dropout"),
    (0.0, "resid_dropout embed_dropout"),
)
BY_NAME = {name: size for size, names in SIZES for name in names.split()}
#: What is tried for a model that those sizes do not fit.
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"hidden_size": 512, "head_dim": 128},
    {"attn_pdrop": 0, "resid_pdrop": 0},
    {"attention_types": [[["global", "local"], 1]], "window_size": 9},
)
#: What the hybrid models of a type need besides: layers of both kinds, and states that are small. Models that choose
#: keys choose them in one layer for both.
_BOTH = {"layer_types": ["linear_attention", "full_attention"]}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8}
_MIXED = {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "num_hidden_layers": 3}
HYBRIDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _BOTH),
    "olmo_hybrid": {**_BOTH, "num_key_value_heads": 4},
    "bailing_hybrid": _BOTH,
    "kimi_linear": {**_BOTH, "linear_num_heads": 4, "linear_head_dim": 8},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_MAMBA2, **_BOTH},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron_h": {"mamba_num_heads": 8},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, "n_mamba_heads": 2},
    "zamba2": {**_MIXED, "n_mamba_heads": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    **{kind: {"indexer_types": ["full", "shared"]} for kind in ("glm_moe_dsa", "hy_v4")},
    "mistral_large4_text": {"indexer_types": ["full", "shared"], "no_rope_layers": [1, 0]},
    "minimax_m3_vl_text": {
        **{"layer_types": ["minimax_m3_sparse", "full_attention"], "index_n_heads": 2, "index_block_size": 4},
        "index_topk_blocks": 3,
    },
    "glm5_next_text": {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "num_experts": 4, "n_routed_experts": 4},
}
#: Fields of configurations whose values are sizes, or of training and loading alone, by parts of their names.
NOT_FLIPPED = (
    *("drop", "eps", "init", "loss", "coef", "vocab", "token_id", "token_index", "num_", "_dim", "dim_", "_size"),
    *("heads", "noise", "dtype", "pretraining_tp", "vision", "audio", "image", "video", "encoder_layers", "n_layer"),
    *("use_cache", "output_", "return_", "use_mamba", "max_position", "experts", "is_encoder_decoder", "n_group"),
    "sparse_prediction",  # logits of labelled rows only
)
#: Other values of fields whose type does not name them.
WORDS: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rotary", "absolute", "relative_key"),
    "summary_type": ("last", "mean"),
    "attention_type": ("original_full", "full"),
    "attn_type": ("uni", "bi"),
    "topk_method": ("noaux_tc", "group_limited_greedy"),
    "layer_types": (["sliding_attention", "full_attention"], ["full_attention"] * 2, ["chunked_attention"] * 2),
    "no_rope_layers": ([1, 0], [0, 1]),
    "rope_parameters": tuple(
        {"rope_theta": 1e4, "rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 16, **more}
        for kind, more in (("longrope", {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}), ("yarn", {}))
    ),
}
#: What a number is set to, where it is a window or the like, and where it is not.
WIDTH, FEW, PART = 9, 2, 0.5
GROUPS: list[Any] = []
#: The end of the name of the text part of a class that has other inputs, too.
TEXT = ".get_decoder()"


def classes() -> dict[str, str]:
    """The model type of every class of the automatic mappings."""
    found: dict[str, str] = {}
    for kind in KINDS:
        for model_type, names in getattr(modeling_auto, f"MODEL{kind}_MAPPING_NAMES").items():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, model_type)
    return found


def configure(kind: Any, **more: Any) -> Any:
    """A tiny configuration of this class, and of the configurations in it, with `more` where it is known."""
    known = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "__dataclass_fields__", ())}
    words = {name: size for name, size in BY_NAME.items() if name in known}
    for name, sub in (getattr(kind, "sub_configs", None) or {}).items():
        if sub is hf.AutoConfig:
            sub = type(getattr(kind(), name))
        if issubclass(sub, hf.PreTrainedConfig):
            fields = getattr(sub, "__dataclass_fields__", ())
            words[name] = configure(sub, **{n: x for n, x in more.items() if n in fields}).to_dict()
    config = kind(**copy.deepcopy({**words, **more}))  # which change dicts
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in rope:  # some models take sections from it
        half = int(BY_NAME["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return config


def make_empty(name: str, model_type: str, **more: Any) -> Any:
    """The model without weights."""
    kind = getattr(hf, name.removesuffix(TEXT))
    config = configure(kind.config_class or configuration_auto.CONFIG_MAPPING[model_type], **more)
    if is_causal(name):
        config.is_decoder = True
    with torch.device("meta"):
        model = kind(config)
    return model.get_decoder() if name.endswith(TEXT) else model


def make(name: str, model_type: str, **more: Any) -> Any:
    """The model without dropout, with random weights, the same on every rank, none of them 0."""
    empty = make_empty(name, model_type, **more)
    size = sum(p.numel() for p in empty.parameters())
    if size > 6_000_000:
        check_model(empty)  # may refuse it
        raise ValueError(f"{size:,} parameters")
    kind, config = type(empty), empty.config
    config._attn_implementation = "eager"
    if torch.get_default_dtype() == torch.float64:  # which grouped products lack
        config._experts_implementation = "eager"
    torch.manual_seed(1)
    model = kind(config).to(torch.get_default_dtype()).eval()
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape)
            p.copy_(noise * min(0.15, p.shape[-1] ** -0.5)) if p.ndim > 1 else p.add_(noise * 0.1)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def fit(name: str, model_type: str, ids: torch.Tensor, **fields: Any) -> tuple[Any, dict[str, Any], torch.Tensor]:
    """(the model, the first of `OTHERS` with which it can be made and run, a result). Raises the error of the first.

    `fields` are set in its configuration.
    """
    errors = []
    for more in ({**HYBRIDS.get(model_type, {}), **other} for other in OTHERS):
        try:
            model = make(name, model_type, **{**more, **fields})
            result = model(**alone(model, ids.expand(2, -1), 0, 0, TOKENS), **without_cache(model))
            first = next((x.detach() for n in FIELDS if isinstance(x := result.get(n), torch.Tensor)), None)
            if first is None:
                raise ValueError(f"returns {', '.join(result)} for tokens alone")
            return make(name, model_type, **{**more, **fields}), more, first
        except FOREIGN as error:
            errors.append(error)
    raise errors[0]


def other_values(config: Any) -> dict[str, list[Any]]:
    """What each field of a configuration, and of those in it, may be set to in its place."""
    found: dict[str, list[Any]] = {}
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        fields = getattr(part, "__dataclass_fields__", {})
        for name in fields.keys() - hf.PreTrainedConfig.__dataclass_fields__.keys():
            value, kinds = vars(part).get(name), {fields[name].type, *typing.get_args(fields[name].type)}
            window = any(word in name for word in ("window", "chunk", "local_attention"))
            flag = isinstance(value, bool) or (value is None and bool in kinds)
            if any(word in name for word in NOT_FLIPPED) and not (window or (flag and "drop" in name)):
                continue
            tried = [x for kind in kinds for x in typing.get_args(kind) if isinstance(x, str)]
            tried = [*WORDS.get(name, ()), *sorted(tried)]
            if flag:
                tried.append(not value)
            elif isinstance(value, int) or (value is None and int in kinds):
                tried.append(WIDTH if window else FEW)
            elif isinstance(value, float) or (value is None and float in kinds):
                tried.append(PART if value != PART else PART / 2)
            found[name] = [*found.get(name, ()), *(x for x in tried if x != value and x not in found.get(name, ()))]
    return dict(sorted(found.items()))


def search_fields(name: str, ids: torch.Tensor) -> list[dict[str, Any]]:
    """Sets of fields which change the numbers of a class: each value in the first set where it makes another result.

    Each value is a set of its own, too, as one may hide another; a value that `check_model` refuses only there.
    """
    model_type = classes()[name.removesuffix(TEXT)]
    alone: list[dict[str, Any]] = []
    model, more, plain = fit(name, model_type, ids)
    found: list[tuple[dict[str, Any], torch.Tensor]] = []
    for field, value in ((field, value) for field, values in other_values(model.config).items() for value in values):
        for i, (fields, before) in enumerate([*found, (dict[str, Any](), plain)]):
            if field in fields:
                continue
            try:
                made, _, result = fit(name, model_type, ids, **{**more, **fields, field: value})
            except FOREIGN:
                continue
            if result.shape == before.shape and torch.allclose(result, before, rtol=1e-3, atol=1e-4):
                break
            alone.append({field: value})
            if told_by(lambda made=made: check_model(made)) == "fine":  # type: ignore[misc]
                found[i : i + 1] = [({**fields, field: value}, result)]
            break
    sets = [fields for fields, _ in found]
    return sets + [fields for fields in alone if fields not in sets]


def is_causal(name: str) -> bool:
    return "CausalLM" in name or "LMHead" in name


def parts_of(model: Any) -> dict[str, list[tuple[int, int, int]]]:
    """The kinds of batches that a model takes; those with an encoder take no documents, and count all places."""
    if not model.config.is_encoder_decoder:
        return PARTS
    return dict.fromkeys(("padded right", "checkpointed"), PARTS["padded right"])


def alone(model: Any, ids: torch.Tensor, row: int, start: int, stop: int) -> dict[str, torch.Tensor]:
    """The tensors of one sequence of a batch, labels among them."""
    part, name = ids[row : row + 1, start:stop], type(model).__name__
    if not model.config.is_encoder_decoder:
        return {"input_ids": part, **make_labels(name, part)}
    decoded = ids.flip(1)[row : row + 1, : IN_ROW[row]]
    return {"input_ids": part, "decoder_input_ids": decoded, **make_labels(name, decoded)}


def is_of_decoder(model: Any, field: str) -> bool:
    return model.config.is_encoder_decoder and field != "encoder_last_hidden_state"


def without_cache(model: Any) -> dict[str, Any]:
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def make_labels(name: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The labels for a class that has a loss of each row."""
    if "TokenClassification" in name:
        return {"labels": ids % 2}
    if "SequenceClassification" in name:
        return {"labels": ids[:, 0] % 2}
    if "QuestionAnswering" in name:
        return {"start_positions": ids[:, 0] % 5, "end_positions": ids[:, 0] % 7}
    return {"labels": ids} if is_causal(name) or "MaskedLM" in name or name in SEQ_TO_SEQ else {}


def fields(result: Any) -> dict[str, torch.Tensor]:
    return {name: result[name] for name in FIELDS if isinstance(result.get(name), torch.Tensor)}


def weights(x: torch.Tensor, tokens: int | None) -> torch.Tensor:
    """A cotangent of fields [.., n, ..] by the place in rows of so many tokens; None: of [.., ..], by the sequence."""
    shape = (3, *x.shape[1:]) if tokens is None else (2, tokens, *x.shape[2:])
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def run_alone(model: Any, mode: str, ids: torch.Tensor) -> tuple[list[Any], list[torch.Tensor], float]:
    """(fields of each sequence alone, gradients of all, the mean loss of all labels)."""
    model.zero_grad()
    found, losses, count = [], 0.0, 0
    for i, (row, start, stop) in enumerate(parts_of(model)[mode]):
        given = alone(model, ids, row, start, stop)
        result = model(**given, **without_cache(model))
        objective = torch.zeros(())
        for n, x in fields(result).items():
            first, last, tokens = (0, IN_ROW[row], DECODED) if is_of_decoder(model, n) else (start, stop, TOKENS)
            of_rows = x.ndim > 1 and x.shape[1] == last - first
            weight = weights(x, tokens)[row, first:last] if of_rows else weights(x, None)[i]
            objective = objective + (x * weight).sum()
        objective.backward()
        found.append({n: x.detach() for n, x in fields(result).items()})
        if result.get("loss") is not None:
            labels = given.get("labels", given["input_ids"][0])
            labels = labels.shape[1] - is_causal(type(model).__name__) if labels.ndim > 1 else 1
            losses, count = losses + float(result.loss.detach()) * labels, count + labels
    return (
        found,
        [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()],
        losses / max(count, 1),
    )


def run_all_alone(model: Any, ids: torch.Tensor, modes: Iterable[str]) -> dict[str, Any] | str:
    """`run_alone` by the kind of batch, once for kinds of the same sequences; or why it cannot be run."""
    parts, found = parts_of(model), dict[str, Any]()
    try:
        for mode in modes:
            same = [other for other in found if parts[other] is parts[mode]]
            found[mode] = found[same[0]] if same else run_alone(model, mode, ids)
    except FOREIGN as error:
        return not_buildable(error)
    return found


def whole_batch(model: Any, mode: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The batch of all sequences of this kind; answers count the places of the row."""
    name, parts = type(model).__name__, parts_of(model)[mode]
    batch, labels = {"input_ids": ids}, make_labels(name, ids)
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids.flip(1)[:, :DECODED]
        batch["decoder_attention_mask"] = (torch.arange(DECODED) < torch.tensor(IN_ROW)[:, None]).long()
        labels = make_labels(name, batch["decoder_input_ids"])
    elif "start_positions" in labels and not mode.startswith("padded"):
        labels = {}
    elif "labels" not in labels or labels["labels"].ndim == 1:
        of_parts = [make_labels(name, ids[row : row + 1, start:]) for row, start, _ in parts]
        first = torch.tensor([start for _, start, _ in parts]) if "start_positions" in labels else 0
        labels = {key: torch.cat([part[key] for part in of_parts]) + first for key in labels}
    if mode.startswith("padded") or model.config.is_encoder_decoder:
        batch["attention_mask"] = torch.zeros_like(ids)
        for row, start, stop in parts:
            batch["attention_mask"][row, start:stop] = 1
        if not model.config.is_encoder_decoder:  # heads of sequences know padding by its id
            batch["input_ids"] = ids.where(batch["attention_mask"] != 0, BY_NAME["pad_token_id"])
    return {**batch, **labels}


def compare(
    model: Any, group: Any, layout: str, mode: str, expected: Any, ids: torch.Tensor, bound: float = BOUND
) -> str:
    """ "exact", or WRONG and the differences of fields, gradients and loss that are above `bound`."""
    rank, ranks, name = dist.get_rank(group), dist.get_world_size(group), type(model).__name__
    batch = whole_batch(model, mode, ids)
    borders = None if "attention_mask" in batch else [[0, 17, TOKENS], [0, TOKENS]]
    if mode == "checkpointed":
        if not model.supports_gradient_checkpointing:
            return "exact"
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad()
    part = shard_batch(batch, group, layout=layout, cu_seqlens=borders, shift=is_causal(name))
    result = model(**part, **without_cache(model))
    loss, whole = torch.zeros(()), fields(result)
    for n, x in fields(result).items():
        tokens, mask = TOKENS, batch.get("attention_mask")
        if is_of_decoder(model, n):
            tokens, mask = DECODED, batch["decoder_attention_mask"]
        cut = ra.make_layout(layout, tokens=tokens, ranks=ranks)
        local = x.ndim > 1 and x.shape[1] == cut.rows(rank)
        of_rows = local or (x.ndim > 1 and x.shape[1] == tokens)
        weight = weights(x, tokens if of_rows else None)[: 2 if of_rows else len(x)]
        if of_rows and mask is not None:
            weight[mask == 0] = 0
        loss = loss + (x * (cut.shard_tensor(weight, rank, dim=1) if local else weight / ranks)).sum()
        if local:
            shards: list[Any] = [None] * ranks
            dist.all_gather_object(shards, x.detach().numpy(), group=group)
            whole[n] = cut.unshard_tensor([torch.from_numpy(s) for s in shards], dim=1)
    loss.backward()
    right, gradients, mean = expected
    wrong = {}
    if result.get("loss") is not None:
        wrong["loss"] = abs(float(mean_over_ranks(result.loss, group=group)) - mean)
    for i, ((row, start, stop), theirs) in enumerate(zip(parts_of(model)[mode], right, strict=True)):
        for n, x in theirs.items():
            first, last, tokens = (0, IN_ROW[row], DECODED) if is_of_decoder(model, n) else (start, stop, TOKENS)
            ours = whole[n][row, first:last] if whole[n].ndim > 1 and whole[n].shape[1] == tokens else whole[n][i]
            far = (ours - x[0]).abs().max() / x.abs().max().clamp(min=1e-6) if ours.shape == x[0].shape else 1.0
            wrong[n] = max(wrong.get(n, 0.0), float(far))
    largest = max(float(g.abs().max()) for g in gradients) or 1.0
    for p, g in zip(model.parameters(), gradients, strict=True):
        mine = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(mine, group=group)
        wrong["gradients"] = max(wrong.get("gradients", 0.0), float((mine - g).abs().max()) / largest)
    bad = {n: f"{x:.2g}" for n, x in wrong.items() if not x < bound}
    return f"WRONG {bad}" if bad else "exact"


def not_buildable(error: Exception) -> str:
    return f"not buildable: {type(error).__name__}: {str(error)[:150]}"


def make_ids() -> torch.Tensor:
    """The tokens of a batch, some of them masked."""
    ids = torch.randint(8, CLASSES, (2, TOKENS), generator=torch.Generator().manual_seed(2))
    ids[0, [3, 4, 30]] = ids[1, 20] = BY_NAME["mask_token_id"]
    return ids


def one(
    rank: int,
    name: str,
    bound: float = BOUND,
    fields: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    half: int | None = None,
) -> dict[str, str]:
    """What a rank of three finds for each mode of a class with these fields set, and for 2 and 3 ranks.

    half: 0 or 1 for each mode on one of these numbers only, every other one on 2.
    """
    torch.set_default_dtype(dtype)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    ids = make_ids()
    if not GROUPS:
        GROUPS.extend(dist.new_group(list(range(n)), timeout=timedelta(seconds=LIMIT / 3)) for n in (2, 3))
    groups, mode = dict(zip(("zigzag", "contiguous"), GROUPS, strict=True)), "made"
    if rank == 2:
        del groups["zigzag"]
    try:
        if "input_ids" not in inspect.signature(getattr(hf, name.removesuffix(TEXT)).forward).parameters:
            return {"": "no text"}
        model, *_ = fit(name, classes()[name.removesuffix(TEXT)], ids[:1], **(fields or {}))
        ours = {layout: parallelize(copy.deepcopy(model), group, layout=layout) for layout, group in groups.items()}
        modes = list(parts_of(model))
        runs = list(product(("zigzag", "contiguous"), modes))
        if half is not None:
            runs = [run for i, run in enumerate(runs) if (i + i // len(modes)) % 2 == half]
        if fields:  # a kind of batch for each layout
            padded = next(mode for mode in modes if mode.startswith("padded"))
            runs = [run for run in runs if run in (("zigzag", padded), ("contiguous", "packed"))]
            runs = runs[-1:] if len(fields) == 1 else runs
        modes = [mode for mode in modes if not fields or mode in ("packed", padded)]
        expected = of_first(lambda: run_all_alone(model, ids, modes))
    except ra.RingAttentionError as error:
        return {"": f"refused: {type(error).__name__}: {error}"}
    except FOREIGN as error:
        return {"": not_buildable(error)}
    if isinstance(expected, str):
        return {"": expected}
    found: dict[str, str] = {}
    for layout, mode in runs:
        if layout not in groups:
            continue
        group = groups[layout]
        where = f"{mode} {dist.get_world_size(group)}"
        try:
            found[where] = compare(ours[layout], group, layout, mode, expected[mode], ids, bound)
        except (ra.Mismatch, ra.CommFailure) as error:
            *_, said = str(error).split(" cannot take part: ")  # by another rank, which refused it
            if said == str(error):
                return {where: f"crash: {type(error).__name__}: {error}"}
            found[where] = f"refused: Unsupported: {said}"
        except ra.RingAttentionError as error:
            found[where] = f"refused: {type(error).__name__}: {error}"
        except FOREIGN as error:
            return {where: f"crash: {type(error).__name__}: {str(error)[:150]}"}
    return found


def fine(rank: int, name: str) -> dict[str, str]:
    """`one` in fp64, to `FINE`; a rank goes on in fp32."""
    try:
        return one(rank, name, FINE, None, torch.float64) | {
            "made": str(next(make(name, classes()[name]).parameters()).dtype)
        }
    finally:
        torch.set_default_dtype(torch.float32)


def verdict(results: list[dict[str, str]]) -> str:
    """One line of what the ranks found: the worst answer first, and the modes of each."""
    modes: dict[str, set[str]] = {}
    for found in results:
        for mode, text in found.items():
            modes.setdefault(text, set()).add(mode)
    words = ("WRONG", "crash", "exact", "refused")
    order = sorted(modes, key=lambda text: [not text.startswith(word) for word in words])
    shown = [f"{text} [{', '.join(sorted(modes[text]))}]" if len(modes) > 1 else text for text in order]
    return " ".join(" | ".join(shown).replace(" []", "").split())


#: A section of docs/support.md; the site shows the table beside it.
INTRODUCTION = """## Classes of transformers

Which models of Hugging Face transformers {transformers} run over ranks, and why others are refused.
Of {classes} classes and variants {counts}. {blind} more classes have no tokens.

```{{raw}} html
<p><label for="search">Search for a class or a reason:</label> <input id="search" type="search"></p>
<div id="families"></div>
<script src="_static/support_models_data.js"></script>
<script src="_static/support_models.js"></script>
```

The data are [one table](support_models.csv). `CLASS(field=value)` is a class with a field of its configuration changed,
`{text}` the text part of the class above it. "Not set up" says why no tiny model was made.

`python tests/helpers/sweep.py` makes every class of the automatic mappings tiny, with random weights, and compares it
on 2 and 3 ranks (torch {torch}, CPU, fp32) with each sequence alone: logits, hidden states, poolers, answers, losses
and all gradients, to 0.2 % of the largest value. Tests hold some to 1e-5. A class whose fp32 numbers differ by more is
run again with weights in fp64, where 1e-6 is the bound: rounding can choose another expert. Batches are packed, padded
on the left, padded on the right, and packed with gradient checkpointing; models with an encoder and a decoder have
padded ones only.
"""
#: The words of an answer, what comes first being served least.
ANSWERS = {"WRONG": "wrong", "crash": "crashed", "refused": "refused", "exact": "exact", "not buildable": "not set up"}


def answer(text: str) -> str:
    """What a line says about a class: "exact" where only some batches are refused, too."""
    return text.split(":")[0].split(" {")[0].split(" [")[0]


def write_page(lines: list[str]) -> None:
    """Write the section of docs/support.md, and the table beside it, of lines of this program."""
    found = dict(line.split("\t") for line in lines if "\t" in line)
    counts = Counter(map(answer, found.values()))
    shown = [f"{counts[word]} are {words}" for word, words in ANSWERS.items()]
    page = INTRODUCTION.format(
        transformers=hf.__version__, torch=torch.__version__.split("+")[0], text=TEXT, blind=counts["no text"],
        classes=sum(counts.values()) - counts["no text"], counts=", ".join(shown),
    )  # fmt: skip
    before, after = re.split(r"^## Classes.*?(?=^## )", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    PAGE.write_text(f"{before}{page}\n{after}")
    with TABLE.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["class", "answer", "why"])
        table.writerows(row(*each) for each in sorted(found.items()) if answer(each[1]) in ANSWERS)


def row(name: str, text: str) -> list[str]:
    """The row of a class in the table."""
    own = text.removeprefix(f"{answer(text)}: ").removeprefix("Unsupported: ")
    return [name, ANSWERS[answer(text)], "" if own == "exact" else own.removeprefix(f"{name} ").replace("|", ";")]


def read_table() -> list[list[str]]:
    """The rows of the table: [class, answer, why]."""
    with TABLE.open(newline="") as file:
        return list(csv.reader(file))[1:]


def find_fields(name: str, known: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The sets of fields with which a class that is served is compared: all for one class of a configuration."""
    model_type = classes()[name.removesuffix(TEXT)]
    if model_type not in known:
        known[model_type] = search_fields(name, make_ids()[:1])
        return known[model_type]
    return known[model_type][:1]


def main(names: list[str]) -> int:
    if names[:1] == ["--page"]:
        write_page(sys.stdin.read().splitlines())
        return 0
    plain = names[:1] == ["--plain"]
    names = names[plain:]
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    launcher.get_context = lambda method: multiprocessing.get_context("fork")  # type: ignore[assignment]
    counts: Counter[str] = Counter()
    pool: Pool | None = None
    known: dict[str, list[dict[str, Any]]] = {}
    # Classes with logits first: the fields of a configuration are searched by its first class.
    todo: list[tuple[str, dict[str, Any]]] = [
        (name, {}) for name in names or sorted(classes(), key=lambda x: ("CausalLM" not in x, "For" not in x, x))
    ]
    for name, _ in todo:
        getattr(hf, name, None)  # ranks have imported what this process has
    while todo:
        (name, fields), pool = todo.pop(0), pool or Pool(3)
        try:
            text = verdict(pool.run(one, name, BOUND, fields, timeout=LIMIT))
            if text.startswith("WRONG"):  # unless rounding chose another expert, or another side of a limit
                fine = verdict(pool.run(one, name, FINE, fields, torch.float64, timeout=LIMIT))
                text = f"exact: in fp64 to {FINE}; in fp32 {text}" if fine == "exact" else text
        except LaunchFailure as error:
            text = f"crash: {str(error).splitlines()[0]}"
        if any(word in text for word in ("crash", "CommFailure", "Mismatch")):
            pool.kill()
            pool = None
        if "use parallelize(" in text:
            todo.insert(0, (name + TEXT, {}))
        if not fields and not plain and answer(text) == "exact":
            todo[:0] = [(name, more) for more in find_fields(name, known)]
        counts[answer(text)] += 1
        print(show(name, fields), text, sep="\t", flush=True)
    if pool is not None:
        pool.kill()
    print(*(f"{count} {word}" for word, count in counts.most_common()), sep=", ")
    return int(counts["WRONG"] + counts["crash"] > 0)


def show(name: str, fields: dict[str, Any]) -> str:
    """A class with fields of its configuration."""
    return f"{name}({', '.join(f'{field}={value!r}' for field, value in fields.items())})" if fields else name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
