"""Decide from a transformers model itself whether it can run over ranks, and read what its calls need."""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import (
    LOSS_MAPPING,
    ForCausalLMLoss,
    ForMaskedLMLoss,
    ForQuestionAnsweringLoss,
    ForSequenceClassificationLoss,
    ForTokenClassification,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from ..errors import InvalidInput, Unsupported
from .choices import INDEXED, choosing_layers
from .encoder_decoder import find_tables
from .heads import find_pooling
from .hybrids import mixing_functions, unknown_functions

#: The attribute of attention modules where `tell_positions` stores the positions of a call.
PLACES = "_ringattn_positions"
#: The kinds of layers that attend only through transformers' attention functions, that mix no rows, and that mix them
#: only through the functions of `hybrids.FUNCTIONS`.
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "mlp", "moe")
RECURRENT_TYPES = ("linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding")
#: The kinds of PEFT adapters that mix rows or bypass the model's hooks.
ADAPTERS = ("ADALORA", "ADAPTION_PROMPT", "LILY", "POLY", "SHADOW", "XLORA", "aLoRA")


def unwrap_adapters(model: Any) -> PreTrainedModel:
    """The transformers model inside PEFT's wrapper, or the model itself. Raises Unsupported for some adapters."""
    for name, config in getattr(model, "peft_config", {}).items():
        kind = "aLoRA" if getattr(config, "alora_invocation_tokens", None) else config.peft_type.value
        if config.is_prompt_learning or kind in ADAPTERS:
            words = "adds tokens" if config.is_prompt_learning else "is not computed row by row by a call of the model"
            raise Unsupported(f"adapter {name!r} ({kind}) {words}; use another kind, such as LoRA")
    if isinstance(model, PreTrainedModel) or not hasattr(model, "peft_config"):
        return cast("PreTrainedModel", model)
    if "forward" in type(model.base_model).forward.__code__.co_names:
        raise Unsupported("this release of PEFT calls model.forward directly, past all hooks; install peft>=0.21")
    return cast("PreTrainedModel", model.base_model.model)


def check_model(model: PreTrainedModel) -> tuple[bool | None, str | None]:
    """Check that ring attention can compute a model; returns (whether labels are next tokens, rows the head reads).

    The first is None for a model without a loss per row. The second is described in `find_pooling`, and None for a
    model whose head does not read whole sequences. Raises Unsupported, naming the feature, if ring attention cannot
    compute all attention of the model, or if rows of different tokens are combined elsewhere.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise InvalidInput(
            f"{type(model).__name__} is not a transformers model; parallelize a PreTrainedModel before DDP, FSDP or "
            "torch.compile wraps it, or use ringattn.nn.RingAttention in your own models"
        )
    both, name, config = model.config.is_encoder_decoder, type(model).__name__, model.config
    if not _is_of_text(config):
        parts = [path for path, part in model.named_modules() if part is model.get_decoder() and path]
        hint = f"parallelize(model.{parts[0]}, ...)" if parts else "a language model"
        raise Unsupported(f"{name} has inputs besides text; use {hint} alone, and give inputs_embeds to shard_batch")
    loss = LOSS_MAPPING.get(model.loss_type)
    causal = loss is ForCausalLMLoss or any(
        kind.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for kind in type(model).__mro__
    )
    if both and (causal or name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()):
        causal, loss = False, ForMaskedLMLoss  # labels belong to the decoder's rows
    aligned, bare = loss in (ForMaskedLMLoss, ForTokenClassification), model.base_model is model
    field = {ForSequenceClassificationLoss: "logits", ForQuestionAnsweringLoss: "start_logits"}.get(loss)
    mixes, unknown = any(map(mixing_functions, model.modules())), unknown_functions(model)
    kinds = set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES) - set(RECURRENT_TYPES if mixes else ())
    kinds -= INDEXED if choosing_layers(model) else set()
    attends = bool(kinds) or not set(getattr(config, "layer_types", None) or "?") <= set(RECURRENT_TYPES[:3])
    reads = (model if field is None else model.base_model).forward
    places = "position_ids" in inspect.signature(reads).parameters or (both and len(find_tables(model)) == 2)
    through = model._supports_attention_backend or (model._can_set_attn_implementation() and model._supports_sdpa)
    whole = "decoder_input_ids" in inspect.signature(model.forward).parameters
    alibi = any("alibi" in word for word in dir(model.base_model))
    stretched = both and any(map(rotates_by_length, model.modules()))
    other = not (causal or aligned or bare or field)
    mixing = "its indexer scores keys in pools" if kinds & INDEXED else "ringattn does not know how their rows mix"

    def given(word: str) -> Any:
        return getattr(config, word, None)

    for feature, present, hint in (
        ("inputs other than tokens", model.main_input_name != "input_ids", "only sequences of tokens are sharded"),
        (f"functions that ringattn does not know: {', '.join(sorted(unknown))}", unknown, ""),
        (f"layers of type {', '.join(sorted(kinds))}", kinds, mixing),
        (
            "a decoder for rows that it lacks",
            given("add_cross_attention") and not both,
            "set add_cross_attention=False",
        ),
        ("embeddings scaled by the share of masked tokens (token_dropout)", given("token_dropout"), ""),
        ("a mask made of its values (keep_window_size)", hasattr(config, "keep_window_size"), ""),
        ("embeddings of neighbouring tokens (trigram_input)", given("trigram_input"), ""),
        ("a bias of relative positions", hasattr(config, "relative_attention_num_buckets"), ""),
        ("ALiBi", given("alibi") or alibi, ""),
        ("attention outside of transformers' attention functions", attends and not through, ""),
        ("only one half of an encoder and a decoder", both and not whole, "use the whole model"),
        ("no argument position_ids, by which a rank says which rows it has", attends and not places, ""),
        ("a head over an encoder and a decoder", both and field is not None, "use its base model"),
        ("rope that depends on the lengths of two sequences", stretched, ""),
        ("a head whose loss is not of tokens, classes or answers", other, "use its base model and your own loss"),
    ):
        if present:
            raise Unsupported(f"{name} has {feature}; {hint or 'not supported over ranks: shard the batch instead'}")
    if field is not None and not bare:
        return None, find_pooling(model, field)
    return None if not (causal or aligned) else not aligned, None


def _is_of_text(config: Any) -> bool:
    """Whether a model with this config has only text parts: a single one, or an encoder and a decoder."""
    parts = [getattr(config, name, None) for name in config.sub_configs]
    parts = [part for part in parts if hasattr(part, "num_hidden_layers")]
    return all(map(_is_of_text, parts)) if config.is_encoder_decoder else not parts


def rotates_by_length(module: nn.Module) -> bool:
    """Whether the module is a rotary embedding that rotates a row otherwise if the largest position is far away."""
    kinds = getattr(module, "rope_type", None)
    if kinds is None or "position_ids" not in inspect.signature(module.forward).parameters:
        return False
    with torch.device("cpu"):  # a new module in place of one without numbers
        lost = any(x.is_meta for x in module.buffers())
        rope: Any = type(module)(module.config) if lost else deepcopy(module).cpu()
        for kind in [{"layer_type": kind} for kind in kinds] if isinstance(kinds, dict) else [{}]:
            asked = (torch.tensor(places, device="cpu") for places in ([[0, 1]], [[0, 1, 2**30]]))
            near, far = (rope.forward(torch.zeros(1, device="cpu"), position_ids=places, **kind)[0] for places in asked)
            if not torch.allclose(near, far[..., :2, :]):
                return True
    return False


def drop_positions(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` without `position_ids` if the model takes no `position_ids`, because it has no attention."""
    if "position_ids" in inspect.signature(model.forward).parameters:
        return kwargs
    return {name: x for name, x in kwargs.items() if name != "position_ids"}


def tell_positions(model: nn.Module) -> None:
    """Add hooks that pass `position_ids` to attention layers that scale queries by position, as in Llama 4."""
    for layer in model.modules():
        if getattr(getattr(layer, "self_attn", None), "attn_temperature_tuning", False):
            layer.register_forward_pre_hook(_tell, with_kwargs=True)


def _tell(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    setattr(layer.self_attn, PLACES, kwargs["position_ids"])


def scale_by_position(module: Any, query: torch.Tensor) -> torch.Tensor:
    """The queries [B, H, n, D], corrected if their scale depends on position, as in Llama 4.

    The layer has scaled them as if the rows were at positions 0 .. n-1; the result has the scale of their true
    positions.
    """
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query
    positions: Any = getattr(module, PLACES)
    places = torch.stack([positions, torch.arange(query.shape[2], device=query.device).expand_as(positions)])
    scale = 1 + module.attn_scale * torch.log1p(torch.floor((places.float() + 1) / module.floor_scale))
    return (query * (scale[0] / scale[1])[:, None, :, None]).to(query.dtype)


def first_position(model: nn.Module) -> int:
    """The position of the first token; models like RoBERTa start one after the position of padding."""
    tables = [getattr(module, "position_embeddings", None) for module in model.modules()]
    padding = [place for x in tables if (place := getattr(x, "padding_idx", None)) is not None]
    return padding[0] + 1 if padding else 0
