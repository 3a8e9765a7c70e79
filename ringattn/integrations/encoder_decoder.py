"""Positions and cross-attention of encoder-decoder models, whose two sequences are both sharded."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from .generation import STATE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: From the names that a model with one sequence uses to those of the decoder's tensors in a batch.
DECODER = {"input_ids": "decoder_input_ids", "attention_mask": "decoder_attention_mask", "labels": "labels"}
#: Arguments that pass an attention module the rows of another sequence as keys.
OTHERS = ("key_value_states", "encoder_hidden_states")
#: Attribute of such a module: whether its call got these rows. Attribute of a position table: the part it belongs to.
CROSS, PART = "_ringattn_cross", "_ringattn_part"


def find_tables(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The position embedding modules of the encoder and the decoder, by name; only those that take `position_ids`."""
    parts = {"encoder": model.get_encoder(), "decoder": model.get_decoder()}
    tables = {name: getattr(part, "embed_positions", None) for name, part in parts.items()}
    return {
        name: table
        for name, table in tables.items()
        if table is not None and "position_ids" in inspect.signature(table.forward).parameters
    }


def attend_across(model: PreTrainedModel) -> None:
    """Add hooks to an encoder-decoder model so that it can run on sharded sequences.

    They tell each attention whether its keys come from the encoder, and give the position embeddings the positions of
    this rank's rows.
    """
    for module in model.modules():
        if not inspect.signature(module.forward).parameters.keys().isdisjoint(OTHERS):
            module.register_forward_pre_hook(_note_keys, with_kwargs=True)
    for name, table in find_tables(model).items():
        setattr(table, PART, name)
        table.register_forward_pre_hook(_place_rows, with_kwargs=True)


def _note_keys(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Set `CROSS` of the module: whether this call got the rows of another sequence."""
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    setattr(module, CROSS, any(given.get(name) is not None for name in OTHERS))


def _place_rows(table: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a position table, with the positions of this rank's rows."""
    ring = getattr(table, STATE)
    return args, kwargs if ring is None else {**kwargs, "position_ids": ring.call.places[getattr(table, PART)]}
