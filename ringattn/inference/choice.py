"""Keys that the new tokens of a cache choose by content: the best of all ranks, and attention to those of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor

from ..call.compile import CompiledCall
from ..errors import InvalidInput
from ..kernels.chosen import find_visible, take_best
from ..kernels.contract import Pair
from ..kernels.memory import empty, wide
from ..kernels.softmax import begin_sums, merge_
from ..plan.row_sets import Ranges
from ..plan.work import find_tiles, join_dense, lower
from ..transport.base import Program
from .partials import RowGroups, as_bytes, exchange
from .store import LayerStore

#: Bytes of the scores that are made at once.
SCORE_BYTES = 1 << 28


@dataclass(frozen=True)
class Chooser:
    """How the new tokens of a layer choose their keys: `chosen=` of `KVCache.prefill` and `KVCache.step`.

    keys: [B, 1, n, D], what an indexer knows of the new tokens. The cache holds it beside their keys and values.
    score: a function of the `keys` [B, 1, N, D] of any tokens and a slice of the new rows. Returns how well each token
        fits each row, [B, groups, rows, N].
    chosen: int32 [B, groups, n, k]. The layer writes into it the slots of the k tokens of the largest scores (in fp32)
        that each row sees by the pattern, best first, and -1 where there are fewer. Of equal scores the lower slot
        comes first. A later layer may take it in place of a Chooser.
    heads: the scores of each pair that `score` sums; memory limits the rows that it gets at once.
    """

    keys: Tensor
    score: Callable[[Tensor, slice], Tensor]
    chosen: Tensor
    heads: int = 1

    def find(self, keys: Tensor, slots: Tensor, seen: Callable[[slice], Tensor]) -> None:
        """Fill `chosen` from the `keys` of all tokens, which are at these slots. `seen` is `find_seen` of some rows."""
        self.chosen.fill_(-1)
        for part in split_rows(self.chosen.shape[2], 4 * len(keys) * self.heads * len(slots)):
            scores = self.score(keys, part).float().masked_fill(~seen(part).unsqueeze(1), -torch.inf)
            places, _ = take_best(scores, slots.expand(scores.shape), self.chosen.shape[3])
            self.chosen[:, :, part, : places.shape[3]] = places


def split_rows(rows: int, row_bytes: int) -> list[slice]:
    """Slices of rows whose scores take `SCORE_BYTES` at most, where one row of them takes `row_bytes`."""
    step = max(SCORE_BYTES // max(row_bytes, 1), 1)
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


def find_seen(groups: RowGroups, q: Ranges, keys: Ranges, heads: int, batch: int, device: torch.device) -> Tensor:
    """Which of the tokens at slots `keys` the queries at slots `q` see: bool [B or 1, rows, keys]."""
    rows, width = sum(map(len, q)), sum(map(len, keys))
    found: list[Tensor | None] = [None] * batch
    for pattern, members in groups:
        works = list(lower(join_dense(find_tiles(pattern, q, keys, heads)), 1))
        seen = find_visible(works, heads, rows, width, device)
        if members is None:
            return seen[None]
        for row in members:
            found[row] = seen
    return torch.stack([x for x in found if x is not None])


def list_slots(runs: Ranges, device: torch.device) -> Tensor:
    """The slots in `runs`, int32 [n]."""
    every = (torch.arange(x.start, x.stop, x.step, dtype=torch.int32, device=device) for x in (range(0), *runs))
    return torch.cat([*every])


def join_candidates(
    rank: int, counts: Sequence[int], chooser: Chooser, store: LayerStore, slots: Tensor, seen: Tensor, tag: int,
    label: str,
) -> Program[None]:  # fmt: skip
    """Fill the choice of a step: the best of all ranks' own best tokens, with equal bits on all ranks.

    counts: the tokens that each rank holds. slots, seen: those of this rank, see `find_seen`.
    """
    (*shape, most), device = chooser.chosen.shape, slots.device
    scores = empty((*shape, 0), torch.float32, device)
    if len(slots):
        scores = (
            chooser.score(held_keys(store, chooser), slice(None)).float().masked_fill(~seen.unsqueeze(1), -torch.inf)
        )
    places, best = take_best(scores, slots.expand(scores.shape), most)
    mine = torch.cat([as_bytes(best.contiguous()), as_bytes(places.contiguous())])
    sizes = [8 * shape[0] * shape[1] * shape[2] * min(most, count) for count in counts]
    inbox = [mine if p == rank else empty((size,), torch.uint8, device) for p, size in enumerate(sizes)]
    yield from exchange(rank, [mine] * len(counts), inbox, tag, label)
    halves = [[x.view(*shape, -1) for x in y.view(torch.float32).tensor_split(2)] for y in inbox if len(y)]
    scores, places = (torch.cat(x, -1) for x in zip(*halves, strict=True))
    found, _ = take_best(scores, places.view(torch.int32), most)
    chooser.chosen.fill_(-1)[..., : found.shape[3]] = found


def held_keys(store: LayerStore, chooser: Chooser) -> Tensor:
    """What an indexer knows of the tokens that a rank holds, [B, 1, n, D]."""
    held = store.index.whole() if store.index is not None else ()
    return held[0] if held else chooser.keys[:, :, :0]


def attend_chosen(
    q: Tensor, chosen: Tensor, slots: Tensor, seen: Tensor, store: LayerStore, call: CompiledCall
) -> Pair:
    """Attention of replicated queries to those of their chosen keys that one rank holds: (out, lse) as `attend`.

    chosen: slots [B, groups, T, k]. slots, seen: those that the rank holds, see `find_seen`.
    """
    batch, heads, tokens, _ = q.shape
    kind, device = wide(q.dtype), q.device
    out = empty((batch, heads, tokens, call.sizes["value_dim"]), kind, device)
    lse = empty((batch, heads, tokens), kind, device)
    begin_sums(out, lse)
    if not len(slots):
        return out, lse
    order = slots.argsort()
    places = torch.searchsorted(slots[order], chosen.to(slots.dtype).contiguous())
    rows = order[places.clamp_(max=len(slots) - 1)]
    here = (slots[rows] == chosen) & seen.unsqueeze(1).expand(batch, chosen.shape[1], -1, -1).gather(-1, rows)
    few = here.byte().argsort(dim=-1, descending=True, stable=True)[..., : int(here.sum(-1).max())]
    parts = lcm(chosen.shape[1], call.sizes["kv_heads"])
    rows, here = (x.gather(-1, few).repeat_interleave(parts // chosen.shape[1], 1) for x in (rows, here))
    head = torch.arange(parts, device=device)[:, None, None] // (parts // call.sizes["kv_heads"])
    q = q.to(kind).unflatten(1, (parts, -1)).transpose(2, 3)
    first = 0
    for block in store.blocks:
        if not block.count:
            continue
        at = rows - first
        first += block.count
        element = torch.tensor(block.of or range(batch), device=device)[:, None, None, None]
        local = element, head, at.clamp(0, block.count - 1)
        k, *v = (x[local].to(kind) for x in block.tensors)
        logits = q @ k.mT * call.factor
        if call.options.softcap is not None:
            logits = call.options.softcap * (logits / call.options.softcap).tanh()
        hidden = ~(here & (at >= 0) & (at < block.count)).unsqueeze(3)
        logits = logits.masked_fill(hidden, -torch.inf)
        part_lse = logits.logsumexp(-1, keepdim=True)
        part = (logits - part_lse.clamp_min(torch.finfo(kind).min)).exp() @ (v[0] if v else k)
        part, part_lse = (x.transpose(2, 3).flatten(1, 2) for x in (part, part_lse))
        merge_(out, lse, part, part_lse.squeeze(-1))
    return out, lse


def check_chooser(chosen: Any, q: Tensor, store: LayerStore, length: int) -> None:
    """Raise InvalidInput for an argument `chosen` that does not fit q, or what a layer holds of `length` tokens."""
    if length and isinstance(chosen, Chooser) != (store.index is not None):
        raise InvalidInput(
            "a layer takes a Chooser for all its tokens or for none: what an indexer knows of the earlier ones is "
            + ("missing" if store.index is None else "held")
        )
    wanted, shape = (len(q), 1, q.shape[2]), tuple(chosen.keys.shape) if isinstance(chosen, Chooser) else ()
    if shape and (len(shape) != 4 or shape[:3] != wanted):
        raise InvalidInput(f"keys of a Chooser must be [batch, 1, new tokens, dim] = {(*wanted, 'dim')}, got {shape}")
