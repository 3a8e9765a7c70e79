"""Layers of transformers that attend through latents (MLA), and that choose their keys by content (DSA).

Such a layer computes the keys and values of all heads by a method of its own, `expand_kv(latents, rotated key)`, which
transformers made to be bypassed: latents and rotated key travel as one row a token, and are expanded at the visits. A
layer that chooses keys does so by its own indexer, which here sees the indexer keys of all ranks.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from ..call.functional import get_transport
from ..call.rows import Rows
from ..transport.records import exchange_values
from .batches import cut_batch, read_borders
from .generation import STATE
from .ranks import GatherRows

#: The attribute of a layer with its `_Expansion`, and that of an indexer with the document borders of its layer's call.
EXPANSION, BORDERS = "_ringattn_expansion", "_ringattn_borders"
#: The arguments of an indexer that scores each key by itself, and attributes of those that score keys in pools.
INDEXER, POOLS = {"hidden_states", "position_embeddings", "attention_mask", "position_ids", "cache"}, ("index_kpool",)
#: Bytes of the scores that an indexer makes at once.
SCORE_BYTES = 1 << 28


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


def choosing_layers(model: nn.Module) -> list[Any]:
    """The layers of a model that attend to keys chosen by an indexer which can run over ranks."""
    found = [(layer, indexer) for layer in model.modules() if (indexer := getattr(layer, "indexer", None)) is not None]
    return [
        layer
        for layer, indexer in found
        if hasattr(type(layer), "expand_kv")
        and inspect.signature(type(indexer).forward).parameters.keys() >= INDEXER
        and not any(hasattr(indexer, name) for name in POOLS)
    ]


def take_latents(model: nn.Module) -> None:
    """Let the layers of a parallelized model give latents to attention, and choose among the keys of all ranks."""
    for layer in model.modules():
        if hasattr(type(layer), "expand_kv") and EXPANSION not in vars(layer):
            vars(layer).update({EXPANSION: _Expansion(layer), "expand_kv": MethodType(_give_rows, layer)})
    for layer in choosing_layers(model):
        if "forward" not in vars(layer.indexer):
            layer.register_forward_pre_hook(_note_borders, with_kwargs=True)
            vars(layer.indexer)["forward"] = MethodType(_choose, layer.indexer)


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


def _note_borders(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    vars(layer.indexer)[BORDERS] = kwargs.get("cu_seq_lens_q")


class _Keys:
    """What an indexer gets as its cache: keeps the new keys, and returns one of them, or the keys of all ranks."""

    def __init__(self, whole: Tensor | None = None) -> None:
        self.whole = whole

    def update_indexer(self, new: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.new = new
        return new[:, :1] if self.whole is None else self.whole


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def _choose(indexer: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The positions [B, n, k] that an indexer chooses for each row of this rank. Collective.

    The indexer's own forward chooses, for a few rows at a time, as it scores them with all keys at once.
    """
    own, ring = type(indexer).forward, getattr(indexer, STATE, None)
    if ring is None:
        return cast(Tensor, own(indexer, *args, **kwargs))
    _, *named = inspect.signature(own).bind(indexer, *args, **kwargs).arguments.items()
    given: dict[str, Any] = dict(named)
    states, mask = given["hidden_states"], given["attention_mask"]  # of `_write_mask`
    batch, rows, device = len(states), states.shape[1], states.device

    def run(part: slice, seen: Tensor, keys: _Keys) -> Tensor:
        def take(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(take, x))
            return x[:, part] if isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == rows else x

        changed = {name: take(x) for name, x in given.items()} | {"attention_mask": seen, "cache": keys}
        return cast(Tensor, own(indexer, **changed))

    mine = _Keys()
    run(slice(None), torch.ones(batch, rows, 1, dtype=torch.bool, device=device), mine)
    real = mask[:, 0] if mask.shape[-1] else torch.ones(batch, rows, dtype=torch.bool, device=device)
    group, borders = ring.place.group, vars(indexer).get(BORDERS)
    lengths = exchange_values(get_transport(group), "call", rows, int)
    tokens = sum(lengths)
    cut = cut_batch(ring.layout, tokens, len(lengths), borders)
    places = list(map(cut.positions, range(len(lengths))))
    joined = torch.cat([mine.new, real.to(mine.new.dtype)[..., None]], -1)
    whole = GatherRows.apply(joined, places, group)
    keys, real = _Keys(whole[..., :-1]), whole[:, None, :, -1] != 0
    queries = places[dist.get_rank(group)]
    starts = [np.zeros(1, np.int64)]
    if borders is not None:
        documents = read_borders(borders)
        starts = [np.asarray(documents.row(row).starts[:-1]) for row in range(documents.rows or 1)]
    first = np.stack([x[np.searchsorted(x, queries, "right") - 1] for x in starts])
    if mask.shape[1] > 2:  # the keys of a window
        first = np.maximum(first, queries - (mask.shape[1] - 2) + 1)
    low, high = (torch.from_numpy(x).to(device)[..., None] for x in (first, queries[None]))
    every = torch.arange(tokens, device=device)
    step = max(SCORE_BYTES // (4 * batch * indexer.n_heads * tokens), 1)
    parts = [slice(i, min(i + step, rows)) for i in range(0, rows, step)]
    return torch.cat([run(x, (every >= low[:, x]) & (every <= high[:, x]) & real, keys) for x in parts], 1)
