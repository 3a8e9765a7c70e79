"""Layers of transformers that choose their keys by content: their own indexers, over the keys of all ranks.

An indexer chooses keys (DeepSeek-V3.2, GLM-5), or blocks of them for each group of heads (MiniMax M3). It runs for the
rows of a rank as in one process, but gets what indexers know of the tokens of all ranks.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from types import MethodType
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..call.functional import get_transport
from ..inference.choice import Chooser, split_rows
from ..transport.records import exchange_values
from .batches import cut_batch, read_borders
from .generation import ROWS, STATE
from .ranks import GatherRows

#: The attribute of an indexer with the document borders and the mask of its layer's call.
GIVEN = "_ringattn_given"
#: The arguments of an indexer that scores each key by itself, and of one that scores blocks of a sequence.
BLOCKS = {"hidden_states", "position_embeddings", "position_ids", "cache"}
INDEXER = BLOCKS | {"attention_mask"}
#: The kinds of layers that choose keys, in the words of configs.
INDEXED = {"indexed_attention", "minimax_m3_sparse"}


def choosing_layers(model: nn.Module) -> list[Any]:
    """The layers of a model that attend to keys chosen by an indexer which can run over ranks."""
    found = [layer for layer in model.modules() if getattr(layer, "indexer", None) is not None]
    return [layer for layer in found if _runner(layer) is not None]


def _runner(layer: Any) -> Any:
    """What runs a layer's indexer over ranks; None: nothing does, as for one that scores keys in pools."""
    named, indexer = inspect.signature(type(layer.indexer).forward).parameters.keys(), layer.indexer
    if hasattr(type(layer), "expand_kv") and named >= INDEXER and not hasattr(indexer, "index_kpool"):
        return _choose
    return _choose_blocks if named - {"self"} == BLOCKS and hasattr(indexer, "topk_blocks") else None


def take_indexers(model: nn.Module) -> None:
    """Let the layers of a parallelized model choose among the keys of all ranks."""
    for layer in choosing_layers(model):
        if "forward" not in vars(layer.indexer):
            layer.register_forward_pre_hook(_note_call, with_kwargs=True)
            vars(layer.indexer)["forward"] = MethodType(_runner(layer), layer.indexer)


def _note_call(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    vars(layer.indexer)[GIVEN] = kwargs.get("cu_seq_lens_q"), kwargs.get("attention_mask")


class _Keys:
    """What an indexer gets as its cache: keeps the new keys, and returns one of them, or the keys of all ranks."""

    def __init__(self, whole: Tensor | None = None) -> None:
        self.whole = whole

    def update_indexer(self, new: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.new = new
        return new[..., :1, :] if self.whole is None else self.whole

    # An indexer of blocks asks the layer's part of the cache.
    update_index = update_indexer
    layers = property(lambda self: self)

    def __getitem__(self, layer: int) -> _Keys:
        return self


class _Scores(TorchFunctionMode):
    """A context that notes the scores of which an indexer takes the largest."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.topk:
            self.found: Tensor = args[0]
        return function(*args, **(kwargs or {}))


def _gather(
    ring: Any, borders: Tensor | None, new: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, np.ndarray[Any, Any], list[Any]]:
    """(keys [B, N, D] and whether they are real [B, N], of all ranks; this rank's positions; starts of documents).

    new: the keys [B, n, D] of this rank. mask: [B, 2 or more, n], of `_write_mask`. There is a list of starts for each
    row of the batch, or one for all. Collective.
    """
    real = torch.ones_like(new[..., :1]) if mask is None or not mask.shape[-1] else mask[:, 0, :, None].to(new.dtype)
    group = ring.place.group
    lengths = exchange_values(get_transport(group), "call", new.shape[1], int)
    cut = cut_batch(ring.layout, sum(lengths), len(lengths), borders)
    places = list(map(cut.positions, range(len(lengths))))
    whole = GatherRows.apply(torch.cat([new, real], -1), places, group)
    starts = [np.zeros(1, np.int64)]
    if borders is not None:
        documents = read_borders(borders)
        starts = [np.asarray(documents.row(row).starts[:-1]) for row in range(documents.rows or 1)]
    return whole[..., :-1], whole[..., -1] != 0, places[dist.get_rank(group)], starts


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def _choose(indexer: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The positions [B, n, k] that an indexer chooses for each row of this rank. Collective.

    The indexer's own forward chooses, for a few rows at a time, as it scores them with all keys at once. In a
    generation its layer fills the result, see `Chooser`.
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
    if ring.call.generation is not None:

        def score(keys: Tensor, part: slice) -> Tensor:
            every = torch.ones(1, 1, 1, dtype=torch.bool, device=device).expand(batch, rows, keys.shape[2])
            with _Scores() as scores:
                run(part, every[:, part], _Keys(keys[:, 0]))
            return scores.found.unsqueeze(1)

        chosen = torch.full((batch, 1, rows, indexer.index_topk), -1, dtype=torch.int32, device=device)
        ring.call.generation.chooser = Chooser(mine.new.unsqueeze(1), score, chosen, indexer.n_heads)
        return chosen[:, 0]
    keys, real, queries, starts = _gather(ring, vars(indexer)[GIVEN][0], mine.new, mask)
    first = np.stack([x[np.searchsorted(x, queries, "right") - 1] for x in starts])
    if mask.shape[1] > 2:  # the keys of a window
        first = np.maximum(first, queries - (mask.shape[1] - 2) + 1)
    low, high = (torch.from_numpy(x).to(device)[..., None] for x in (first, queries[None]))
    every, real, held = torch.arange(keys.shape[1], device=device), real[:, None], _Keys(keys)
    parts = split_rows(rows, 4 * batch * indexer.n_heads * keys.shape[1])
    return torch.cat([run(x, (every >= low[:, x]) & (every <= high[:, x]) & real, held) for x in parts], 1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def _choose_blocks(
    indexer: Any, hidden_states: Tensor, position_embeddings: Any, cache: Any, position_ids: Tensor
) -> Tensor:
    """What an indexer of blocks chooses for each group of heads and row of this rank: [B, groups, n, k]. Collective.

    It counts blocks from the first token of each sequence, be it a document or a row without its padding, and chooses
    for each sequence alone. If all sequences begin at a block of the batch, these are numbers of its blocks; else they
    are positions.
    """
    own, ring = type(indexer).forward, getattr(indexer, STATE, None)
    if ring is None:
        if indexer.config._attn_implementation == ROWS:  # which runs tokens alone, at positions that have no keys
            cache, position_ids = None, torch.zeros_like(position_ids)
        return cast(Tensor, own(indexer, hidden_states, position_embeddings, cache, position_ids))
    mine, device = _Keys(), hidden_states.device
    own(indexer, hidden_states, position_embeddings, mine, torch.zeros_like(position_ids))
    borders, mask = vars(indexer)[GIVEN]
    keys, real, queries, starts = _gather(ring, borders, mine.new[:, 0], None if mask is None else mask[:, 0])
    seen, size = real.cpu().numpy(), indexer.block_size
    sequences = [
        (row, first + np.flatnonzero(seen[row, first:last]))
        for row in range(len(seen))
        for first, last in pairwise([*starts[row % len(starts)], seen.shape[1]])
    ]
    aligned = all(len(x) == 0 or (x[0] % size == 0 and x[-1] - x[0] == len(x) - 1) for _, x in sequences)
    most = indexer.topk_blocks * (1 if aligned else size)
    chosen = torch.full((len(seen), indexer.num_heads, len(queries), most), -1, device=device)
    for row, places in sequences:
        local = np.flatnonzero(np.isin(queries, places))
        held = _Keys(keys[row : row + 1, None, torch.from_numpy(places).to(device)])
        for part in split_rows(len(local), 4 * indexer.num_heads * len(places)):
            at = torch.from_numpy(local[part]).to(device)
            counted = torch.from_numpy(np.searchsorted(places, queries[local[part]])).to(device)[None]
            of_rows = (x[min(row, len(x) - 1), at][None] for x in position_embeddings)
            found = own(indexer, hidden_states[row, at][None], tuple(of_rows), held, counted)[0]
            if aligned:
                found = torch.where(found < 0, -1, found + places[0] // size)
            else:
                inside = (found[..., None] * size + torch.arange(size, device=device)).flatten(-2)
                real_places = torch.from_numpy(places).to(device)
                hidden = (inside < 0) | (inside >= len(places))
                found = real_places[inside.clamp(0, len(places) - 1)].masked_fill(hidden, -1)
            chosen[row][:, at, : found.shape[-1]] = found
    return chosen
