"""Layers of transformers that attend through latents (MLA).

Such a layer computes the keys and values of all heads by a method of its own, `expand_kv(latents, rotated key)`, which
transformers made to be bypassed: latents and rotated key travel as one row a token, and are expanded at the visits.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..call.rows import Rows
from .generation import STATE

#: The attribute of a layer with its `_Expansion`.
EXPANSION = "_ringattn_expansion"


class _Expansion(nn.Module):
    """`expand_kv` of a layer's class, as a function of rows and of the weights of the layer's projection.

    A module, as torch.compile takes no method of one as the argument of an operator.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer: Any = layer

    def forward(self, rows: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        """k and v by the layer's weights, or by these, which are the same, cast by autocast or kept by a graph."""
        if weights:
            named = dict(zip(self.weights(), weights, strict=True))
            return cast("tuple[Tensor, Tensor]", functional_call(self, named, (rows,)))
        width = self.layer.kv_lora_rank
        k, v = type(self.layer).expand_kv(self.layer, rows[..., :width], rows[..., width:])
        return k, v

    def weights(self) -> dict[str, Tensor]:
        """The weights that are numbers, those of adapters included; what is quantized stays in the layer."""
        own = self.layer.kv_b_proj.named_parameters()
        return {f"layer.kv_b_proj.{name}": p for name, p in own if p.is_floating_point()}


def take_latents(model: nn.Module) -> None:
    """Let the layers of a parallelized model give latents to attention."""
    for layer in model.modules():
        if hasattr(type(layer), "expand_kv") and EXPANSION not in vars(layer):
            vars(layer).update({EXPANSION: _Expansion(layer), "expand_kv": MethodType(_give_rows, layer)})


def _give_rows(layer: Any, latents: Tensor, rotated: Tensor) -> tuple[Any, Tensor | None]:
    """(Rows, None) in a call over ranks; else, and where the projection cannot run at visits, keys and values.

    A visit cannot repeat the dropout of an adapter, nor take weights from another device or a tensor-parallel rank, nor
    those that FSDP1 hides while the layer runs.
    """
    rows, expansion = torch.cat((latents, rotated), -1), getattr(layer, EXPANSION)
    weights = tuple(expansion.weights().values())
    drops = any(isinstance(x, nn.Dropout) and x.p and x.training for x in layer.kv_b_proj.modules())
    plain = any(True for _ in layer.kv_b_proj.parameters())
    plain = plain and all(type(x) is nn.Parameter and not x.is_meta for x in weights)
    if getattr(layer, STATE, None) is None or drops or not plain:
        return cast("tuple[Tensor, Tensor]", expansion(rows))
    return Rows(rows, expand=expansion, weights=weights), None
